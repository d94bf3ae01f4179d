"""The foreachBatch function: every partition is parsed and stored in a Python worker, and rejects go to their folder."""

import gc
import logging
import re
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from copy import copy
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from pipeline.core.background import made_ahead
from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.ingest.cold_folder import ColdPlace
from pipeline.ingest.parsing import FileText, ParsedPart, parse_file
from pipeline.ingest.rejects import RejectsWriter, first_reject, reject_record
from pipeline.ingest.shard_writer import finish_all, open_shard_writers, split_by_shard
from pipeline.ingest.stores import Patience, WriterSettings, patience_of
from pipeline.ingest.summary import Summary
from pipeline.ingest.transactions import PartQueue
from pipeline.ingest.transforms import file_texts

log = logging.getLogger(__name__)

# Not as a text, which costs each batch 5 ms: Java would parse it.
_TYPES: dict[Any, T.DataType] = {int: T.LongType(), str: T.StringType(), list[str]: T.ArrayType(T.StringType())}
_SUMMARY_COLUMNS = T.StructType([T.StructField(f.name, _TYPES[f.type]) for f in fields(Summary)])
_UNREAD_FILE = re.compile(r"FAILED_READ_FILE[.\w]*\] Encountered error while reading file (?:file:/*(?=/))?(\S+?)\.? ")


class BatchWriter:
    """Writes micro-batches; each line is stored exactly once, whatever was stored before of its file, or topic."""

    def __init__(
        self,
        settings: WriterSettings,
        clock: Clock,
        report: Callable[[int, Summary, float], object],
        write: "PartitionWriter | None" = None,
    ) -> None:
        """Make one.

        Args:
            report: called for each batch that is stored, before Spark commits it: its number, what became of its lines, and
                the seconds it took. What it raises fails the batch.

            write: does it for a partition of the batch; None means for files.

        ``is_there`` tells, of a batch that is stored, whether no failover has undone any of it meanwhile. ``away`` tells which
        shards are not asked, and ``note`` is told, after each writing, which shards were found away.
        """
        self.is_there: Callable[[Summary], bool] = lambda stored: True
        self.away: Callable[[], Collection[int]] = lambda: ()
        self.note: Callable[[Collection[int]], object] = lambda away: None
        self._write_partition = write or PartitionWriter(settings)
        self._clock = clock
        self._report = report

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Store one micro-batch. Returns when Redis has acknowledged every message of it; raises otherwise."""
        started_ms = self._clock.monotonic_ms()
        total = done = self.write(batch)
        while done.lost or not self.is_there(done):
            if done.lost:
                log.warning(
                    "Redis lost what it had taken of %d parts, as after a crash; they are stored again", done.lost
                )
            done = self.write(batch)
            total.write_again(done)
        self._report(batch_id, total, (self._clock.monotonic_ms() - started_ms) / 1000)

    def warm_up(self, nothing: DataFrame) -> None:
        """Take the way of a batch with no rows: workers start, import and connect."""
        self.write(nothing)

    def write(self, batch: DataFrame, away: Collection[int] | None = None) -> Summary:
        """Store the rows of a batch, which may be stored already; returns what became of their lines.

        Args:
            away: shards that are not asked; None means those that are known to be away.
        """
        away = self.away() if away is None else away
        total = Summary()
        # One small row a partition comes back, so what the driver does is the same for any number of messages.
        try:
            write = self._write_partition.of_writing(secrets.randbits(62), away)
            rows = batch.mapInArrow(write, _SUMMARY_COLUMNS).collect()
        except Exception as exc:
            if unread := _UNREAD_FILE.search(str(exc)):
                raise _unread_file(batch.sparkSession, unquote(unread[1])) from exc
            raise
        for row in rows:
            total.add(Summary(**row.asDict()))
        self._write_partition.learn(total)
        self.note(total.away - {*away})
        return total


def _unread_file(spark: SparkSession, path: str) -> PipelineError:
    """Find out which hosts do not see a file: Spark's error names the file only."""

    def probe(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"host": [socket.gethostname()], "is_there": [Path(path).exists()]})

    tasks = 2 * spark.sparkContext.defaultParallelism  # more than cores, so that every executor gets one
    rows = spark.range(0, tasks, 1, tasks).mapInArrow(probe, "host string, is_there boolean").collect()
    hosts = sorted({row.host for row in rows if not row.is_there})
    return PipelineError(
        f"An executor on {', '.join(hosts) or 'a host that is gone'} does not see {path}: mount that folder on every executor "
        "and start the job again; nothing of this batch was deleted."
    )


def count_lines(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Parse and count, where ``PartitionWriter`` stores: starts a Python worker with all that it imports."""
    lines = sum(part.lines for file in file_texts(batches) for part in parse_file(file))
    yield pa.RecordBatch.from_pydict({"lines": [lines]})


def _read_parts(
    batches: Iterable[pa.RecordBatch], shards: int, cold: ColdPlace | None
) -> Iterator[tuple[FileText, ParsedPart, dict[int, PartQueue]]]:
    """Parse files, and sort what each shard gets of them."""
    for file in file_texts(batches):
        about = file.is_repeated, file.has_waited, cold.cold_from_ms(file.arrival_ms) if cold else None
        for part in parse_file(file):
            split = split_by_shard(part, shards)
            yield file, part, {shard: PartQueue(share, *about) for shard, share in split.items()}


class PartitionWriter:
    """The mapInArrow function of a batch: file rows in, one summary row out."""

    def __init__(self, settings: WriterSettings) -> None:
        self._settings = settings
        self._writing: tuple[int, Collection[int]] = (0, ())

    def of_writing(self, number: int, away: Collection[int]) -> Self:
        """Return the same for the tasks of one writing, of this number, which do not ask the shards that are away."""
        made = copy(self)
        made._writing = (number, away)
        return made

    def learn(self, done: Summary) -> None:
        """Take note of what a writing has told, for the next ones."""

    def patience(self) -> Patience:
        """Return what this process has with the shards."""
        return patience_of(self._settings, *self._writing) if self._writing[0] else Patience(self._settings.patience_ms)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Store the lines of a partition's files and write their rejects."""
        summary = self.write(batches)
        freeze_once()
        yield pa.RecordBatch.from_pylist([{f.name: getattr(summary, f.name) for f in fields(summary)}])

    def write(self, batches: Iterable[pa.RecordBatch]) -> Summary:
        """Store and return what became of the lines. A wait for Redis ends with the patience, if it has a limit, or the task."""
        shards = open_shard_writers(self._settings, self.patience())
        summary = Summary()
        with RejectsWriter(Path(self._settings.rejects), self._settings.rejects_mark) as rejects:
            with closing(made_ahead(_read_parts(batches, len(shards), self._settings.cold))) as parts:
                for file, part, queues in parts:
                    if not summary.file_tokens or summary.file_tokens[-1] != file.token:
                        summary.file_tokens.append(file.token)
                    if not file.is_repeated:  # else its rejects are in place, or where somebody has taken them
                        rejects.write(file, (reject_record(file.name, line) for line in part.rejected))
                        first = first_reject(file.name, part.rejected)
                        summary.add(
                            Summary(part.lines, rejected=len(part.rejected), blank=part.blank, first_reject=first)
                        )
                    for shard, queue in queues.items():
                        shards[shard].add(queue)
            summary.add(finish_all(shards))
        return summary


@cache
def freeze_once() -> None:
    """Let the garbage collector pass over what is there now. Spark calls it after each task, and our imports cost it 70 ms."""
    gc.freeze()
