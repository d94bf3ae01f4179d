"""The driver's loop: keep the feed going, watch the query, end both cleanly."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import NoReturn, Protocol

from py4j.protocol import Py4JError
from pyspark.sql.streaming.query import StreamingQuery

from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError, StoreError
from pipeline.core.ids import token_epoch_ms
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
    clock: Clock,
    stopping: Callable[[], bool],
    interruptibly: Callable[[Callable[[], object]], None],
    housekeeping: Callable[[], None],
) -> None:
    """Feed the query until a stop, then let its batch finish.

    Raises:
        PipelineError: the query ended by itself.
    """
    while not stopping():
        feed.step(stopping)
        housekeeping()
        if not query.isActive:
            raise_failure(query)
        interruptibly(feed.wait)
    feed.close()
    stop_query(query, clock)


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


def run_to_the_end(query: StreamingQuery, stopping: Callable[[], bool], clock: Clock) -> None:
    """Wait for a query that ends by itself.

    Raises:
        PipelineError: it failed.
    """
    while query.isActive:
        if stopping():
            stop_query(query, clock)
            return
        Event().wait(CHECK_MS / 1000)
    if query.exception() is not None:
        raise_failure(query)


def stop_query(query: StreamingQuery, clock: Clock) -> None:
    """Stop between two batches, if the one in hand ends soon; one that is cut off is replayed and stores nothing twice."""
    deadline_ms = clock.monotonic_ms() + STOP_MS
    try:
        while query.isActive and query.status["isTriggerActive"] and clock.monotonic_ms() < deadline_ms:
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
            missing = {token for token in self.store.fenced_tokens(self.source_id) if token not in here}
            gone = missing if self._missing is None else missing & self._missing
            self.store.forget_fences(self.source_id, [token for token in gone if token_epoch_ms(token) < oldest_ms])
            self._missing = missing
        except (StoreError, OSError) as exc:
            log.debug("the fences are swept later: %s", exc)
