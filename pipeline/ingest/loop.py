"""The driver's loop: keep the feed going, watch the query, end both cleanly."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import NoReturn, Protocol

from py4j.protocol import Py4JError
from pyspark.sql.streaming.query import StreamingQuery

from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError, StoreError
from pipeline.core.ids import token_epoch_ms
from pipeline.ingest.checkpoint import CheckpointKeeper
from pipeline.ingest.feeds import Feed
from pipeline.ingest.query import query_failure

log = logging.getLogger(__name__)

STOP_MS = 20_000  # how long a batch in hand may take at a stop; cut off after that, it is replayed at the next start
CHECK_MS = 20
LOOKS_PER_KEEP = 6


class FenceStore(Protocol):
    """What the sweeper asks of the store."""

    def fenced_tokens(self, source_id: str) -> Iterable[str]:
        """Walk the landing files that have a fence."""
        ...

    def forget_fences(self, source_id: str, file_tokens: Sequence[str]) -> None:
        """Drop fences."""
        ...


def run_until_stopped(
    feed: Feed,
    query: StreamingQuery,
    start_again: Callable[[], StreamingQuery],
    clock: Clock,
    stopping: Callable[[], bool],
    interruptibly: Callable[[Callable[[], object]], None],
    sweeper: "FenceSweeper | None",
    keeper: CheckpointKeeper | None,
) -> None:
    """Feed the query until a stop, then let its batch finish.

    Args:
        start_again: starts the next query when the checkpoint was begun anew.

        sweeper: None for an input without landing folder.

        keeper: None for a checkpoint that is not ours to keep.

    Raises:
        PipelineError: the query ended by itself, or its checkpoint can't be kept.
    """
    while not stopping():
        feed.step(stopping)
        if sweeper is not None:
            sweeper.sweep()
        if not query.isActive:
            raise_failure(query)
        if keeper is not None and keeper.wants_stop(partial(_is_between_batches, query)):
            stopped_ms = clock.monotonic_ms()
            query.stop()
            files = keeper.prepare()
            query = start_again()
            paused_sec = (clock.monotonic_ms() - stopped_ms) / 1000
            log.info("rolled the checkpoint: its log named %s files; paused for %.2f s", f"{files:,}", paused_sec)
        interruptibly(feed.wait)
    feed.close()
    stop_query(query, clock)
    if keeper is not None:
        keeper.tidy()


def _is_between_batches(query: StreamingQuery) -> bool:
    return not query.status["isTriggerActive"]


def run_once(feed: Feed, stopping: Callable[[], bool], interruptibly: Callable[[Callable[[], object]], None]) -> None:
    """Bring in what is there, before a query that takes in what is there; it ends whatever the input does.

    Raises:
        SourceError: the line server was never reached, or the disk stays full.
    """
    feed.step(stopping)
    feed.start_finishing()
    while not stopping() and not feed.is_taken_in():
        interruptibly(feed.wait)
        feed.step(stopping)
    feed.close()


def run_to_the_end(
    query: StreamingQuery,
    stopping: Callable[[], bool],
    clock: Clock,
    keeper: CheckpointKeeper | None,
    look: Callable[[], object] | None,
) -> None:
    """Wait for a query that ends by itself; ``look`` is called many times a second.

    Raises:
        PipelineError: it failed.
    """
    while query.isActive:
        if stopping():
            stop_query(query, clock)
            break
        if look is not None:
            look()
        Event().wait(CHECK_MS / 1000)
    else:
        if query.exception() is not None:
            raise_failure(query)
    if keeper is not None:
        keeper.tidy()


def stop_query(query: StreamingQuery, clock: Clock) -> None:
    """Stop between two batches, if the one in hand ends soon; one that is cut off is replayed and stores nothing twice."""
    deadline_ms = clock.monotonic_ms() + STOP_MS
    try:
        while query.isActive and not _is_between_batches(query) and clock.monotonic_ms() < deadline_ms:
            Event().wait(CHECK_MS / 1000)
        query.stop()
    except (Py4JError, OSError):
        # A SIGTERM to the whole process group, as systemd sends it, ends the JVM as well.
        log.warning("Spark was stopped first, so the batch in hand is replayed at the next start")


def raise_failure(query: StreamingQuery) -> NoReturn:
    """Raise what ended the query, as one sentence."""
    exc = query.exception()
    if exc is None:
        raise PipelineError("The streaming query was stopped from outside; start the job again.")
    raise query_failure(exc) from exc


@dataclass(slots=True)
class FenceSweeper:
    """Forgets the fences of landing files that are gone, ``keep_ms`` after they landed.

    A fence must outlive every task that may still hold rows of its file. A file is deleted only after its batch is
    committed, and it counts as gone when it is missing at a start, or at two looks in a row.
    """

    store: FenceStore
    source_id: str
    landing: Path
    keep_ms: float
    clock: Clock
    _missing: set[str] | None = None
    _next_ms: float = 0.0

    def sweep(self) -> None:
        """Look once in a while; a server that does not answer is for others to tell."""
        now_ms = self.clock.monotonic_ms()
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self.keep_ms / LOOKS_PER_KEEP
        oldest_ms = self.clock.wall_ms() - self.keep_ms
        try:
            here = {path.name.partition(".")[0] for path in self.landing.iterdir()}
            # The fence of a later piece of a large file has the piece's first line behind the file's token.
            missing = {f for f in self.store.fenced_tokens(self.source_id) if f.partition(".")[0] not in here}
            gone = missing if self._missing is None else missing & self._missing
            old = [f for f in gone if token_epoch_ms(f.partition(".")[0]) < oldest_ms]
            self.store.forget_fences(self.source_id, old)
            self._missing = missing
        except (StoreError, OSError) as exc:
            log.debug("the fences are swept later: %s", exc)
