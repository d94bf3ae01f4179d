"""The foreachBatch function: every partition is parsed and stored in a Python worker, and rejects go to their folder."""

import gc
import logging
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pipeline.core.background import made_ahead
from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.core.messages import Change
from pipeline.ingest.parsing import FileText, ParsedPart, parse_file
from pipeline.ingest.rejects import RejectsWriter, first_reject, reject_record
from pipeline.ingest.stores import WriterSettings, open_changing_stores, open_stores, retrying, wait_until_kept
from pipeline.ingest.transactions import ALL_STORED, PartQueue, Step, split_by_shard
from pipeline.ingest.transforms import file_texts
from pipeline.store.base import ChangingStore, Scheduled, SchedulingStore

log = logging.getLogger(__name__)

SUMMARY_COLUMNS = (
    "lines long, stored long, duplicates long, rejected long, blank long, lost long, "
    "cancelled long, replaced long, late long, stored_again long, first_reject string, file_tokens array<string>, "
    "histories array<string>"
)
TRANSACTION_BYTES = 4 * 1024 * 1024  # long messages: a transaction has no more than this, give or take one
WAITING_FILES = 500  # tiny files: this many are stored together
# Parts are stored together, in order of due time, once they have so much: in longer runs order gains little more (ADR 4).
SORTED_MESSAGES, SORTED_BYTES = 100_000, 32 * 1024 * 1024

_UNREAD_FILE = re.compile(r"FAILED_READ_FILE[.\w]*\] Encountered error while reading file (?:file:/*(?=/))?(\S+?)\.? ")


@dataclass(slots=True)
class Summary:
    """What became of the lines of a partition or batch.

    ``cancelled`` and ``replaced`` are lines that did that, ``late`` those whose message was in flight or delivered by then.
    ``first_reject`` says where a rejected line stood, if any was, and why. ``file_tokens`` are its files, of which all is stored
    unless ``lost`` says how many parts the server has lost again; a part that is in several shards counts in each.
    ``stored_again`` are those of ``stored`` that were stored before and undone by a failover, and ``histories`` what
    ``SchedulingStore.history`` said of the servers when all was stored.
    """

    lines: int = 0
    stored: int = 0
    duplicates: int = 0
    rejected: int = 0
    blank: int = 0
    lost: int = 0
    cancelled: int = 0
    replaced: int = 0
    late: int = 0
    stored_again: int = 0
    first_reject: str = ""
    file_tokens: list[str] = field(default_factory=list, compare=False)
    histories: list[str] = field(default_factory=list, compare=False)

    def add(self, other: "Summary") -> None:
        first = self.first_reject or other.first_reject
        for name in (f.name for f in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_reject = first


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


def _read_parts(
    batches: Iterable[pa.RecordBatch], shards: int
) -> Iterator[tuple[FileText, ParsedPart, dict[int, PartQueue]]]:
    """Parse files, and sort what each shard gets of them."""
    for file in file_texts(batches):
        for part in parse_file(file):
            split = split_by_shard(part, shards)
            yield file, part, {shard: PartQueue(share, file.is_repeated) for shard, share in split.items()}


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
        shards = open_shard_writers(self._settings)
        summary = Summary()
        with RejectsWriter(Path(self._settings.rejects), self._settings.rejects_mark) as rejects:
            with closing(made_ahead(_read_parts(batches, len(shards)))) as parts:
                for file, part, queues in parts:
                    if not summary.file_tokens or summary.file_tokens[-1] != file.token:
                        summary.file_tokens.append(file.token)
                    rejects.write(file, (reject_record(file.name, line) for line in part.rejected))
                    first = first_reject(file.name, part.rejected)
                    summary.add(Summary(part.lines, rejected=len(part.rejected), blank=part.blank, first_reject=first))
                    for shard, queue in queues.items():
                        shards[shard].add(queue)
            for writer in shards:
                summary.add(writer.finish())
        return summary


class ShardWriter:
    """Stores what a partition has for one shard."""

    def __init__(self, store: SchedulingStore, changing: ChangingStore, settings: WriterSettings) -> None:
        self._store = store
        self._changing = changing
        self._settings = settings
        self._waiting: list[PartQueue] = []
        self._part_ids: list[str] = []
        self._was_away = False
        self.summary = Summary()

    def add(self, queue: PartQueue) -> None:
        """Store a part, now or together with others."""
        self._waiting.append(queue)
        self._part_ids.append(queue.part_id)
        messages = sum(waiting.left + len(waiting.changes) for waiting in self._waiting)
        size = sum(waiting.size_to(len(waiting)) for waiting in self._waiting)
        if len(self._waiting) >= WAITING_FILES or messages >= SORTED_MESSAGES or size >= SORTED_BYTES:
            self._store_waiting()

    def finish(self) -> Summary:
        """Store the rest, and look whether all of it is still there."""
        self._store_waiting()
        if self._part_ids:
            self.summary.histories = wait_until_kept(self._store, self._settings)
        # A server that came back without its last writes, as weak settings allow, has lost messages and markers together.
        markers = retrying(lambda: self._store.markers(self._settings.source_id, self._part_ids))
        self.summary.lost = sum(marker != ALL_STORED for marker in markers)
        return self.summary

    def _store_waiting(self) -> None:
        queues, self._waiting = self._waiting, []
        self.store(queues)

    def store(self, queues: list[PartQueue]) -> None:
        """Store by transactions; one that finds a marker elsewhere goes on from there."""
        if any(queue.changes for queue in queues):
            self._resume(queues)
            self._make_changes(queues)
        while step := Step(queues, self._settings.transaction_messages, TRANSACTION_BYTES):
            done = retrying(partial(self._store_step, step, queues))
            if done is not None:
                again = step.advance()
                self.summary.add(Summary(stored=done.stored, duplicates=len(done.duplicates), stored_again=again))
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
        markers = retrying(lambda: self._store.markers(self._settings.source_id, part_ids))
        for queue, marker in zip(queues, markers, strict=True):
            before = queue.place
            self.summary.duplicates += queue.resume(marker) - before

    def _make_changes(self, queues: list[PartQueue]) -> None:
        """Cancel and replace what the parts say, and count it."""
        changes = _changes_left(queues)
        done = retrying(lambda: self._changing.apply(changes))
        self.summary.add(Summary(**asdict(done)))
        self.summary.duplicates += sum(len(queue.changes) for queue in queues) - len(changes)


def open_shard_writers(settings: WriterSettings) -> list[ShardWriter]:
    """Return a writer for each shard, on the connections of this process."""
    stores = zip(open_stores(settings.redis), open_changing_stores(settings), strict=True)
    return [ShardWriter(store, changing, settings) for store, changing in stores]


def _changes_left(queues: Iterable[PartQueue]) -> list[Change]:
    """Return what parts change of which nothing is stored: a marker moves only after that. To change it again changes nothing."""
    return [change for queue in queues if not queue.is_begun for change in queue.changes]


@cache
def freeze_once() -> None:
    """Let the garbage collector pass over what is there now. Spark calls it after each task, and our imports cost it 70 ms."""
    gc.freeze()
