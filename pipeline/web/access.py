"""Who may ask: hosts, origins, tokens and their rights, rates."""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from pipeline.config import ApiSettings
from pipeline.core.errors import ConfigError
from pipeline.web.problems import Problem

Right = Literal["schedule", "read", "operate"]
RIGHTS: Final = frozenset[str](get_args(Right))

_LINE: Final = re.compile(r"([A-Za-z0-9._-]{1,64})\s+([0-9a-f]{64})((?:\s+\w+)+)", re.ASCII)
_BEARER: Final = re.compile(rb"bearer +([\x21-\x7e]{1,1000})", re.IGNORECASE)
_PORT: Final = re.compile(rb":[0-9]{1,5}\Z")

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the name of a token, "" where none is needed."""

    name: str
    rights: frozenset[str]


ANYBODY: Final = Caller("", RIGHTS)


class Access:
    """Decides who may ask.

    Args:
        tokens: the callers by the SHA-256 of their token, in hex; none means that everybody may do everything.

        now_sec: a clock that only runs forward.
    Raises:
        ConfigError: everybody could reach the address, and there are no tokens.
    """

    def __init__(
        self, settings: ApiSettings, tokens: Sequence[tuple[str, Caller]], now_sec: Callable[[], float]
    ) -> None:
        if not tokens and not settings.unix and not is_loopback(settings.host):
            raise ConfigError(
                f"Others can reach {settings.host}: name a file of tokens with --tokens, or listen on 127.0.0.1 or a unix socket."
            )
        self._tokens = [(digest.encode(), caller) for digest, caller in tokens]
        self.takes_tokens = bool(tokens)
        listed = [name.strip().lower() for name in settings.hosts.split(",") if name.strip()]
        own = f"[{settings.host}]" if ":" in settings.host else settings.host.lower()
        self._hosts = frozenset(name.encode() for name in listed or ["localhost", "127.0.0.1", "[::1]", own])
        self._rate = settings.rate_per_token
        self._now_sec = now_sec
        self._buckets: dict[str, tuple[float, float]] = {}  # by caller: what is left, and when that was

    def check_source(self, headers: Headers) -> None:
        """Refuse what a foreign web page sends, under a name of its own or in the name of its visitor.

        Raises:
            Problem: ``wrong_host``, ``foreign_origin``.
        """
        self.check_host(headers)
        if not _is_own_origin(headers) or (
            b"origin" not in headers and headers.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none")
        ):
            raise _foreign()

    def check_host(self, headers: Headers) -> None:
        """Refuse a request under a name that is not ours.

        Raises:
            Problem: ``wrong_host``.
        """
        if _PORT.sub(b"", headers.get(b"host", b"").lower()) not in self._hosts:
            raise Problem("wrong_host", "Name this server as api.hosts has it.", closes=True)

    def check_visit(self, headers: Headers, changes: bool) -> bool:
        """Refuse what a foreign web page sends to a page of ours; a form must say that it comes from us.

        Returns:
            Whether it is one of ours that asks. If not, a link of another site was followed, and the browser has kept our cookies.
        Raises:
            Problem: ``wrong_host``, ``foreign_origin``.
        """
        self.check_host(headers)
        site = headers.get(b"sec-fetch-site")
        if not _is_own_origin(headers):
            raise _foreign()
        if changes:
            if (b"origin" not in headers and site is None) or site not in (None, b"same-origin"):
                raise _foreign()
            return True
        if site in (None, b"same-origin", b"none"):
            return True
        if (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) != (b"navigate", b"document"):
            raise _foreign()
        return False

    def check_caller(self, headers: Headers, right: Right) -> Caller:
        """Return who asks.

        Raises:
            Problem: ``no_token``, ``not_allowed``, ``rate_exceeded``.
        """
        caller = self._find(headers.get(b"authorization", b"")) if self._tokens else ANYBODY
        self.check_right(caller, right)
        return caller

    def check_right(self, caller: Caller, right: Right) -> None:
        """Refuse who may not do something, or does too much.

        Raises:
            Problem: ``not_allowed``, ``rate_exceeded``.
        """
        if right not in caller.rights:
            raise Problem("not_allowed", f"The token {caller.name} does not have the right {right}.", closes=True)
        if self._rate:
            self._count(caller.name)

    def place_of(self, token: bytes) -> int | None:
        """Return the place of a token in the file of tokens; None if it is not there."""
        digest = hashlib.sha256(token).hexdigest().encode()
        found = None
        for place, (known, _) in enumerate(self._tokens):  # all of them, so that the time says nothing
            if hmac.compare_digest(known, digest):
                found = place
        return found

    def caller_at(self, place: int) -> Caller:
        """Return who has the token at a place of the file."""
        return self._tokens[place][1]

    def _find(self, authorization: bytes) -> Caller:
        token = _BEARER.fullmatch(authorization)
        place = self.place_of(token[1] if token else b"")
        if token is None or place is None:
            how = {"WWW-Authenticate": "Bearer"}
            raise Problem("no_token", "Send the header Authorization: Bearer TOKEN.", headers=how, closes=True)
        return self.caller_at(place)

    def _count(self, name: str) -> None:
        now = self._now_sec()
        left, since = self._buckets.get(name, (float(self._rate), now))
        left = min(float(self._rate), left + (now - since) * self._rate)
        self._buckets[name] = (max(0.0, left - 1), now)
        if left < 1:
            raise Problem("rate_exceeded", f"A token may make {self._rate} requests a second.", closes=True)


def _is_own_origin(headers: Headers) -> bool:
    """Say whether an origin, if one is named, is ours."""
    host, origin = headers.get(b"host", b"").lower(), headers.get(b"origin")
    return origin is None or origin.lower() in (b"http://" + host, b"https://" + host)


def _foreign() -> Problem:
    return Problem("foreign_origin", "Only pages of this server may send requests.", closes=True)


def read_tokens(path: str) -> list[tuple[str, Caller]]:
    """Read a file of tokens; "" is none.

    Raises:
        ConfigError: it can't be read, or has no token, or a line that is none.
    """
    if not path:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The file of tokens {path} can't be read ({exc}).") from exc
    found = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        read = _LINE.fullmatch(line)
        rights = frozenset(read[3].split()) if read else frozenset[str]()
        if read is None or not rights <= RIGHTS:
            raise ConfigError(
                f"Line {number} of {path} is not a name, the SHA-256 of a token in hex, and rights of schedule, read and operate."
            )
        found.append((read[2], Caller(read[1], rights)))
    if not found:
        raise ConfigError(f"The file of tokens {path} has none.")
    return found


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
