"""From the bytes of a landing file to its messages: the rules of ``core/validation.py`` at millions of lines.

``validate_line`` is the reference and judges whatever is unusual. Three faster forms come first: lines that are no more than a
message and a number are read all at once (``plain_lines.py``), then those that differ in their values alone (``alike_lines.py``),
and the other usual ones one by one (``usual_lines.py``). A line that none takes is not refused: it goes to the reference. So they
may be narrow and must never accept more; a table and property tests hold that.

Guarantee: the same file gives the same messages with the same ids and due times, whenever and however often it is parsed.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.cold import COLD_HOUR_MAX, COLD_PLACE_LENGTH, HOUR_MS
from pipeline.core.ids import LINE_NO_MAX, MESSAGE_ID_LENGTH, TOKEN_ALPHABET, TOKEN_HALF_BITS, TOKEN_LENGTH
from pipeline.core.messages import FORM_PLAIN, Change, Message, Reason, Rejection, Replacement
from pipeline.core.validation import Kind, validate_line
from pipeline.ingest.alike_lines import read_alike_lines, read_csv_rows
from pipeline.ingest.columns import Accepted, IdParts, accept, join
from pipeline.ingest.plain_lines import Ints, Lines, read_plain_lines
from pipeline.ingest.usual_lines import fast_request

# A file is parsed and stored in parts of about so many bytes, cut at line ends, which bounds what a task holds of it. The
# cuts name the markers of the parts, so the number must never change.
PART_BYTES: Final = 16 * 1024 * 1024
AT_ONCE_FROM_LINES: Final = 100  # so many take as long one by one as at once

_BOM: Final = b"\xef\xbb\xbf"
_STAMP: Final = re.compile(rb"([0-9]{1,15})\t")
_HEX_DIGITS: Final = np.frombuffer(b"0123456789abcdef", np.uint8)
_TOKEN_CODES: Final = np.array([max(TOKEN_ALPHABET.find(chr(code)), 0) for code in range(256)], np.uint8)
_HEX_CODES: Final = np.array([max("0123456789abcdef".find(chr(code)), 0) for code in range(256)], np.uint8)
_TOKEN_CHARACTERS: Final = np.frombuffer(TOKEN_ALPHABET.encode(), np.uint8)


@dataclass(frozen=True, slots=True)
class FileText:
    """One landing file as Spark read it (``schemas.FILE_ROW``)."""

    token: str
    first_line: int
    kind: Kind
    name: str
    arrival_ms: int
    content: bytes
    is_repeated: bool = False
    has_waited: bool = False


@dataclass(frozen=True, slots=True)
class RejectedLine:
    """A line that is not accepted, what is not UTF-8 in it replaced by U+FFFD."""

    line_no: int
    raw: str
    rejection: Rejection


@dataclass(frozen=True, slots=True)
class ParsedPart:
    """The messages of one part of a file: ``line_nos`` to ``idempotency_keys`` run in parallel, in no order.

    ``part_id`` names what is stored of this part. A message without idempotency key has null. ``changes`` are the lines that cancel
    or replace; each replacement has its message id.
    """

    part_id: str
    line_nos: Ints
    due_ms: Ints
    members: pa.Array
    idempotency_keys: pa.Array
    rejected: list[RejectedLine]
    lines: int
    blank: int
    changes: Sequence[Change] = ()


def parse_file(file: FileText) -> Iterator[ParsedPart]:
    """Yield the parts of a file; a file without lines is one empty part. Never raises on what users sent.

    Lines end with ``\\n``, and one ``\\r`` before it is not theirs; the file's byte order mark and a CSV header are no lines.
    """
    content, header, first_line = file.content, "", file.first_line
    start = len(_BOM) if content.startswith(_BOM) and (first_line == 1 or file.kind == "csv") else 0
    if file.kind == "csv":
        end = _line_end(content, start)
        header = content[start:end].removesuffix(b"\n").removesuffix(b"\r").decode(errors="replace")
        start = end
    part_id = file.token
    while True:
        end = _line_end(content, start + PART_BYTES)
        part = _parse_part(part_id, file, header, Lines.of(content[start:end]), first_line)
        yield part
        first_line += part.lines
        if end == len(content):
            return
        part_id, start = f"{file.token}.{first_line}", end


def _line_end(content: bytes, start: int) -> int:
    """Return where the line that holds byte ``start`` ends, its line end included."""
    return content.find(b"\n", start) + 1 or len(content)


def _parse_part(part_id: str, file: FileText, header: str, lines: Lines, first_line: int) -> ParsedPart:
    """Read the lines that can be read many at once, and the others one by one."""

    def message_ids(indexes: Ints) -> IdParts:
        return file.token.encode(), as_hex(indexes + first_line)

    is_within = first_line + len(lines) - 1 <= LINE_NO_MAX
    found = read_at_once(lines, file.kind, header, file.arrival_ms, message_ids) if is_within else []
    is_left = np.ones(len(lines), np.bool_)
    for accepted in found:
        is_left[accepted.indexes] = False
    others = _OneByOne(file, header, is_fast=file.kind != "csv" and is_within)
    for index, line in zip(np.flatnonzero(is_left).tolist(), lines.cut(is_left), strict=True):
        others.read(line, first_line + index)
    indexes, due_ms, members, keys = joined([*found, others.accepted(first_line)])
    return ParsedPart(
        part_id,
        line_nos=indexes + first_line,
        due_ms=due_ms,
        members=members,
        idempotency_keys=keys,
        rejected=others.rejected,
        lines=len(lines),
        blank=others.blank,
        changes=others.changes,
    )


def read_at_once(
    lines: Lines, kind: Kind, header: str, arrival_ms: int | Ints, message_ids: Callable[[Ints], IdParts]
) -> list[Accepted]:
    """Read the lines that are plain, then those that are alike, if there are many. What is not among them is left to others.

    Args:
        arrival_ms: of all of them, or of each.

        message_ids: returns those of some lines, by index, as parts to be joined.
    """
    if len(lines) < AT_ONCE_FROM_LINES or kind == "sock":
        return []
    if kind == "csv":
        return [*chain.from_iterable(accept(rows, arrival_ms, message_ids) for rows in read_csv_rows(lines, header))]
    plain = read_plain_lines(lines, arrival_ms)
    members = join(*message_ids(plain.indexes), FORM_PLAIN.encode(), plain.texts)
    is_left = np.ones(len(lines), np.bool_)
    is_left[plain.indexes] = False
    alike = (accept(columns, arrival_ms, message_ids) for columns in read_alike_lines(lines, is_left))
    return [Accepted(plain.indexes, plain.due_ms, members, None), *chain.from_iterable(alike)]


def joined(found: Sequence[Accepted]) -> tuple[Ints, Ints, pa.Array, pa.Array]:
    """Return the columns of all that was accepted: indexes, due times, members, and keys, null where there is none."""
    keys = [pa.nulls(len(each.indexes), pa.binary()) if each.keys is None else each.keys for each in found]
    return (
        np.concatenate([each.indexes for each in found]),
        np.concatenate([each.due_ms for each in found]),
        pa.concat_arrays([each.members for each in found]),
        pa.concat_arrays(keys),
    )


def as_hex(line_nos: Ints) -> pa.Array:
    """Write line numbers as a message id holds them, eight digits each."""
    digits = _HEX_DIGITS[line_nos[:, None] >> np.arange(28, -1, -4) & 15]
    offsets = np.arange(0, 8 * len(line_nos) + 1, 8, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(line_nos), [None, pa.py_buffer(offsets), pa.py_buffer(digits)])


def as_half(values: Ints) -> pa.Array:
    """Write numbers as halves of tokens (``core/ids.py``), seven characters each."""
    characters = _TOKEN_CHARACTERS[values[:, None] >> np.arange(TOKEN_HALF_BITS - 6, -1, -6) & 63]
    offsets = np.arange(0, 7 * len(values) + 1, 7, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(characters)])


def cold_places(members: pa.Array, due_ms: Ints) -> pa.Array:
    """Write the places of cold messages (``core/cold.py``)."""
    if not len(members):
        return members
    message_ids = pc.binary_slice(members, 0, MESSAGE_ID_LENGTH).cast(pa.binary(MESSAGE_ID_LENGTH))
    characters = np.frombuffer(message_ids.buffers()[1], np.uint8)[: MESSAGE_ID_LENGTH * len(members)]
    tokens, lines = np.split(characters.reshape(-1, MESSAGE_ID_LENGTH), [TOKEN_LENGTH], axis=1)
    hours = np.minimum(due_ms // HOUR_MS, COLD_HOUR_MAX).astype(">u4").view(np.uint8).reshape(-1, 4)
    parts = (
        np.unpackbits(hours, axis=1)[:, 12:],
        np.unpackbits(_TOKEN_CODES[tokens][:, :, None], axis=2)[:, :, 2:].reshape(len(members), -1),
        np.unpackbits(_HEX_CODES[lines][:, :, None], axis=2)[:, :, 4:].reshape(len(members), -1),
    )
    packed = np.packbits(np.concatenate(parts, axis=1), axis=1)
    offsets = np.arange(0, COLD_PLACE_LENGTH * len(members) + 1, COLD_PLACE_LENGTH, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(members), [None, pa.py_buffer(offsets), pa.py_buffer(packed)])


def accepted_of(
    indexes: Sequence[int], due_ms: Sequence[int], members: Sequence[bytes], keys: Sequence[str]
) -> Accepted:
    """Make columns of messages that were read one by one; an empty key is none."""
    columns = np.array(indexes, np.int64), np.array(due_ms, np.int64), pa.array(members, pa.binary())
    return Accepted(*columns, pa.array([key or None for key in keys], pa.string()).cast(pa.binary()))


class _OneByOne:
    """The lines of a part that are neither plain nor alike, read one after the other."""

    def __init__(self, file: FileText, header: str, is_fast: bool) -> None:
        self.is_fast = is_fast
        self.line_nos: list[int] = []
        self.due_ms: list[int] = []
        self.members: list[bytes] = []
        self.keys: list[str] = []
        self.rejected: list[RejectedLine] = []
        self.changes: list[Change] = []
        self.blank = 0
        self._file = file
        self._token, self._arrival_ms, self._has_stamps = file.token, file.arrival_ms, file.kind == "sock"
        self._header = header

    def read(self, line: bytes, line_no: int) -> None:
        """Read a line by the fast form, or else by the reference."""
        arrival_ms: int | None = self._arrival_ms
        if self._has_stamps:
            arrival_ms, line = _split_stamp(line)
        request = fast_request(line, arrival_ms) if self.is_fast and arrival_ms is not None else None
        if request is None:
            judged = self._judge(line, line_no, arrival_ms)
            if judged is None:
                self.blank += 1
                return
            if isinstance(judged, Rejection):
                self.rejected.append(RejectedLine(line_no, line.decode(errors="replace"), judged))
                return
            if not isinstance(judged, Message):
                self.changes.append(self._with_message_id(judged, line_no))
                return
            request = judged
        self.keys.append(request.id)
        self.line_nos.append(line_no)
        self.due_ms.append(request.due_ms)
        self.members.append(request.to_member(self._message_id(line_no)))

    def accepted(self, first_line: int) -> Accepted:
        """Return the messages that were read."""
        return accepted_of([number - first_line for number in self.line_nos], self.due_ms, self.members, self.keys)

    def _message_id(self, line_no: int) -> str:
        return f"{self._token}{line_no:08x}"  # as ids.message_id, which checks it, too

    def _with_message_id(self, change: Change, line_no: int) -> Change:
        if not isinstance(change, Replacement):
            return change
        return Replacement(replace(change.message, message_id=self._message_id(line_no)))

    def _judge(self, line: bytes, line_no: int, arrival_ms: int | None) -> Message | Change | Rejection | None:
        judged = validate_line(line, self._file.kind, arrival_ms or 0, self._header)
        if judged is None or (isinstance(judged, Rejection) and judged.reason == Reason.NOT_UTF8):
            return judged
        if arrival_ms is None:
            return Rejection(Reason.BAD_SOCKET_LINE, "The socket line has no arrival time in front of it.")
        if line_no > LINE_NO_MAX:
            return Rejection(Reason.LINE_NO_TOO_HIGH, f"The line's number is above {LINE_NO_MAX}; split the file.")
        return judged


def _split_stamp(line: bytes) -> tuple[int | None, bytes]:
    """Split a socket line into its arrival, in ms UTC, and what was sent."""
    stamp = _STAMP.match(line)
    return (int(stamp[1]), line[stamp.end() :]) if stamp else (None, line)
