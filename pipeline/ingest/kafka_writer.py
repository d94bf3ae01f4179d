"""Records to messages, where Spark's workers store them: each record once, whoever reads it and how often.

A batch brings ranges of offsets. The progress marker of a partition says how far it is stored, and moves in the transaction that
stores the messages. So the marker counts, and not where a range begins. Records are read in windows (``kafka_windows.py``), which
come in order of offset; the messages of one are stored in order of due time, by some transactions.
"""

import base64
import json
import logging
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pipeline.config import KafkaSettings
from pipeline.core.records import ARRIVAL_MS_MAX, Record, Records, headers_of
from pipeline.core.text import count_text, visible
from pipeline.ingest.kafka_parsing import parse_records
from pipeline.ingest.kafka_reader import Range, RangeReader, ReadSettings, RecordReader
from pipeline.ingest.kafka_source import SCHEMA, partition_of
from pipeline.ingest.kafka_windows import WINDOW_TRANSACTIONS, PartitionMarker, WindowQueue
from pipeline.ingest.parsing import PART_BYTES, FileText, ParsedPart, RejectedLine
from pipeline.ingest.rejects import RejectsWriter
from pipeline.ingest.shard_writer import TRANSACTION_BYTES, ShardWriter, Summary
from pipeline.ingest.stores import WriterSettings, open_changing_stores, open_stores, retrying, wait_until_kept
from pipeline.ingest.transactions import split_by_shard
from pipeline.ingest.writer import PartitionWriter
from pipeline.kafka.cluster import Cluster, Partition, TopicGone
from pipeline.store.base import NO_MARKER, ChangingStore, MarkerMove, MessageRows, SchedulingStore, Transaction

UNLIMITED: Final = sys.maxsize  # an open window was within the limits of who opened it

log = logging.getLogger(__name__)


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

    def write(self, batches: Iterable[pa.RecordBatch]) -> Summary:
        """Read and store the ranges. A wait for Redis or Kafka has no limit: Spark ends it by ending the task."""
        stores = list(zip(open_stores(self._settings.redis), open_changing_stores(self._settings), strict=True))
        clients = self._open_clients(self._read.properties)
        summary = Summary()
        with RejectsWriter(Path(self._settings.rejects), self._settings.rejects_mark) as rejects:
            for batch in batches:
                for row in batch.to_pylist():
                    partition = Partition(row["topic"], row["topic_id"], row["partition"])
                    read = RangeReader(self._read, *clients, Range(partition, row["begin"], row["end"]))
                    summary.add(RangeStorer(stores, self._settings, read, rejects).store())
        return summary


class RangeStorer:
    """Stores what a reader brings, in the shards that it belongs to."""

    def __init__(
        self,
        shards: Sequence[tuple[SchedulingStore, ChangingStore]],
        settings: WriterSettings,
        reader: RangeReader,
        rejects: RejectsWriter,
    ) -> None:
        self._stores = [store for store, _ in shards]
        self._writers = [ShardWriter(store, changing, settings) for store, changing in shards]
        self._settings = settings
        self._reader = reader
        self._rejects = rejects
        self._part_id = reader.range.partition.part_id
        self._markers = [self._marker(store) for store in self._stores]
        self._told = 0  # the offset up to which records are counted
        self._summary = Summary()

    def store(self) -> Summary:
        """Store the range; returns what became of its records."""
        reader = self._reader
        self._told = max(self._place(), reader.range.begin)
        self._summary.duplicates = self._summary.lines = min(self._told, reader.end) - reader.range.begin
        was_read = reader.range.begin > 0 or NO_MARKER not in self._markers
        for shard, marker in enumerate(self._markers):
            if marker == NO_MARKER:  # each knows where it began before one has more: no checkpoint may say so again
                self._begin(shard)
        try:
            while (place := self._place()) < reader.end:
                self._store(*self._read(place, place > 0 and was_read))
        except TopicGone:
            log.warning("%s is gone: deleted, and what was not read of it with it", reader.range.partition)
        else:
            self._look_again()
        for writer in self._writers:
            self._summary.add(writer.summary)
        return self._summary

    def _look_again(self) -> None:
        for store in self._stores:
            self._summary.histories += wait_until_kept(store, self._settings)
            # A server that came back without its last writes, as weak settings allow, has lost messages and markers together.
            self._summary.lost += PartitionMarker.of(self._marker(store) or "0").next < self._reader.end

    def _marker(self, store: SchedulingStore) -> str:
        [marker] = retrying(lambda: store.markers(self._settings.source_id, [self._part_id]))
        return marker

    def _marker_of(self, shard: int) -> PartitionMarker:
        return PartitionMarker.of(self._markers[shard] or str(self._reader.range.begin))

    def _place(self) -> int:
        """Return the offset up to which all shards have everything."""
        return min(self._marker_of(shard).next for shard in range(len(self._markers)))

    def _begin(self, shard: int) -> None:
        move = MarkerMove(self._part_id, NO_MARKER, str(self._reader.range.begin))
        retrying(
            lambda: self._stores[shard].schedule(
                self._settings.source_id, Transaction([move], MessageRows([], []), MessageRows([], []), 0)
            )
        )
        self._markers[shard] = self._marker(self._stores[shard])

    def _read(self, place: int, is_known: bool) -> tuple[Records, int, int]:
        """Read the records of a window; returns them, their first offset, and the one behind them."""
        reader, messages = self._reader, self._settings.transaction_messages
        markers = [self._marker_of(shard) for shard in range(len(self._markers))]
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
        if part.rejected:
            self._write_rejects(part, records, place, behind)
        shares = split_by_shard(part, len(self._writers))
        for shard, writer in enumerate(self._writers):
            at, share = self._marker_of(shard).next, shares.get(shard)
            if place < at < behind:  # a writer died between two shards: this one has a part of it
                left = self._parse(records.since(at))
                share = split_by_shard(left, len(self._writers)).get(shard)
            if at < behind:
                queue = WindowQueue(
                    share or self._parse(Records()), self._reader.range.begin, behind, self._markers[shard]
                )
                self._summary.duplicates += queue.place
                writer.store([queue])
                self._markers[shard] = queue.marker
        if self._place() >= behind > self._told:
            new = part if self._told <= place else self._parse(records.since(self._told))
            self._summary.add(Summary(new.lines, rejected=len(new.rejected), blank=new.blank))
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


@dataclass(frozen=True, slots=True)
class RecordsAgain:
    """What was read of Kafka; see ``repair.Repeatable``. A marker that went back says from where on a partition is read again.

    Args:
        write: stores ranges, as ``BatchWriter.write``.
    """

    spark: SparkSession
    settings: KafkaSettings
    write: Callable[[DataFrame], Summary]

    def read_again(self, since_ms: int) -> str:
        """Store what is missing of each partition, up to where the query has read it; that does not wait for its next record."""
        ends: dict[str, int] = {}
        for query in self.spark.streams.active:
            if progress := query.lastProgress:
                ends |= json.loads(progress.sources[0].endOffset)
        rows = []
        for name, end in ends.items():
            at = partition_of(name)
            begin = 0 if self.settings.start == "earliest" else end  # for a partition whose marker is gone
            rows.append((at.topic, at.topic_id, at.number, begin, end))
        if not rows:
            return ""
        done = self.write(self.spark.createDataFrame(rows, SCHEMA))
        missing = count_text(done.stored, "message")
        return f"{count_text(len(rows), 'partition')} of Kafka, of which {missing} were missing"

    def forget_archived(self) -> None:
        """Do nothing: Kafka keeps its records for as long as it likes."""

    def newest_are_stored(self) -> bool:
        """Say yes: nothing is known."""
        return True


def _reject_record(partition: Partition, line: RejectedLine, record: Record) -> dict[str, Any]:
    """Return a rejected record for the rejects: where it stood, the reason, a sentence, and all that it has."""
    found: dict[str, Any] = {
        "topic": partition.topic,
        "partition": partition.number,
        "offset": line.line_no,
        "timestamp_ms": record.timestamp_ms,
        "reason": line.rejection.reason.value,
        "detail": line.rejection.detail,
        "raw": line.raw,
        "headers": headers_of(record, "json", {}),
    }
    if record.value is not None and line.raw.encode() != record.value:
        found["raw_base64"] = base64.b64encode(record.value).decode()
    return found


_clients: dict[tuple[int, tuple[tuple[str, str], ...]], tuple[Cluster, RecordReader]] = {}


def open_clients_once(properties: Mapping[str, str]) -> tuple[Cluster, RecordReader]:
    """Return this process's clients; Python workers live on from batch to batch, and so do their connections."""
    key = (os.getpid(), tuple(sorted(properties.items())))
    if key not in _clients:
        _clients[key] = Cluster(properties), RecordReader(properties)
    return _clients[key]
