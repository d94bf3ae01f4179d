"""Records of Kafka to messages, as ``parsing.py`` does it with lines of files: many at once where they are no more than a line."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.messages import FORM_PLAIN, Change, Message, Rejection, Replacement
from pipeline.core.records import ARRIVAL_MS_MAX, Record, RecordFormat, request_of, with_headers
from pipeline.ingest.parsing import PLAIN_FROM_LINES, ParsedPart, RejectedLine, as_half, as_hex
from pipeline.ingest.plain_lines import NO_PLAIN_LINES, Ints, Lines, read_plain_lines
from pipeline.ingest.usual_lines import fast_request
from pipeline.kafka.cluster import Partition

OFFSET_BITS: Final = 32  # of an offset that a message id has in place of a line's number
_LOW: Final = (1 << OFFSET_BITS) - 1


def tokens_of(partition: Partition, offsets: Ints, timestamps_ms: Ints) -> pa.Array:
    """Return the first parts of the message ids of records, to which 32 bits of their offsets belong.

    They sort by the time of the record, as all ids do by the time of arrival, and for one time by offset. The rest tells topics and
    partitions apart: 20 bits of the topic id, 14 of the partition, 8 more of the offset.
    """
    place = (int(partition.topic_id, 16) & 0xFFFFF) << 22 | (partition.number & 0x3FFF) << 8
    return pc.binary_join_element_wise(as_half(timestamps_ms), as_half(place | offsets >> OFFSET_BITS & 0xFF), b"")


def parse_records(partition: Partition, records: Sequence[Record], record_format: RecordFormat) -> ParsedPart:
    """Read the requests of records. The same records give the same messages, with the same ids and due times."""
    offsets = np.array([each.offset for each in records], np.int64)
    times = np.array([each.timestamp_ms for each in records], np.int64)
    heads = tokens_of(partition, offsets, times)
    ids = pc.binary_join_element_wise(heads, as_hex(offsets & _LOW), b"")
    plain, places = NO_PLAIN_LINES, np.empty(0, np.int64)
    bare = np.array(_bare_places(records) if record_format == "json" else [], np.int64)
    if len(bare) >= PLAIN_FROM_LINES:
        lines = Lines.of(b"\n".join(records[at].value or b"" for at in bare.tolist()) + b"\n")
        plain = read_plain_lines(lines, times[bare])
        places = bare[plain.indexes]
    is_other = np.ones(len(records), np.bool_)
    is_other[places] = False
    read = _Reading()
    for at in np.flatnonzero(is_other).tolist():
        read.add(records[at], ids[at].as_py().decode(), _judge(records[at], record_format))
    members = pc.binary_join_element_wise(ids.take(pa.array(places)), FORM_PLAIN.encode(), plain.texts, b"")
    return ParsedPart(
        partition.part_id,
        line_nos=np.concatenate((np.array(read.offsets, np.int64), offsets[places])),
        due_ms=np.concatenate((np.array(read.due_ms, np.int64), plain.due_ms)),
        members=pa.concat_arrays([pa.array(read.members, pa.binary()), members]),
        idempotency_keys=read.keys,
        rejected=read.rejected,
        lines=len(records),
        blank=read.blank,
        changes=read.changes,
    )


def _bare_places(records: Sequence[Record]) -> list[int]:
    """Return which records are no more than a line."""
    return [
        at
        for at, (_, timestamp_ms, value, key, headers) in enumerate(records)
        if key is None
        and value is not None
        and headers is not None
        and not headers
        and 0 <= timestamp_ms <= ARRIVAL_MS_MAX
        and b"\n" not in value
    ]


def _judge(record: Record, record_format: RecordFormat) -> Message | Change | Rejection | None:
    is_usual = record_format == "json" and record.headers is not None and 0 <= record.timestamp_ms <= ARRIVAL_MS_MAX
    message = fast_request(record.value, record.timestamp_ms) if is_usual and record.value is not None else None
    return with_headers(message, record, record_format) if message else request_of(record, record_format)


class _Reading:
    """What records ask for, one after the other."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.due_ms: list[int] = []
        self.members: list[bytes] = []
        self.keys: dict[int, str] = {}
        self.rejected: list[RejectedLine] = []
        self.changes: list[Change] = []
        self.blank = 0

    def add(self, record: Record, message_id: str, judged: Message | Change | Rejection | None) -> None:
        if judged is None:
            self.blank += 1
        elif isinstance(judged, Rejection):
            raw = (record.value or b"").decode(errors="replace")
            self.rejected.append(RejectedLine(record.offset, raw, judged))
        elif isinstance(judged, Replacement):
            self.changes.append(Replacement(replace(judged.message, message_id=message_id)))
        elif isinstance(judged, Message):
            if judged.id:
                self.keys[len(self.members)] = judged.id
            self.offsets.append(record.offset)
            self.due_ms.append(judged.due_ms)
            self.members.append(judged.to_member(message_id))
        else:
            self.changes.append(judged)
