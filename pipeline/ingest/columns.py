"""Requests as columns of values: the rules of ``core/validation.py`` for many of them at once, and the members that they make.

Rows whose values are usual and right are taken. The others are left, which says nothing about them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.due import DELAY_SEC_MAX, DUE_MS_MAX, EPOCH_MS_MIN
from pipeline.core.ids import MESSAGE_ID_LENGTH
from pipeline.core.messages import DEFAULT_TOPIC, FORM_JSON, FORM_PLAIN
from pipeline.core.validation import ID_LENGTH_MAX, ID_PATTERN, TOPIC_PATTERN
from pipeline.ingest.plain_lines import Bools, Ints, bytes_at, slices, whole_numbers

DUE_FIELDS: Final = frozenset({"delay_sec", "countdown", "due"})

_IS_ID_BYTE: Final = np.array([re.fullmatch(ID_PATTERN, chr(code)) is not None for code in range(256)])
_IS_TOPIC: Final = re.compile(TOPIC_PATTERN).fullmatch
_decode_texts: Final = msgspec.json.Decoder(list[str]).decode

# 2026-01-31T12:00:00, then a fraction of a second or none, then Z or an offset.
_TIME_LENGTH: Final = 19
_DIGIT_PLACES: Final = [0, 1, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18]
_MARK_PLACES: Final = [4, 7, 10, 13, 16]
_MARKS: Final = np.frombuffer(b"--T::", np.uint8)
_FRACTION_DIGITS_MAX: Final = 9
_OFFSET_HOURS_MAX: Final = 17
_FIRST_DAYS: Final = np.arange("1970-01", "10000-02", dtype="datetime64[M]").astype("datetime64[D]").astype(np.int64)
_ZERO: Final = np.uint8(ord("0"))

IdParts = tuple[pa.Array | bytes, ...]


@dataclass(frozen=True, slots=True)
class Values:
    """Where one value begins and ends in each row."""

    begins: Ints
    ends: Ints

    def where(self, is_wanted: Bools) -> "Values":
        """Return those of some rows."""
        return Values(self.begins[is_wanted], self.ends[is_wanted])


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows that have the same fields: the index of each, and where its values are in ``text``, which is UTF-8.

    ``numbers`` are what is a number in JSON; in CSV, a due time may be one in some rows. In JSON, texts are escaped as members have
    it; in CSV, a quote is there twice. There are no control characters.
    """

    text: bytes
    indexes: Ints
    fields: Mapping[str, Values]
    numbers: Mapping[str, Values]
    headers: Mapping[str, Values]
    is_json: bool

    def where(self, is_wanted: Bools) -> "Columns":
        """Return some rows."""
        fields, numbers, headers = (
            {name: values.where(is_wanted) for name, values in part.items()}
            for part in (self.fields, self.numbers, self.headers)
        )
        return Columns(self.text, self.indexes[is_wanted], fields, numbers, headers, self.is_json)

    def without(self, name: str) -> "Columns":
        """Return all rows without a field."""
        fields = {field: values for field, values in self.fields.items() if field != name}
        return Columns(self.text, self.indexes, fields, self.numbers, self.headers, self.is_json)

    def cut(self, values: Values) -> pa.Array:
        """Return values as an array of binaries."""
        return slices(self.text, values.begins, values.ends)


@dataclass(frozen=True, slots=True)
class Accepted:
    """Messages, in parallel: the index of the row, when it is due, the member, and the idempotency key; None if none has one."""

    indexes: Ints
    due_ms: Ints
    members: pa.Array
    keys: pa.Array | None


def accept(columns: Columns, arrival_ms: int | Ints, message_ids: Callable[[Ints], IdParts]) -> Iterator[Accepted]:
    """Yield the messages of the rows that are usual and right.

    Args:
        arrival_ms: of all of them, or of each, by index.

        message_ids: returns those of some rows, by index, as parts to be joined.
    """
    is_right, due_ms = _due_ms_of(columns, arrival_ms)
    message = columns.fields["message"]
    is_right &= (message.ends > message.begins) & (due_ms >= 0) & (due_ms <= DUE_MS_MAX)
    keys = topics = None
    ids = message_ids(columns.indexes)
    if "id" in columns.fields:
        keys = columns.cut(columns.fields["id"])
        is_right &= _are_ids(keys, ids)
    if "topic" in columns.fields:
        topics = columns.cut(columns.fields["topic"]).dictionary_encode()
        names = topics.dictionary.to_pylist()
        kinds = np.array([0 if not _is_topic(name) else 1 if name != DEFAULT_TOPIC.encode() else 2 for name in names])
        kind_of = kinds[topics.indices.to_numpy()] if names else np.empty(0, np.int64)
        is_right &= kind_of > 0
    if not is_right.all():
        if is_right.any():
            yield from accept(columns.where(is_right), arrival_ms, message_ids)
        return
    if topics is not None and (kind_of == 2).any():
        yield from accept(columns.where(kind_of == 2).without("topic"), arrival_ms, message_ids)
        if (kind_of == 1).any():
            yield from accept(columns.where(kind_of == 1), arrival_ms, message_ids)
        return
    yield Accepted(columns.indexes, due_ms, _members_of(columns, ids, topics, keys), keys)


def _members_of(columns: Columns, ids: IdParts, topics: pa.Array | None, keys: pa.Array | None) -> pa.Array:
    """Write what ``Message.to_member`` writes."""
    body = columns.cut(columns.fields["message"])
    if not columns.is_json and b'""' in columns.text:
        body = pc.replace_substring(body, b'""', b'"')
    if topics is None and keys is None and not columns.headers:
        return join(*ids, FORM_PLAIN.encode(), _unescaped(body) if columns.is_json else body)
    if not columns.is_json:
        body = pc.replace_substring(pc.replace_substring(body, b"\\", b"\\\\"), b'"', b'\\"')
    parts = [*ids, f'{FORM_JSON}{{"message":"'.encode(), body]
    if topics is not None:
        parts += [b'","topic":"', topics.dictionary_decode()]
    if keys is not None:
        parts += [b'","id":"', keys]
    opening = '","headers":{'
    for name in sorted(columns.headers, key=lambda name: name.encode("utf-16-be")):
        parts += [f'{opening}"{name}":"'.encode(), columns.cut(columns.headers[name])]
        opening = '",'
    return join(*parts, b'"}}' if columns.headers else b'"}')


def join(*parts: pa.Array | bytes) -> pa.Array:
    """Join columns of binaries, and bytes that are the same in all rows."""
    return pc.binary_join_element_wise(*parts, b"")


def _unescaped(bodies: pa.Array) -> pa.Array:
    """Return JSON texts as what they say."""
    has_escape = pc.match_substring(bodies, b"\\")
    escaped = bodies.filter(has_escape).to_pylist()
    if not escaped:
        return bodies
    texts = _decode_texts(b'["' + b'","'.join(escaped) + b'"]')
    return pc.replace_with_mask(bodies, has_escape, pa.array(texts, pa.string()).cast(pa.binary()))


def _are_ids(keys: pa.Array, ids: IdParts) -> Bools:
    """Say which keys are as ``ID_PATTERN`` wants them; one that is its message id has a member of its own form."""
    offsets = np.frombuffer(keys.buffers()[1], np.int32)[: len(keys) + 1] if len(keys) else np.zeros(1, np.int32)
    lengths = np.diff(offsets)
    are_ids = (lengths >= 1) & (lengths <= ID_LENGTH_MAX)
    if len(keys) and offsets[-1]:
        wrong = np.flatnonzero(~_IS_ID_BYTE[np.frombuffer(keys.buffers()[2], np.uint8)[: offsets[-1]]])
        are_ids[np.searchsorted(offsets, wrong, side="right") - 1] = False
    if (lengths == MESSAGE_ID_LENGTH).any():
        are_ids &= ~_as_bools(pc.equal(keys, join(*ids)))
    return are_ids


def _is_topic(name: bytes) -> bool:
    return _IS_TOPIC(name.decode()) is not None


def _as_bools(column: Any) -> Bools:
    return column.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _due_ms_of(columns: Columns, arrival_ms: int | Ints) -> tuple[Bools, Ints]:
    """Return when the rows are due, and first which of them say so in a usual way."""
    fields, text = columns.fields, columns.text
    [name] = DUE_FIELDS & (fields.keys() | columns.numbers.keys())
    values = columns.numbers.get(name) or fields[name]
    is_right, number = np.zeros(len(columns.indexes), np.bool_), np.zeros(len(columns.indexes), np.int64)
    if name in columns.numbers or not columns.is_json:
        is_right, number = whole_numbers(text, values.begins, values.ends)
    if name != "due":
        arrivals = arrival_ms if isinstance(arrival_ms, int) else arrival_ms[columns.indexes]
        return is_right & (number <= DELAY_SEC_MAX), arrivals + number * 1000
    is_right &= number >= EPOCH_MS_MIN
    if name in columns.numbers or is_right.all():
        return is_right, number
    is_time, due_ms = times(text, values.begins, values.ends)
    return is_right | is_time, np.where(is_right, number, due_ms)


def times(text: bytes, begins: Ints, ends: Ints) -> tuple[Bools, Ints]:
    """Read ISO 8601 times as programs write them; says first which are, from 1970 on. Rounds up to the ms, as ``core/due.py``."""
    if len(text) <= _TIME_LENGTH:
        return np.zeros(len(begins), np.bool_), np.zeros(len(begins), np.int64)
    windows = np.ndarray((len(text) - _TIME_LENGTH + 1,), f"V{_TIME_LENGTH}", text, strides=(1,))
    characters = windows[np.minimum(begins, len(windows) - 1)].view(np.uint8).reshape(-1, _TIME_LENGTH)
    digits = characters[:, _DIGIT_PLACES] - _ZERO
    is_time = (ends - begins > _TIME_LENGTH) & (digits <= 9).all(axis=1)
    is_time &= (characters[:, _MARK_PLACES] == _MARKS).all(axis=1)
    year = digits[:, :4] @ np.array([1000, 100, 10, 1])
    month, day, hour, minute, second = (digits[:, 4::2] * np.int64(10) + digits[:, 5::2]).T
    is_time &= (year >= 1970) & (month >= 1) & (month <= 12) & (hour <= 23) & (minute <= 59) & (second <= 59)
    months = np.where(is_time, (year - 1970) * 12 + month - 1, 0)
    first_day = _FIRST_DAYS[months]
    is_time &= (day >= 1) & (day <= _FIRST_DAYS[months + 1] - first_day)
    seconds = ((first_day + day - 1) * 24 + hour) * 3600 + minute * 60 + second
    zone = begins + _TIME_LENGTH
    is_utc = bytes_at(text, zone) == ord("Z")
    if (is_utc & (zone + 1 == ends))[is_time].all():
        return is_time, seconds * 1000
    ms, zone = _fractions(text, zone, ends)
    is_zone, offset = _offsets(text, zone, ends)
    return is_time & is_zone, (seconds - offset) * 1000 + ms


def _fractions(text: bytes, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Read fractions of a second; returns them in ms, rounded up, and where they end: where they begin, if there is none."""
    micros, places = np.zeros(len(begins), np.int64), begins + 1
    is_inside = bytes_at(text, begins) == ord(".")
    for place in range(_FRACTION_DIGITS_MAX):
        digits = bytes_at(text, places) - _ZERO
        is_inside = is_inside & (digits <= 9) & (places < ends)
        if place < 6:  # digits beyond are cut
            micros = micros * 10 + np.where(is_inside, digits, 0)
        places = places + is_inside
    return -(-micros // 1000), np.where(places == begins + 1, begins, places)


def _offsets(text: bytes, begins: Ints, ends: Ints) -> tuple[Bools, Ints]:
    """Read ``Z`` and offsets such as ``+02:00``, in seconds; says first which are there."""
    signs = bytes_at(text, begins)
    is_utc = (signs == ord("Z")) & (begins + 1 == ends)
    digits = np.stack([bytes_at(text, begins + place) - _ZERO for place in (1, 2, 4, 5)])
    hours, minutes = digits[::2] * np.int64(10) + digits[1::2]
    is_offset = (begins + 6 == ends) & ((signs == ord("+")) | (signs == ord("-"))) & (digits <= 9).all(axis=0)
    is_offset &= (bytes_at(text, begins + 3) == ord(":")) & (hours <= _OFFSET_HOURS_MAX) & (minutes <= 59)
    seconds = (hours * 60 + minutes) * np.where(signs == ord("-"), -60, 60)
    return is_utc | is_offset, np.where(is_offset, seconds, 0)
