"""The driver's loop: keep the feed going, watch the query, end both cleanly."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Protocol

from pyspark.sql.streaming.query import StreamingQuery

from pipeline.core.clock import Clock
from pipeline.core.errors import StoreError
from pipeline.ingest.feeds import Feed
from pipeline.ingest.query import query_failure

log = logging.getLogger(__name__)

STOP_MS = 20_000  # how long a batch in hand may take at a stop; cut off after that, it is replayed at the next start
CHECK_MS = 20


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
    """Bring in what is there, before a query that takes in what is there."""
    feed.step(stopping)
    while not stopping() and not feed.is_taken_in():
        interruptibly(feed.wait)
        feed.step(stopping)
    feed.close()


def stop_query(query: StreamingQuery, clock: Clock) -> None:
    """Stop between two batches, if the one in hand ends soon; one that is cut off is replayed and stores nothing twice."""
    deadline_ms = clock.monotonic_ms() + STOP_MS
    while query.isActive and query.status["isTriggerActive"] and clock.monotonic_ms() < deadline_ms:
        Event().wait(CHECK_MS / 1000)
    query.stop()


def raise_failure(query: StreamingQuery) -> None:
    """Raise what ended the query, as one sentence."""
    exc = query.exception()
    if exc is not None:
        raise query_failure(exc) from exc


@dataclass(slots=True)
class FenceSweeper:
    """Forgets the fences of landing files that have been gone for ``keep_ms``.

    A fence must outlive its file: a writer of an earlier run of the query may still hold rows of it. So a file counts as gone
    only after this process has missed it for that long.
    """

    store: FenceStore
    source_id: str
    landing: Path
    keep_ms: float
    clock: Clock
    _missing_since_ms: dict[str, float] = field(default_factory=dict)
    _next_ms: float = 0.0

    def sweep(self) -> None:
        """Look once in a while; a server that does not answer is for others to tell."""
        now_ms = self.clock.monotonic_ms()
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self.keep_ms / 6
        try:
            here = {path.name.partition(".")[0] for path in self.landing.iterdir()}
            missing = [token for token in self.store.fenced_tokens(self.source_id) if token not in here]
            self._missing_since_ms = {token: self._missing_since_ms.get(token, now_ms) for token in missing}
            over = [token for token, since_ms in self._missing_since_ms.items() if now_ms - since_ms >= self.keep_ms]
            self.store.forget_fences(self.source_id, over)
        except (StoreError, OSError) as exc:
            log.debug("the fences are swept later: %s", exc)
