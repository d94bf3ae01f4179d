"""The rules of a JSON line for those that are usual, one at a time, without NumPy and Arrow.

msgspec decodes JSON straight into a typed struct and refuses by itself unknown fields, wrong types, trailing text, NaN and bad
UTF-8. What it would let pass, a name that is there twice, shows in the number of quotes. A line that is not taken here goes to the
reference, ``core/validation.py``.
"""

import re
from typing import Final

import msgspec

from pipeline.core.due import DELAY_SEC_MAX, DUE_MS_MAX, EPOCH_MS_MIN, due_ms_of_text
from pipeline.core.messages import DEFAULT_TOPIC, Message
from pipeline.core.validation import ID_PATTERN, TOPIC_PATTERN

USUAL_LINE_BYTES_MAX: Final = 50_000  # the limits of validate_line on single parts of a line start above this

_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
_IS_ID: Final = re.compile(ID_PATTERN).fullmatch
_IS_TOPIC: Final = re.compile(TOPIC_PATTERN).fullmatch
_ABSENT: Final = msgspec.UNSET


class _Fields(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The fields of a request as JSON types; null is none of them. An empty id or topic is told from none by its quotes."""

    message: str
    delay_sec: int | float | msgspec.UnsetType = _ABSENT
    countdown: int | float | msgspec.UnsetType = _ABSENT
    due: int | str | msgspec.UnsetType = _ABSENT
    id: str = ""
    topic: str = ""
    headers: dict[str, str] | msgspec.UnsetType = _ABSENT


_decode: Final = msgspec.json.Decoder(_Fields).decode


def fast_request(line: bytes, arrival_ms: int) -> Message | None:
    """Read a JSON line that is usual and right; None says nothing about the line."""
    if len(line) > USUAL_LINE_BYTES_MAX:
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
        if due < EPOCH_MS_MIN:
            return None
        due_ms = due
    elif type(due) is str:
        expected = 8
        read_ms = due_ms_of_text(due)
        if read_ms is None:
            return None
        due_ms = read_ms
    else:
        return None
    if not fields.message or not 0 <= due_ms <= DUE_MS_MAX:
        return None
    if fields.id:
        if not _IS_ID(fields.id):
            return None
        expected += 4
    if fields.topic:
        if not _IS_TOPIC(fields.topic):
            return None
        expected += 4
    headers = fields.headers
    if headers is _ABSENT:
        headers = {}
    else:
        expected += 2 + 4 * len(headers)
    if quotes != expected:
        return None
    return Message(due_ms, fields.message, fields.topic or DEFAULT_TOPIC, fields.id, headers)
