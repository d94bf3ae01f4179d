"""What a message holds, as a page shows it: nothing of it can hide, move or reverse what is around it."""

import base64
import binascii
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pipeline.core.records import BASE64, ENCODING
from pipeline.core.text import visible

SHOWN_MAX: Final = 20_000  # characters of a body
BYTES_MAX: Final = 2_048  # of one that is bytes
ROW: Final = 16  # bytes a line
PREVIEW_MAX: Final = 120


@dataclass(frozen=True, slots=True)
class Content:
    """A body as text of some lines; ``kind`` says what it is, ``note`` how much of it is left out."""

    kind: str
    text: str
    note: str


def content_of(body: str, headers: Mapping[str, str]) -> Content:
    """Return what a page shows of a body: bytes as hexadecimal numbers, JSON indented, other text as it is."""
    if headers.get(ENCODING) == BASE64:
        try:
            return _bytes(base64.b64decode(body, validate=True))
        except (binascii.Error, ValueError):
            pass  # it says so and is none: then it is text
    cut = body[:SHOWN_MAX]
    note = f"The first {SHOWN_MAX:,} of {len(body):,} characters." if len(body) > SHOWN_MAX else ""
    if not note and body[:1] in ("{", "["):
        try:
            return Content("JSON", _lines(msgspec.json.format(body, indent=2)), "")
        except (msgspec.DecodeError, RecursionError):
            pass
    return Content("text", _lines(cut), note)


def _bytes(content: bytes) -> Content:
    rows = []
    for first in range(0, min(len(content), BYTES_MAX), ROW):
        row = content[first : first + ROW]
        readable = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        rows.append(f"{first:06x}  {row.hex(' '):<{3 * ROW - 1}}  {readable}")
    note = f"The first {BYTES_MAX:,} of {len(content):,} bytes." if len(content) > BYTES_MAX else ""
    return Content(f"{len(content):,} bytes", "\n".join(rows), note)


def _lines(text: str) -> str:
    return "\n".join(visible(line) for line in text.split("\n"))


def preview_of(body: str, headers: Mapping[str, str]) -> str:
    """Return the beginning of a body, in one line."""
    if headers.get(ENCODING) == BASE64:
        return "(bytes)"
    return visible(body[:PREVIEW_MAX]) + (" …" if len(body) > PREVIEW_MAX else "")


def curl_line(address: str, request: Mapping[str, Any], with_token: bool) -> str:
    """Return the command that sends a request to the API."""
    token = " -H 'Authorization: Bearer TOKEN'" if with_token else ""
    body = shlex.quote(msgspec.json.encode(request).decode())
    return f"curl {shlex.quote(address + '/v1/messages')}{token} -H 'Content-Type: application/json' -d {body}"
