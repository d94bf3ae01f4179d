"""JSON as a request may have it: stricter than ``json.loads``, and each refusal has its reason."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final, NoReturn

from pipeline.core.messages import Reason, Rejection, has_lone_surrogate

# The limits that Jackson, the parser of many producers and of Spark, sets by default (StreamReadConstraints).
NUMBER_DIGITS_MAX: Final = 1_000
NAME_UTF16_UNITS_MAX: Final = 50_000
JSON_TEXT_PATTERN: Final = r'"(?:[^"\\]++|\\.)*+"'
# A request has two objects at most; a line with far more opening brackets could overflow a parser's stack.
BRACKETS_MAX: Final = 64

_JSON_TEXT: Final = re.compile(JSON_TEXT_PATTERN)
_JSON_WHITESPACE: Final = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Number:
    """A JSON number as it was written: whether 1.0 is an integer is a question about its text."""

    literal: str


class RefusedError(ValueError):
    """Carries a rejection out of nested parsing; ``validate_line`` returns it."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.rejection = Rejection(reason, detail)


def parse_json(text: str) -> object:
    """Parse exactly one JSON value, numbers kept as written; stricter than ``json.loads`` in what RFC 8259 leaves open.

    Raises:
        RefusedError: it is not JSON, or not as a request may have it.
    """
    if _brackets_in(text) > BRACKETS_MAX and _brackets_in(_JSON_TEXT.sub("", text)) > BRACKETS_MAX:
        refuse(Reason.TOO_DEEP, f"The line has more than {BRACKETS_MAX} objects and arrays; a request has two at most.")
    decoder = json.JSONDecoder(
        object_pairs_hook=_object_of, parse_int=json_number, parse_float=json_number, parse_constant=_constant_of
    )
    start = len(text) - len(text.lstrip(_JSON_WHITESPACE))
    try:
        value, end = decoder.raw_decode(text, start)
    except RefusedError:
        raise
    except (ValueError, RecursionError) as error:
        at = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        refuse(Reason.NOT_JSON, f"The line is not JSON{at}: {getattr(error, 'msg', 'nested too deeply')}.")
    if text[end:].strip(_JSON_WHITESPACE):
        refuse(Reason.TRAILING_TEXT, f"There is more text after the JSON value, from character {end + 1} on.")
    if isinstance(value, str):
        check_text(value)
    return value


def _brackets_in(text: str) -> int:
    return text.count("{") + text.count("[")


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    for name, value in pairs:
        check_text(name)
        if isinstance(value, str):
            check_text(value)
        if len(name.encode("utf-16-le")) > 2 * NAME_UTF16_UNITS_MAX:
            refuse(Reason.NOT_JSON, f"The name of a field is longer than {NAME_UTF16_UNITS_MAX} characters.")
    if len(fields) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        refuse(Reason.DUPLICATE_KEY, f"The field {twice[:80]!r} is there twice.")
    return fields


def check_text(text: str) -> None:
    """Refuse a text that no UTF-8 can carry."""
    if has_lone_surrogate(text):
        refuse(Reason.NOT_JSON, "A text holds half of a surrogate pair, which is no character.")


def json_number(literal: str) -> Number:
    """Take a JSON number as it is written.

    Raises:
        RefusedError: it has too many digits.
    """
    digits = sum(character.isdigit() for character in literal)
    # The zero in front of a point is not counted.
    if digits - literal.lstrip("-").startswith("0") > NUMBER_DIGITS_MAX:
        refuse(Reason.NOT_JSON, f"A number has more than {NUMBER_DIGITS_MAX} digits.")
    return Number(literal)


def _constant_of(name: str) -> NoReturn:
    refuse(Reason.NOT_JSON, f"{name} is not a JSON number.")


def refuse(reason: Reason, detail: str) -> NoReturn:
    """Refuse the line that is read."""
    raise RefusedError(reason, detail)
