"""What a user sees of the query while it runs: a line a batch, and counters in Redis for ``jobs/status.py``."""

import json
import logging
from collections.abc import Callable
from threading import Event, Lock
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from pipeline.config import Settings
from pipeline.core.clock import Clock
from pipeline.core.lateness import Lateness
from pipeline.core.text import count_text, nonzero_text
from pipeline.ingest.landed import LandingFiles
from pipeline.ingest.summary import Summary
from pipeline.store.heartbeats import IngestProgress

log = logging.getLogger(__name__)

PENDING_MAX = 100  # batches whose progress events Spark may be late with
WAIT_SEC = 2.0  # for the next event of a query that has ended; with a Java that is gone none comes


class BatchReporter(StreamingQueryListener):
    """Logs a line for each batch when it is stored; records it, and deletes its files, when Spark has committed it.

    Args:
        reads: the input in words.

        landing: None where files are not landed.

        record: takes the counters, once for each batch that had lines; what it raises disturbs nobody.

        rejects: the folder of rejected lines.
    """

    def __init__(
        self,
        source_id: str,
        reads: str,
        landing: LandingFiles | None,
        record: Callable[[IngestProgress], object],
        clock: Clock,
        rejects: str = "rejects",
    ) -> None:
        self._source_id = source_id
        self.reads = reads
        self.is_running = False
        self.batch_times = Lateness()
        self.last_batch_ms = 0
        self._landing = landing
        self._record = record
        self._rejects = rejects
        self._clock = clock
        self._started_ms = clock.wall_ms()
        self._total = Summary()
        self._batches = self._files = 0
        self._lock = Lock()
        self._stored: dict[int, tuple[Summary, float, int | None]] = {}
        # Of the query that runs: a later one numbers its batches from 0 if its checkpoint is new.
        self._run_id: object = None
        self._has_ended = Event()
        self._is_deleting = False

    def report(self, batch_id: int, summary: Summary, elapsed_sec: float) -> None:
        """Log what became of a batch; Spark commits it after this.

        Raises:
            PipelineError: the batch must not be committed, as not all its files are stored.
        """
        if self._landing is not None:
            self._landing.check_batch(batch_id, summary.file_tokens, summary.lacking)
        waited_ms = self._landing.oldest_waiting_ms() if self._landing else None
        log.info("%s", batch_line(batch_id, summary, elapsed_sec, waited_ms))
        if summary.stored_again:
            log.warning("stored again what Redis had lost: %s", count_text(summary.stored_again, "message"))
        if summary.rejected:
            log.warning("%s rejected, see %s (first: %s)", f"{summary.rejected:,}", self._rejects, summary.first_reject)
        with self._lock:
            self._stored[batch_id] = (summary, elapsed_sec, waited_ms)
            if len(self._stored) > PENDING_MAX:  # of batches that were cut off before they were committed
                del self._stored[next(iter(self._stored))]

    def counts(self) -> dict[str, int]:
        """Return how many batches were committed, and what became of their lines, by the names of ``IngestProgress``."""
        names = ("lines", "stored", "duplicates", "rejected", "cancelled", "replaced", "late")
        return {"batches": self._batches} | {name: getattr(self._total, name) for name in names}

    def backlog(self) -> tuple[int, int] | None:
        """Return how many files wait, and how long the oldest does in ms; None if it is not known; see ``LandingFiles``."""
        return self._landing.backlog() if self._landing else None

    def total_text(self) -> str:
        """Return what was stored, all together, also of a batch of which Spark has not told yet: ``3 batches: 12 lines, …``."""
        self._count_rest()
        total = self._total
        return (
            f"{count_text(self._batches, 'batch', 'batches')}: {count_text(total.lines, 'line')}, "
            f"{total.stored:,} stored, {total.duplicates:,} duplicates, {total.rejected:,} rejected{_changes_text(total)}"
        )

    def wait_for_the_end(self) -> None:
        """Wait, not long, for the events of a query that has ended, and until the files of its last batch are deleted."""
        while not self._has_ended.wait(WAIT_SEC) and self._is_deleting:
            pass

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 (Spark's name)
        """Start over; Spark waits for it. Of the query before nothing is waited for any more."""
        self._run_id = event.runId
        self._count_rest()
        self._has_ended.clear()
        self.is_running = True

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 (Spark's name)
        """Count a committed batch, then delete its files: of ten thousand that takes seconds."""
        if event.progress.runId != self._run_id:
            return  # the start of this query has seen to the files of the one before
        self._is_deleting = self._landing is not None
        self._count(event)
        if self._landing is not None:
            self._landing.delete_batch(event.progress.batchId)
        self._is_deleting = False

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 (Spark's name)
        """Note that no more events come."""
        if event.runId == self._run_id:
            self.is_running = False
            self._has_ended.set()

    def _count(self, event: QueryProgressEvent) -> None:
        """Count a batch; one without files brings nothing to count."""
        with self._lock:
            stored = self._stored.pop(event.progress.batchId, None)
        if stored is None or not stored[0].lines:
            return
        summary, elapsed_sec, waited_ms = stored
        self._add(summary, elapsed_sec, event.progress.numInputRows)  # a file is a row where Spark reads it
        try:
            self._record(self._progress(event.progress, summary, elapsed_sec, waited_ms))
        except Exception as exc:
            log.debug("the progress is recorded with the next batch: %s", exc)

    def _count_rest(self) -> None:
        """Count the batches that were stored and of which no event has come; one that still comes finds nothing to count."""
        with self._lock:
            rest, self._stored = [*self._stored.values()], {}
        for summary, elapsed_sec, _ in rest:
            if summary.lines:
                self._add(summary, elapsed_sec, len(summary.file_tokens))

    def _add(self, summary: Summary, elapsed_sec: float, files: int) -> None:
        self._total.add(summary)
        self._batches += 1
        self._files += files
        self.batch_times.add(round(elapsed_sec * 1_000))
        self.last_batch_ms = self._clock.wall_ms()

    def _progress(self, event: Any, summary: Summary, elapsed_sec: float, waited_ms: int | None) -> IngestProgress:
        total = self._total
        return IngestProgress(
            source_id=self._source_id,
            reads=self.reads,
            started_ms=self._started_ms,
            batches=self._batches,
            files=self._files,
            lines=total.lines,
            stored=total.stored,
            duplicates=total.duplicates,
            rejected=total.rejected,
            blank=total.blank,
            cancelled=total.cancelled,
            replaced=total.replaced,
            late=total.late,
            stored_again=total.stored_again,
            last_batch_ms=self.last_batch_ms,
            last_lines=summary.lines,
            last_lines_per_sec=_rate(summary, elapsed_sec),
            last_took_ms=event.durationMs.get("triggerExecution", 0),
            last_oldest_waiting_ms=waited_ms,
            last_lag=lag_of(event),
            last_phases_ms={name: ms for name, ms in event.durationMs.items() if name != "triggerExecution"},
        )


def collector_of(settings: Settings, reporter: BatchReporter) -> Any:
    """Return what serves the metrics of an ingest job; only who has them served loads their library."""
    from pipeline.ingest.metrics import IngestCollector

    return IngestCollector(settings.redis.namespace, reporter)


def lag_of(progress: Any) -> int | None:
    """Return how many offsets of Kafka the batch of a progress event has left; None for another source."""
    for source in progress.sources:
        try:
            last: dict[str, int] = json.loads(source.latestOffset)
            read: dict[str, int] = json.loads(source.endOffset)
            return sum(max(0, end - read.get(name, 0)) for name, end in last.items())
        except (ValueError, TypeError, AttributeError):
            return None  # other sources have offsets of other forms
    return None


def batch_line(batch_id: int, summary: Summary, elapsed_sec: float, waited_ms: int | None) -> str:
    """Return the line of a batch: with a million lines it still fits a terminal, log prefix included."""
    rate = _rate(summary, elapsed_sec)
    line = (
        f"batch {batch_id}: {summary.lines:,} in, {summary.stored:,} stored, {summary.duplicates:,} duplicates, "
        f"{summary.rejected:,} rejected{_changes_text(summary)}, {f'{rate / 1000:,.0f}k' if rate >= 10_000 else f'{rate:,}'}/s"
    )
    if summary.lacking:
        shards = sorted(summary.away)
        names = f"shard{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"
        line += f", up to {count_text(summary.waiting, 'line')} waiting for {names}"
    return line if waited_ms is None else f"{line}, backlog {waited_ms / 1000:,.1f} s"


def _changes_text(summary: Summary) -> str:
    return nonzero_text(cancelled=summary.cancelled, replaced=summary.replaced, late=summary.late)


def _rate(summary: Summary, elapsed_sec: float) -> int:
    return round(summary.lines / max(elapsed_sec, 0.001))
