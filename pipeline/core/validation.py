"""The rules of a request, in plain Python: the reference that says whether a line is taken, and if not, why.

``ingest/parsing.py`` takes in the millions by a faster form, which leaves everything unusual to this one. One table
(``tests/cases``) and a property test keep the two the same.
"""

import re
from collections.abc import Mapping
from typing import Final, Literal

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
from pipeline.core.messages import (
    DEFAULT_TOPIC,
    REQUEST_FIELDS,
    Cancellation,
    Change,
    Message,
    Reason,
    Rejection,
    Replacement,
)
from pipeline.core.strict_json import Number, RefusedError, check_text, json_number, parse_json, refuse

Kind = Literal["json", "csv", "sock"]

REQUEST_BYTES_MAX: Final = 4 * 1024 * 1024
MESSAGE_BYTES_MAX: Final = 256 * 1024

ID_LENGTH_MAX: Final = 128
ID_PATTERN: Final = rf"[A-Za-z0-9._:-]{{1,{ID_LENGTH_MAX}}}"
TOPIC_PATTERN: Final = r"[A-Za-z0-9._-]{1,64}"

_ID: Final = re.compile(ID_PATTERN)
_TOPIC: Final = re.compile(TOPIC_PATTERN)
_INTEGER: Final = re.compile(INTEGER_PATTERN)
_NUMBER: Final = re.compile(NUMBER_PATTERN)
_EPOCH_MS: Final = re.compile(EPOCH_MS_PATTERN)


def validate_line(
    raw: bytes | str, kind: Kind, arrival_ms: int, header: str | None = None
) -> Message | Change | Rejection | None:
    """Judge one line, without its line end (``\\n`` or ``\\r\\n``) and without the byte order mark of its file.

    A ``sock`` line comes without the arrival time in front of it; ``header`` is the first line of a ``csv`` file. Never raises on
    what users sent.

    Returns:
        The request, or why it is refused, or None for a blank line.
    """
    try:
        return _validate_line(raw, kind, arrival_ms, header or "")
    except RefusedError as refused:
        return refused.rejection


def validate_request(fields: Mapping[str, object], arrival_ms: int) -> Message | Change | Rejection:
    """Judge a request of a program: the fields of a line, with values of Python. Never raises on what they hold."""
    try:
        for value in fields.values():
            for text in (*value, *value.values()) if isinstance(value, dict) else (value,):
                if isinstance(text, str):
                    check_text(text)
        typed = {name: Number(repr(value)) if type(value) in (int, float) else value for name, value in fields.items()}
        return _validate_fields(typed, arrival_ms)
    except RefusedError as refused:
        return refused.rejection


def validate_cells(cells: Mapping[str, str], arrival_ms: int) -> Message | Change | Rejection:
    """Judge a request whose fields are all text, as in CSV. Never raises on what they hold."""
    try:
        return _validate_fields({name: _value_of_cell(name, cell) for name, cell in cells.items()}, arrival_ms)
    except RefusedError as refused:
        return refused.rejection


def _validate_line(raw: bytes | str, kind: Kind, arrival_ms: int, header: str) -> Message | Change | None:
    encoded = raw.encode(errors="surrogatepass") if isinstance(raw, str) else raw
    if len(encoded) > REQUEST_BYTES_MAX:
        refuse(Reason.LINE_TOO_LONG, f"The line has {len(encoded)} bytes; at most {REQUEST_BYTES_MAX} are allowed.")
    try:
        line = encoded.decode()
    except UnicodeDecodeError as error:
        refuse(Reason.NOT_UTF8, f"The line is not UTF-8: byte {error.start + 1} can't be read.")
    if not line.strip(" \t\r"):
        return None
    fields = _fields_of_csv_row(line, header) if kind == "csv" else _fields_of_json_line(line)
    return _validate_fields(fields, arrival_ms)


def _fields_of_json_line(line: str) -> dict[str, object]:
    document = parse_json(line)
    if not isinstance(document, dict):
        refuse(Reason.NOT_AN_OBJECT, "The line is JSON but not an object with fields: write one object a line.")
    return document


def _fields_of_csv_row(line: str, header: str) -> dict[str, object]:
    names = parse_csv_header(header)
    if isinstance(names, Rejection):
        refuse(names.reason, names.detail)
    cells = split_csv_row(line)
    if cells is None:
        refuse(Reason.BAD_CSV_ROW, "The row's quotes are not closed on this line or not doubled inside a cell.")
    if len(cells) != len(names):
        refuse(Reason.RAGGED_ROW, f"The row has {len(cells)} cells and the header has {len(names)}.")
    return {name: _value_of_cell(name, cell) for name, cell in zip(names, cells, strict=True) if cell}


def _value_of_cell(name: str, cell: str) -> object:
    """Give a cell the type that its text has; what has none stays text, and the rules of the field refuse it."""
    is_delay = name in ("delay_sec", "countdown") and _NUMBER.fullmatch(cell)
    if is_delay or (name == "due" and _EPOCH_MS.fullmatch(cell)):
        return json_number(cell)
    if name == "replace" and cell in ("true", "false"):
        return cell == "true"
    if name != "headers":
        return cell
    try:
        return parse_json(cell)
    except RefusedError:
        return cell


def _validate_fields(fields: dict[str, object], arrival_ms: int) -> Message | Change:
    for name in fields:
        if name not in REQUEST_FIELDS:
            refuse(Reason.UNKNOWN_FIELD, f"The field {name[:80]!r} is not one of {', '.join(sorted(REQUEST_FIELDS))}.")
    replaces = _validate_replace(fields)
    if "cancel" in fields:
        return _validate_cancellation(fields, replaces)
    body = _validate_body(fields)
    due_ms = _validate_due(fields, arrival_ms)
    idempotency_key = _validate_id(fields, "id")
    topic = _validate_name(fields, "topic", _TOPIC, Reason.BAD_TOPIC, "1 to 64 of A-Z a-z 0-9 . _ -")
    message = Message(due_ms, body, topic or DEFAULT_TOPIC, idempotency_key or "", _validate_headers(fields))
    if not replaces:
        return message
    if not idempotency_key:
        refuse(Reason.REPLACE_WITHOUT_ID, "The field replace is true and the field id is missing, which says what.")
    return Replacement(message)


def _validate_replace(fields: dict[str, object]) -> bool:
    replaces = fields.get("replace", False)
    if not isinstance(replaces, bool):
        refuse(Reason.WRONG_TYPE, f"The field replace takes true or false, not {_kind_of(replaces)}.")
    return replaces


def _validate_cancellation(fields: dict[str, object], replaces: bool) -> Cancellation:
    others = [name for name in fields if name != "cancel" and (name != "replace" or replaces)]
    if others:
        refuse(Reason.CANCEL_NOT_ALONE, f"The field cancel stands alone, without {' and '.join(others)}.")
    return Cancellation(_validate_id(fields, "cancel") or "")


def _validate_id(fields: dict[str, object], name: str) -> str | None:
    return _validate_name(fields, name, _ID, Reason.BAD_ID, "1 to 128 of A-Z a-z 0-9 . _ : -")


def _validate_body(fields: dict[str, object]) -> str:
    if "message" not in fields:
        refuse(Reason.MISSING_MESSAGE, "The field message is missing.")
    body = _text_of(fields, "message")
    if not body:
        refuse(Reason.EMPTY_MESSAGE, "The field message is empty.")
    size = len(body.encode())
    if size > MESSAGE_BYTES_MAX:
        refuse(Reason.MESSAGE_TOO_LONG, f"The message has {size} bytes; at most {MESSAGE_BYTES_MAX} are allowed.")
    return body


def _validate_due(fields: dict[str, object], arrival_ms: int) -> int:
    present = [name for name in ("delay_sec", "countdown", "due") if name in fields]
    if not present:
        refuse(Reason.MISSING_DUE, "One of the fields delay_sec, countdown and due is needed, and none is there.")
    if len(present) > 1:
        refuse(Reason.BOTH_DUE, f"The fields {' and '.join(present)} are both there; give exactly one.")
    name = present[0]
    due_ms = _due_ms_of(fields[name]) if name == "due" else arrival_ms + _delay_ms_of(name, fields[name])
    if not is_due_in_range(due_ms):
        refuse(Reason.DUE_OUT_OF_RANGE, "The due time lies outside the years 1970 to 9999.")
    return due_ms


def _delay_ms_of(name: str, value: object) -> int:
    if not isinstance(value, Number):
        refuse(Reason.WRONG_TYPE, f"The field {name} takes a number of seconds, not {_kind_of(value)}.")
    delay_ms = delay_ms_of_number(value.literal)
    if delay_ms is None:
        refuse(
            Reason.DELAY_OUT_OF_RANGE, f"The field {name} takes 0 to {DELAY_SEC_MAX} seconds, not {value.literal[:40]}."
        )
    return delay_ms


def _due_ms_of(value: object) -> int:
    if isinstance(value, Number) and _INTEGER.fullmatch(value.literal):
        number = int(value.literal)
        if 0 <= number < EPOCH_MS_MIN:
            refuse(
                Reason.DUE_IN_SECONDS, f"The due time {number} looks like seconds; epoch milliseconds have 13 digits."
            )
        return number
    if not isinstance(value, str):
        wanted = "an ISO 8601 string or a whole number of milliseconds"
        refuse(Reason.WRONG_TYPE, f"The field due takes {wanted}, not {_kind_of(value)}.")
    due_ms = due_ms_of_text(value)
    if due_ms is None and has_no_zone(value):
        refuse(Reason.DUE_WITHOUT_ZONE, f"The time {value} has no zone; add Z or an offset such as +02:00.")
    if due_ms is None:
        refuse(Reason.NOT_A_TIME, f"{value[:80]!r} is not a time such as 2026-01-31T12:00:00Z, or no such time exists.")
    return due_ms


def _validate_name(
    fields: dict[str, object], name: str, pattern: re.Pattern[str], reason: Reason, limits: str
) -> str | None:
    if name not in fields:
        return None
    text = _text_of(fields, name)
    if pattern.fullmatch(text) is None:
        length = f", which has {len(text):,} characters" if len(text) > 64 else ""
        refuse(reason, f"The field {name} takes {limits}, not {text[:140]!r}{length}.")
    return text


def _validate_headers(fields: dict[str, object]) -> dict[str, str]:
    headers = fields.get("headers", {})
    if not isinstance(headers, dict):
        refuse(Reason.BAD_HEADERS, f"The field headers takes an object of strings, not {_kind_of(headers)}.")
    for name, value in headers.items():
        if not isinstance(value, str):
            refuse(Reason.BAD_HEADERS, f"The header {name[:80]!r} takes a string, not {_kind_of(value)}.")
    return headers


def _text_of(fields: dict[str, object], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        hint = "; write JSON as a string, for example with to_json" if isinstance(value, dict | list) else ""
        refuse(Reason.WRONG_TYPE, f"The field {name} takes a string, not {_kind_of(value)}{hint}.")
    return value


def _kind_of(value: object) -> str:
    kinds = {bool: "true or false", str: "a string", dict: "an object", list: "an array", Number: "this number"}
    return kinds.get(type(value), "null" if value is None else f"a value of type {type(value).__name__}")
