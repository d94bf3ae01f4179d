"""The rules of a request, in plain Python: the reference that says whether a line is taken, and if not, why.

``ingest/parsing.py`` takes in the millions by a faster form, which leaves everything unusual to this one. One table
(``tests/cases``) and a property test keep the two the same.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from pipeline.core.csv_rows import parse_csv_header, split_csv_row
from pipeline.core.due import (
    DELAY_SEC_MAX,
    EPOCH_MS_MIN,
    EPOCH_MS_PATTERN,
    INTEGER_PATTERN,
    NUMBER_PATTERN,
    delay_ms_of_number,
    due_ms_of_text,
    has_no_zone,
    is_due_in_range,
)
from pipeline.core.messages import DEFAULT_TOPIC, REQUEST_FIELDS, Message, Reason, Rejection, has_lone_surrogate

Kind = Literal["json", "csv", "sock"]

REQUEST_BYTES_MAX: Final = 4 * 1024 * 1024
MESSAGE_BYTES_MAX: Final = 256 * 1024
# The limits that Jackson, the parser of many producers and of Spark, sets by default (StreamReadConstraints).
NUMBER_DIGITS_MAX: Final = 1_000
NAME_UTF16_UNITS_MAX: Final = 50_000

ID_PATTERN: Final = r"[A-Za-z0-9._:-]{1,128}"
TOPIC_PATTERN: Final = r"[A-Za-z0-9._-]{1,64}"
JSON_TEXT_PATTERN: Final = r'"(?:[^"\\]++|\\.)*+"'
# A request has two objects at most; a line with far more opening brackets could overflow a parser's stack.
BRACKETS_MAX: Final = 64

_ID: Final = re.compile(ID_PATTERN)
_TOPIC: Final = re.compile(TOPIC_PATTERN)
_INTEGER: Final = re.compile(INTEGER_PATTERN)
_NUMBER: Final = re.compile(NUMBER_PATTERN)
_JSON_TEXT: Final = re.compile(JSON_TEXT_PATTERN)
_EPOCH_MS: Final = re.compile(EPOCH_MS_PATTERN)
_JSON_WHITESPACE: Final = " \t\n\r"


@dataclass(frozen=True, slots=True)
class _Number:
    """A JSON number as it was written: whether 1.0 is an integer is a question about its text."""

    literal: str


class _RefusedError(ValueError):
    """Carries a rejection out of nested parsing; never leaves this module."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.rejection = Rejection(reason, detail)


def validate_line(
    raw: bytes | str, kind: Kind, arrival_ms: int, header: str | None = None
) -> Message | Rejection | None:
    """Judge one line, without its line end (``\\n`` or ``\\r\\n``) and without the byte order mark of its file.

    A ``sock`` line comes without the arrival time in front of it; ``header`` is the first line of a ``csv`` file. Never raises on
    what users sent.

    Returns:
        The request, or why it is refused, or None for a blank line.
    """
    try:
        return _validate_line(raw, kind, arrival_ms, header or "")
    except _RefusedError as refused:
        return refused.rejection


def _validate_line(raw: bytes | str, kind: Kind, arrival_ms: int, header: str) -> Message | None:
    encoded = raw.encode(errors="surrogatepass") if isinstance(raw, str) else raw
    if len(encoded) > REQUEST_BYTES_MAX:
        _refuse(Reason.LINE_TOO_LONG, f"The line has {len(encoded)} bytes; at most {REQUEST_BYTES_MAX} are allowed.")
    try:
        line = encoded.decode()
    except UnicodeDecodeError as error:
        _refuse(Reason.NOT_UTF8, f"The line is not UTF-8: byte {error.start + 1} can't be read.")
    if not line.strip(" \t\r"):
        return None
    fields = _fields_of_csv_row(line, header) if kind == "csv" else _fields_of_json_line(line)
    return _validate_fields(fields, arrival_ms)


def _fields_of_json_line(line: str) -> dict[str, object]:
    document = _parse_json(line)
    if not isinstance(document, dict):
        _refuse(Reason.NOT_AN_OBJECT, "The line is JSON but not an object with fields: write one object a line.")
    return document


def _fields_of_csv_row(line: str, header: str) -> dict[str, object]:
    names = parse_csv_header(header)
    if isinstance(names, Rejection):
        _refuse(names.reason, names.detail)
    cells = split_csv_row(line)
    if cells is None:
        _refuse(Reason.BAD_CSV_ROW, "The row's quotes are not closed on this line or not doubled inside a cell.")
    if len(cells) != len(names):
        _refuse(Reason.RAGGED_ROW, f"The row has {len(cells)} cells and the header has {len(names)}.")
    return {name: _value_of_cell(name, cell) for name, cell in zip(names, cells, strict=True) if cell}


def _value_of_cell(name: str, cell: str) -> object:
    """Give a cell the type that its text has; what has none stays text, and the rules of the field refuse it."""
    if (name in ("delay_sec", "countdown") and _NUMBER.fullmatch(cell)) or (
        name == "due" and _EPOCH_MS.fullmatch(cell)
    ):
        return _number_of(cell)
    if name != "headers":
        return cell
    try:
        return _parse_json(cell)
    except _RefusedError:
        return cell


def _validate_fields(fields: dict[str, object], arrival_ms: int) -> Message:
    for name in fields:
        if name not in REQUEST_FIELDS:
            _refuse(Reason.UNKNOWN_FIELD, f"The field {name[:80]!r} is not one of {', '.join(sorted(REQUEST_FIELDS))}.")
    body = _validate_body(fields)
    due_ms = _validate_due(fields, arrival_ms)
    idempotency_key = _validate_name(fields, "id", _ID, Reason.BAD_ID, "1 to 128 of A-Z a-z 0-9 . _ : -")
    topic = _validate_name(fields, "topic", _TOPIC, Reason.BAD_TOPIC, "1 to 64 of A-Z a-z 0-9 . _ -")
    return Message(due_ms, body, topic or DEFAULT_TOPIC, idempotency_key or "", _validate_headers(fields))


def _validate_body(fields: dict[str, object]) -> str:
    if "message" not in fields:
        _refuse(Reason.MISSING_MESSAGE, "The field message is missing.")
    body = _text_of(fields, "message")
    if not body:
        _refuse(Reason.EMPTY_MESSAGE, "The field message is empty.")
    size = len(body.encode())
    if size > MESSAGE_BYTES_MAX:
        _refuse(Reason.MESSAGE_TOO_LONG, f"The message has {size} bytes; at most {MESSAGE_BYTES_MAX} are allowed.")
    return body


def _validate_due(fields: dict[str, object], arrival_ms: int) -> int:
    present = [name for name in ("delay_sec", "countdown", "due") if name in fields]
    if not present:
        _refuse(Reason.MISSING_DUE, "One of the fields delay_sec, countdown and due is needed, and none is there.")
    if len(present) > 1:
        _refuse(Reason.BOTH_DUE, f"The fields {' and '.join(present)} are both there; give exactly one.")
    name = present[0]
    due_ms = _due_ms_of(fields[name]) if name == "due" else arrival_ms + _delay_ms_of(name, fields[name])
    if not is_due_in_range(due_ms):
        _refuse(Reason.DUE_OUT_OF_RANGE, "The due time lies outside the years 1970 to 9999.")
    return due_ms


def _delay_ms_of(name: str, value: object) -> int:
    if not isinstance(value, _Number):
        _refuse(Reason.WRONG_TYPE, f"The field {name} takes a number of seconds, not {_kind_of(value)}.")
    delay_ms = delay_ms_of_number(value.literal)
    if delay_ms is None:
        _refuse(
            Reason.DELAY_OUT_OF_RANGE, f"The field {name} takes 0 to {DELAY_SEC_MAX} seconds, not {value.literal[:40]}."
        )
    return delay_ms


def _due_ms_of(value: object) -> int:
    if isinstance(value, _Number) and _INTEGER.fullmatch(value.literal):
        number = int(value.literal)
        if 0 <= number < EPOCH_MS_MIN:
            _refuse(
                Reason.DUE_IN_SECONDS, f"The due time {number} looks like seconds; epoch milliseconds have 13 digits."
            )
        return number
    if not isinstance(value, str):
        wanted = "an ISO 8601 string or a whole number of milliseconds"
        _refuse(Reason.WRONG_TYPE, f"The field due takes {wanted}, not {_kind_of(value)}.")
    due_ms = due_ms_of_text(value)
    if due_ms is None and has_no_zone(value):
        _refuse(Reason.DUE_WITHOUT_ZONE, f"The time {value} has no zone; add Z or an offset such as +02:00.")
    if due_ms is None:
        _refuse(
            Reason.NOT_A_TIME, f"{value[:80]!r} is not a time such as 2026-01-31T12:00:00Z, or no such time exists."
        )
    return due_ms


def _validate_name(
    fields: dict[str, object], name: str, pattern: re.Pattern[str], reason: Reason, limits: str
) -> str | None:
    if name not in fields:
        return None
    text = _text_of(fields, name)
    if pattern.fullmatch(text) is None:
        _refuse(reason, f"The field {name} takes {limits}, not {text[:140]!r}.")
    return text


def _validate_headers(fields: dict[str, object]) -> dict[str, str]:
    headers = fields.get("headers", {})
    if not isinstance(headers, dict):
        _refuse(Reason.BAD_HEADERS, f"The field headers takes an object of strings, not {_kind_of(headers)}.")
    for name, value in headers.items():
        if not isinstance(value, str):
            _refuse(Reason.BAD_HEADERS, f"The header {name[:80]!r} takes a string, not {_kind_of(value)}.")
    return headers


def _text_of(fields: dict[str, object], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        hint = "; write JSON as a string, for example with to_json" if isinstance(value, dict | list) else ""
        _refuse(Reason.WRONG_TYPE, f"The field {name} takes a string, not {_kind_of(value)}{hint}.")
    return value


def _kind_of(value: object) -> str:
    kinds = {bool: "true or false", str: "a string", dict: "an object", list: "an array", _Number: "this number"}
    return kinds.get(type(value), "null")


def _parse_json(text: str) -> object:
    """Parse exactly one JSON value, numbers kept as written; stricter than ``json.loads`` in what RFC 8259 leaves open."""
    if _brackets_in(text) > BRACKETS_MAX and _brackets_in(_JSON_TEXT.sub("", text)) > BRACKETS_MAX:
        _refuse(
            Reason.TOO_DEEP, f"The line has more than {BRACKETS_MAX} objects and arrays; a request has two at most."
        )
    decoder = json.JSONDecoder(
        object_pairs_hook=_object_of, parse_int=_number_of, parse_float=_number_of, parse_constant=_constant_of
    )
    start = len(text) - len(text.lstrip(_JSON_WHITESPACE))
    try:
        value, end = decoder.raw_decode(text, start)
    except _RefusedError:
        raise
    except (ValueError, RecursionError) as error:
        at = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        _refuse(Reason.NOT_JSON, f"The line is not JSON{at}: {getattr(error, 'msg', 'nested too deeply')}.")
    if text[end:].strip(_JSON_WHITESPACE):
        _refuse(Reason.TRAILING_TEXT, f"There is more text after the JSON value, from character {end + 1} on.")
    if isinstance(value, str):
        _check_text(value)
    return value


def _brackets_in(text: str) -> int:
    return text.count("{") + text.count("[")


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    for name, value in pairs:
        _check_text(name)
        if isinstance(value, str):
            _check_text(value)
        if len(name.encode("utf-16-le")) > 2 * NAME_UTF16_UNITS_MAX:
            _refuse(Reason.NOT_JSON, f"The name of a field is longer than {NAME_UTF16_UNITS_MAX} characters.")
    if len(fields) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        _refuse(Reason.DUPLICATE_KEY, f"The field {twice[:80]!r} is there twice.")
    return fields


def _check_text(text: str) -> None:
    if has_lone_surrogate(text):
        _refuse(Reason.NOT_JSON, "A text holds half of a surrogate pair, which is no character.")


def _number_of(literal: str) -> _Number:
    digits = sum(character.isdigit() for character in literal)
    # The zero in front of a point is not counted.
    if digits - literal.lstrip("-").startswith("0") > NUMBER_DIGITS_MAX:
        _refuse(Reason.NOT_JSON, f"A number has more than {NUMBER_DIGITS_MAX} digits.")
    return _Number(literal)


def _constant_of(name: str) -> NoReturn:
    _refuse(Reason.NOT_JSON, f"{name} is not a JSON number.")


def _refuse(reason: Reason, detail: str) -> NoReturn:
    raise _RefusedError(reason, detail)
