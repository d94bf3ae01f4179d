"""What a loop counts, and what waits in Redis, for Prometheus. Imported only where it is served: loading the library takes time."""

import sys
from collections.abc import Callable, Iterator
from threading import Lock
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.clock import Clock
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.lateness import BOUNDS_MS
from pipeline.drain.totals import Totals
from pipeline.store.outlook import Outlook

LOOK_MS = 5_000  # Redis is asked at most so often, however often somebody scrapes
# Python lets a thread run for 5 ms while another waits. A scrape of 100 topics takes 20 ms, and a loop that woke up meanwhile for a
# message that is due would get on only after 5 of them; so it is 1.
SWITCH_SEC = 0.0005
BUCKETS_AHEAD = 36  # six hours
PAST = "past"  # the label of all buckets before the present one
LOOP_COUNTERS = {
    "claimed": "Messages that the loop took from Redis.",
    "stale": "Messages delivered whose lease was over before they were acknowledged: they come again.",
    "repeated": "Messages delivered that may have been delivered before: possible duplicates.",
    "reclaimed": "Messages given back from claims whose lease was over.",
}


class LoopCollector(Collector):
    """The numbers of one loop and, at most every ``LOOK_MS``, of its namespace. Called from threads of its own.

    Args:
        look: asks Redis; raises ``PipelineError`` if it does not answer.
    """

    def __init__(self, totals: Totals, look: Callable[[], Outlook], clock: Clock) -> None:
        self._totals = totals
        self._look = look
        self._clock = clock
        self._lock = Lock()
        self._outlook: Outlook | None = None
        self._looked_ms: float | None = None

    def collect(self) -> Iterator[Metric]:
        """Return everything as it is now."""
        yield from self._loop_metrics()
        yield from self._namespace_metrics(self._recent_outlook())

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering it asks nobody."""
        return iter(())

    def _loop_metrics(self) -> Iterator[Metric]:
        # The loop goes on meanwhile: each number is taken once, and what follows from it computed from that.
        topics = {topic: (list(late.counts), late.sum_ms) for topic, late in list(self._totals.topics.items())}
        delivered = CounterMetricFamily(
            "duetime_delivered", "Messages delivered and acknowledged by the loop.", labels=["topic"]
        )
        lateness = HistogramMetricFamily(
            "duetime_lateness_seconds",
            "From when a message was due to when the sink had it, on the clock of the loop's machine.",
            labels=["topic"],
        )
        for topic, (counts, sum_ms) in topics.items():
            label = [topic]
            delivered.add_metric(label, sum(counts))
            lateness.add_metric(label, _cumulative(counts), sum_ms / 1_000)
        yield delivered
        yield lateness
        for name, meaning in LOOP_COUNTERS.items():
            yield CounterMetricFamily(f"duetime_{name}", meaning, value=getattr(self._totals, name))
        errors = CounterMetricFamily("duetime_errors", "Calls that failed, by what caused it.", labels=["kind"])
        for kind, count in list(self._totals.errors.items()):
            errors.add_metric([kind], count)
        yield errors

    def _namespace_metrics(self, outlook: Outlook | None) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "duetime_redis_up", "1 if Redis answered when it was asked last.", value=0 if outlook is None else 1
        )
        if outlook is None:
            return
        yield GaugeMetricFamily(
            "duetime_oldest_due_age_seconds",
            "How late the oldest message of the namespace is that is not acknowledged, 0 if none is late.",
            value=outlook.overdue_ms / 1_000,
        )
        next_due = GaugeMetricFamily(
            "duetime_next_due_timestamp_seconds", "When the next message of the namespace is due; absent if none waits."
        )
        if outlook.next_due_ms is not None:
            next_due.add_metric([], outlook.next_due_ms / 1_000)
        yield next_due
        scheduled = GaugeMetricFamily(
            "duetime_scheduled_messages",
            "Messages of the namespace that wait in the ten minutes which begin so many minutes after the present ones.",
            labels=["minutes_ahead"],
        )
        for minutes, messages in _by_minutes_ahead(outlook).items():
            scheduled.add_metric([minutes], messages)
        yield scheduled

    def _recent_outlook(self) -> Outlook | None:
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._looked_ms is None or now_ms - self._looked_ms >= LOOK_MS:
                self._looked_ms = now_ms
                try:
                    self._outlook = self._look()
                except PipelineError:
                    self._outlook = None
            return self._outlook


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


def _by_minutes_ahead(outlook: Outlook) -> dict[str, int]:
    """Return what waits, by label; all labels are always there."""
    present_ms = bucket_start_ms(outlook.now_ms)
    past = sum(messages for start_ms, messages in outlook.waiting.items() if start_ms < present_ms)
    starts = range(present_ms, present_ms + BUCKETS_AHEAD * BUCKET_WIDTH_MS, BUCKET_WIDTH_MS)
    ahead = {str((start_ms - present_ms) // 60_000): outlook.waiting.get(start_ms, 0) for start_ms in starts}
    return {PAST: past, **ahead}
