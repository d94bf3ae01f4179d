"""From what a request says about time to ``due_ms``.

Nothing here rounds down: a message is never due before the moment that was asked for. The only exception is what lies below the
microsecond: a delay is rounded to the nearest microsecond first (0.1 + 0.2 is 0.30000000000000004 and means 300 ms), and digits
of an ISO time beyond the sixth are cut.
"""

import re
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

DUE_MS_MAX: Final = 253_402_300_799_999  # 9999-12-31T23:59:59.999Z
EPOCH_MS_MIN: Final = 100_000_000_000  # an integer below it is taken for seconds; as ms it lies before March 1973
DELAY_SEC_MAX: Final = 31_622_400  # 366 days

# [0-9] and never \d, which matches the digits of all scripts.
LOCAL_TIME_PATTERN: Final = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ](?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:[.,][0-9]{1,9})?)?"
)
ZONED_TIME_PATTERN: Final = LOCAL_TIME_PATTERN + r"(?:[Zz]|[+-][0-9]{2}(?::?[0-5][0-9])?)"
NUMBER_PATTERN: Final = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
INTEGER_PATTERN: Final = r"-?(?:0|[1-9][0-9]*)"
EPOCH_MS_PATTERN: Final = r"0|[1-9][0-9]*"

_LOCAL_TIME: Final = re.compile(LOCAL_TIME_PATTERN)
_ZONED_TIME: Final = re.compile(ZONED_TIME_PATTERN)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NO_OFFSET: Final = timedelta()
_OFFSET_MAX: Final = timedelta(hours=18)  # as in java.time.ZoneOffset; real offsets lie within 14 hours
_MICROSECOND: Final = timedelta(microseconds=1)
_DECIMAL_MICROSECOND: Final = Decimal("0.000001")
_DECIMAL_DIGITS_MAX: Final = 38


def is_due_in_range(due_ms: int) -> bool:
    """Say whether a due time lies in the years 1970 to 9999."""
    return 0 <= due_ms <= DUE_MS_MAX


def delay_ms_of_number(literal: str) -> int | None:
    """Turn a delay in seconds, as written in JSON, into ms: HALF_UP to the microsecond, then up to the ms.

    A literal with an exponent, or with more than 38 digits, is read as a double; any other is exact.

    Returns:
        The delay in ms, or None if it is outside 0..366 days.
    """
    if literal.isascii() and literal.isdigit() and len(literal) <= len(str(DELAY_SEC_MAX)):  # the usual ones
        return int(literal) * 1_000 if int(literal) <= DELAY_SEC_MAX else None
    as_float = float(literal)
    if not 0 <= as_float <= DELAY_SEC_MAX:
        return None
    exact = _exact_decimal(literal)
    seconds = Decimal(repr(as_float)) if exact is None else exact
    micros = int(seconds.quantize(_DECIMAL_MICROSECOND, rounding=ROUND_HALF_UP).scaleb(6))
    return _ms_rounded_up(micros)


def has_no_zone(text: str) -> bool:
    """Say whether the text is a date and a time of day that only lacks its zone."""
    return _LOCAL_TIME.fullmatch(text) is not None


def due_ms_of_text(text: str) -> int | None:
    """Turn an ISO 8601 time with a zone into due_ms, rounded up to the ms.

    Returns:
        ms UTC, outside 0..DUE_MS_MAX if the time is before 1970 or after 9999; None if there is no such form, day or offset.
    """
    if _ZONED_TIME.fullmatch(text) is None:
        return None
    try:
        moment = datetime.fromisoformat(text.upper())  # which cuts digits beyond the sixth
    except ValueError:
        return None
    if abs(moment.utcoffset() or _NO_OFFSET) > _OFFSET_MAX:
        return None
    return due_ms_of_time(moment)


def due_ms_of_time(moment: datetime) -> int:
    """Turn a time with a zone into due_ms, rounded up to the ms."""
    micros = (moment - EPOCH) // _MICROSECOND
    # Before 1970 stays before 1970, even by a microsecond, which rounding up would turn into 0.
    return -1 if -1_000 < micros < 0 else _ms_rounded_up(micros)


def time_of_ms(epoch_ms: int) -> datetime:
    """Return a time in UTC; one before 1970 or after 9999, which another program may have written, becomes the first or last."""
    return EPOCH + timedelta(milliseconds=min(max(epoch_ms, 0), DUE_MS_MAX))


def _exact_decimal(literal: str) -> Decimal | None:
    """Read a literal exactly, or return None where it is read as a double."""
    if "e" in literal or "E" in literal:
        return None
    digits = literal.lstrip("-").replace(".", "").lstrip("0")
    scale = len(literal.partition(".")[2])
    if len(digits) > _DECIMAL_DIGITS_MAX or scale > _DECIMAL_DIGITS_MAX:
        return None
    return Decimal(literal)


def _ms_rounded_up(micros: int) -> int:
    return -(-micros // 1_000)
