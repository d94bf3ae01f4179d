"""Kafka records as requests, and messages as records again: what of a record travels where.

A message is text, with headers that are text. A record is bytes: its value, its key and any number of headers, which may be there
twice or have no value. What is text stays text. The rest travels in headers of ours: nothing of a record is lost, and nothing else
has to know of bytes (docs/adr/0019-bytes-as-text.md).

    duetime-encoding   base64: the message is the base64 of bytes that are no text
    kafka-key          the key of the record, if it is text …
    kafka-key-base64   … and if it is not
    kafka-headers      all headers as a JSON list of [name, base64 or null], if the headers of the message don't say as much
"""

import base64
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from pipeline.core.ids import TOKEN_HALF_BITS
from pipeline.core.messages import Change, Message, Reason, Rejection, Replacement
from pipeline.core.validation import validate_cells, validate_line

Headers = Sequence[tuple[str, bytes | None]]
RecordFormat = Literal["json", "raw"]

ENCODING: Final = "duetime-encoding"
BASE64: Final = "base64"
KEY: Final = "kafka-key"
KEY_BASE64: Final = "kafka-key-base64"
ALL_HEADERS: Final = "kafka-headers"
ARRIVAL_MS_MAX: Final = (1 << TOKEN_HALF_BITS) - 1  # what the id of a message can say, the year 2109
RESERVED: Final = frozenset({ENCODING, KEY, KEY_BASE64, ALL_HEADERS})

# What a record of the format raw asks for by its headers, by the names of the fields of a request.
ASKED: Final[Mapping[str, str]] = {
    "duetime-delay-sec": "delay_sec",
    "duetime-due": "due",
    "duetime-topic": "topic",
    "duetime-id": "id",
}


_OURS: Final = frozenset({*ASKED, "duetime-due-ms"})  # asked for, or written by us: not for the next reader
_NOT_SAID: Final = RESERVED | _OURS


class Record(NamedTuple):
    """A record as Kafka has it. ``timestamp_ms`` is epoch ms UTC, negative if there is none."""

    offset: int
    timestamp_ms: int
    value: bytes | None
    key: bytes | None = None
    headers: Headers | None = ()  # None: the name of one is not UTF-8


@dataclass(slots=True)
class Records:
    """Records in order of offset, in parallel columns: an object for each would take longer than all else that is done with it."""

    offsets: list[int] = field(default_factory=list)
    timestamps_ms: list[int] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    headers: list[Headers | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.offsets)

    def at(self, index: int) -> Record:
        """Return one of them."""
        return Record(
            self.offsets[index], self.timestamps_ms[index], self.values[index], self.keys[index], self.headers[index]
        )

    def cut(self, first: int, last: int | None = None) -> "Records":
        """Return some of them, by index."""
        return Records(*(column[first:last] for column in self._columns()))

    def since(self, offset: int) -> "Records":
        """Return those from an offset on."""
        return self.cut(bisect_left(self.offsets, offset))

    def extend(self, more: "Records") -> None:
        """Append others."""
        for column, others in zip(self._columns(), more._columns(), strict=True):
            column.extend(others)

    def size(self) -> int:
        """Return the bytes of their values, keys and headers."""
        headers = (pair for of in filter(None, self.headers) for pair in of)
        return (
            sum(map(len, filter(None, self.values)))
            + sum(map(len, filter(None, self.keys)))
            + sum(len(name) + len(value or b"") for name, value in headers)
        )

    def _columns(self) -> tuple[list[Any], ...]:
        return self.offsets, self.timestamps_ms, self.values, self.keys, self.headers


def request_of(record: Record, record_format: RecordFormat) -> Message | Change | Rejection | None:
    """Judge a record. The request arrived at the time of the record, whatever the clock says now. Never raises.

    Returns:
        What it asks for, why it is refused, or None if it asks for nothing: in the format json, a blank value or none at all, as
        compacted topics have them.
    """
    if not 0 <= record.timestamp_ms <= ARRIVAL_MS_MAX:
        return Rejection(
            Reason.DUE_OUT_OF_RANGE, "The record has no timestamp of this century, which says when it arrived."
        )
    if record.headers is None:
        return Rejection(Reason.BAD_HEADERS, "The name of a header is not UTF-8.")
    try:
        judged = _of_json(record) if record_format == "json" else _of_raw(record)
    except UnicodeDecodeError:
        return Rejection(Reason.BAD_HEADERS, "A header that asks for something is not UTF-8.")
    if isinstance(judged, Replacement):
        return Replacement(with_headers(judged.message, record, record_format))
    return with_headers(judged, record, record_format) if isinstance(judged, Message) else judged


def _of_json(record: Record) -> Message | Change | Rejection | None:
    return None if record.value is None else validate_line(record.value, "json", record.timestamp_ms)


def _of_raw(record: Record) -> Message | Change | Rejection:
    asked = [(ASKED[name], value) for name, value in record.headers or () if name in ASKED]
    cells = {name: (value or b"").decode() for name, value in asked}
    if len(cells) < len(asked):
        return Rejection(Reason.DUPLICATE_KEY, "A header that asks for something is there twice.")
    text = _text_of(record.value)
    judged = validate_cells({**cells, "message": _base64(record.value) if text is None else text}, record.timestamp_ms)
    if text is None and isinstance(judged, Message):
        return replace(judged, headers={ENCODING: BASE64})
    return judged


def with_headers(message: Message, record: Record, record_format: RecordFormat) -> Message:
    """Let what a record has beside its value travel with its message. What the request itself says of a header counts."""
    if not record.headers and record.key is None:
        return message
    return replace(message, headers=headers_of(record, record_format, message.headers))


def headers_of(record: Record, record_format: RecordFormat, own: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of the message of a record, of which the request has some of its ``own``."""
    sent = [(name, value) for name, value in record.headers or () if record_format == "json" or name not in ASKED]
    texts = {name: text for name, value in sent if name not in RESERVED and (text := _text_of(value)) is not None}
    kept: dict[str, str] = {}
    if [(name, text.encode()) for name, text in sorted(texts.items())] != sent or texts.keys() & own.keys():
        listed = [[name, None if value is None else _base64(value)] for name, value in sent]
        kept[ALL_HEADERS] = json.dumps(listed, separators=(",", ":"))
    if record.key is not None:
        key = _text_of(record.key)
        kept |= {KEY_BASE64: _base64(record.key)} if key is None else {KEY: key}
    return {**texts, **own, **kept}


class Outgoing(NamedTuple):
    """A record that a message becomes."""

    value: bytes
    key: bytes | None
    headers: list[tuple[str, str | bytes | None]]


def outgoing(body: bytes, headers: Mapping[str, str], message_id: str, due_ms: int) -> Outgoing:
    """Return the record of a message: what came from Kafka leaves as it came, byte for byte, unless the request said otherwise.

    Args:
        message_id: the idempotency key, else the message id, for consumers that have to tell copies.
    """
    own: list[tuple[str, str | bytes | None]]
    own = [("duetime-id", message_id.encode()), ("duetime-due-ms", b"%d" % due_ms)]
    if not headers:
        return Outgoing(body, None, own)
    came = [pair for pair in _listed(headers[ALL_HEADERS]) if pair[0] not in _OURS] if ALL_HEADERS in headers else []
    said = {name: text.encode() for name, text in headers.items() if name not in _NOT_SAID}
    kept = [(name, value) for name, value in came if name not in said or (name, said[name]) in came]
    more = [pair for pair in said.items() if pair not in came]
    key = headers.get(KEY)
    encoded = _bytes_of(body) if headers.get(ENCODING) == BASE64 else None
    return Outgoing(
        value=body if encoded is None else encoded,
        key=_bytes_of(headers[KEY_BASE64]) if KEY_BASE64 in headers else None if key is None else key.encode(),
        headers=[*kept, *more, *own],
    )


def _listed(text: str) -> list[tuple[str, bytes | None]]:
    """Read what ``headers_of`` wrote; nothing, if it is something else: anybody may schedule a message with such a header."""
    try:
        listed = json.loads(text or "[]")
        return [
            (_name_of(name), None if value is None else base64.b64decode(value, validate=True))
            for name, value in listed
        ]
    except (ValueError, TypeError, RecursionError):
        return []


def _name_of(name: object) -> str:
    """Return the name of a header; raises ``ValueError`` if it is not UTF-8, which would crash the client of Kafka."""
    return str(name).encode().decode()


def _bytes_of(text: str | bytes) -> bytes | None:
    """Return what base64 stands for; None if it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


def _text_of(value: bytes | None) -> str | None:
    """Return bytes as text; None if they are none."""
    try:
        return value.decode() if value is not None else None
    except UnicodeDecodeError:
        return None


def _base64(value: bytes | None) -> str:
    return base64.b64encode(value or b"").decode()
