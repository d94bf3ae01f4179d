"""Records to messages, where Spark's workers store them: each record once, whoever reads it and how often.

A batch brings ranges of offsets. The progress marker of a partition says how far it is stored, and moves in the transaction that
stores the messages. So the marker counts, and not where a range begins. Records are read in windows (``kafka_windows.py``), which
come in order of offset; the messages of one are stored in order of due time, by some transactions.
"""

import base64
import logging
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa

from pipeline.core.errors import StoreUnavailable
from pipeline.core.records import ARRIVAL_MS_MAX, Record, Records, headers_of
from pipeline.core.text import visible
from pipeline.ingest.kafka_parsing import parse_records
from pipeline.ingest.kafka_reader import Range, RangeReader, ReadSettings, RecordReader
from pipeline.ingest.kafka_windows import WINDOW_TRANSACTIONS, PartitionMarker, WindowQueue, first_marker
from pipeline.ingest.parsing import PART_BYTES, FileText, ParsedPart, RejectedLine
from pipeline.ingest.rejects import RAW_CHARS_MAX, RejectsWriter, raw_fields
from pipeline.ingest.shard_writer import TRANSACTION_BYTES, ShardWriter, split_by_shard
from pipeline.ingest.stores import (
    Patience,
    WriterSettings,
    open_changing_stores,
    open_stores,
    retrying,
    wait_until_kept,
)
from pipeline.ingest.summary import Summary
from pipeline.ingest.writer import PartitionWriter
from pipeline.kafka.cluster import Cluster, Partition, TopicGone
from pipeline.store.base import NO_MARKER, ChangingStore, MarkerMove, MessageRows, SchedulingStore, Transaction
from pipeline.store.shards import shard_of

UNLIMITED: Final = sys.maxsize  # an open window was within the limits of who opened it

log = logging.getLogger(__name__)

T = TypeVar("T")


class RangeWriter(PartitionWriter):
    """The mapInArrow function of a batch: rows of ranges in, one summary row out."""

    def __init__(
        self,
        settings: WriterSettings,
        read: ReadSettings,
        open_clients: Callable[[Mapping[str, str]], tuple[Cluster, RecordReader]] | None = None,
    ) -> None:
        """Make one.

        Args:
            open_clients: opens clients by their properties; None means those of this process.
        """
        super().__init__(settings)
        self._read = read
        self._open_clients = open_clients or open_clients_once
        self._begun: set[str] = set()

    def learn(self, done: Summary) -> None:
        """Remember which partitions each shard has a marker of: it needs nobody to tell it where to begin."""
        self._begun.update(done.file_tokens)

    def write(self, batches: Iterable[pa.RecordBatch]) -> Summary:
        """Read and store the ranges. A wait for Kafka has no limit, and for Redis that of the patience: Spark ends the task."""
        stores = list(zip(open_stores(self._settings.redis), open_changing_stores(self._settings), strict=True))
        clients = self._open_clients(self._read.properties)
        patience, summary = self.patience(), Summary()
        with RejectsWriter(Path(self._settings.rejects), self._settings.rejects_mark) as rejects:
            for batch in batches:
                for row in batch.to_pylist():
                    partition = Partition(row["topic"], row["topic_id"], row["partition"])
                    read = RangeReader(self._read, *clients, Range(partition, row["begin"], row["end"]))
                    is_begun = partition.part_id in self._begun
                    summary.add(RangeStorer(stores, self._settings, read, rejects, patience, is_begun).store())
        return summary


class RangeStorer:
    """Stores what a reader brings, in the shards that it belongs to and that are not away.

    One that is away knows by its marker from where on it lacks something, if it has one: a partition that is not known to be
    begun in all of them waits for all.
    """

    def __init__(
        self,
        shards: Sequence[tuple[SchedulingStore, ChangingStore]],
        settings: WriterSettings,
        reader: RangeReader,
        rejects: RejectsWriter,
        patience: Patience | None = None,
        is_begun: bool = False,
    ) -> None:
        self._patience = patience = patience or Patience()
        self._stores = [store for store, _ in shards]
        self._writers = [ShardWriter(*each, settings, shard, patience) for shard, each in enumerate(shards)]
        self._is_begun = is_begun
        self._away: set[int] = set()
        self._settings = settings
        self._reader = reader
        self._rejects = rejects
        self._part_id = reader.range.partition.part_id
        self._markers = [NO_MARKER for _ in self._stores]
        for shard in range(len(self._stores)):
            with self._or_without(shard):
                self._markers[shard] = self._marker(shard)
        self._told = 0  # the offset up to which records are counted
        self._summary = Summary()

    def store(self) -> Summary:
        """Store the range; returns what became of its records."""
        reader = self._reader
        self._told = max(self._place(), reader.range.begin)
        self._summary.duplicates = self._summary.lines = min(self._told, reader.end) - reader.range.begin
        was_read = reader.range.begin > 0 or NO_MARKER not in [self._markers[shard] for shard in self._present()]
        for shard in self._present():
            if self._markers[shard] == NO_MARKER:
                # Each knows where it began before one has more: no checkpoint may say so again.
                with self._or_without(shard):
                    self._begin(shard)
        if not self._away:
            self._is_begun = True
            self._summary.file_tokens = [self._part_id]
        try:
            while (place := self._place()) < reader.end:
                self._store(*self._read(place, place > 0 and was_read))
        except TopicGone:
            log.warning("%s is gone: deleted, and what was not read of it with it", reader.range.partition)
        else:
            self._look_again()
        for writer in self._writers:
            self._summary.add(writer.summary)
        self._summary.lacking = [f"{self._part_id} {shard}" for shard in sorted(self._away)]
        return self._summary

    def _present(self) -> list[int]:
        return [shard for shard in range(len(self._stores)) if shard not in self._away]

    @contextmanager
    def _or_without(self, shard: int) -> Iterator[None]:
        """Go on without a shard that turns out to be away."""
        try:
            yield
        except StoreUnavailable:
            self._away.add(shard)

    def _ask(self, shard: int, call: Callable[[], T]) -> T:
        return self._patience.retrying(shard, call) if self._is_begun else retrying(call)

    def _look_again(self) -> None:
        for shard in self._present():
            with self._or_without(shard):
                histories = wait_until_kept(self._stores[shard], self._settings, partial(self._ask, shard))
                # A server that came back without its last writes, as weak settings allow, has lost messages and markers together.
                self._summary.lost += PartitionMarker.of(self._marker(shard) or "0").next < self._reader.end
                self._summary.histories += histories

    def _marker(self, shard: int) -> str:
        store = self._stores[shard]
        [marker] = self._ask(shard, lambda: store.markers(self._settings.source_id, [self._part_id]))
        return marker

    def _marker_of(self, shard: int) -> PartitionMarker:
        return PartitionMarker.of(self._markers[shard] or str(self._reader.range.begin))

    def _place(self) -> int:
        """Return the offset up to which all shards that are there have everything."""
        return min((self._marker_of(shard).next for shard in self._present()), default=self._reader.end)

    def _begin(self, shard: int) -> None:
        move = MarkerMove(self._part_id, NO_MARKER, first_marker(self._reader.range.begin))
        nothing = Transaction([move], MessageRows([], []), MessageRows([], []), 0)
        self._ask(shard, lambda: self._stores[shard].schedule(self._settings.source_id, nothing))
        self._markers[shard] = self._marker(shard)

    def _read(self, place: int, is_known: bool) -> tuple[Records, int, int]:
        """Read the records of a window; returns them, their first offset, and the one behind them."""
        reader, messages = self._reader, self._settings.transaction_messages
        markers = [self._marker_of(shard) for shard in self._present()]
        ends = {marker.end for marker in markers if marker.is_open and marker.end > place}
        if not ends:
            records, behind = reader.read(place, is_known, reader.end, WINDOW_TRANSACTIONS * messages, PART_BYTES)
            return records, place, behind
        end = min(*ends, reader.end)
        if {end} != ends:  # we don't see all of an open window, or there are two: one transaction after the other
            records, behind = reader.read(place, is_known, end, messages, TRANSACTION_BYTES)
            return records, place, behind
        records, behind = reader.read(place, is_known, end, UNLIMITED, UNLIMITED)
        while behind < end == min(end, reader.end):
            more, behind = reader.read(behind, True, end, UNLIMITED, UNLIMITED)
            records.extend(more)
        return (records, place, behind) if behind == end else (Records(), place, place)

    def _store(self, records: Records, place: int, behind: int) -> None:
        """Store what lies between two offsets, in each shard that does not have it."""
        part = self._parse(records)
        own = shard_of(self._part_id, len(self._writers))  # its marker says which rejects are written and counted
        if part.rejected and own not in self._away and self._marker_of(own).next < behind:
            self._write_rejects(part, records, place, behind)
        shares = split_by_shard(part, len(self._writers))
        waiting = (each for shard, each in shares.items() if shard in self._away)
        self._summary.waiting += sum(len(each.due_ms) + len(each.changes) for each in waiting)
        for shard in self._present():
            at, share = self._marker_of(shard).next, shares.get(shard)
            if place < at < behind:  # a writer died between two shards: this one has a part of it
                left = self._parse(records.since(at))
                share = split_by_shard(left, len(self._writers)).get(shard)
            if at < behind:
                queue = WindowQueue(
                    share or self._parse(Records()), self._reader.range.begin, behind, self._markers[shard]
                )
                self._summary.duplicates += queue.place
                with self._or_without(shard):
                    self._writers[shard].store([queue])
                self._markers[shard] = queue.marker
                self._summary.waiting += queue.lines_left if shard in self._away else 0
        if self._place() >= behind > self._told:
            new = part if self._told <= place else self._parse(records.since(self._told))
            rejected = 0 if own in self._away else len(new.rejected)
            self._summary.add(Summary(new.lines, rejected=rejected, blank=new.blank))
            self._told = behind

    def _parse(self, records: Records) -> ParsedPart:
        return parse_records(self._reader.range.partition, records, self._reader.format)

    def _write_rejects(self, part: ParsedPart, records: Records, place: int, behind: int) -> None:
        """Put the rejects of a window in place. Writers with other windows may write some of them once more."""
        partition = self._reader.range.partition
        name = f"{partition.part_id}.{place:014d}-{behind:014d}"
        arrival_ms = max(0, records.timestamps_ms[0]) & ARRIVAL_MS_MAX
        file = FileText(name, 1, "json", partition.topic[:100], arrival_ms, b"")
        indexes = (bisect_left(records.offsets, each.line_no) for each in part.rejected)
        rejected = zip(part.rejected, map(records.at, indexes), strict=True)
        self._rejects.write(file, (_reject_record(partition, *each) for each in rejected))
        self._rejects.close()
        first = part.rejected[0]
        at = f"{visible(str(partition))} offset {first.line_no}, {first.rejection.reason.value}"
        self._summary.first_reject = self._summary.first_reject or at


def _reject_record(partition: Partition, line: RejectedLine, record: Record) -> dict[str, Any]:
    """Return a rejected record for the rejects: where it stood, the reason, a sentence, and all that it has."""
    found: dict[str, Any] = {
        "topic": partition.topic,
        "partition": partition.number,
        "offset": line.line_no,
        "timestamp_ms": record.timestamp_ms,
        "reason": line.rejection.reason.value,
        "detail": line.rejection.detail,
        **raw_fields(line.raw),
        "headers": headers_of(record, "json", {}),
    }
    if record.value is not None and line.raw.encode() != record.value:
        found["raw_base64"] = base64.b64encode(record.value[:RAW_CHARS_MAX]).decode()
    return found


_clients: dict[tuple[int, tuple[tuple[str, str], ...]], tuple[Cluster, RecordReader]] = {}


def open_clients_once(properties: Mapping[str, str]) -> tuple[Cluster, RecordReader]:
    """Return this process's clients; Python workers live on from batch to batch, and so do their connections."""
    key = (os.getpid(), tuple(sorted(properties.items())))
    if key not in _clients:
        _clients[key] = Cluster(properties), RecordReader(properties)
    return _clients[key]
