"""The foreachBatch function: every partition is parsed and stored in a Python worker, and rejects go to their folder."""

import logging
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame

from pipeline.config import RedisSettings
from pipeline.core.clock import Clock, SystemClock
from pipeline.ingest.parsing import parse_file
from pipeline.ingest.rejects import RejectsWriter, reject_record
from pipeline.ingest.transactions import ALL_STORED, PieceQueue, Step, parts_by_shard
from pipeline.ingest.transforms import file_texts
from pipeline.store.base import SchedulingStore
from pipeline.store.connection import connect
from pipeline.store.patience import call_patiently
from pipeline.store.redis_store import RedisStore
from pipeline.store.shards import open_shards

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
    wait_for_disk: bool = False


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
        shards = [ShardWriter(store, self._settings) for store in open_stores(self._settings.redis)]
        rejects = RejectsWriter(Path(self._settings.rejects))
        summary = Summary()
        for file in file_texts(batches):
            for piece in parse_file(file):
                rejects.write(file.token, (reject_record(file.name, line) for line in piece.rejected))
                summary.add(Summary(lines=piece.lines, rejected=len(piece.rejected), blank=piece.blank))
                for shard, part in parts_by_shard(piece, len(shards)).items():
                    shards[shard].add(PieceQueue(part))
        for writer in shards:
            summary.add(writer.finish())
        rejects.close()
        return summary


class ShardWriter:
    """Stores what a partition has for one shard."""

    def __init__(self, store: SchedulingStore, settings: WriterSettings) -> None:
        self._store = store
        self._settings = settings
        self._waiting: list[PieceQueue] = []
        self._fence_tokens: list[str] = []
        self._summary = Summary()

    def add(self, queue: PieceQueue) -> None:
        """Store a piece, now or together with others."""
        self._waiting.append(queue)
        self._fence_tokens.append(queue.fence_token)
        messages = sum(waiting.left for waiting in self._waiting)
        if len(self._waiting) >= WAITING_FILES or messages >= self._settings.transaction_messages:
            self._store_waiting()

    def finish(self) -> Summary:
        """Store the rest, and look whether all of it is still there."""
        self._store_waiting()
        if self._settings.wait_for_disk and self._fence_tokens:
            _patiently(self._store.wait_for_disk)
        # A server that came back without its last writes, as weak settings allow, has lost messages and fences together.
        fences = _patiently(lambda: self._store.fences(self._settings.source_id, self._fence_tokens))
        self._summary.lost = sum(fence != ALL_STORED for fence in fences)
        return self._summary

    def _store_waiting(self) -> None:
        """Store by transactions; one that finds a fence elsewhere takes up from there."""
        source_id, queues, self._waiting = self._settings.source_id, self._waiting, []
        while step := Step(queues, self._settings.transaction_messages, TRANSACTION_BYTES):
            done = _patiently(partial(self._store.schedule, source_id, step.transaction))
            if done is not None:
                step.advance()
                self._summary.add(Summary(stored=done.stored, known=done.known))
                continue
            fences = _patiently(lambda: self._store.fences(source_id, [queue.fence_token for queue in queues]))
            for queue, fence in zip(queues, fences, strict=True):
                before = queue.place
                self._summary.known += queue.resume(fence) - before


def _patiently(call: Callable[[], T]) -> T:
    return call_patiently(call, lambda ms: threading.Event().wait(ms / 1000), SystemClock(), random.random)


_stores: dict[tuple[int, RedisSettings], list[RedisStore]] = {}


def open_stores(settings: RedisSettings) -> list[RedisStore]:
    """Return this process's stores, one a shard; Python workers live on from batch to batch, and so do their connections."""
    key = (os.getpid(), settings)
    if key not in _stores:
        _stores[key] = open_shards(connect(settings), settings)
    return _stores[key]
