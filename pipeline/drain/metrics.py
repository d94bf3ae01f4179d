"""What a loop counts, and what is scheduled, for Prometheus. Imported only where it is served: loading the library takes time."""

import sys
from collections.abc import Callable, Iterator
from threading import Lock
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline import __version__
from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.clock import Clock
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.lateness import BOUNDS_MS
from pipeline.drain.stats import Totals
from pipeline.store.heartbeats import LOOP_COUNTERS
from pipeline.store.stats import Forecast

READ_MS = 5_000  # Redis is asked at most so often, however often somebody scrapes
# Python lets a thread go on for 5 ms while another one waits, and a scrape of 100 topics computes for 100 ms. A loop that woke up
# meanwhile for a message got on after 11 ms in half of all cases (p99 46), and with this after 5 (p99 37), on busy cores.
SWITCH_SEC = 0.0005
BUCKETS_AHEAD = 36  # six hours
PAST = "past"  # the label of all buckets before the present one


class LoopCollector(Collector):
    """The numbers of one loop and, at most every ``READ_MS``, of its namespace. Called from threads of its own.

    Args:
        read: asks Redis; raises ``PipelineError`` if it does not answer.
    """

    def __init__(self, namespace: str, totals: Totals, read: Callable[[], Forecast], clock: Clock) -> None:
        self._namespace = namespace
        self._totals = totals
        self._read = read
        self._clock = clock
        self._lock = Lock()
        self._forecast: Forecast | None = None
        self._read_ms: float | None = None

    def collect(self) -> Iterator[Metric]:
        """Return everything as it is now."""
        yield from self._loop_metrics()
        yield from self._namespace_metrics(self._recent_forecast())

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering it asks nobody."""
        return iter(())

    def _loop_metrics(self) -> Iterator[Metric]:
        stats = self._totals.snapshot()
        yield self._gauge("build_info", "The version of the loop.", 1, version=__version__)
        delivered = CounterMetricFamily("duetime_delivered", LOOP_COUNTERS["delivered"], labels=["namespace", "topic"])
        lateness = HistogramMetricFamily(
            "duetime_lateness_seconds",
            "From when a message was due, or came in if that was later, to when the sink had it, on the loop's clock.",
            labels=["namespace", "topic"],
        )
        for topic, each in stats.topics.items():
            labels = [self._namespace, topic]
            delivered.add_metric(labels, each.delivered)
            lateness.add_metric(labels, _cumulative(each.lateness.counts), each.lateness.sum_ms / 1_000)
        yield delivered
        yield lateness
        for name, meaning in LOOP_COUNTERS.items():
            if name != "delivered":
                counter = CounterMetricFamily(f"duetime_{name}", meaning, labels=["namespace"])
                counter.add_metric([self._namespace], getattr(stats, name))
                yield counter
        outbox = HistogramMetricFamily(
            "duetime_outbox_seconds", "From when a message came due to when it was in Kafka.", labels=["namespace"]
        )
        outbox.add_metric([self._namespace], _cumulative(stats.outbox.counts), stats.outbox.sum_ms / 1_000)
        yield outbox
        meaning = "Partitions of Kafka where a transaction hangs, so that consumers that read committed stand still."
        yield self._gauge("kafka_stuck_partitions", meaning, len(stats.stuck_partitions))
        errors = CounterMetricFamily(
            "duetime_errors", "Calls that failed, by what caused it.", labels=["namespace", "kind"]
        )
        for kind, count in stats.errors.items():
            errors.add_metric([self._namespace, kind], count)
        yield errors

    def _namespace_metrics(self, forecast: Forecast | None) -> Iterator[Metric]:
        yield self._gauge("redis_up", "1 if Redis answered when it was asked last.", 0 if forecast is None else 1)
        if forecast is None:
            return
        yield self._gauge(
            "oldest_due_age_seconds",
            "How late the oldest message is that is not acknowledged, 0 if none is late; what a pause holds is not.",
            forecast.overdue_ms / 1_000,
        )
        yield self._gauge("held_messages", "Messages that came due while their topic was paused.", forecast.held)
        yield self._gauge("cold_messages", "Messages that wait in cold files.", forecast.cold)
        cold_due = GaugeMetricFamily(
            "duetime_cold_due_timestamp_seconds",
            "When the hour begins in which the first of these is due; absent if there are none.",
            labels=["namespace"],
        )
        if forecast.cold_due_ms is not None:
            cold_due.add_metric([self._namespace], forecast.cold_due_ms / 1_000)
        yield cold_due
        yield self._gauge("outbox_messages", "Messages that wait to be written to Kafka.", forecast.outbox)
        meaning = "How long the oldest of these waits, 0 if there is none."
        yield self._gauge("outbox_age_seconds", meaning, forecast.outbox_ms / 1_000)
        yield self._gauge(
            "shards_away", "Shards that do not answer; what they hold is not counted.", len(forecast.away)
        )
        files = sum(each.files for each in forecast.waiting)
        yield self._gauge("ingest_waiting_files", "Files that were read and wait for shards that are away.", files)
        oldest_ms = min((each.oldest_ms for each in forecast.waiting), default=forecast.now_ms)
        meaning = "How long ago the oldest of these was landed, 0 if there is none."
        yield self._gauge("ingest_waiting_age_seconds", meaning, max(0, forecast.now_ms - oldest_ms) / 1_000)
        lag = GaugeMetricFamily(
            "duetime_ingest_lag_records",
            "Offsets of Kafka that the last batch of an ingest job left.",
            labels=["namespace", "reads"],
        )
        for reads, offsets in forecast.lags.items():
            lag.add_metric([self._namespace, reads], offsets)
        yield lag
        if forecast.next_due_ms is not None:
            meaning = "When the next message of the namespace is due; absent if nothing is scheduled."
            yield self._gauge("next_due_timestamp_seconds", meaning, forecast.next_due_ms / 1_000)
        scheduled = GaugeMetricFamily(
            "duetime_scheduled_messages",
            "Messages scheduled for the ten minutes which begin so many minutes after the present ones.",
            labels=["namespace", "minutes_ahead"],
        )
        for minutes, messages in _by_minutes_ahead(forecast).items():
            scheduled.add_metric([self._namespace, minutes], messages)
        yield scheduled

    def _gauge(self, name: str, meaning: str, value: float, **labels: str) -> Metric:
        family = GaugeMetricFamily(f"duetime_{name}", meaning, labels=["namespace", *labels])
        family.add_metric([self._namespace, *labels.values()], value)
        return family

    def _recent_forecast(self) -> Forecast | None:
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._read_ms is None or now_ms - self._read_ms >= READ_MS:
                self._read_ms = now_ms
                try:
                    self._forecast = self._read()
                except PipelineError:
                    self._forecast = None
            return self._forecast


def serve_metrics(host: str, port: int, collector: LoopCollector) -> WSGIServer:
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


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    so_far, buckets = 0, []
    for bound, count in zip((*(str(bound_ms / 1_000) for bound_ms in BOUNDS_MS), "+Inf"), counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    return buckets


def _by_minutes_ahead(forecast: Forecast) -> dict[str, int]:
    """Return how many messages are scheduled, by label; all labels are always there."""
    present_ms = bucket_start_ms(forecast.now_ms)
    past = sum(messages for start_ms, messages in forecast.buckets.items() if start_ms < present_ms)
    starts = range(present_ms, present_ms + BUCKETS_AHEAD * BUCKET_WIDTH_MS, BUCKET_WIDTH_MS)
    ahead = {str((start_ms - present_ms) // 60_000): forecast.buckets.get(start_ms, 0) for start_ms in starts}
    return {PAST: past, **ahead}
