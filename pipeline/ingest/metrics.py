"""What an ingest job and a hydrator have done, for Prometheus. Imported only where it is served."""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import Metric

from pipeline.ingest.hydration import Hydrator
from pipeline.ingest.progress import BatchReporter
from pipeline.metrics import JobCollector

COUNTED: Final = {
    "batches": "Batches with lines that were stored and committed.",
    "lines": "Lines or records in them.",
    "stored": "Messages that were stored.",
    "duplicates": "Lines that were stored before, or whose id was known.",
    "rejected": "Lines that were not accepted.",
    "cancelled": "Lines that cancelled an id.",
    "replaced": "Lines that replaced a message, or were the first with their id.",
    "late": "Lines that came too late to cancel or replace.",
}


class IngestCollector(JobCollector):
    """The numbers of one ingest job. It asks nobody for them, and lists the landing folder."""

    def __init__(self, namespace: str, reporter: BatchReporter) -> None:
        super().__init__(namespace)
        self._reporter = reporter

    def collect(self) -> Iterator[Metric]:
        """Return everything as it is now."""
        reporter, reads = self._reporter, (self._reporter.reads,)
        yield self.build_info()
        yield self.gauges("ingest_up", "1 while the query runs.", {reads: reporter.is_running}, "reads")
        counts = reporter.counts()
        for name, meaning in COUNTED.items():
            yield self.counter(f"ingest_{name}", meaning, {reads: counts[name]}, "reads")
        meaning = "How long it took to store a batch with lines."
        yield self.histogram("ingest_batch_seconds", meaning, {reads: reporter.batch_times}, "reads")
        at_ms = reporter.last_batch_ms
        success = {reads: at_ms / 1_000} if at_ms else {}
        meaning = "When the last batch with lines was committed; absent before the first."
        yield self.gauges("ingest_last_success_timestamp_seconds", meaning, success, "reads")
        files, age = {}, {}
        if (backlog := reporter.backlog()) is not None:
            files[reads], age[reads] = backlog[0], backlog[1] / 1_000
        meaning = "Landing files that are not stored, as far as they are listed; absent where files are not landed."
        yield self.gauges("ingest_backlog_files", meaning, files, "reads")
        meaning = "How long ago the oldest of these was landed, 0 if there is none."
        yield self.gauges("ingest_backlog_seconds", meaning, age, "reads")


class HydratorCollector(JobCollector):
    """The numbers of one hydrator. It asks nobody for them."""

    def __init__(self, namespace: str, hydrator: Hydrator) -> None:
        super().__init__(namespace)
        self._hydrator = hydrator

    def collect(self) -> Iterator[Metric]:
        """Return everything as it is now."""
        hydrator = self._hydrator
        yield self.build_info()
        meaning = "1 if nothing was in the way of the last look at the cold folder."
        yield self.gauge("hydrator_up", meaning, hydrator.is_well)
        messages = {(): hydrator.totals.messages}
        yield self.counter("hydrator_messages", "Cold messages that were brought into Redis.", messages)
        yield self.counter("hydrator_files", "Cold files that were done with.", {(): hydrator.totals.files})
        at_ms = hydrator.last_success_ms
        meaning = "When it last found all in Redis that is due soon; absent before the first time."
        yield self.gauges("hydrator_last_success_timestamp_seconds", meaning, {(): at_ms / 1_000} if at_ms else {})
