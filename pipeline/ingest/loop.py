"""The driver's loop: keep the source going, watch the query, end both cleanly."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Protocol

from py4j.protocol import Py4JError
from pyspark.sql.streaming.query import StreamingQuery

from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError, StoreError
from pipeline.ingest.checkpoint import CheckpointRoller
from pipeline.ingest.query import Tries, query_failure
from pipeline.ingest.sources import Source

log = logging.getLogger(__name__)

STOP_MS = 20_000  # how long a running batch may take at a stop; cut off after that, it is replayed at the next start
CHECK_MS = 20
QUERY_LOOK_MS = 1_000  # between two looks whether the query still runs: a call to Java, which an idle job would feel
LOOKS_PER_KEEP = 6
# What Spark says of a query until it knows whether there is something.
_BEFORE_A_LOOK = ("Initializing", "Getting offsets")


class MarkerStore(Protocol):
    """What the sweeper asks of the store."""

    def marked_parts(self, source_id: str) -> Iterable[tuple[str, int]]:
        """Walk the parts that have a marker, each with when it moved last (epoch ms); one may come several times."""
        ...

    def forget_markers(self, source_id: str, part_ids: Sequence[str]) -> None:
        """Delete markers."""
        ...


def wait_for_first_look(query: StreamingQuery, stopping: Callable[[], bool]) -> None:
    """Return when the query has looked once for something to read: the source in Python starts a process for that."""
    pause = Event()
    while query.isActive and not stopping():
        if not query.status["message"].startswith(_BEFORE_A_LOOK):
            return
        pause.wait(CHECK_MS / 1000)


class Restarts:
    """Starts a query again when its checkpoint was started anew, or when it has failed for a reason of the moment.

    Args:
        start: starts it.

        checkpoint: for the sentence about a full disk.

        tries: those of one query after the other.
    """

    def __init__(self, start: Callable[[], StreamingQuery], checkpoint: str, tries: Tries) -> None:
        self.start = start
        self._checkpoint = checkpoint
        self._tries = tries

    def after(self, query: StreamingQuery) -> StreamingQuery:
        """Start the query again after one that has ended; what that has stored is known, so nothing is stored twice.

        Raises:
            PipelineError: it was stopped from outside, or failed for another reason, or again and again.
        """
        exc = query.exception()
        if exc is None:
            raise PipelineError("The streaming query was stopped from outside; start the job again.")
        if any(each.numInputRows for each in query.recentProgress):
            self._tries.reset()
        if not self._tries.has_another(exc):
            raise query_failure(exc, self._checkpoint) from exc
        return self.start()


def run_until_stopped(
    source: Source,
    query: StreamingQuery,
    restarts: Restarts,
    clock: Clock,
    stopping: Callable[[], bool],
    interruptibly: Callable[[Callable[[], object]], None],
    sweeper: "MarkerSweeper | None",
    roller: CheckpointRoller | None,
) -> None:
    """Feed the query until a stop, then let its batch finish; the source stays open.

    Args:
        restarts: starts the next query.

        sweeper: None for an input without landing folder.

        roller: None for a checkpoint that is not ours to keep.

    Raises:
        PipelineError: the query ended by itself, or its checkpoint can't be kept.
    """
    next_look_ms = 0.0
    while not stopping():
        source.step(stopping)
        if sweeper is not None:
            sweeper.sweep()
        now_ms = clock.monotonic_ms()
        if now_ms >= next_look_ms:
            next_look_ms = now_ms + QUERY_LOOK_MS
            if not query.isActive:
                query = restarts.after(query)
        if roller is not None and roller.wants_stop(partial(_is_between_batches, query)):
            stopped_ms = clock.monotonic_ms()
            query.stop()
            files = roller.prepare()
            query = restarts.start()
            paused_sec = (clock.monotonic_ms() - stopped_ms) / 1000
            log.info("rolled the checkpoint: its log named %s files; paused for %.2f s", f"{files:,}", paused_sec)
        interruptibly(source.wait)
    source.finish()
    stop_query(query, clock)


def _is_between_batches(query: StreamingQuery) -> bool:
    return not query.status["isTriggerActive"]


def run_once(
    source: Source, stopping: Callable[[], bool], interruptibly: Callable[[Callable[[], object]], None]
) -> None:
    """Bring in what is there, before a query that takes in what is there; it ends whatever the input does.

    The source stays open, so that no other job takes its input while the query runs.

    Raises:
        SourceError: the line server was never reached, or the disk stays full.
    """
    source.step(stopping)
    source.begin_drain()
    while not stopping() and not source.is_drained():
        interruptibly(source.wait)
        source.step(stopping)
    source.finish()


def run_to_the_end(
    query: StreamingQuery,
    restarts: Restarts,
    stopping: Callable[[], bool],
    clock: Clock,
    look: Callable[[], object] | None,
) -> None:
    """Wait for a query that ends by itself; ``look`` is called many times a second.

    Raises:
        PipelineError: it failed.
    """
    while query.isActive or query.exception() is not None:
        if stopping():
            stop_query(query, clock)
            break
        if not query.isActive:
            query = restarts.after(query)
        if look is not None:
            look()
        Event().wait(CHECK_MS / 1000)


def stop_query(query: StreamingQuery, clock: Clock) -> None:
    """Stop between two batches, if the running one ends soon; one that is cut off is replayed and stores nothing twice."""
    deadline_ms = clock.monotonic_ms() + STOP_MS
    try:
        while query.isActive and not _is_between_batches(query) and clock.monotonic_ms() < deadline_ms:
            Event().wait(CHECK_MS / 1000)
        query.stop()
    except (Py4JError, OSError):
        # A SIGTERM to the whole process group, as systemd sends it, ends the JVM as well.
        log.warning("Spark was stopped first, so the running batch is replayed at the next start")


@dataclass(slots=True)
class MarkerSweeper:
    """Deletes the markers of landing files that are gone, ``keep_ms`` after their last move.

    A marker must outlive every task that may still hold rows of its file. A file is deleted only after its batch is
    committed, and it counts as gone when it is missing at a start, or at two looks in a row.
    """

    store: MarkerStore
    source_id: str
    landing: Path
    keep_ms: float
    clock: Clock
    _missing: set[str] | None = None
    _next_ms: float = 0.0

    def sweep(self) -> None:
        """Look once in a while; a server that does not answer is reported elsewhere."""
        now_ms = self.clock.monotonic_ms()
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self.keep_ms / LOOKS_PER_KEEP
        oldest_ms = self.clock.wall_ms() - self.keep_ms
        try:
            here = tokens_below(self.landing)
            moved_ms: dict[str, int] = {}  # of the files that are gone
            parts: dict[str, str] = {}  # of these; each shard may have a marker of a part, with a time of its own
            for part_id, at_ms in self.store.marked_parts(self.source_id):
                # The id of a later part of a large file is the file's token and the part's first line.
                token = part_id.partition(".")[0]
                if token not in here:
                    parts[part_id] = token
                    moved_ms[token] = max(at_ms, moved_ms.get(token, at_ms))
            gone = moved_ms.keys() if self._missing is None else moved_ms.keys() & self._missing
            old = [part_id for part_id, token in parts.items() if token in gone and moved_ms[token] < oldest_ms]
            self.store.forget_markers(self.source_id, old)
            self._missing = set(moved_ms)
        except (StoreError, OSError) as exc:
            log.debug("the markers are swept later: %s", exc)


def tokens_below(landing: Path) -> set[str]:
    """Return the tokens of the files in a landing folder, of those that wait for a shard, and of those that may be read again.

    Raises:
        OSError: it can't be listed.
    """
    # Twice, as a file may move between the folder and those in it meanwhile.
    names = [name for _ in range(2) for _, _, found in os.walk(landing, onerror=_fail) for name in found]
    return {name.partition(".")[0] for name in names}


def _fail(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # what was archived long ago is deleted at any time
        raise error
