"""Records to messages, where Spark's workers store them: each record once, whoever reads it and how often.

A batch brings ranges of offsets. The progress marker of a partition says how far it is stored, as the next offset, and moves in
the transaction that stores the messages. So the marker counts, and not where a range begins. Transactions come in order of offset;
the messages of one are in order of due time.
"""

import base64
import logging
import os
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from pipeline.core.backoff import backoff_ms
from pipeline.core.errors import SourceError
from pipeline.core.records import ARRIVAL_MS_MAX, Record, RecordFormat, headers_of
from pipeline.core.text import visible
from pipeline.ingest.kafka_parsing import parse_records
from pipeline.ingest.kafka_reader import RecordReader
from pipeline.ingest.parsing import FileText, ParsedPart, RejectedLine
from pipeline.ingest.rejects import RejectsWriter
from pipeline.ingest.transactions import split_by_shard, transaction_of_part
from pipeline.ingest.writer import (
    TRANSACTION_BYTES,
    PartitionWriter,
    Summary,
    WriterSettings,
    open_changing_stores,
    open_stores,
    retrying,
)
from pipeline.kafka.cluster import Cluster, KafkaAway, Partition, RecordsGone, TopicGone
from pipeline.store.base import NO_MARKER, ChangingStore, MarkerMove, Scheduled, SchedulingStore

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """What travels to the executors beside the settings of the writer."""

    properties: dict[str, str]
    format: RecordFormat
    accept_loss: bool


@dataclass(frozen=True, slots=True)
class Range:
    """A row of a batch: the offsets of a partition from ``begin`` to before ``end``, as far as they are not stored yet."""

    partition: Partition
    begin: int
    end: int


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
        with RejectsWriter(Path(self._settings.rejects)) as rejects:
            for batch in batches:
                for row in batch.to_pylist():
                    partition = Partition(row["topic"], row["topic_id"], row["partition"])
                    read = _RangeReader(self._read, *clients, Range(partition, row["begin"], row["end"]))
                    summary.add(RangeStorer(stores, self._settings, read, rejects).store())
        return summary


class _RangeReader:
    """Reads one range; waits where Kafka does not answer."""

    def __init__(self, settings: ReadSettings, cluster: Cluster, reader: RecordReader, wanted: Range) -> None:
        self.format: RecordFormat = settings.format
        self.range = wanted
        self.end = wanted.end
        self._cluster, self._reader = cluster, reader
        self._accept_loss = settings.accept_loss

    def read(self, place: int, is_known: bool, count: int) -> tuple[list[Record], int]:
        """Return records from an offset on, and the offset behind them.

        Args:
            is_known: whether all before ``place`` was read once, so that there must be no hole behind it.

        Raises:
            TopicGone: it was deleted.
            SourceError: there is a hole, and it is not accepted.
            ConfigError: the cluster does not let us in.
        """
        return self._waiting(partial(self._try, place, is_known, count))

    def _try(self, place: int, is_known: bool, count: int) -> tuple[list[Record], int]:
        partition = self.range.partition
        try:
            found = self._reader.read(partition, place, self.end, count, TRANSACTION_BYTES)
        except (KafkaAway, TopicGone, RecordsGone) as exc:
            self._cluster.check(partition)  # the reader may know it no more, or not yet
            first = self._cluster.first_offsets([partition])[partition] if isinstance(exc, RecordsGone) else 0
            if first > place:
                return self._behind_hole(place, first, is_known)
            # An election may have cut the end of the log off, and then nothing comes: it is read when it is written again.
            self.end = min(self.end, max(place, self._cluster.end_offsets([partition])[partition]))
            if self.end > place:
                raise KafkaAway(str(exc) or f"{partition} can't be read yet") from exc
            return [], place
        # An id never comes back. So what was read is of this topic, if it is there still, and not of one made anew meanwhile.
        self._cluster.check(partition)
        return found

    def _behind_hole(self, place: int, first: int, is_known: bool) -> tuple[list[Record], int]:
        hole = f"the records {place} to {first - 1} of {self.range.partition}"
        if is_known and not self._accept_loss:
            raise SourceError(
                f"Kafka has deleted {hole} before they were read. Start again with kafka.accept_loss = true to go on behind them."
            )
        if is_known:
            log.warning("%s are lost: Kafka has deleted them", hole)
        return [], min(first, self.end)

    def _waiting(self, call: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                result = call()
            except KafkaAway as exc:
                failures += 1
                if failures == 1:
                    log.warning("waiting for Kafka: %s", exc)
                threading.Event().wait(backoff_ms(failures, random.random) / 1000)
            else:
                if failures:
                    log.warning("Kafka answers again")
                return result


class RangeStorer:
    """Stores what a reader brings, in the shards that it belongs to."""

    def __init__(
        self,
        shards: Sequence[tuple[SchedulingStore, ChangingStore]],
        settings: WriterSettings,
        reader: _RangeReader,
        rejects: RejectsWriter,
    ) -> None:
        self._shards = shards
        self._settings = settings
        self._reader = reader
        self._rejects = rejects
        self._part_id = reader.range.partition.part_id
        self._markers = [self._marker(store) for store, _ in shards]
        self._summary = Summary()

    def store(self) -> Summary:
        """Store the range; returns what became of its records."""
        reader = self._reader
        places = [self._place(shard) for shard in range(len(self._shards))]
        self._summary.duplicates = self._summary.lines = max(0, min(*places, reader.end) - reader.range.begin)
        was_read = reader.range.begin > 0 or NO_MARKER not in self._markers
        for shard, marker in enumerate(self._markers):
            if marker == NO_MARKER:  # each knows where it began before one has more: no checkpoint may say so again
                self._store_share(shard, self._parse([]), reader.range.begin)
        try:
            while (place := min(self._place(shard) for shard in range(len(self._shards)))) < reader.end:
                records, behind = reader.read(place, place > 0 and was_read, self._settings.transaction_messages)
                self._store(records, place, behind)
        except TopicGone:
            log.warning("%s is gone: deleted, and what was not read of it with it", reader.range.partition)
            return self._summary
        for store, _ in self._shards:
            if self._settings.wait_for_disk:
                retrying(store.wait_for_disk)
            # A server that came back without its last writes, as weak settings allow, has lost messages and markers together.
            self._summary.lost += int(self._marker(store) or 0) < reader.end
        return self._summary

    def _place(self, shard: int) -> int:
        return int(self._markers[shard] or self._reader.range.begin)

    def _marker(self, store: SchedulingStore) -> str:
        [marker] = retrying(lambda: store.markers(self._settings.source_id, [self._part_id]))
        return marker

    def _store(self, records: Sequence[Record], place: int, behind: int) -> None:
        """Store what lies between two offsets, in each shard that does not have it."""
        part = self._parse(records)
        if part.rejected:
            self._write_rejects(part, records, place, behind)
        self._summary.add(Summary(part.lines, rejected=len(part.rejected), blank=part.blank))
        shares = split_by_shard(part, len(self._shards))
        for shard in range(len(self._shards)):
            at, share = self._place(shard), shares.get(shard)
            if place < at < behind:  # a writer died between two shards: this one has a part of it
                left = self._parse([each for each in records if each.offset >= at])
                share = split_by_shard(left, len(self._shards)).get(shard)
            if at < behind:
                self._store_share(shard, share or self._parse([]), behind)

    def _parse(self, records: Sequence[Record]) -> ParsedPart:
        return parse_records(self._reader.range.partition, records, self._reader.format)

    def _write_rejects(self, part: ParsedPart, records: Sequence[Record], place: int, behind: int) -> None:
        """Put the rejects of a transaction in place. Writers with other transactions may write some of them once more."""
        partition = self._reader.range.partition
        by_offset = {record.offset: record for record in records}
        name = f"{partition.part_id}.{place:014d}-{behind:014d}"
        file = FileText(name, 1, "json", partition.topic[:100], max(0, records[0].timestamp_ms) & ARRIVAL_MS_MAX, b"")
        rejected = ((each, by_offset[each.line_no]) for each in part.rejected)
        self._rejects.write(file, (_reject_record(partition, *each) for each in rejected))
        self._rejects.close()
        first = part.rejected[0]
        at = f"{visible(str(partition))} offset {first.line_no}, {first.rejection.reason.value}"
        self._summary.first_reject = self._summary.first_reject or at

    def _store_share(self, shard: int, share: ParsedPart, behind: int) -> None:
        store, changing = self._shards[shard]
        move = MarkerMove(self._part_id, self._markers[shard], str(behind))
        transaction = transaction_of_part(share, move)

        def try_it() -> Scheduled | None:
            # Each time: a server that was away may have lost what was changed. To change it again changes nothing.
            changed = changing.apply(share.changes) if share.changes else None
            done = store.schedule(self._settings.source_id, transaction)
            if done is not None and changed is not None:
                self._summary.add(Summary(**asdict(changed)))
            return done

        done = retrying(try_it)
        if done is None:  # another writer, or a try whose reply was lost, has moved it
            self._markers[shard] = self._marker(store)
            self._summary.duplicates += len(share.due_ms)
        else:
            self._markers[shard] = str(behind)
            self._summary.add(Summary(stored=done.stored, duplicates=len(done.duplicates)))


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
