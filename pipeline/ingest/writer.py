"""The foreachBatch function: every partition is parsed and stored in a Python worker, and rejects go to their folder."""

import gc
import logging
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.ingest.parsing import parse_file
from pipeline.ingest.rejects import RejectsWriter, first_reject, reject_record
from pipeline.ingest.shard_writer import ShardWriter, Summary
from pipeline.ingest.stores import WriterSettings, open_changing_stores, open_stores
from pipeline.ingest.transactions import PartQueue, split_by_shard
from pipeline.ingest.transforms import file_texts

log = logging.getLogger(__name__)

SUMMARY_COLUMNS = (
    "lines long, stored long, duplicates long, rejected long, blank long, lost long, "
    "cancelled long, replaced long, late long, stored_again long, first_reject string, file_tokens array<string>, "
    "histories array<string>"
)
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

        ``is_there`` tells, of a batch that is stored, whether no failover has undone any of it meanwhile.
        """
        self.is_there: Callable[[Summary], bool] = lambda stored: True
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
            total.add(Summary(stored=done.stored, stored_again=done.stored))
        self._report(batch_id, total, (self._clock.monotonic_ms() - started_ms) / 1000)

    def warm_up(self, nothing: DataFrame) -> None:
        """Take the way of a batch with no rows: workers start, import and connect."""
        self.write(nothing)

    def write(self, batch: DataFrame) -> Summary:
        """Store the rows of a batch, which may be stored already; returns what became of their lines."""
        total = Summary()
        # One small row a partition comes back, so what the driver does is the same for any number of messages.
        try:
            rows = batch.mapInArrow(self._write_partition, SUMMARY_COLUMNS).collect()
        except Exception as exc:
            if unread := _UNREAD_FILE.search(str(exc)):
                raise _unread_file(batch.sparkSession, unquote(unread[1])) from exc
            raise
        for row in rows:
            total.add(Summary(**row.asDict()))
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


class PartitionWriter:
    """The mapInArrow function of a batch: file rows in, one summary row out."""

    def __init__(self, settings: WriterSettings) -> None:
        self._settings = settings

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Store the lines of a partition's files and write their rejects."""
        summary = self.write(batches)
        freeze_once()
        yield pa.RecordBatch.from_pylist([{f.name: getattr(summary, f.name) for f in fields(summary)}])

    def write(self, batches: Iterable[pa.RecordBatch]) -> Summary:
        """Store and return what became of the lines. A wait for Redis has no limit: Spark ends it by ending the task."""
        stores = zip(open_stores(self._settings.redis), open_changing_stores(self._settings), strict=True)
        shards = [ShardWriter(*both, self._settings, shard) for shard, both in enumerate(stores)]
        cold = self._settings.cold
        summary = Summary()
        with RejectsWriter(Path(self._settings.rejects), self._settings.rejects_mark) as rejects:
            for file in file_texts(batches):
                cold_from_ms = cold.cold_from_ms(file.arrival_ms) if cold else None
                summary.file_tokens.append(file.token)
                for part in parse_file(file):
                    rejects.write(file, (reject_record(file.name, line) for line in part.rejected))
                    first = first_reject(file.name, part.rejected)
                    summary.add(Summary(part.lines, rejected=len(part.rejected), blank=part.blank, first_reject=first))
                    for shard, share in split_by_shard(part, len(shards)).items():
                        shards[shard].add(PartQueue(share, file.is_repeated, cold_from_ms))
            for writer in shards:
                summary.add(writer.finish())
        return summary


@cache
def freeze_once() -> None:
    """Let the garbage collector pass over what is there now. Spark calls it after each task, and our imports cost it 70 ms."""
    gc.freeze()
