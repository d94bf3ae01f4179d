"""The plain lines of a JSON file, read all at once: a message and a whole number, as programs write them by the million.

    {"message": "the text", "delay_sec": 90}

Six quotes and nothing escaped: then the places of the quotes are the whole structure of the line, and a few comparisons of whole
arrays decide about every line of a part. That takes a tenth of the time of a parser that makes objects of them
(docs/adr/0008-parsing-in-python.md). Whatever else a line holds or leaves out, other spaces, another order, an id, makes it no
plain line, which says nothing about whether it is right: the caller reads it one by one. So this form may be narrow and must never
accept more than ``core/validation.py`` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa

from pipeline.core.due import DELAY_SEC_MAX, DUE_MS_MAX, EPOCH_MS_MIN
from pipeline.ingest.usual_lines import USUAL_LINE_BYTES_MAX

DIGITS_MAX: Final = 15  # those of DUE_MS_MAX

_NEWLINE, _RETURN, _SPACE, _QUOTE, _ZERO, _BACKSLASH = b'\n\r "0\\'

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Lines:
    """Where the lines of ``text`` start, and where they stop: before the newline, and before one return in front of that.

    What several readers want to know of the text is found once.
    """

    text: bytes
    starts: Ints
    stops: Ints

    @classmethod
    def of(cls, text: bytes) -> "Lines":
        """Find the lines of a text; what follows the last newline is a line if it is not empty."""
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == _NEWLINE)
        if text and not text.endswith(b"\n"):
            ends = np.append(ends, len(text))
        starts = np.concatenate((ends[:0], [0], ends[:-1] + 1))[: len(ends)]
        has_return = (ends > starts) & (bytes_at(text, ends - 1) == _RETURN)
        return cls(text, starts, ends - has_return)

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def quotes(self) -> Ints:
        """Where there are quotes."""
        return np.flatnonzero(np.frombuffer(self.text, np.uint8) == _QUOTE)

    @cached_property
    def first_quotes(self) -> Ints:
        """Which of the quotes is the first one behind the start of each line."""
        return np.searchsorted(self.quotes, self.starts)

    @cached_property
    def slashes(self) -> Ints:
        """Where there are backslashes."""
        data = np.frombuffer(self.text if b"\\" in self.text else b"", np.uint8)
        return np.flatnonzero(data == _BACKSLASH)

    @cached_property
    def controls(self) -> Ints:
        """Where there are control characters, but for newlines."""
        data = np.frombuffer(self.text, np.uint8)
        return np.flatnonzero((data < _SPACE) & (data != _NEWLINE))

    @cached_property
    def is_utf8(self) -> bool:
        """Whether the text is UTF-8."""
        if self.text.isascii():
            return True
        try:
            self.text.decode()
        except UnicodeDecodeError:
            return False
        return True

    def without(self, *places: Ints) -> Bools:
        """Return which lines are not too long and have none of the bytes at some places."""
        is_fit = self.stops - self.starts <= USUAL_LINE_BYTES_MAX
        odd = np.concatenate(places)
        odd_line = np.searchsorted(self.starts, odd, side="right") - 1
        is_fit[odd_line[odd < self.stops[odd_line]]] = False
        return is_fit

    def cut(self, is_wanted: Bools) -> Iterator[bytes]:
        """Yield the wanted lines."""
        for start, stop in zip(self.starts[is_wanted].tolist(), self.stops[is_wanted].tolist(), strict=True):
            yield self.text[start:stop]


@dataclass(frozen=True, slots=True)
class PlainLines:
    """The lines that are plain, by index from 0, and what they say, in parallel."""

    indexes: Ints
    due_ms: Ints
    texts: pa.Array


def read_plain_lines(lines: Lines, arrival_ms: int | Ints) -> PlainLines:
    """Find and read the plain lines: each is right as it stands, with ``due_ms`` in ms UTC.

    Args:
        arrival_ms: of all of them, or of each.
    """
    text = lines.text
    indexes, quotes = _with_six_quotes(lines)
    arrivals = arrival_ms if isinstance(arrival_ms, int) else arrival_ms[indexes]
    _, q1, q2, q3, q4, q5 = quotes.T
    starts, stops = lines.starts[indexes], lines.stops[indexes]
    first_value, second_value = q1 + 2 + _is_at(text, q1 + 2, b" "), q5 + 2 + _is_at(text, q5 + 2, b" ")
    second_name = q3 + 2 + _is_at(text, q3 + 2, b" ")
    is_delay = _is_at(text, q4, b'"delay_sec"') | _is_at(text, q4, b'"countdown"')
    is_plain = (
        _is_at(text, starts, b'{"message":')  # with its quotes, which are the first two
        & (first_value == q2)
        & (q3 > q2 + 1)
        & _is_at(text, q3 + 1, b",")
        & (second_name == q4)
        & (is_delay | _is_at(text, q4, b'"due"'))
        & _is_at(text, q5 + 1, b":")
        & _is_at(text, stops - 1, b"}")
    )
    is_number, number = whole_numbers(text, second_value, stops - 1)
    due_ms = np.where(is_delay, arrivals + number * 1000, number)
    is_plain &= is_number & np.where(is_delay, number <= DELAY_SEC_MAX, number >= EPOCH_MS_MIN)
    is_plain &= (due_ms >= 0) & (due_ms <= DUE_MS_MAX)
    return PlainLines(indexes[is_plain], due_ms[is_plain], slices(text, q2[is_plain] + 1, q3[is_plain]))


def _with_six_quotes(lines: Lines) -> tuple[Ints, Ints]:
    """Return the lines that are not too long with six quotes, no escapes and no control characters, and where the quotes are."""
    first_quote, quotes = lines.first_quotes, lines.quotes
    is_fit = lines.without(lines.controls, lines.slashes) & (np.diff(first_quote, append=len(quotes)) == 6)
    indexes = np.flatnonzero(is_fit & lines.is_utf8)
    return indexes, quotes[first_quote[indexes, None] + np.arange(6)]


def bytes_at(text: bytes, places: Ints) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes at places; beyond the ends of the text those at the ends, which callers tell apart by the places."""
    data = np.frombuffer(text, np.uint8)
    return data.take(places, mode="clip") if text else np.zeros(len(places), np.uint8)


def _is_at(text: bytes, places: Ints, word: bytes) -> Bools:
    found = np.ones(len(places), np.bool_)
    for offset, byte in enumerate(word):
        found &= bytes_at(text, places + offset) == byte
    return found


def whole_numbers(text: bytes, starts: Ints, stops: Ints) -> tuple[Bools, Ints]:
    """Read whole numbers as JSON writes them, without a sign; says first which of them are there."""
    lengths = stops - starts
    is_number = (lengths >= 1) & (lengths <= DIGITS_MAX) & ~((lengths > 1) & _is_at(text, starts, b"0"))
    numbers = np.zeros(len(starts), np.int64)
    for offset in range(lengths[is_number].max(initial=0)):
        digits = bytes_at(text, starts + offset) - np.uint8(_ZERO)  # what is below "0" turns round and is above 9
        is_inside = offset < lengths
        is_number &= ~is_inside | (digits <= 9)
        numbers = np.where(is_inside, numbers * 10 + digits, numbers)
    return is_number, numbers


def slices(text: bytes, starts: Ints, stops: Ints) -> pa.Array:
    """Cut slices out of a text: in an array of all that lies in and between them every second is one."""
    offsets = np.stack((starts, stops), axis=1).ravel().astype(np.int32)
    if not len(offsets):
        return pa.array([], pa.binary())
    cut = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(text)])
    return cut.take(pa.array(np.arange(0, len(offsets), 2)))
