"""What every job's metrics for Prometheus share. Imported only where they are served: loading the library takes time."""

import sys
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TypeVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline import __version__
from pipeline.core.errors import ConfigError
from pipeline.core.lateness import BOUNDS_MS, Lateness

# Python lets a thread go on for 5 ms while another one waits, and a scrape of 100 topics computes for 100 ms. A loop that woke up
# meanwhile for a message got on after 11 ms in half of all cases (p99 46), and with this after 5 (p99 37), on busy cores.
SWITCH_SEC = 0.0005
_BOUNDS = (*(str(bound_ms / 1_000) for bound_ms in BOUNDS_MS), "+Inf")

Labels = TypeVar("Labels", bound=tuple[str, ...])  # the values of a sample's labels, without the namespace


class JobCollector(Collector):
    """The metrics of one job; each sample has the label ``namespace``. ``collect`` is called from threads of the server."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering it asks nobody."""
        return iter(())

    def build_info(self) -> Metric:
        """Return the version of the job."""
        return self.gauges("build_info", "The version of the job.", {(__version__,): 1}, "version")

    def gauge(self, name: str, meaning: str, value: float) -> Metric:
        """Return a gauge with one sample."""
        return self.gauges(name, meaning, {(): value})

    def gauges(self, name: str, meaning: str, values: Mapping[Labels, float], *labels: str) -> Metric:
        """Return a gauge with a sample for each of the values of ``labels``."""
        family = GaugeMetricFamily(f"duetime_{name}", meaning, labels=["namespace", *labels])
        for own, value in values.items():
            family.add_metric([self._namespace, *own], value)
        return family

    def counter(self, name: str, meaning: str, counts: Mapping[Labels, float], *labels: str) -> Metric:
        """Return a counter with a sample for each of the values of ``labels``; the library adds ``_total`` to its name."""
        family = CounterMetricFamily(f"duetime_{name}", meaning, labels=["namespace", *labels])
        for own, count in counts.items():
            family.add_metric([self._namespace, *own], count)
        return family

    def histogram(self, name: str, meaning: str, found: Mapping[Labels, Lateness], *labels: str) -> Metric:
        """Return a histogram in seconds with a set of buckets for each of the values of ``labels``."""
        family = HistogramMetricFamily(f"duetime_{name}", meaning, labels=["namespace", *labels])
        for own, each in found.items():
            buckets = [(bound, float(count)) for bound, count in zip(_BOUNDS, accumulate(each.counts), strict=True)]
            family.add_metric([self._namespace, *own], buckets, each.sum_ms / 1_000)
        return family


def serve_metrics(host: str, port: int, collector: Collector) -> WSGIServer:
    """Serve ``http://host:port/metrics`` until the process ends, by a thread of its own.

    Raises:
        ConfigError: the address can't be had.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as exc:
        raise ConfigError(
            f"The metrics can't be served on {host} port {port} ({exc.strerror}); choose another --metrics-port."
        ) from exc
    sys.setswitchinterval(SWITCH_SEC)
    return server
