"""Records of Kafka to messages, as ``parsing.py`` does it with lines of files: many at once where they are no more than a line."""

from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.messages import Change, Message, Rejection, Replacement
from pipeline.core.records import ARRIVAL_MS_MAX, Record, RecordFormat, Records, request_of, with_headers
from pipeline.ingest.columns import Accepted, IdParts
from pipeline.ingest.parsing import (
    AT_ONCE_FROM_LINES,
    ParsedPart,
    RejectedLine,
    accepted_of,
    as_half,
    as_hex,
    joined,
    read_at_once,
)
from pipeline.ingest.plain_lines import Ints, Lines
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


def parse_records(partition: Partition, records: Records, record_format: RecordFormat) -> ParsedPart:
    """Read the requests of records. The same records give the same messages, with the same ids and due times."""
    offsets = np.array(records.offsets, np.int64)
    times = np.array(records.timestamps_ms, np.int64)
    heads = tokens_of(partition, offsets, times)
    ids = pc.binary_join_element_wise(heads, as_hex(offsets & _LOW), b"")
    found: list[Accepted] = []
    is_left = np.ones(len(records), np.bool_)
    if record_format == "json" and len(records) >= AT_ONCE_FROM_LINES:
        bare, text = _bare_lines(records, times)

        def message_ids(indexes: Ints) -> IdParts:
            return (ids.take(pa.array(bare[indexes])),)

        for accepted in read_at_once(Lines.of(text), "json", "", times[bare], message_ids):
            places = bare[accepted.indexes]
            is_left[places] = False
            found.append(replace(accepted, indexes=places))
    read = _Reading()
    for at in np.flatnonzero(is_left).tolist():
        record = records.at(at)
        read.add(at, record, ids[at].as_py().decode(), _judge(record, record_format))
    places, due_ms, members, keys = joined([*found, read.accepted()])
    return ParsedPart(
        partition.part_id,
        line_nos=offsets[places],
        due_ms=due_ms,
        members=members,
        idempotency_keys=keys,
        rejected=read.rejected,
        lines=len(records),
        blank=read.blank,
        changes=read.changes,
    )


def _bare_lines(records: Records, times: Ints) -> tuple[Ints, bytes]:
    """Return which records are no more than a line, and their lines."""
    values, count = records.values, len(records)
    is_in_time = (times >= 0) & (times <= ARRIVAL_MS_MAX)
    if is_in_time.all() and records.keys.count(None) == count == records.headers.count(()) and None not in values:
        text = b"\n".join(values) + b"\n"  # type: ignore[arg-type]  # there is no None
        if text.count(b"\n") == count:
            return np.arange(count), text
    columns = zip(is_in_time.tolist(), values, records.keys, records.headers, strict=True)
    bare = [
        at
        for at, (is_sent, value, key, headers) in enumerate(columns)
        if is_sent and key is None and value is not None and headers is not None and not headers and b"\n" not in value
    ]
    return np.array(bare, np.int64), b"".join((values[at] or b"") + b"\n" for at in bare)


def _judge(record: Record, record_format: RecordFormat) -> Message | Change | Rejection | None:
    is_usual = record_format == "json" and record.headers is not None and 0 <= record.timestamp_ms <= ARRIVAL_MS_MAX
    message = fast_request(record.value, record.timestamp_ms) if is_usual and record.value is not None else None
    return with_headers(message, record, record_format) if message else request_of(record, record_format)


class _Reading:
    """What records ask for, one after the other."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.due_ms: list[int] = []
        self.members: list[bytes] = []
        self.keys: list[str] = []
        self.rejected: list[RejectedLine] = []
        self.changes: list[Change] = []
        self.blank = 0

    def add(self, place: int, record: Record, message_id: str, judged: Message | Change | Rejection | None) -> None:
        if judged is None:
            self.blank += 1
        elif isinstance(judged, Rejection):
            raw = (record.value or b"").decode(errors="replace")
            self.rejected.append(RejectedLine(record.offset, raw, judged))
        elif isinstance(judged, Replacement):
            self.changes.append(Replacement(replace(judged.message, message_id=message_id)))
        elif isinstance(judged, Message):
            self.places.append(place)
            self.due_ms.append(judged.due_ms)
            self.members.append(judged.to_member(message_id))
            self.keys.append(judged.id)
        else:
            self.changes.append(judged)

    def accepted(self) -> Accepted:
        return accepted_of(self.places, self.due_ms, self.members, self.keys)
