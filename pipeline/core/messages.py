"""A message in each of its forms, and why a request was refused.

A scheduled message is one member of a sorted set: its fixed-width id, then one letter that names the form of the rest.

    <message_id>m<body>         topic "default", no idempotency key, no headers: the usual case costs one byte
    <message_id>j<JSON object>  {"message":…,"topic":…,"id":…,"headers":{…}}, what is absent left out
    <message_id>r<JSON object>  the same of a message that was rescheduled, with "due_ms" as it was, as text, and, if it is retried
                                for one group of consumers, "group" and "attempt"

In a stream it has a field for each of these. What users read and write is called ``message`` in every form, ``body`` in Python.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Self, TypeVar, dataclass_transform

from pipeline.core.due import time_of_ms
from pipeline.core.ids import LINE_NO_LENGTH, MESSAGE_ID_LENGTH, TOKEN_LENGTH, message_id_of_entry

T = TypeVar("T")
DEFAULT_TOPIC: Final = "default"
REQUEST_FIELDS: Final = ("message", "delay_sec", "countdown", "due", "id", "topic", "headers", "cancel", "replace")
FORM_PLAIN: Final = "m"
FORM_JSON: Final = "j"
FORM_RESCHEDULED: Final = "r"

_JSON_FIELDS: Final = ("message", "topic", "id", "headers")
_RESCHEDULED_FIELDS: Final = (*_JSON_FIELDS, "due_ms", "group", "attempt")
_is_message_id: Final = re.compile(rf"[0-9A-Za-z_-]{{{TOKEN_LENGTH}}}[0-9a-f]{{{LINE_NO_LENGTH}}}").fullmatch
_is_number: Final = re.compile(r"-?[0-9]{1,16}").fullmatch
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
    DUE_IN_SECONDS = "due_in_seconds"
    NOT_A_TIME = "not_a_time"
    BAD_ID = "bad_id"
    BAD_TOPIC = "bad_topic"
    BAD_HEADERS = "bad_headers"
    CANCEL_NOT_ALONE = "cancel_not_alone"
    REPLACE_WITHOUT_ID = "replace_without_id"


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a line was refused: the class of fault, and one sentence for the person who sent it."""

    reason: Reason
    detail: str


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value_type(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Make a dataclass that type checkers take for frozen. At run time it is not, as that costs 1 us for each one that is made."""
    return dataclass(slots=True, kw_only=kw_only)


@value_type()
class Message:
    """A message: requested, scheduled, delivered, pending (``store.entries.Entry``) or dead (``DeadLetter``).

    Args:
        due_ms: when it is due; of one that was rescheduled, when it was due first. Epoch ms UTC.

        body: what is delivered, the ``message`` of the request.

        id: the idempotency key, else the message id; "" in a request without a key.

        message_id: of this time that it is scheduled; "" in a request, which has none yet. Unique among messages that are
            scheduled for the first time; that of others comes from their stream entry (``ids.message_id_of_entry``).

        attempt: which one this is, from 1.

        group: of consumers, the only one that gets it; "" means whoever reads the topic.
    """

    due_ms: int
    body: str
    topic: str = DEFAULT_TOPIC
    id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    message_id: str = ""
    attempt: int = 1
    group: str = ""

    @property
    def due(self) -> datetime:
        """``due_ms`` as a time in UTC."""
        return time_of_ms(self.due_ms)

    def to_member(self, message_id: str = "", is_rescheduled: bool = False) -> bytes:
        """Write it as the member that is scheduled; equal messages give equal bytes.

        ``message_id`` is that of a request, which has none yet; ``is_rescheduled`` if it is scheduled at another time than
        ``due_ms``, or for its group alone.

        Raises:
            ValueError: the message id has another form, or a text holds a lone surrogate, which UTF-8 can't carry.
        """
        message_id = message_id or self.message_id
        if _is_message_id(message_id) is None:
            raise ValueError(f"{message_id!r} is not a message id: it takes a token and eight lower-case hex digits.")
        has_key = is_rescheduled or (self.id != "" and self.id != message_id)
        if not has_key and not self.headers and self.topic == DEFAULT_TOPIC:
            return f"{message_id}{FORM_PLAIN}{self.body}".encode()
        fields = [f'"message":{_quoted(self.body)}']
        if self.topic != DEFAULT_TOPIC:
            fields.append(f'"topic":{_quoted(self.topic)}')
        if has_key:
            fields.append(f'"id":{_quoted(self.id)}')
        if self.headers:
            # By UTF-16 code units: part of the format since its first version.
            names = sorted(self.headers, key=lambda name: name.encode("utf-16-be"))
            pairs = ",".join(f"{_quoted(name)}:{_quoted(self.headers[name])}" for name in names)
            fields.append(f'"headers":{{{pairs}}}')
        if is_rescheduled:
            fields.append(f'"due_ms":"{self.due_ms}"')  # as text: Lua's JSON would round the number
            if self.group:
                fields.append(f'"group":{_quoted(self.group)},"attempt":"{self.attempt}"')
        return f"{message_id}{FORM_RESCHEDULED if is_rescheduled else FORM_JSON}{{{','.join(fields)}}}".encode()

    @classmethod
    def from_member(cls, member: bytes, due_ms: int, attempt: int = 1) -> Self:
        """Read a scheduled message.

        ``due_ms`` is its score, and ``attempt`` which one this is, unless the member itself says it.

        Raises:
            ValueError: the member is not one that ``to_member`` writes; the sentence says what is wrong with it.
        """
        try:
            text = member.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"The member is not UTF-8 at byte {error.start}, so another program wrote it.") from error
        message_id, form = text[:MESSAGE_ID_LENGTH], text[MESSAGE_ID_LENGTH : MESSAGE_ID_LENGTH + 1]
        if _is_message_id(message_id) is None:
            raise ValueError(f"The member starts with {message_id!r}, which is not a message id.")
        rest = text[MESSAGE_ID_LENGTH + 1 :]
        if form == FORM_PLAIN:
            return cls(due_ms, rest, DEFAULT_TOPIC, message_id, {}, message_id, attempt)
        if form not in (FORM_JSON, FORM_RESCHEDULED):
            raise ValueError(f"The rest of member {message_id} has the unknown form {form!r}, not m, j or r.")
        fields = _read_json(message_id, rest, _JSON_FIELDS if form == FORM_JSON else _RESCHEDULED_FIELDS)
        if form == FORM_RESCHEDULED:
            due_ms = _number_in(message_id, fields, "due_ms", "")
            attempt = _number_in(message_id, fields, "attempt", attempt)
        topic, group = fields.get("topic", DEFAULT_TOPIC), fields.get("group", "")
        key, headers = fields.get("id", message_id), fields.get("headers", {})
        return cls(due_ms, fields["message"], topic, key, headers, message_id, attempt, group)

    @classmethod
    def read_member(cls, member: bytes, due_ms: int, attempt: int = 1) -> Self:
        """Read a scheduled message; one that is not in our format, say from a ZADD by hand, is taken as it stands."""
        try:
            return cls.from_member(member, due_ms, attempt)
        except ValueError:
            text = member.decode("utf-8", "replace")
            message_id = text[:MESSAGE_ID_LENGTH]
            return cls(due_ms, text, id=message_id, message_id=message_id, attempt=attempt)

    def to_record(self) -> dict[str, Any]:
        """Return what users see of it, under the names of the request."""
        record: dict[str, Any] = {
            "id": self.id,
            "topic": self.topic,
            "message": self.body,
            "due_ms": self.due_ms,
            "attempt": self.attempt,
        }
        if self.headers:
            record["headers"] = dict(self.headers)
        return record

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of its entry in a stream."""
        fields = self.to_record()
        if self.headers:
            fields["headers"] = json.dumps(fields["headers"], ensure_ascii=False)
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes], entry_id: str, /, deliveries: int = 1, **known: Any) -> Self:
        """Read an entry of a stream. Whatever another program wrote there, it is a message: what is not UTF-8 becomes readable.

        ``deliveries`` is how often the entry was delivered: each one after the first is one attempt more. What is ``known`` counts
        instead of what the fields say.
        """
        texts = {name: value.decode("utf-8", "replace") for name, value in fields.items()}
        return cls(
            number_of(texts.get(b"due_ms", ""), int(entry_id.partition("-")[0])),
            texts.get(b"message", ""),
            known.pop("topic", None) or texts.get(b"topic", DEFAULT_TOPIC),
            texts.get(b"id", entry_id),
            read_headers(texts[b"headers"]) if b"headers" in texts else {},
            message_id_of_entry(entry_id),
            max(1, number_of(texts.get(b"attempt", ""), 1)) + max(deliveries, 1) - 1,
            known.pop("group", None) or texts.get(b"group", ""),
            **known,
        )


@dataclass(frozen=True, slots=True)
class Replacement:
    """A request that takes the place of the message that waits with the same idempotency key, or is the first with it."""

    message: Message

    @property
    def key(self) -> str:
        return self.message.id


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A request that no message with this idempotency key be delivered, neither one that waits nor one that comes later."""

    key: str


Change = Replacement | Cancellation


def has_lone_surrogate(text: str) -> bool:
    """Say whether a text holds half of a surrogate pair, as JSON's escapes can write and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _read_json(message_id: str, text: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the JSON object of a member, its fields checked but for numbers."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The rest of member {message_id} is not JSON.") from error
    if not isinstance(fields, dict) or not fields.keys() <= {*names}:
        raise ValueError(f"The rest of member {message_id} is not an object of {', '.join(names)}.")
    headers = fields.get("headers", {})
    texts = [fields.get("message"), *(fields[name] for name in names if name in fields and name != "headers")]
    texts += [*headers, *headers.values()] if isinstance(headers, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"The rest of member {message_id} has a field of the wrong type.")
    if has_lone_surrogate("".join(texts)):
        raise ValueError(f"The rest of member {message_id} has a lone surrogate, which is no character.")
    return fields


def _number_in(message_id: str, fields: Mapping[str, str], name: str, otherwise: int | str) -> int:
    text = str(fields.get(name, otherwise))
    if not _is_number(text):
        raise ValueError(f"The rest of member {message_id} does not say its {name}.")
    return int(text)


def number_of(text: str, otherwise: int) -> int:
    """Return the number that a text is, or another one if it is none, or more than a time can be."""
    return int(text) if _is_number(text) else otherwise


def read_headers(text: str) -> dict[str, str]:
    """Return headers that are written as JSON; none if another program wrote something else there."""
    try:
        headers = json.loads(text or "{}")
        pairs = headers.items() if isinstance(headers, dict) else ()
        return {_without_surrogates(name): _without_surrogates(str(value)) for name, value in pairs}
    except (ValueError, RecursionError):
        return {}


def _without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _quoted(text: str) -> str:
    return f'"{text.translate(_JSON_ESCAPES)}"'
