"""The foreachBatch function: every partition goes to Redis in chunks, through Arrow, and rejects go to their folder."""

import logging
import os
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from pipeline.config import RedisSettings
from pipeline.core.clock import Clock, SystemClock
from pipeline.ingest.chunks import FileChunk, cut_chunks
from pipeline.ingest.rejects import RejectsWriter, reject_record
from pipeline.store.base import Store
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.patience import call_patiently
from pipeline.store.redis_store import RedisStore

log = logging.getLogger(__name__)

SUMMARY_COLUMNS = "lines long, stored long, known long, rejected long, blank long"
ROUND_TRIP_CHUNKS = 200  # tiny files: this many go in one round trip
ROUND_TRIP_BYTES = 8 * 1024 * 1024  # and long messages no more than this, give or take a chunk


@dataclass(slots=True)
class Summary:
    """What became of the lines of a partition or batch."""

    lines: int = 0
    stored: int = 0
    known: int = 0
    rejected: int = 0
    blank: int = 0

    def add(self, other: "Summary") -> None:
        for name in (f.name for f in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """What travels to the executors: values only, no clients."""

    redis: RedisSettings
    source_id: str
    rejects: str
    chunk_lines: int


class BatchWriter:
    """Writes micro-batches; exactly once per line, since each chunk is fenced in Redis by its landing file and line."""

    def __init__(self, settings: WriterSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Store one micro-batch. Returns when Redis has acknowledged every message of it; raises otherwise."""
        started_ms = self._clock.monotonic_ms()
        total = Summary()
        write = PartitionWriter(self._settings)
        # One small row a partition comes back, so what the driver does is the same for any number of messages.
        for row in batch.mapInArrow(write, SUMMARY_COLUMNS).collect():
            total.add(Summary(**row.asDict()))
        elapsed_sec = max(self._clock.monotonic_ms() - started_ms, 1) / 1000
        log.info(
            "batch %d: %s lines, %s stored, %s known, %s rejected, %s blank in %.2f s (%s/s)",
            batch_id,
            *(f"{n:,}" for n in (total.lines, total.stored, total.known, total.rejected, total.blank)),
            elapsed_sec,
            f"{total.lines / elapsed_sec:,.0f}",
        )


def count_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Count, where ``PartitionWriter`` stores: starts a Python worker with all that it imports."""
    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})


class PartitionWriter:
    """The mapInArrow function of one batch: rows in, one summary row out."""

    def __init__(self, settings: WriterSettings) -> None:
        self._settings = settings

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Store the rows of a partition and write its rejects, in line order."""
        store = open_store(self._settings.redis)
        rejects = RejectsWriter(Path(self._settings.rejects))
        summary = Summary()
        waiting: list[FileChunk] = []
        for file_chunk in cut_chunks(batches, self._settings.chunk_lines):
            rejects.write(file_chunk.chunk.file_token, (reject_record(row) for row in file_chunk.rejected.to_pylist()))
            waiting.append(file_chunk)
            if len(waiting) >= ROUND_TRIP_CHUNKS or self._is_enough(waiting):
                summary.add(self._store(store, waiting))
                waiting = []
        summary.add(self._store(store, waiting))
        rejects.close()
        yield pa.RecordBatch.from_pylist([{f.name: getattr(summary, f.name) for f in fields(summary)}])

    def _is_enough(self, waiting: Sequence[FileChunk]) -> bool:
        lines, size = sum(c.lines for c in waiting), sum(c.size_bytes for c in waiting)
        return lines >= self._settings.chunk_lines or size >= ROUND_TRIP_BYTES

    def _store(self, store: Store, file_chunks: Sequence[FileChunk]) -> Summary:
        if not file_chunks:
            return Summary()
        chunks = [c.chunk for c in file_chunks]
        # As long as it takes: Spark ends the wait by ending the task.
        results = call_patiently(
            lambda: store.schedule(self._settings.source_id, chunks),
            lambda ms: threading.Event().wait(ms / 1000),
            SystemClock(),
            random.random,
        )
        return Summary(
            lines=sum(c.lines for c in file_chunks),
            stored=sum(r.stored for r in results),
            known=sum(r.known for r in results),
            rejected=sum(c.rejected.num_rows for c in file_chunks),
            blank=sum(c.blank for c in file_chunks),
        )


_stores: dict[tuple[int, str, str], RedisStore] = {}


def open_store(settings: RedisSettings) -> RedisStore:
    """Return this process's store; Python workers live on from batch to batch, and so do their connections."""
    key: tuple[Any, ...] = (os.getpid(), settings.url, settings.namespace)
    if key not in _stores:
        _stores[key] = RedisStore(connect(settings), Keys(settings.namespace))
    return _stores[key]
