"""What drain loops asked the server for and what it said, read from the calls that went through a proxy."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from pipeline.core.messages import Message
from pipeline.store.scripts import read_script
from tests.chaos.proxy import Call, Exchange, Matches

OF_CLAIMS = ("claim", "ack", "release")
SCRIPTS = {
    hashlib.sha1(read_script(name).encode(), usedforsecurity=False).hexdigest().encode(): name for name in OF_CLAIMS
}


@dataclass(frozen=True)
class Request:
    """A call of one of the scripts: which, for which claim, of the loop with which process id, and all its arguments."""

    script: str
    token: str
    loop: int
    arguments: list[bytes]

    @property
    def until_ms(self) -> int:
        """The end of the lease that an acknowledgement or a release names; 0 of a release by a finder."""
        return int(self.arguments[1] or 0)


@dataclass(frozen=True)
class Row:
    """A message of a claim, by the id under which it is shown."""

    id: str
    due_ms: int
    attempt: int


@dataclass
class Claim:
    """A claim that was made, and how far its holder brought it."""

    loop: int
    token: str
    begun_ms: int
    until_ms: int
    rows: list[Row]
    acknowledged: int = 0
    given_back: bool = False

    @property
    def is_finished(self) -> bool:
        return self.given_back or self.acknowledged == len(self.rows)


@dataclass
class Log:
    """All claims by token and end of lease, and what else the server said; loops are process ids.

    ``unknown`` counts calls by script of which nobody knows whether they were executed; ``failed`` calls by loop that were not
    answered, or by an error.
    """

    claims: dict[tuple[str, int], Claim] = field(default_factory=dict)
    late: int = 0
    taken_back: int = 0
    forgotten: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)


def request_of(call: Call) -> Request | None:
    """Read a call, None if it does not run a script for a claim."""
    words = call[0]
    script = SCRIPTS.get(words[1]) if len(call) == 1 and words[0] == b"EVALSHA" else None
    if script is None:
        return None
    arguments = list(words[3 + int(words[2]) :])
    token = arguments[1 if script == "claim" else 0].decode()
    return Request(script, token, int(token.rsplit(":", 3)[1]), arguments)


def asking(script: str, loop: int | None = None) -> Matches:
    """Match the calls by which a loop, or any, runs a script for a claim of its own."""

    def matches(call: Call) -> bool:
        request = request_of(call)
        if request is None or request.script != script or (script == "release" and not request.until_ms):
            return False
        return loop in (None, request.loop)

    return matches


def value_of(reply: bytes) -> Any:
    """Return a reply as Python has it, None for nil; an error is its text."""
    return _read_value(BytesIO(reply))


def read_log(exchanges: Iterable[Exchange]) -> Log:
    """Read calls in the order in which they came."""
    log = Log()
    for exchange in exchanges:
        request = request_of(exchange.call)
        if request is None:
            continue
        heard = exchange.heard or b"-"
        log.failed[request.loop] += heard.startswith(b"-") and not heard.startswith(b"-NOSCRIPT")
        if exchange.said is None:
            log.unknown[request.script] += exchange.was_sent
        elif exchange.said.startswith(b"-"):
            log.forgotten += exchange.said.startswith(b"-NOSCRIPT")
        else:
            _note(log, request, value_of(exchange.said))
    return log


def _note(log: Log, request: Request, said: list[Any]) -> None:
    if request.script == "claim":
        if said[0] == b"OK":
            until_ms = int(said[3])
            begun_ms = until_ms - int(request.arguments[4])
            claim = Claim(request.loop, request.token, begun_ms, until_ms, _rows(said[4], said[5]))
            log.claims.setdefault((request.token, until_ms), claim)  # asked again, it is told again
    elif request.script == "ack":
        if said[0] == b"OK":
            log.claims[request.token, request.until_ms].acknowledged = int(request.arguments[3])
        else:
            log.late += 1
    elif said[0] == b"OK" and request.until_ms:
        log.claims[request.token, request.until_ms].given_back = True
    elif said[0] == b"OK":
        log.taken_back += said[1]


def _rows(rows: list[bytes], attempts: list[bytes]) -> list[Row]:
    tried = attempts or [b"0"] * (len(rows) // 2)
    members = zip(rows[::2], rows[1::2], tried, strict=True)
    return [
        Row(Message.from_member(member, int(due_ms)).id, int(due_ms), int(ended) + 1)
        for member, due_ms, ended in members
    ]


def _read_value(stream: BytesIO) -> Any:
    head = stream.readline()
    kind, text = head[:1], head[1:-2]
    if kind == b":":
        return int(text)
    if kind not in b"$*":
        return text
    size = int(text)
    if size < 0:
        return None
    return stream.read(size + 2)[:-2] if kind == b"$" else [_read_value(stream) for _ in range(size)]
