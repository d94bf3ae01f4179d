"""From the bytes of a landing file to its messages: the rules of ``core/validation.py`` at millions of lines.

``validate_line`` is the reference and judges whatever is unusual. The usual line, JSON with plain fields, takes the fast form
first: msgspec decodes it straight into a typed struct and refuses by itself unknown fields, wrong types, trailing text, NaN
and bad UTF-8. What it would let pass, a name that is there twice, shows in the number of quotes. A line that the fast form doesn't
take is not refused: it goes to the reference. So the fast form may be narrow and must never accept more; a table and a property
test hold that.

Guarantee: the same file gives the same messages with the same ids and due times, whenever and however often it is parsed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from pipeline.core.due import DELAY_SEC_MAX, due_ms_of_text, is_due_in_range
from pipeline.core.ids import LINE_NO_MAX
from pipeline.core.messages import (
    BODY_PLAIN,
    DEFAULT_TOPIC,
    MessageRequest,
    Reason,
    Rejection,
    encode_member,
)
from pipeline.core.validation import ID_PATTERN, TOPIC_PATTERN, Kind, validate_line
from pipeline.store.resp import frame_pair

# A file is parsed and stored in pieces of about so many bytes, cut at line ends, which bounds what a task holds of it. The
# cuts name the fences of the pieces, so the number must never change.
PIECE_BYTES: Final = 16 * 1024 * 1024
# Longer lines are rare, and the limits of validate_line on single parts of a line start here.
FAST_LINE_BYTES: Final = 50_000

_BOM: Final = b"\xef\xbb\xbf"
_STAMP: Final = re.compile(rb"([0-9]{1,15})\t")
_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
_IS_ID: Final = re.compile(ID_PATTERN).fullmatch
_IS_TOPIC: Final = re.compile(TOPIC_PATTERN).fullmatch
_ABSENT: Final = msgspec.UNSET


class _Fields(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The fields of a request as JSON types; null is none of them."""

    message: str
    delay_sec: int | float | msgspec.UnsetType = _ABSENT
    countdown: int | float | msgspec.UnsetType = _ABSENT
    due: int | str | msgspec.UnsetType = _ABSENT
    id: str | msgspec.UnsetType = _ABSENT
    topic: str | msgspec.UnsetType = _ABSENT
    headers: dict[str, str] | msgspec.UnsetType = _ABSENT


_decode: Final = msgspec.json.Decoder(_Fields).decode


@dataclass(frozen=True, slots=True)
class FileText:
    """One landing file as Spark read it (``schemas.FILE_ROW``)."""

    token: str
    first_line: int
    kind: Kind
    name: str
    arrival_ms: int
    content: bytes


@dataclass(frozen=True, slots=True)
class RejectedLine:
    """A line that is not accepted, what is not UTF-8 in it replaced by U+FFFD."""

    line_no: int
    raw: str
    rejection: Rejection


@dataclass(slots=True)
class ParsedPiece:
    """The lines of one piece of a file. ``due_ms`` and ``pairs`` run in parallel, in line order.

    ``fence_token`` names what is stored of this piece; each pair is a ``resp.frame_pair`` of due_ms and member; ``caller_ids`` are
    by index into ``pairs``.
    """

    fence_token: str
    due_ms: list[int] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    caller_ids: dict[int, str] = field(default_factory=dict)
    rejected: list[RejectedLine] = field(default_factory=list)
    lines: int = 0
    blank: int = 0


def parse_file(file: FileText) -> Iterator[ParsedPiece]:
    """Yield the pieces of a file; a file without lines is one empty piece. Never raises on what users sent.

    Lines end with ``\\n``, and one ``\\r`` before it is not theirs; the file's byte order mark and a CSV header are no lines.
    """
    content, header, first_line = file.content, "", file.first_line
    start = len(_BOM) if content.startswith(_BOM) and (first_line == 1 or file.kind == "csv") else 0
    if file.kind == "csv":
        end = _line_end(content, start)
        header = _without_return(content[start:end].removesuffix(b"\n")).decode(errors="replace")
        start = end
    fence_token = file.token
    while True:
        end = _line_end(content, start + PIECE_BYTES)
        lines = content[start:end].split(b"\n")
        if not lines[-1]:
            lines.pop()  # the rest behind the last line end is no line
        yield _parse_lines(ParsedPiece(fence_token, lines=len(lines)), file, header, lines, first_line)
        first_line += len(lines)
        if end == len(content):
            return
        fence_token, start = f"{file.token}.{first_line}", end


def _line_end(content: bytes, start: int) -> int:
    """Return where the line that holds byte ``start`` ends, its line end included."""
    return content.find(b"\n", start) + 1 or len(content)


def _parse_lines(piece: ParsedPiece, file: FileText, header: str, lines: list[bytes], first_line: int) -> ParsedPiece:
    token, is_sock, is_csv = file.token, file.kind == "sock", file.kind == "csv"
    is_beyond = first_line + len(lines) - 1 > LINE_NO_MAX
    arrival_ms: int | None = file.arrival_ms
    add_due, add_pair = piece.due_ms.append, piece.pairs.append
    for line_no, line in enumerate(lines, first_line):
        if is_sock:
            arrival_ms, line = _split_stamp(line)
        found = None if is_csv or is_beyond or arrival_ms is None else fast_request(line, arrival_ms)
        if found is None:
            _add_judged(piece, file, header, line_no, _without_return(line), arrival_ms)
            continue
        due_ms, fields = found
        if fields.id is _ABSENT and fields.topic is _ABSENT and fields.headers is _ABSENT:
            add_due(due_ms)
            add_pair(frame_pair(due_ms, f"{token}{line_no:08x}{BODY_PLAIN}{fields.message}"))
        else:
            _add(piece, token, line_no, _as_request(due_ms, fields))
    return piece


def _split_stamp(line: bytes) -> tuple[int | None, bytes]:
    """Split a socket line into its arrival, in ms UTC, and what was sent."""
    stamp = _STAMP.match(line)
    return (int(stamp[1]), line[stamp.end() :]) if stamp else (None, line)


def fast_request(line: bytes, arrival_ms: int) -> tuple[int, _Fields] | None:
    """Read a JSON line that is usual and right; None says nothing about the line.

    Returns:
        due_ms, in ms UTC and in range, and the fields, which keep all rules.
    """
    if len(line) > FAST_LINE_BYTES:
        return None
    try:
        fields = _decode(line)
    except (msgspec.MsgspecError, ValueError):
        return None
    # With escapes taken out, the quotes left are those around names and texts: more than these means a name twice.
    quotes = line.count(b'"') if b"\\" not in line else _ESCAPE.sub(b"", line).count(b'"')
    delay_sec, due = fields.delay_sec, fields.due
    if delay_sec is _ABSENT:
        delay_sec = fields.countdown
    elif fields.countdown is not _ABSENT:
        return None
    expected = 6
    if type(delay_sec) is int:
        if due is not _ABSENT or not 0 <= delay_sec <= DELAY_SEC_MAX:
            return None
        due_ms = arrival_ms + delay_sec * 1000
    elif delay_sec is not _ABSENT:
        return None  # how a fraction is rounded depends on how it was written
    elif type(due) is int:
        due_ms = due
    elif type(due) is str:
        expected = 8
        read_ms = due_ms_of_text(due)
        if read_ms is None:
            return None
        due_ms = read_ms
    else:
        return None
    if not fields.message or not is_due_in_range(due_ms):
        return None
    if fields.id is not _ABSENT:
        if not _IS_ID(fields.id):
            return None
        expected += 4
    if fields.topic is not _ABSENT:
        if not _IS_TOPIC(fields.topic):
            return None
        expected += 4
    if fields.headers is not _ABSENT:
        expected += 2 + 4 * len(fields.headers)
    return (due_ms, fields) if quotes == expected else None


def _as_request(due_ms: int, fields: _Fields) -> MessageRequest:
    return MessageRequest(
        due_ms,
        fields.message,
        DEFAULT_TOPIC if fields.topic is _ABSENT else fields.topic,
        None if fields.id is _ABSENT else fields.id,
        {} if fields.headers is _ABSENT else fields.headers,
    )


def _add(piece: ParsedPiece, token: str, line_no: int, request: MessageRequest) -> None:
    if request.caller_id is not None:
        piece.caller_ids[len(piece.pairs)] = request.caller_id
    message_id = f"{token}{line_no:08x}"
    member = encode_member(message_id, request.message, request.topic, request.caller_id, request.headers)
    piece.due_ms.append(request.due_ms)
    piece.pairs.append(frame_pair(request.due_ms, member.decode()))


def _add_judged(
    piece: ParsedPiece, file: FileText, header: str, line_no: int, line: bytes, arrival_ms: int | None
) -> None:
    """Let the reference judge a line."""
    judged = validate_line(line, file.kind, arrival_ms or 0, header)
    if judged is None:
        piece.blank += 1
        return
    if not isinstance(judged, Rejection) or judged.reason != Reason.NOT_UTF8:
        if arrival_ms is None:
            judged = Rejection(Reason.BAD_SOCKET_LINE, "The socket line has no arrival time in front of it.")
        elif line_no > LINE_NO_MAX:
            judged = Rejection(Reason.LINE_NO_TOO_HIGH, f"The line's number is above {LINE_NO_MAX}; split the file.")
    if isinstance(judged, Rejection):
        piece.rejected.append(RejectedLine(line_no, line.decode(errors="replace"), judged))
    else:
        _add(piece, file.token, line_no, judged)


def _without_return(line: bytes) -> bytes:
    return line[:-1] if line.endswith(b"\r") else line
