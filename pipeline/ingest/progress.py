"""What a user sees of the query while it runs: a line a batch, and counters in Redis for ``jobs/status.py``."""

import logging
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from threading import Event, Lock
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from pipeline.core.clock import Clock
from pipeline.core.ids import token_epoch_ms
from pipeline.ingest.checkpoint import committed_log_id, log_id_of, names_read
from pipeline.ingest.writer import Summary
from pipeline.landing.names import parse_landing_name
from pipeline.store.ingests import IngestProgress

log = logging.getLogger(__name__)

LISTED_MAX = 10_000  # landing files looked at for each batch
UNTOLD_MAX = 100  # batches that Spark may be behind with telling
WAIT_SEC = 2.0  # for Spark to tell of the last batch


class WaitingFiles:
    """Tells how long the oldest landing file that is not stored has waited since it was landed.

    It costs a listing of at most ``LISTED_MAX`` names a batch; with more the oldest of those is taken. Spark deletes what is
    stored later, and those names are remembered until they are gone.
    """

    def __init__(self, checkpoint: Path, landing: Path, clock: Clock) -> None:
        self._checkpoint = checkpoint
        self._landing = landing
        self._clock = clock
        self._stored: set[str] = set()
        self._read_up_to: int | None = None

    def oldest_ms(self, batch_id: int) -> int | None:
        """Return it for the moment after ``batch_id`` was stored; 0 if no file waits, None if it can't be known."""
        try:
            if self._read_up_to is None:
                self._read_up_to = committed_log_id(self._checkpoint)
            up_to = log_id_of(self._checkpoint, batch_id)
            if up_to <= self._read_up_to:  # the checkpoint was rolled: its log counts from 0 again
                self._read_up_to = -1
            self._stored |= names_read(self._checkpoint, self._read_up_to, up_to)
            self._read_up_to = up_to
            with os.scandir(self._landing) as entries:
                here = {entry.name for entry in islice(entries, LISTED_MAX)}
        except (OSError, ValueError, KeyError, TypeError) as exc:
            log.debug("how long files have waited is not known: %s", exc)
            return None
        if len(here) < LISTED_MAX:
            self._stored &= here
        waiting = [landed.token for name in here - self._stored if (landed := parse_landing_name(name))]
        # Tokens sort by time. One that was made in the same millisecond as others is a little ahead of the clock.
        return max(0, self._clock.wall_ms() - token_epoch_ms(min(waiting))) if waiting else 0


class BatchReporter(StreamingQueryListener):
    """Logs a line for each batch when it is stored, and records it when Spark has committed it.

    Args:
        reads: the input in words.

        waiting: None where files are not landed, or the checkpoint is not local.

        record: takes the counters, once for each batch that had lines; what it raises disturbs nobody.
    """

    def __init__(
        self,
        source_id: str,
        reads: str,
        waiting: WaitingFiles | None,
        record: Callable[[IngestProgress], object],
        clock: Clock,
    ) -> None:
        self._source_id = source_id
        self._reads = reads
        self._waiting = waiting
        self._record = record
        self._clock = clock
        self._started_ms = clock.wall_ms()
        self._total = Summary()
        self._batches = self._files = 0
        self._lock = Lock()
        self._stored: dict[int, tuple[Summary, float, int | None]] = {}
        self._has_ended = Event()

    def report(self, batch_id: int, summary: Summary, elapsed_sec: float) -> None:
        """Log what became of a batch; Spark commits it after this."""
        waited_ms = self._waiting.oldest_ms(batch_id) if self._waiting else None
        log.info("%s", batch_line(batch_id, summary, elapsed_sec, waited_ms))
        with self._lock:
            self._stored[batch_id] = (summary, elapsed_sec, waited_ms)
            if len(self._stored) > UNTOLD_MAX:  # of batches that were cut off before they were committed
                del self._stored[next(iter(self._stored))]

    def wait_for_the_end(self) -> None:
        """Wait, not long, until Spark has told of the last batch of a query that has ended."""
        self._has_ended.wait(WAIT_SEC)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 (Spark's name)
        """Start over; Spark waits for it."""
        self._has_ended.clear()

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 (Spark's name)
        """Count a committed batch; one without files brings nothing to count."""
        with self._lock:
            stored = self._stored.pop(event.progress.batchId, None)
        if stored is None or not stored[0].lines:
            return
        summary, elapsed_sec, waited_ms = stored
        self._total.add(summary)
        self._batches += 1
        self._files += event.progress.numInputRows  # a file is a row where Spark reads it
        try:
            self._record(self._progress(event.progress, summary, elapsed_sec, waited_ms))
        except Exception as exc:
            log.debug("the progress is told with the next batch: %s", exc)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 (Spark's name)
        """All batches were told."""
        self._has_ended.set()

    def _progress(self, told: Any, summary: Summary, elapsed_sec: float, waited_ms: int | None) -> IngestProgress:
        total = self._total
        return IngestProgress(
            source_id=self._source_id,
            reads=self._reads,
            started_ms=self._started_ms,
            batches=self._batches,
            files=self._files,
            lines=total.lines,
            stored=total.stored,
            known=total.known,
            rejected=total.rejected,
            blank=total.blank,
            last_batch_ms=self._clock.wall_ms(),
            last_lines=summary.lines,
            last_lines_per_sec=_rate(summary, elapsed_sec),
            last_took_ms=told.durationMs.get("triggerExecution", 0),
            last_oldest_waiting_ms=waited_ms,
            last_phases_ms={name: ms for name, ms in told.durationMs.items() if name != "triggerExecution"},
        )


def batch_line(batch_id: int, summary: Summary, elapsed_sec: float, waited_ms: int | None) -> str:
    """Return the line of a batch: with a million lines it still fits a terminal, log prefix included."""
    rate = _rate(summary, elapsed_sec)
    line = (
        f"batch {batch_id}: {summary.lines:,} in, {summary.stored:,} stored, {summary.known:,} known, "
        f"{summary.rejected:,} rejected, {f'{rate / 1000:,.0f}k' if rate >= 10_000 else f'{rate:,}'}/s"
    )
    return line if waited_ms is None else f"{line}, oldest waits {waited_ms / 1000:,.1f} s"


def _rate(summary: Summary, elapsed_sec: float) -> int:
    return round(summary.lines / max(elapsed_sec, 0.001))
