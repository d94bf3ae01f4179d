"""The foreachBatch function: every partition is parsed and stored in a Python worker, and rejects go to their folder."""

import logging
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame

from pipeline.config import RedisSettings
from pipeline.core.clock import Clock, SystemClock
from pipeline.ingest.parsing import parse_file
from pipeline.ingest.rejects import RejectsWriter, reject_record
from pipeline.ingest.transactions import ALL_STORED, PieceQueue, Step
from pipeline.ingest.transforms import file_texts
from pipeline.store.base import Store
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.patience import call_patiently
from pipeline.store.redis_store import RedisStore

log = logging.getLogger(__name__)

T = TypeVar("T")

SUMMARY_COLUMNS = "lines long, stored long, known long, rejected long, blank long, lost long"
TRANSACTION_BYTES = 4 * 1024 * 1024  # long messages: a transaction has no more than this, give or take one
WAITING_FILES = 500  # tiny files: this many are stored together


@dataclass(slots=True)
class Summary:
    """What became of the lines of a partition or batch; ``lost`` counts files that the server lost again."""

    lines: int = 0
    stored: int = 0
    known: int = 0
    rejected: int = 0
    blank: int = 0
    lost: int = 0

    def add(self, other: "Summary") -> None:
        for name in (f.name for f in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """What travels to the executors: values only, no clients."""

    redis: RedisSettings
    source_id: str
    rejects: str
    transaction_messages: int


class BatchWriter:
    """Writes micro-batches of file rows; each line is stored exactly once, whatever was stored of its file before."""

    def __init__(
        self, settings: WriterSettings, clock: Clock, report: Callable[[int, "Summary", float], object]
    ) -> None:
        """``report`` is told of each batch that is stored: its number, what became of its lines, and the seconds it took."""
        self._settings = settings
        self._clock = clock
        self._report = report

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Store one micro-batch. Returns when Redis has acknowledged every message of it; raises otherwise."""
        started_ms = self._clock.monotonic_ms()
        total = self._write(batch)
        while total.lost:
            log.warning("Redis lost what it had taken of %d files, as after a crash; they are stored again", total.lost)
            total = self._write(batch)
        self._report(batch_id, total, (self._clock.monotonic_ms() - started_ms) / 1000)

    def _write(self, batch: DataFrame) -> Summary:
        total = Summary()
        write = PartitionWriter(self._settings)
        # One small row a partition comes back, so what the driver does is the same for any number of messages.
        for row in batch.mapInArrow(write, SUMMARY_COLUMNS).collect():
            total.add(Summary(**row.asDict()))
        return total


def count_lines(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Parse and count, where ``PartitionWriter`` stores: starts a Python worker with all that it imports."""
    lines = sum(piece.lines for file in file_texts(batches) for piece in parse_file(file))
    yield pa.RecordBatch.from_pydict({"lines": [lines]})


class PartitionWriter:
    """The mapInArrow function of one batch: file rows in, one summary row out."""

    def __init__(self, settings: WriterSettings) -> None:
        self._settings = settings

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Store the lines of a partition's files and write their rejects."""
        summary = self.write(batches)
        yield pa.RecordBatch.from_pylist([{f.name: getattr(summary, f.name) for f in fields(summary)}])

    def write(self, batches: Iterable[pa.RecordBatch]) -> Summary:
        """Do it. As long as it takes: Spark ends a wait for Redis by ending the task."""
        store = open_store(self._settings.redis)
        rejects = RejectsWriter(Path(self._settings.rejects))
        summary = Summary()
        waiting: list[PieceQueue] = []
        fence_tokens: list[str] = []
        for file in file_texts(batches):
            for piece in parse_file(file):
                rejects.write(file.token, (reject_record(file.name, line) for line in piece.rejected))
                summary.add(Summary(lines=piece.lines, rejected=len(piece.rejected), blank=piece.blank))
                waiting.append(PieceQueue(piece))
                fence_tokens.append(piece.fence_token)
                if self._is_enough(waiting):
                    summary.add(self._store(store, waiting))
                    waiting = []
        summary.add(self._store(store, waiting))
        rejects.close()
        # A server that came back without its last writes, as weak settings allow, has lost messages and fences together.
        fences = _patiently(lambda: store.fences(self._settings.source_id, fence_tokens))
        summary.lost = sum(fence != ALL_STORED for fence in fences)
        return summary

    def _is_enough(self, waiting: Sequence[PieceQueue]) -> bool:
        return (
            len(waiting) >= WAITING_FILES or sum(queue.left for queue in waiting) >= self._settings.transaction_messages
        )

    def _store(self, store: Store, queues: Sequence[PieceQueue]) -> Summary:
        """Store what is left of some queues, by transactions; one that finds a fence elsewhere takes up from there."""
        source_id, stored, known = self._settings.source_id, 0, 0
        while step := Step(queues, self._settings.transaction_messages, TRANSACTION_BYTES):
            done = _patiently(partial(store.schedule, source_id, step.transaction))
            if done is not None:
                step.advance()
                stored, known = stored + done.stored, known + done.known
                continue
            fences = _patiently(lambda: store.fences(source_id, [queue.fence_token for queue in queues]))
            for queue, fence in zip(queues, fences, strict=True):
                before = queue.place
                known += queue.resume(fence) - before
        return Summary(stored=stored, known=known)


def _patiently(call: Callable[[], T]) -> T:
    return call_patiently(call, lambda ms: threading.Event().wait(ms / 1000), SystemClock(), random.random)


_stores: dict[tuple[int, str, str], RedisStore] = {}


def open_store(settings: RedisSettings) -> RedisStore:
    """Return this process's store; Python workers live on from batch to batch, and so do their connections."""
    key: tuple[Any, ...] = (os.getpid(), settings.url, settings.namespace)
    if key not in _stores:
        _stores[key] = RedisStore(connect(settings), Keys(settings.namespace))
    return _stores[key]
