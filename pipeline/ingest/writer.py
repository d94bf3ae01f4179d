"""The foreachBatch function: every partition is parsed and stored in a Python worker, and rejects go to their folder."""

import gc
import logging
import re
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import copy
from dataclasses import asdict, fields
from functools import cache, partial
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError, StoreUnavailable
from pipeline.core.messages import Change
from pipeline.ingest.parsing import parse_file
from pipeline.ingest.rejects import RejectsWriter, first_reject, reject_record
from pipeline.ingest.stores import (
    Patience,
    WriterSettings,
    open_changing_stores,
    open_stores,
    patience_of,
    wait_until_kept,
)
from pipeline.ingest.summary import SUMMARY_COLUMNS, Summary
from pipeline.ingest.transactions import ALL_STORED, PartQueue, Step, split_by_shard
from pipeline.ingest.transforms import file_texts
from pipeline.store.base import ChangingStore, Scheduled, SchedulingStore

log = logging.getLogger(__name__)

T = TypeVar("T")

TRANSACTION_BYTES = 4 * 1024 * 1024  # long messages: a transaction has no more than this, give or take one
WAITING_FILES = 500  # tiny files: this many are stored together

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
            rows = batch.mapInArrow(write, SUMMARY_COLUMNS).collect()
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
        stores = zip(open_stores(self._settings.redis), open_changing_stores(self._settings), strict=True)
        patience = self.patience()
        shards = [ShardWriter(*each, self._settings, shard, patience) for shard, each in enumerate(stores)]
        summary = Summary()
        with RejectsWriter(Path(self._settings.rejects), self._settings.rejects_mark) as rejects:
            for file in file_texts(batches):
                summary.file_tokens.append(file.token)
                for part in parse_file(file):
                    if not file.is_repeated:  # else its rejects are in place, or where somebody has taken them
                        rejects.write(file, (reject_record(file.name, line) for line in part.rejected))
                        first = first_reject(file.name, part.rejected)
                        summary.add(
                            Summary(part.lines, rejected=len(part.rejected), blank=part.blank, first_reject=first)
                        )
                    for shard, share in split_by_shard(part, len(shards)).items():
                        shards[shard].add(PartQueue(share, file.is_repeated, file.has_waited))
            for writer in shards:
                summary.add(writer.finish())
        return summary


class ShardWriter:
    """Stores what a partition has for one shard. If that is away, it says so in its summary."""

    def __init__(
        self,
        store: SchedulingStore,
        changing: ChangingStore,
        settings: WriterSettings,
        shard: int = 0,
        patience: Patience | None = None,
    ) -> None:
        self._store = store
        self._changing = changing
        self._settings = settings
        self._shard = shard
        self._patience = patience or Patience()
        self._lacks = False
        self._waiting: list[PartQueue] = []
        self._part_ids: list[str] = []
        self._was_away = False
        self.summary = Summary()

    def add(self, queue: PartQueue) -> None:
        """Store a part, now or together with others."""
        self._waiting.append(queue)
        self._part_ids.append(queue.part_id)
        messages = sum(waiting.left + len(waiting.changes) for waiting in self._waiting)
        if len(self._waiting) >= WAITING_FILES or messages >= self._settings.transaction_messages:
            self._store_waiting()

    def finish(self) -> Summary:
        """Store the rest, and look whether all of it is still there."""
        self._store_waiting()
        if self._part_ids and not self._lacks:
            try:
                self._look_again()
            except StoreUnavailable:
                self._lacks = True
        if self._lacks:  # of what was stored before, too, it is not known whether it is there
            tokens = sorted({part_id.partition(".")[0] for part_id in self._part_ids})
            self.summary.lacking = [f"{token} {self._shard}" for token in tokens]
        return self.summary

    def _look_again(self) -> None:
        histories = wait_until_kept(self._store, self._settings, self._retrying)
        # A server that came back without its last writes, as weak settings allow, has lost messages and markers together.
        markers = self._retrying(lambda: self._store.markers(self._settings.source_id, self._part_ids))
        self.summary.lost = sum(marker != ALL_STORED for marker in markers)
        self.summary.histories = histories

    def _store_waiting(self) -> None:
        queues, self._waiting = self._waiting, []
        try:
            self.store(queues)
        except StoreUnavailable:
            self._lacks = True
            self.summary.waiting += sum(queue.lines_left for queue in queues)
            self.summary.lines -= sum(queue.lines_left for queue in queues if not queue.is_repeated)

    def _retrying(self, call: Callable[[], T]) -> T:
        return self._patience.retrying(self._shard, call)

    def store(self, queues: list[PartQueue]) -> None:
        """Store by transactions; one that finds a marker elsewhere goes on from there.

        Raises:
            StoreUnavailable: the shard is away; how far it has come, the markers say.
        """
        if any(queue.changes for queue in queues):
            self._resume(queues)
            self._make_changes(queues)
        while step := Step(queues, self._settings.transaction_messages, TRANSACTION_BYTES):
            done = self._retrying(partial(self._store_step, step, queues))
            if done is not None:
                repeated, again = step.advance()
                self.summary.add(Summary(repeated, done.stored, len(done.duplicates), stored_again=again))
            else:
                self._resume(queues)

    def _store_step(self, step: Step, queues: list[PartQueue]) -> Scheduled | None:
        """Try to store a transaction. A server that was away may have lost what was changed, so that is changed again before."""
        if self._was_away:
            self._changing.apply(_changes_left(queues))
        self._was_away = True  # unless it answers
        done = self._store.schedule(self._settings.source_id, step.transaction)
        self._was_away = done is None
        return done

    def _resume(self, queues: list[PartQueue]) -> None:
        """Go on from where the markers are; what is stored already, by another writer or before a lost reply, is known."""
        part_ids = [queue.part_id for queue in queues]
        markers = self._retrying(lambda: self._store.markers(self._settings.source_id, part_ids))
        for queue, marker in zip(queues, markers, strict=True):
            before = queue.place
            known = queue.resume(marker) - before
            self.summary.duplicates += 0 if queue.is_repeated else known

    def _make_changes(self, queues: list[PartQueue]) -> None:
        """Cancel and replace what the parts say, and count it."""
        changes = _changes_left(queues)
        done = self._retrying(lambda: self._changing.apply(changes))
        self.summary.add(Summary(**asdict(done)))
        self.summary.lines += sum(len(_changes_left([queue])) for queue in queues if queue.is_repeated)
        self.summary.duplicates += sum(
            len(queue.changes) for queue in queues if queue.is_begun and not queue.is_repeated
        )


def _changes_left(queues: Iterable[PartQueue]) -> list[Change]:
    """Return what parts change of which nothing is stored: a marker moves only after that. To change it again changes nothing."""
    return [change for queue in queues if not queue.is_begun for change in queue.changes]


@cache
def freeze_once() -> None:
    """Let the garbage collector pass over what is there now. Spark calls it after each task, and our imports cost it 70 ms."""
    gc.freeze()
