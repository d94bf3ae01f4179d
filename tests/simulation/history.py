"""What happened in a run, and whether it kept the promises; the checks see nothing of the loops but this.

Each check answers with sentences, none if all is well. Times are virtual milliseconds from the start.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# What a loop may be late without a fault: the messages that are due with it, and four round trips for each claim.
WORK_MS = 300
# After the last fault: a restart, the longest backoff, the time-outs of two calls.
RECOVERY_MS = 3_000 + 5_000 + 2_000
SERVER = "server"


@dataclass(frozen=True)
class Event:
    """``who`` is a process, the server or the ingest; ``details`` depend on ``what``."""

    at_ms: float
    who: str
    what: str
    details: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.at_ms:12.3f}  {self.who:8} {self.what:12} {' '.join(map(str, self.details))}"


@dataclass
class History:
    """Events in their order."""

    lease_ms: float
    wait_ms_max: float
    events: list[Event] = field(default_factory=list)

    def add(self, at_ms: float, who: str, what: str, *details: Any) -> None:
        self.events.append(Event(at_ms, who, what, details))

    def of(self, what: str) -> Iterator[Event]:
        return (event for event in self.events if event.what == what)

    def faults(self) -> list[tuple[float, float, str, str]]:
        """When each began and ended, whom it hit, and its kind."""
        return [(e.at_ms, e.details[1], e.who, e.details[0]) for e in self.of("fault")]

    def has_jumps(self) -> bool:
        return any(kind == "clock jump" for *_, kind in self.faults())

    def seen(self) -> Counter[str]:
        """Count what must not be missing from some hundred runs, lest they prove nothing."""
        found = Counter(kind for *_, kind in self.faults())
        found.update(
            e.what
            for e in self.events
            if e.what in ("late_acks", "reclaimed", "gave back", "moved", "misfiled", "unheard ring")
            or e.what in ("cancelled", "rescheduled", "replaced")
        )
        claims = Counter(e.details[0] for e in self.of("claimed") if e.details[2])
        found["a claim ahead"] = sum(bool(e.details[4]) for e in self.of("claimed"))
        found["a claim told again"] = sum(not e.details[2] for e in self.of("claimed"))
        found["a token claimed again"] = sum(count > 1 for count in claims.values())
        found["a duplicate"] = sum(n > 1 for n in Counter(e.details[1] for e in self.of("delivered")).values())
        found["a late arrival"] = sum(e.details[1] for e in self.of("accepted"))
        return +found


def check(history: History) -> list[str]:
    """Say every promise that was broken."""
    checks = (
        *(nothing_lost, nothing_invented, duplicates, moved_once, cancelled, never_early, lateness),
        *(fencing, leases, one_claim, endings),
    )
    return [f"{one.__name__}: {said}" for one in checks for said in one(history)]


def nothing_lost(history: History) -> Iterator[str]:
    """V1: what was accepted is delivered, once everything is quiet; V8: and was in one place at every moment."""
    delivered = {e.details[1] for what in ("delivered", "moved") for e in history.of(what)}
    delivered |= {e.details[0] for e in history.of("cancelled")}
    for event in history.of("accepted"):
        yield from (f"{m.decode()} was accepted and never delivered" for m, _ in event.details[0] if m not in delivered)
    yield from (f"at {e.at_ms} the server held {e.details}" for e in history.of("unbalanced"))
    yield from (f"left over at the end: {e.details}" for e in history.of("left over"))


def nothing_invented(history: History) -> Iterator[str]:
    """V2 and V3: what is delivered was offered."""
    offered = {m for e in history.of("accepted") for m, _ in e.details[0]}
    yield from (f"{e.details[1]} was never offered" for e in history.of("delivered") if e.details[1] not in offered)


def duplicates(history: History) -> Iterator[str]:
    """V4: of the deliveries of a message one is acknowledged, and every other names the fault that lost its claim."""
    acknowledged = {(e.details[0], m) for e in history.of("acknowledged") for m in e.details[1]}
    claims = defaultdict(list)  # member -> when it was claimed, and under which token
    for event in history.of("claimed"):
        for m, _ in event.details[1] if event.details[2] else ():
            claims[m].append((event.at_ms, event.details[0]))
    faults = history.faults()
    for event in history.of("delivered"):
        token, m = event.details[:2]
        if (token, m) in acknowledged:
            continue
        begun_ms = max(at_ms for at_ms, claimed in claims[m] if claimed == token and at_ms <= event.at_ms)
        until_ms = min((at_ms for at_ms, _ in claims[m] if at_ms > begun_ms), default=float("inf"))
        if not any(
            who in (event.who, SERVER) and at_ms <= until_ms and end_ms >= begun_ms for at_ms, end_ms, who, _ in faults
        ):
            yield f"{event.who} delivered {m.decode()} under {token} and did not acknowledge it, and no fault says why"


def moved_once(history: History) -> Iterator[str]:
    """What is in a stream came there once, and nowhere else: no fault excuses a copy."""
    moved = Counter(e.details[1] for e in history.of("moved"))
    yield from (f"{m.decode()} was moved {n} times" for m, n in moved.items() if n > 1)
    yield from (f"{e.details[1]} was moved and delivered" for e in history.of("delivered") if e.details[1] in moved)


def cancelled(history: History) -> Iterator[str]:
    """What a caller was told is cancelled is not delivered after that."""
    gone = set()
    for event in history.events:
        if event.what == "cancelled":
            gone.add(event.details[0])
        elif event.what in ("claimed", "moved"):
            taken = [m for m, _ in event.details[1]] if event.what == "claimed" else [event.details[1]]
            yield from (f"{m.decode()} was cancelled, and {event.what} after that" for m in taken if m in gone)


def never_early(history: History) -> Iterator[str]:
    """V5: on the server's clock, which a jump may have set back since the claim."""
    dues: dict[bytes, int] = {}
    claimed: dict[
        tuple[str, bytes], int
    ] = {}  # when a message was due as it was claimed: it may be rescheduled after that
    latest_ms = 0
    for event in history.events:
        if event.what == "accepted":
            dues.update(event.details[0])
        if event.what == "rescheduled":
            dues[event.details[0]] = event.details[1]
        if event.what == "claimed":
            latest_ms = max(latest_ms, event.details[3])
            for m, _ in event.details[1]:
                claimed.setdefault((event.details[0], m), dues.get(m, 0))
        if event.what == "moved" and event.details[2] < dues[event.details[1]]:
            yield f"{event.details[1].decode()} was moved early"
        if event.what == "delivered":
            token, m, _, server_ms = event.details
            if max(latest_ms, server_ms) < claimed.get((token, m), 0):
                yield f"{m.decode()} came {claimed[token, m] - server_ms} ms early"


def lateness(history: History) -> Iterator[str]:
    """V6: at once without faults, a wait's cap if a ring went unheard; after the last fault a lease and a recovery later."""
    faults = history.faults()
    unheard = any(True for _ in history.of("unheard ring"))
    jump_ms = max((abs(e.details[2]) for e in history.of("fault") if e.details[0] == "clock jump"), default=0)
    first = {}
    rescheduled = {e.details[0]: max(e.at_ms, e.details[2]) for e in history.of("rescheduled")}
    for event in history.events:
        if event.what in ("delivered", "moved"):
            first.setdefault(event.details[1], event.at_ms)
    for event in history.of("accepted"):
        for (m, _), due_at_ms in zip(event.details[0], event.details[2], strict=True):
            if m not in first:
                continue
            ends = [end_ms for at_ms, end_ms, *_ in faults if at_ms <= first[m]]
            from_ms = max(rescheduled.get(m, due_at_ms), event.at_ms, *ends, 0)
            allowed_ms = WORK_MS + (history.wait_ms_max if unheard or ends else 0)
            if ends:
                allowed_ms += history.lease_ms + RECOVERY_MS + jump_ms
            if first[m] - from_ms > allowed_ms:
                yield f"{m.decode()} came {first[m] - from_ms:.0f} ms late, and {allowed_ms:.0f} are allowed"


def fencing(history: History) -> Iterator[str]:
    """V7: a message is acknowledged once, after its delivery under that claim; each delivering claim is one attempt more."""
    acknowledged = Counter(m for e in history.of("acknowledged") for m in e.details[1])
    yield from (f"{m.decode()} was acknowledged {n} times" for m, n in acknowledged.items() if n > 1)
    delivered = set()
    for event in history.events:
        if event.what == "delivered":
            delivered.add(event.details[:2])
        if event.what == "acknowledged":
            token = event.details[0]
            missing = [m.decode() for m in event.details[1] if (token, m) not in delivered]
            yield from (f"{m} was acknowledged under {token} before it was delivered" for m in missing)
    attempts: dict[bytes, int] = {}
    for event in history.of("claimed"):
        for m, attempt in event.details[1]:
            if event.details[2] and (event.details[0], m) in delivered:
                if attempt <= attempts.get(m, 0):
                    yield f"{m.decode()} was claimed for attempt {attempt} after it was delivered in attempt {attempts[m]}"
                attempts[m] = attempt


def leases(history: History) -> Iterator[str]:
    """V7: nothing is started after the lease, unless the server's clock jumped."""
    if history.has_jumps():
        return
    claimed_ms: dict[str, float] = {}
    for event in history.events:
        if event.what == "claimed" and event.details[2]:
            claimed_ms[event.details[0]] = event.at_ms
        if event.what == "started":
            over_ms = event.at_ms - claimed_ms[event.details[0]] - history.lease_ms
            if over_ms >= 0:
                yield f"{event.who} began to deliver {over_ms:.0f} ms after the lease of {event.details[0]}"


def one_claim(history: History) -> Iterator[str]:
    """V9: a loop holds one claim and the next one at a time, also when the reply to the last one was lost."""
    if history.has_jumps():
        return
    for event in history.of("claimed"):
        if len(event.details[4]) > 1:
            yield f"{event.who} claimed {event.details[0]} while it held {event.details[4]}"


def endings(history: History) -> Iterator[str]:
    """V10: a loop ends when it is told to, holds nothing then, and says what it did (beside what it heard that it had moved)."""
    shown = Counter(e.who for e in history.of("delivered"))
    acknowledged = Counter(e.who for e in history.of("acknowledged") for _ in e.details[1])
    for event in history.of("ended"):
        how, answered, held, delivered, late_acks = event.details
        if how == "by itself":
            yield f"{event.who} ended without being told to"
        if how == "killed" or not answered or history.has_jumps():
            continue
        if held:
            yield f"{event.who} ended ({how}) and kept {held}"
        if how == "closed":
            continue
        if delivered + late_acks != shown[event.who]:
            yield f"{event.who} showed {shown[event.who]} messages and says {delivered} and {late_acks} late acks"
        if delivered > acknowledged[event.who]:
            yield f"{event.who} says {delivered} messages delivered and acknowledged {acknowledged[event.who]}"
