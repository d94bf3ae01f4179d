"""The values that travel: a request as the user sent it, a message as it is stored, and why a request was refused.

A stored message is one member of a sorted set: its fixed-width id, then one letter that names the form of the body.

    <message_id>m<message>      topic "default", no id of the caller's, no headers: the usual case costs one byte
    <message_id>j<JSON object>  {"message":…,"topic":…,"id":…,"headers":{…}}, what is absent left out
    <message_id>r<JSON object>  the same of a message that was rescheduled, with "due_ms" as it was, as text, and, if it comes again
                                for one group of consumers, "group" and "attempt"
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pipeline.core.ids import LINE_NO_LENGTH, MESSAGE_ID_LENGTH, TOKEN_LENGTH

DEFAULT_TOPIC: Final = "default"
BODY_PLAIN: Final = "m"
BODY_JSON: Final = "j"
BODY_RESCHEDULED: Final = "r"

_MESSAGE_ID: Final = re.compile(rf"[0-9A-Za-z_-]{{{TOKEN_LENGTH}}}[0-9a-f]{{{LINE_NO_LENGTH}}}")
_DUE_TEXT: Final = re.compile(r"-?[0-9]{1,16}")
# One way to escape each character, so that equal messages give equal bytes.
_JSON_ESCAPES: Final = str.maketrans(
    {code: f"\\u{code:04X}" for code in range(32)}
    | {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", ord('"'): '\\"', ord("\\"): "\\\\"}
)


class Reason(StrEnum):
    """Why a line was refused; the value is what the rejects record."""

    NOT_UTF8 = "not_utf8"
    LINE_TOO_LONG = "line_too_long"
    LINE_NO_TOO_HIGH = "line_no_too_high"
    BAD_SOCKET_LINE = "bad_socket_line"
    BAD_CSV_HEADER = "bad_csv_header"
    BAD_CSV_ROW = "bad_csv_row"
    RAGGED_ROW = "ragged_row"
    NOT_JSON = "not_json"
    TOO_DEEP = "too_deep"
    TRAILING_TEXT = "trailing_text"
    NOT_AN_OBJECT = "not_an_object"
    DUPLICATE_KEY = "duplicate_key"
    UNKNOWN_FIELD = "unknown_field"
    WRONG_TYPE = "wrong_type"
    MISSING_MESSAGE = "missing_message"
    EMPTY_MESSAGE = "empty_message"
    MESSAGE_TOO_LONG = "message_too_long"
    MISSING_DUE = "missing_due"
    BOTH_DUE = "both_due"
    DELAY_OUT_OF_RANGE = "delay_out_of_range"
    DUE_OUT_OF_RANGE = "due_out_of_range"
    DUE_WITHOUT_ZONE = "due_without_zone"
    NOT_A_TIME = "not_a_time"
    BAD_ID = "bad_id"
    BAD_TOPIC = "bad_topic"
    BAD_HEADERS = "bad_headers"


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a line was refused: the class of fault, and one sentence for the person who sent it."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A request that keeps every rule, its due time resolved (ms UTC)."""

    due_ms: int
    message: str
    topic: str = DEFAULT_TOPIC
    caller_id: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Message:
    """A message read back from its member. ``id`` is the caller's own, else the one we gave.

    ``due_ms`` (epoch ms UTC) is when it was due first, if it was rescheduled; otherwise its score says so, and this is None.
    """

    message_id: str
    id: str
    topic: str
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)
    due_ms: int | None = None


def encode_member(
    message_id: str,
    message: str,
    topic: str = DEFAULT_TOPIC,
    caller_id: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """Write a message as the member that is stored; equal messages give equal bytes.

    Raises:
        ValueError: the id has another form, or a text holds a lone surrogate, which UTF-8 can't carry.
    """
    if _MESSAGE_ID.fullmatch(message_id) is None:
        raise ValueError(f"{message_id!r} is not a message id: it takes a token and eight lower-case hex digits.")
    if topic == DEFAULT_TOPIC and caller_id is None and not headers:
        return (message_id + BODY_PLAIN + message).encode()
    fields = [f'"message":{_quoted(message)}']
    if topic != DEFAULT_TOPIC:
        fields.append(f'"topic":{_quoted(topic)}')
    if caller_id is not None:
        fields.append(f'"id":{_quoted(caller_id)}')
    if headers:
        # By UTF-16 code units: part of the format since its first version.
        names = sorted(headers, key=lambda name: name.encode("utf-16-be"))
        fields.append(f'"headers":{{{",".join(f"{_quoted(name)}:{_quoted(headers[name])}" for name in names)}}}')
    return f"{message_id}{BODY_JSON}{{{','.join(fields)}}}".encode()


def encode_again(
    message_id: str,
    message: str,
    topic: str,
    id: str,
    headers: Mapping[str, str],
    due_ms: int,
    group: str = "",
    attempt: int = 1,
) -> bytes:
    """Write the member of a message that is scheduled once more.

    Args:
        message_id: of this time; no two members share it.

        due_ms: when the message was due first, epoch ms UTC. It is written as text, as Lua's JSON would round it.

        group: the group of consumers that gets it, and which ``attempt`` of the group this is; "": whoever gets the topic.
    """
    body: dict[str, object] = {"message": message, "topic": topic, "id": id, "due_ms": str(due_ms)}
    if headers:
        body["headers"] = dict(headers)
    if group:
        body |= {"group": group, "attempt": str(attempt)}
    return f"{message_id}{BODY_RESCHEDULED}{json.dumps(body, ensure_ascii=False)}".encode()


def decode_member(member: bytes) -> Message:
    """Read a stored member.

    Raises:
        ValueError: the member is not one that ``encode_member`` writes; the sentence says what is wrong with it.
    """
    try:
        text = member.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"The member is not UTF-8 at byte {error.start}, so another program wrote it.") from error
    message_id, form, body = text[:MESSAGE_ID_LENGTH], text[MESSAGE_ID_LENGTH : MESSAGE_ID_LENGTH + 1], text[23:]
    if _MESSAGE_ID.fullmatch(message_id) is None:
        raise ValueError(f"The member starts with {message_id!r}, which is not a message id.")
    if form == BODY_PLAIN:
        return Message(message_id, message_id, DEFAULT_TOPIC, body)
    if form == BODY_JSON:
        return _decode_json_body(message_id, body, ())
    if form == BODY_RESCHEDULED:
        return _decode_json_body(message_id, body, ("due_ms", "group", "attempt"))
    raise ValueError(f"The body of member {message_id} has the unknown form {form!r}, not m, j or r.")


def _decode_json_body(message_id: str, body: str, more: Sequence[str]) -> Message:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The body of member {message_id} is not JSON.") from error
    names = ("message", "topic", "id", "headers", *more)
    if not isinstance(fields, dict) or not fields.keys() <= {*names}:
        raise ValueError(f"The body of member {message_id} is not an object of {', '.join(names)}.")
    texts = [fields.get("message"), fields.get("topic", DEFAULT_TOPIC), fields.get("id", message_id)]
    texts += [fields[name] for name in more if name in fields]
    headers = fields.get("headers", {})
    if not isinstance(headers, dict) or not all(isinstance(text, str) for text in [*texts, *headers.values()]):
        raise ValueError(f"The body of member {message_id} has a field of the wrong type.")
    if has_lone_surrogate("".join([*texts, *headers, *headers.values()])):
        raise ValueError(f"The body of member {message_id} has a lone surrogate, which is no character.")
    due_text = fields.get("due_ms")
    if "due_ms" in more and not _DUE_TEXT.fullmatch(due_text or ""):
        raise ValueError(f"The body of member {message_id} does not say when it was due.")
    due_ms = None if due_text is None else int(due_text)
    return Message(message_id, id=texts[2], topic=texts[1], message=texts[0], headers=headers, due_ms=due_ms)


def has_lone_surrogate(text: str) -> bool:
    """Say whether a text holds half of a surrogate pair, as JSON's escapes can write and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _quoted(text: str) -> str:
    return f'"{text.translate(_JSON_ESCAPES)}"'
