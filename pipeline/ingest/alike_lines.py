"""Lines that are alike, read many at once: those that a program writes differ in their values alone.

The reference judges the first of them. If it is right, the text around its values is its shape, and every other line that has the
same text around its own values is read as columns of values (``columns.py``), whose rules are checked there. In JSON the quotes
say where values begin and end, in CSV the commas do. As with ``plain_lines.py``, what is taken is right, and what is not taken
says nothing about the line.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from pipeline.core.csv_rows import parse_csv_header
from pipeline.core.messages import Message, Rejection
from pipeline.core.validation import validate_line
from pipeline.ingest.columns import DUE_FIELDS, Columns, Values
from pipeline.ingest.plain_lines import Bools, Ints, Lines, bytes_at

SHAPES_MAX: Final = 16  # that are looked for in a part; the lines of others are read one by one
ALIKE_FROM_LINES: Final = 50  # so many take as long one by one as at once

_NEWLINE, _SPACE, _QUOTE, _COMMA, _BACKSLASH = b'\n ",\\'
_STRING: Final = re.compile(rb'"((?:[^"\\]|\\.)*+)"')
_NAME_END: Final = re.compile(rb"[ \t]*:")
_NUMBER: Final = re.compile(rb"([ \t]*:[ \t]*)([0-9]+)([ \t]*[,}].*)", re.DOTALL)
_FIELDS: Final = DUE_FIELDS | {"message", "id", "topic"}
# What stands behind a backslash, if text with it is written in the same way in a member.
_IS_SAME_ESCAPE: Final = np.isin(np.arange(256), np.frombuffer(b'"\\bfnrt', np.uint8))


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a value stands in a shape, by the text in front of it: that ends with its quote, unless the value is a number."""

    before: bytes
    name: str
    is_number: bool = False
    is_header: bool = False


@dataclass(frozen=True, slots=True)
class _Shape:
    """The text of a line around its values."""

    slots: tuple[_Slot, ...]
    end: bytes


def read_alike_lines(lines: Lines, is_left: Bools) -> Iterator[Columns]:
    """Find JSON lines that are alike, among those that are left, and yield their values, which nobody has checked yet."""
    if np.count_nonzero(is_left) < ALIKE_FROM_LINES or not lines.is_utf8:
        return
    quotes, is_fit = _quotes_of(lines)
    first_quote = lines.first_quotes if quotes is lines.quotes else np.searchsorted(quotes, lines.starts)
    counts = np.diff(first_quote, append=len(quotes))
    left = np.flatnonzero(is_fit & is_left)
    for _ in range(SHAPES_MAX):
        if len(left) < ALIKE_FROM_LINES:
            return
        first = int(left[0])
        alike = left[counts[left] == counts[first]]
        found = np.array([first])
        shape = _shape_of(lines.text[lines.starts[first] : lines.stops[first]]) if len(alike) > 1 else None
        if shape is not None:
            columns = _match(lines, alike, quotes, first_quote, shape)
            found = columns.indexes
            yield columns
        is_read = np.zeros(len(lines), np.bool_)
        is_read[found] = True
        is_read[first] = True  # whatever became of it
        left = left[~is_read[left]]


def _quotes_of(lines: Lines) -> tuple[Ints, Bools]:
    """Return where quotes begin or end texts, and which lines are not too long and have nothing that is written another way."""
    quotes, slashes = lines.quotes, lines.slashes
    if not len(slashes):
        return quotes, lines.without(lines.controls)
    # Of backslashes in a row the first, the third, … escape what follows them.
    is_first = np.diff(slashes, prepend=-2) != 1
    place = np.arange(len(slashes))
    escaped = slashes[(place - place[is_first][np.cumsum(is_first) - 1]) % 2 == 0] + 1
    is_text = np.ones(len(lines.text) + 1, np.bool_)
    is_text[escaped] = False
    odd = escaped[~_IS_SAME_ESCAPE[bytes_at(lines.text, escaped)]]
    return quotes[is_text[quotes]], lines.without(lines.controls, odd)


def _shape_of(line: bytes) -> _Shape | None:
    """Return the shape of a JSON line, if it is right and of a kind whose values can be told from the text around them."""
    if not isinstance(validate_line(line, "json", 0), Message):
        return None
    slots: list[_Slot] = []
    before, name, depth, end = b"", "", 0, 0
    strings = list(_STRING.finditer(line))
    for string, following in zip(strings, [*strings[1:], None], strict=True):
        gap = line[string.end() : following.start() if following else len(line)]
        lead = line[end : string.start()] if not end else b""
        depth += lead.count(b"{")
        before += lead
        end = string.end()
        if _NAME_END.match(gap):
            name = string[1].decode()
            if "\\" in name or (depth == 1 and name not in _FIELDS and name != "headers"):
                return None
            before += string[0]
            number = _NUMBER.fullmatch(gap)
            if number:
                slots.append(_Slot(before + number[1], name, is_number=True))
                before = number[3]
            else:
                before += gap
        else:
            slots.append(_Slot(before + b'"', name, is_header=depth == 2))
            before = b'"' + gap
        depth += gap.count(b"{") - gap.count(b"}")
    names = [slot.name for slot in slots if not slot.is_header]
    is_whole = "message" in names and len(DUE_FIELDS & {*names}) == 1
    return _Shape(tuple(slots), before) if is_whole else None


def _match(lines: Lines, indexes: Ints, quotes: Ints, first_quote: Ints, shape: _Shape) -> Columns:
    """Find the lines of a shape among some that have as many quotes, and their values.

    Each text before a value is compared with what stands behind the value before. That text has all quotes between the two, so the
    quotes of a line are told apart by their number.
    """
    text, stops = lines.text, lines.stops[indexes]
    first = first_quote[indexes]
    found = np.ones(len(indexes), np.bool_)
    at, quote = lines.starts[indexes], 0
    values: list[tuple[Ints, Ints]] = []
    befores = [*(slot.before for slot in shape.slots), shape.end]
    for number, (slot, before, behind) in enumerate(zip(shape.slots, befores, befores[1:], strict=False), start=1):
        found &= (at + len(before) <= stops) & _is_text(text, at, before)
        begin = at + len(before)
        quote += before.count(b'"')
        if slot.is_number:
            # It ends where the text behind it must begin: that ends with a quote, or with the line.
            last = quotes.take(first + quote + behind.count(b'"') - 1, mode="clip")
            at = (stops if number == len(shape.slots) else last + 1) - len(behind)
        else:
            at = quotes.take(first + quote, mode="clip")
        values.append((begin, at))
    found &= (at + len(shape.end) == stops) & _is_text(text, at, shape.end)
    fields: dict[str, Values] = {}
    numbers: dict[str, Values] = {}
    headers: dict[str, Values] = {}
    for slot, (begin, end) in zip(shape.slots, values, strict=True):
        kind = headers if slot.is_header else numbers if slot.is_number else fields
        kind[slot.name] = Values(begin[found], end[found])
    return Columns(text, indexes[found], fields, numbers, headers, is_json=True)


def _is_text(text: bytes, places: Ints, words: bytes) -> Bools:
    """Say where ``words`` stand; a place so near the end that they don't fit there is the last one where they do."""
    width = len(words)
    if width > len(text):
        return np.zeros(len(places), np.bool_)
    slices = np.ndarray((len(text) - width + 1,), f"S{width}", text, strides=(1,))
    return slices[np.minimum(places, len(text) - width)] == words  # type: ignore[no-any-return]


def read_csv_rows(lines: Lines, header: str) -> Iterator[Columns]:
    """Find the rows of a CSV file that are well formed, and yield their values by which cells are not empty."""
    names = parse_csv_header(header)
    if isinstance(names, Rejection) or not lines.is_utf8 or not len(lines):
        return
    is_fit, quotes = lines.without(lines.controls), lines.quotes
    commas = np.flatnonzero(np.frombuffer(lines.text, np.uint8) == _COMMA)
    if len(quotes):
        first_quote = np.searchsorted(quotes, lines.starts)
        counts = np.diff(first_quote, append=len(quotes))
        is_fit &= counts % 2 == 0
        is_fit[_lines_with_bad_quotes(lines, quotes, np.arange(len(quotes)) - np.repeat(first_quote, counts))] = False
        line = np.searchsorted(lines.starts, commas, side="right") - 1
        commas = commas[(np.searchsorted(quotes, commas) - first_quote[line]) % 2 == 0]
    first_comma = np.searchsorted(commas, lines.starts)
    indexes = np.flatnonzero(is_fit & (np.diff(first_comma, append=len(commas)) == len(names) - 1))
    ends = [commas[first_comma[indexes] + column] for column in range(len(names) - 1)] + [lines.stops[indexes]]
    begins = [lines.starts[indexes], *(end + 1 for end in ends[:-1])]
    present = np.zeros(len(indexes), np.int64)
    cells = []
    for column, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        is_quoted = (bytes_at(lines.text, begin) == _QUOTE) & (begin < end)
        cells.append(Values(begin + is_quoted, end - is_quoted))
        present |= (cells[-1].ends > cells[-1].begins).astype(np.int64) << column
    for mask in np.unique(present).tolist():
        filled = {
            name: cell for column, (name, cell) in enumerate(zip(names, cells, strict=True)) if mask >> column & 1
        }
        if "message" in filled and filled.keys() <= _FIELDS and len(DUE_FIELDS & filled.keys()) == 1:
            yield Columns(lines.text, indexes, filled, {}, {}, is_json=False).where(present == mask)


def _lines_with_bad_quotes(lines: Lines, quotes: Ints, number: Ints) -> Ints:
    """Return the lines, some twice, in which a quote neither begins nor ends a cell nor is doubled.

    Of the quotes of a line, the first, the third, … begin a cell or are the second of two; the others end one or are the first.
    """
    text = lines.text
    line = np.searchsorted(lines.starts, quotes, side="right") - 1
    is_begin = number % 2 == 0
    beside = bytes_at(text, np.where(is_begin, quotes - 1, quotes + 1))
    is_edge = np.where(is_begin, quotes == lines.starts[line], quotes + 1 == lines.stops[line])
    is_good: Bools = is_edge | (beside == _QUOTE) | (beside == _COMMA)
    return line[~is_good]
