"""Text for people: what could drive a terminal made visible, times and spans written out."""

import re
import unicodedata
from datetime import timedelta
from functools import lru_cache

from pipeline import IS_INSTALLED
from pipeline.core.due import DUE_MS_MAX, EPOCH

CALENDAR_FIRST_MS, CALENDAR_LAST_MS = -62_135_596_800_000, DUE_MS_MAX  # years 1 to 9999, what datetime knows
# A text is one line and can't drive the terminal: control, format (bidi, zero width), surrogate, and line separators.
UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_SPAN = re.compile(r"([0-9]{1,12})(s|m|h|d)")
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
JOINERS = frozenset({"\u200c", "\u200d"})  # harmless, and words in Persian or emoji families need them


def visible(text: str) -> str:
    r"""Return ``text`` with everything that could move a cursor, hide or split a line as ``\n`` or ``\u202e``.

    A backslash of the text itself stays as it is: this form is for people, programs read JSON.
    """
    if text.isprintable():
        return text
    return "".join(_visible_character(character) if not character.isprintable() else character for character in text)


def _visible_character(character: str) -> str:
    if character in JOINERS or unicodedata.category(character) not in UNSAFE_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")


def command_text(job: str, arguments: str = "") -> str:
    """Return how users call a job: from a checkout, or as the command that the wheel installs."""
    command = f"duetime {job}" if IS_INSTALLED else f"./spark-submit.sh jobs/{job}.py"
    return f"{command} {arguments}".rstrip()


def install_text(extra: str) -> str:
    """Return how users install what an extra of the wheel brings; nothing is published, so that is done in a checkout."""
    return f"pip install '.[{extra}]' in the checkout brings it"


def utc_text(epoch_ms: int) -> str:
    """Return ``2026-11-20 12:00:01Z``, cut to the second; a time that no calendar has becomes the first or last one."""
    return _second_text(min(max(epoch_ms, CALENDAR_FIRST_MS), CALENDAR_LAST_MS) // 1000)


@lru_cache(maxsize=1_000)  # messages come in order of due time, so most have the second of the one before
def _second_text(epoch_sec: int) -> str:
    return (EPOCH + timedelta(seconds=epoch_sec)).replace(tzinfo=None).isoformat(" ", "seconds") + "Z"


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 message`` or ``2,000 messages``; the plural is the noun with an s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def nonzero_text(**counts: int) -> str:
    """Return ``, 3 cancelled, 1 late``: what is not 0, to go on with a list of counts."""
    return "".join(f", {count:,} {name}" for name, count in counts.items() if count)


def span_text(ms: float) -> str:
    """Return a span of time in the unit that suits it: ``4 ms``, ``4.2 s``, ``4 min 12 s``, ``4 h 12 min``, ``4 d 12 h``."""
    seconds, minutes, hours = int(ms) // 1_000, int(ms) // 60_000, int(ms) // 3_600_000
    if seconds == 0:
        return f"{int(ms)} ms"
    if minutes == 0:
        return f"{int(ms) // 100 / 10} s"
    if hours == 0:
        return f"{minutes} min {seconds % 60} s"
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24:,} d {hours % 24} h"


def span_ms(text: str) -> int | None:
    """Return a span of time such as ``90s``, ``15m``, ``2h`` or ``7d`` in milliseconds; None if it is none."""
    found = _SPAN.fullmatch(text)
    return int(found[1]) * _UNIT_MS[found[2]] if found else None


def age_text(ms: float) -> str:
    """Return how long ago something was, in one unit: ``0.4 s``, ``28 min``, ``3 h``, ``4 d``; a time to come is ``0.0 s``."""
    seconds = max(0, int(ms)) / 1_000
    if seconds < 60:
        return f"{int(seconds * 10) / 10} s"
    if seconds < 3_600:
        return f"{int(seconds // 60)} min"
    if seconds < 172_800:
        return f"{int(seconds // 3_600)} h"
    return f"{int(seconds // 86_400):,} d"


def has_password(url: str) -> bool:
    """Return whether a URL shows a password."""
    return ":" in url.partition("://")[2].rpartition("@")[0] or "password=" in url


def redact_url(url: str) -> str:
    """Return ``url`` without its passwords, fit for a screen or a log."""
    scheme, _, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    shown = f"{scheme}://{user.partition(':')[0]}:***@{host}" if at else url
    return re.sub(r"(?<=password=)[^&]*", "***", shown)
