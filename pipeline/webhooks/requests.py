"""What a message is as a request: pure."""

import json
import re
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from pipeline import __version__
from pipeline.core.due import time_of_ms
from pipeline.core.messages import Message
from pipeline.webhooks.signing import signature

EVENT_TYPE = "message.due"  # of every envelope
HEADER_PREFIX = "duetime-header-"  # so no header of a message is one that means something to a server or a proxy
JSON_TYPE, TEXT_TYPE = "application/json", "text/plain; charset=utf-8"
TOKEN_CHARACTERS = "!#$&'*+.^_`|~"  # what a header's name may have beside letters, digits and -; % begins an escape
VALUE_CHARACTERS = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_is_printable = re.compile(r"[ -~]*[!-~][ -~]*").fullmatch


def body_of(message: Message, format: str) -> bytes:
    """Return what is posted of a message: its text in UTF-8, or an object as Standard Webhooks recommends it."""
    if format == "raw":
        return message.body.encode()
    due = time_of_ms(message.due_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    about = {"id": message.id, "topic": message.topic, "due": due}
    data = about | {"message": message.body, "headers": dict(message.headers)}
    return json.dumps({"type": EVENT_TYPE, "timestamp": due, "data": data}, ensure_ascii=False).encode()


def headers_of(
    message: Message, body: bytes, timestamp_sec: int, secrets: Sequence[bytes], format: str = "raw"
) -> dict[str, str]:
    """Return the headers of the request that carries a message.

    Args:
        body: see ``body_of``.

        timestamp_sec: the time now, in seconds since 1970.

        secrets: that sign it; without any it is not signed.
    """
    own_type = next((value for name, value in message.headers.items() if name.lower() == "content-type"), "")
    if format == "json":
        own_type = JSON_TYPE
    # The signed text is divided by dots. Who chooses an id with dots could else make a signature fit another text.
    webhook_id = quote(message.id, safe=":").replace(".", "%2E")
    headers = {
        "content-type": own_type if _is_printable(own_type) else _type_of(body),
        "user-agent": f"duetime/{__version__}",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp_sec),
        "duetime-topic": message.topic,
        "duetime-due-ms": str(message.due_ms),
        "duetime-attempt": str(message.attempt),
    }
    if secrets:
        headers["webhook-signature"] = signature(secrets, webhook_id, timestamp_sec, body)
    for name, value in message.headers.items():
        if name.lower() != "content-type":
            headers[HEADER_PREFIX + quote(name, safe=TOKEN_CHARACTERS)] = quote(value, safe=VALUE_CHARACTERS)
    return headers


def _type_of(body: bytes) -> str:
    if not body.lstrip(b" \t\r\n").startswith((b"{", b"[")):
        return TEXT_TYPE  # without reading all of it
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return TEXT_TYPE
    return JSON_TYPE
