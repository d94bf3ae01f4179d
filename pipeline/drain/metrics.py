"""What a loop counts, and what is scheduled, for Prometheus. Imported only where it is served: loading the library takes time."""

from collections.abc import Callable, Iterator
from threading import Lock

from prometheus_client.core import Metric

from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.drain.stats import Totals
from pipeline.metrics import JobCollector
from pipeline.store.heartbeats import LOOP_COUNTERS
from pipeline.store.stats import Forecast

READ_MS = 5_000  # Redis is asked at most so often, however often somebody scrapes
BUCKETS_AHEAD = 36  # six hours
PAST = "past"  # the label of all buckets before the present one


class LoopCollector(JobCollector):
    """The numbers of one loop and, at most every ``READ_MS``, of its namespace. Called from threads of its own.

    Args:
        read: asks Redis; raises ``PipelineError`` if it does not answer.
    """

    def __init__(self, namespace: str, totals: Totals, read: Callable[[], Forecast], clock: Clock) -> None:
        super().__init__(namespace)
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

    def _loop_metrics(self) -> Iterator[Metric]:
        stats = self._totals.snapshot()
        yield self.build_info()
        delivered = {(topic,): each.delivered for topic, each in stats.topics.items()}
        yield self.counter("delivered", LOOP_COUNTERS["delivered"], delivered, "topic")
        meaning = (
            "From when a message was due, or came in if that was later, to when the sink had it, on the loop's clock."
        )
        lateness = {(topic,): each.lateness for topic, each in stats.topics.items()}
        yield self.histogram("lateness_seconds", meaning, lateness, "topic")
        for name, meaning in LOOP_COUNTERS.items():
            if name != "delivered":
                yield self.counter(name, meaning, {(): getattr(stats, name)})
        meaning = "From when a message came due to when it was in Kafka."
        yield self.histogram("outbox_seconds", meaning, {(): stats.outbox})
        meaning = "Partitions of Kafka where a transaction hangs, so that consumers that read committed stand still."
        yield self.gauge("kafka_stuck_partitions", meaning, len(stats.stuck_partitions))
        errors = {(kind,): count for kind, count in stats.errors.items()}
        yield self.counter("errors", "Calls that failed, by what caused it.", errors, "kind")

    def _namespace_metrics(self, forecast: Forecast | None) -> Iterator[Metric]:
        yield self.gauge("redis_up", "1 if Redis answered when it was asked last.", 0 if forecast is None else 1)
        if forecast is None:
            return
        yield self.gauge(
            "oldest_due_age_seconds",
            "How late the oldest message is that is not acknowledged, 0 if none is late; what is held is not.",
            forecast.overdue_ms / 1_000,
        )
        meaning = "Messages that are due and wait for a pause or a rate limit of their topic."
        yield self.gauge("held_messages", meaning, forecast.held)
        yield self.gauge("throttled_messages", "Those of them that wait for a rate limit.", forecast.throttled)
        yield self.gauge("cold_messages", "Messages that wait in cold files.", forecast.cold)
        meaning = "When the hour begins in which the first of these is due; absent if there are none."
        cold_due = {} if forecast.cold_due_ms is None else {(): forecast.cold_due_ms / 1_000}
        yield self.gauges("cold_due_timestamp_seconds", meaning, cold_due)
        yield self.gauge("outbox_messages", "Messages that wait to be written to Kafka.", forecast.outbox)
        meaning = "How long the oldest of these waits, 0 if there is none."
        yield self.gauge("outbox_age_seconds", meaning, forecast.outbox_ms / 1_000)
        yield self.gauge("shards_away", "Shards that do not answer; what they hold is not counted.", len(forecast.away))
        files = sum(each.files for each in forecast.waiting)
        yield self.gauge("ingest_waiting_files", "Files that were read and wait for shards that are away.", files)
        oldest_ms = min((each.oldest_ms for each in forecast.waiting), default=forecast.now_ms)
        meaning = "How long ago the oldest of these was landed, 0 if there is none."
        yield self.gauge("ingest_waiting_age_seconds", meaning, max(0, forecast.now_ms - oldest_ms) / 1_000)
        lags = {(reads,): offsets for reads, offsets in forecast.lags.items()}
        meaning = "Offsets of Kafka that the last batch of an ingest job left."
        yield self.gauges("ingest_lag_records", meaning, lags, "reads")
        if forecast.next_due_ms is not None:
            meaning = "When the next message of the namespace is due; absent if nothing is scheduled."
            yield self.gauge("next_due_timestamp_seconds", meaning, forecast.next_due_ms / 1_000)
        meaning = "Messages scheduled for the ten minutes which begin so many minutes after the present ones."
        scheduled = {(minutes,): messages for minutes, messages in _by_minutes_ahead(forecast).items()}
        yield self.gauges("scheduled_messages", meaning, scheduled, "minutes_ahead")

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


def _by_minutes_ahead(forecast: Forecast) -> dict[str, int]:
    """Return how many messages are scheduled, by label; all labels are always there."""
    present_ms = bucket_start_ms(forecast.now_ms)
    past = sum(messages for start_ms, messages in forecast.buckets.items() if start_ms < present_ms)
    starts = range(present_ms, present_ms + BUCKETS_AHEAD * BUCKET_WIDTH_MS, BUCKET_WIDTH_MS)
    ahead = {str((start_ms - present_ms) // 60_000): forecast.buckets.get(start_ms, 0) for start_ms in starts}
    return {PAST: past, **ahead}
