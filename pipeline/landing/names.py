"""Names of landing files and of the work in progress beside them.

    <token>.<first_line>.<kind>.<quoted original name>   a landing file: complete, never changed, read by Spark; its dots are "+"
    <token>.<first_line>.<kind>.<quoted original name>=.<n>   the same, stored before and read again, for the n-th time
    <token>.<first_line>.<kind>.<quoted original name>=.<n>w   the same, of which a shard that was away lacks something
    .work-<token>.<arrival_ms>.<kind>.<coding>.<quoted original name>   claimed from the input folder, not published yet
    .done-<token>                                        how far the work of that token has got
    .seg-<token>                                         a segment being written
    .part-<token>.<quoted host:port>                     lines received from a socket, not published yet

Spark ignores names that start with "." (and "_"). A token sorts by time, and in one process no two are equal.
"""

import os
import re
import secrets
from dataclasses import dataclass, field
from urllib.parse import quote_from_bytes, unquote_to_bytes

from pipeline.core.due import time_of_ms
from pipeline.core.ids import TOKEN_HALF_BITS, TOKEN_LENGTH, decode_token, encode_token

WORK_PREFIX = ".work-"
DONE_PREFIX = ".done-"
SEGMENT_PREFIX = ".seg-"
PART_PREFIX = ".part-"

ORIGINAL_BYTES_MAX = 150  # of an original name in ours; a file name may have 255 bytes, and the rest takes at most 60
KINDS = ("json", "csv", "sock")

WAITED = "w"
REPEATED = re.compile(rf"=\.([0-9]+)({WAITED}?)$")  # no quoted name ends so: two hexadecimal digits come after its "="

_KIND_OF_SUFFIX = {".json": "json", ".jsonl": "json", ".csv": "csv"}
_UNSAFE = re.compile(r"[^\w.-]+")
_UNFINISHED_SUFFIXES = ("~", ".tmp", ".part", ".partial", ".crdownload", ".swp", "._copying_")


@dataclass(frozen=True, slots=True)
class Token:
    """``epoch_ms`` is when the file was claimed, made to rise by one for each token of a process."""

    epoch_ms: int
    random_bits: int
    _text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_text", encode_token(self.epoch_ms, self.random_bits))  # it is asked for often

    def __str__(self) -> str:
        return self._text

    def plus(self, count: int) -> "Token":
        """Return the token of segment ``count`` of this file, counting from 0."""
        return Token(self.epoch_ms + count, self.random_bits)


@dataclass(frozen=True, slots=True)
class LandingName:
    """What the name of a landing file says.

    ``first_line`` is the original line number of the first line that can be a request: 2 for the first segment of a CSV
    file, whose line 1 is the header. ``is_repeated`` says that it is read again, ``has_waited`` that this is for a shard that was
    away, and not after a failover.
    """

    token: str
    first_line: int
    kind: str
    original_name: str
    is_repeated: bool = False
    has_waited: bool = False


@dataclass(frozen=True, slots=True)
class WorkName:
    """What the name of claimed work says.

    ``arrival_ms`` (epoch ms UTC) is when the file came into the input folder. It is part of the name since the rename that
    claims the file is itself a change of its inode. ``quoted`` is kept: a long name was cut and can't be quoted again.
    """

    token: Token
    arrival_ms: int
    kind: str
    gzipped: bool
    quoted: str

    @property
    def original_name(self) -> str:
        """The name that the user gave the file."""
        return unquote_name(self.quoted)

    def __str__(self) -> str:
        coding = "gz" if self.gzipped else "plain"
        return f"{WORK_PREFIX}{self.token}.{self.arrival_ms}.{self.kind}.{coding}.{self.quoted}"

    def landing_name(self, segment: int, first_line: int) -> str:
        """Return the landing file name of one segment: the same after every restart."""
        return landing_name(self.token.plus(segment), first_line, self.kind, self.quoted)


def quote_name(name: str) -> str:
    """Return ``name`` in ASCII without "/" or "%", at most 150 bytes, cut between characters where it is longer."""
    quoted = _quote(name)
    if len(quoted) <= ORIGINAL_BYTES_MAX:
        return quoted
    kept = ""
    for character in name:
        quoted = _quote(character)
        if len(kept) + len(quoted) > ORIGINAL_BYTES_MAX:
            break
        kept += quoted
    return kept


def unquote_name(quoted: str) -> str:
    """Return the original name; bytes that are not UTF-8 become U+FFFD, so the result can always be printed."""
    return unquote_to_bytes(quoted.replace("=", "%")).decode("utf-8", "replace")


def printable_name(name: str) -> str:
    """Return a name from the file system as text that can be stored: what ``unquote_name(quote_name(name))`` gives."""
    return os.fsencode(name).decode("utf-8", "replace")


def landing_name(token: Token, first_line: int, kind: str, quoted: str) -> str:
    """Build the name of a landing file, of the original name as ``quote_name`` gives it."""
    # A landing file has no suffix: Spark would unpack a plain one whose original was called x.json.gz.
    return f"{token}.{first_line}.{kind}.{quoted.replace('.', '+')}"


def parse_landing_name(name: str) -> LandingName | None:
    """Take a landing file name apart; None if it is not one (work in progress, or somebody else's file)."""
    times = REPEATED.search(name)
    token, first_line, kind, quoted = [*REPEATED.sub("", name).split(".", 3), "", "", ""][:4]
    if len(token) != TOKEN_LENGTH or not first_line.isdecimal() or kind not in KINDS:
        return None
    original_name = unquote_name(quoted.replace("+", "."))
    return LandingName(token, int(first_line), kind, original_name, times is not None, bool(times and times[2]))


def repeated_name(name: str, has_waited: bool = False) -> str:
    """Return the name under which a landing file is read again: Spark reads a name once, and the token stays the same.

    Args:
        has_waited: for a shard that was away; else it was stored whole before.
    """
    times = REPEATED.search(name)
    return f"{REPEATED.sub('', name)}=.{int(times[1]) + 1 if times else 1}{WAITED if has_waited else ''}"


def parse_work_name(name: str) -> WorkName | None:
    """Take the name of claimed work apart; None if it is not one."""
    if not name.startswith(WORK_PREFIX):
        return None
    token, arrival_ms, kind, coding, quoted = [*name[len(WORK_PREFIX) :].split(".", 4), "", "", "", ""][:5]
    decoded = parse_token(token)
    if decoded is None or not arrival_ms.isdecimal() or kind not in KINDS or coding not in ("gz", "plain"):
        return None
    return WorkName(decoded, int(arrival_ms), kind, coding == "gz", quoted)


def rejects_name(arrival_ms: int, original_name: str, token: str) -> str:
    """Name the file of what is refused of an input file, for people to find: ``2026-11-20-bad.jsonl-<token>.jsonl``.

    The date is that of the arrival (epoch ms UTC), so the name is the same whenever it is made.
    """
    date = time_of_ms(arrival_ms).date()
    safe_name = _UNSAFE.sub("_", original_name).encode()[:ORIGINAL_BYTES_MAX].decode(errors="ignore")
    return f"{date}-{safe_name}-{token}.jsonl"


def kind_of(name: str) -> tuple[str, bool] | None:
    """Return the kind of an input file and whether it is gzipped; None if its suffix is not one that is read."""
    lowered = name.lower()
    gzipped = lowered.endswith(".gz")
    stem, suffix = os.path.splitext(lowered.removesuffix(".gz"))
    kind = _KIND_OF_SUFFIX.get(suffix) if stem else None
    return (kind, gzipped) if kind else None


def is_unfinished(name: str) -> bool:
    """Return whether the name says "hidden" or "still being written"; such names are never touched or reported."""
    return name.startswith((".", "_")) or name.lower().endswith(_UNFINISHED_SUFFIXES)


class TokenMaker:
    """Makes tokens whose time rises strictly, also when the machine's clock is set back."""

    def __init__(self, last_epoch_ms: int = 0):
        self._last_epoch_ms = last_epoch_ms

    def make(self, now_ms: int) -> Token:
        """Return a new token for ``now_ms`` (epoch ms), bumped past every token made or reserved before."""
        self._last_epoch_ms = max(now_ms, self._last_epoch_ms + 1)
        return Token(self._last_epoch_ms, secrets.randbits(TOKEN_HALF_BITS))

    def reserve(self, token: Token) -> None:
        """Make all later tokens later than ``token``."""
        self._last_epoch_ms = max(self._last_epoch_ms, token.epoch_ms)


def parse_token(text: str) -> Token | None:
    """Return the token that ``str(token)`` wrote as ``text``, or None."""
    try:
        return Token(*decode_token(text))
    except ValueError:
        return None


def _quote(name: str) -> str:
    return quote_from_bytes(os.fsencode(name), safe="").replace("%", "=")
