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
_PUBLIC: Final = re.compile(r"https?://([^/?#@\s]+)/?", re.IGNORECASE)
UNIX: Final = "unix"  # the address of who comes by the unix socket
FAILURES_SEC: Final = 60
ADDRESSES_MAX: Final = 10_000  # from which tokens are counted that are not known

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
        ConfigError: everybody could reach the address, and there are no tokens; or a setting has another form.
    """

    def __init__(
        self, settings: ApiSettings, tokens: Sequence[tuple[str, Caller]], now_sec: Callable[[], float]
    ) -> None:
        if not tokens and not settings.unix and not is_loopback(settings.host):
            raise ConfigError(
                f"Others can reach {settings.host}: name a file of tokens with --tokens, or listen on 127.0.0.1 or a unix socket."
            )
        self._tokens = [(digest.encode(), caller) for digest, caller in tokens]
        self._marks = {_mark(digest): caller for digest, caller in self._tokens}
        self.takes_tokens = bool(tokens)
        listed = [name.strip().lower() for name in settings.hosts.split(",") if name.strip()]
        own = f"[{settings.host}]" if ":" in settings.host else settings.host.lower()
        public = _PUBLIC.fullmatch(settings.public_url)
        if settings.public_url and not public:
            raise ConfigError(
                f"api.public_url must be like https://duetime.example.org, but is {settings.public_url!r}."
            )
        self.public_url = settings.public_url.rstrip("/")
        self.is_secure = self.public_url.lower().startswith("https:")
        hosts = {name.encode() for name in listed or ["localhost", "127.0.0.1", "[::1]", own]}
        self._hosts = hosts | ({_PORT.sub(b"", public[1].lower().encode())} if public else set())
        self._proxies, self._trusts_socket = _proxies_of(settings.trusted_proxies)
        self._failures_max = settings.failed_tokens_max
        self._failures: dict[str, tuple[float, int]] = {}  # by address: since when, and how many
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

    def address_of(self, peer: str, forwarded: str) -> str:
        """Return from where a request comes: of one that a trusted proxy passes on, what it says.

        Args:
            peer: the address of the other end of the connection; "" of a unix socket.

            forwarded: the header X-Forwarded-For, to which each proxy appends what it knows.
        """
        address = _address_of(peer) if peer else UNIX
        given = forwarded.split(",") if forwarded and (self._proxies or self._trusts_socket) else []
        while given and self._is_proxy(address):
            try:
                address = _address_of(given.pop().strip())
            except ValueError:
                break
        return address

    def _is_proxy(self, address: str) -> bool:
        if address == UNIX:
            return self._trusts_socket
        return any(ipaddress.ip_address(address) in network for network in self._proxies)

    def check_caller(self, headers: Headers, right: Right, address: str) -> Caller:
        """Return who asks.

        Raises:
            Problem: ``no_token``, ``not_allowed``, ``rate_exceeded``.
        """
        caller = self._find(headers.get(b"authorization", b""), address) if self._tokens else ANYBODY
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

    def mark_of(self, token: bytes, address: str) -> str | None:
        """Return the mark of a token, by which a session knows it without having it; None if there is no such token.

        Raises:
            Problem: ``rate_exceeded``: too many tokens came from the address that are not known.
        """
        # Who shares an address with everybody, such as that of a proxy, can't be told from others: nobody is locked out there.
        is_shared = address == UNIX or is_loopback(address) or self._is_proxy(address)
        counts = self._failures_max and not is_shared
        place, now = _network_of(address) if counts else "", self._now_sec()
        since, failures = self._failures.get(place, (now, 0))
        if now - since >= FAILURES_SEC:
            since, failures = now, 0
        if counts and failures >= self._failures_max:
            wait = {"Retry-After": str(max(1, round(since + FAILURES_SEC - now)))}
            raise Problem("rate_exceeded", "Too many tokens came from this address that are not known.", headers=wait)
        digest = hashlib.sha256(token).hexdigest().encode()
        found = None
        for known, _ in self._tokens:  # all of them, so that the time says nothing
            if hmac.compare_digest(known, digest):
                found = _mark(known)
        if found is None and counts:
            self._failures.pop(place, None)
            if len(self._failures) >= ADDRESSES_MAX:
                self._failures.pop(next(iter(self._failures)))  # the one that failed longest ago
            self._failures[place] = (since, failures + 1)
        return found

    def caller_of(self, mark: str | None) -> Caller | None:
        """Return who has the token of a mark; None if the file has no such token, or none any more."""
        return self._marks.get(mark or "")

    def _find(self, authorization: bytes, address: str) -> Caller:
        token = _BEARER.fullmatch(authorization)
        caller = self.caller_of(self.mark_of(token[1], address)) if token else None
        if caller is None:
            how = {"WWW-Authenticate": "Bearer"}
            raise Problem("no_token", "Send the header Authorization: Bearer TOKEN.", headers=how, closes=True)
        return caller

    def _count(self, name: str) -> None:
        now = self._now_sec()
        left, since = self._buckets.get(name, (float(self._rate), now))
        left = min(float(self._rate), left + (now - since) * self._rate)
        self._buckets[name] = (max(0.0, left - 1), now)
        if left < 1:
            raise Problem("rate_exceeded", f"A token may make {self._rate} requests a second.")


def _is_own_origin(headers: Headers) -> bool:
    """Say whether an origin, if one is named, is ours."""
    host, origin = headers.get(b"host", b"").lower(), headers.get(b"origin")
    return origin is None or origin.lower() in (b"http://" + host, b"https://" + host)


def _mark(digest: bytes) -> str:
    return hashlib.sha256(digest).hexdigest()


def _proxies_of(text: str) -> tuple[list[ipaddress.IPv4Network | ipaddress.IPv6Network], bool]:
    """Read a list of trusted proxies: their networks, and whether whoever has the unix socket is one.

    Raises:
        ConfigError: it is no such list.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    try:
        return [ipaddress.ip_network(name) for name in names if name != UNIX], UNIX in names
    except ValueError as exc:
        raise ConfigError(
            f"api.trusted_proxies takes addresses, networks and {UNIX}, with commas between: {exc}."
        ) from exc


def _address_of(text: str) -> str:
    """Return an address in its usual form; a socket for both writes one of IPv4 as one of IPv6.

    Raises:
        ValueError: it is no address.
    """
    ip = ipaddress.ip_address(text)
    return str(getattr(ip, "ipv4_mapped", None) or ip)


def _network_of(address: str) -> str:
    """Return what one client has for sure: an address, of IPv6 its network of 64 bits."""
    ip = ipaddress.ip_address(address)
    return address if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


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
