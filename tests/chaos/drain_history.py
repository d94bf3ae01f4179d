"""What happened to messages and drain loops, and whether the promises were kept.

The checks see nothing but this: what was stored, what came out of the loops' standard output, what the server was asked and said,
what it counted, and which faults there were. Each answers with sentences, none if all is well.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.chaos.drain_log import Claim, Log

KILLED, STOPPED, SERVER_KILLED, UNREACHABLE = "killed", "stopped", "server killed", "unreachable"
WAITS, AGAIN, ENDS = "waiting for Redis", "Redis answers again", "stopped while Redis does not answer"
SUMMARY = re.compile(r"delivered ([\d,]+) messages?\b.*; ([\d,]+) late acks, ([\d,]+) reclaimed$")


@dataclass(frozen=True)
class Interruption:
    """What may cost a claim: when it began and ended, in epoch ms, and whom it hit; no loop means all of them."""

    what: str
    begun_ms: float
    ended_ms: float = float("inf")
    loop: int | None = None

    def may_end(self, claim: Claim) -> bool:
        """Tell whether it hit the holder of a claim during the lease."""
        hits = self.loop in (None, claim.loop)
        return hits and self.begun_ms <= claim.until_ms and self.ended_ms >= claim.begun_ms


@dataclass(frozen=True)
class Shown:
    """A line of a loop's standard output, and when it was read."""

    loop: int
    read_ms: int
    record: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.record["id"])

    @property
    def attempt(self) -> int:
        return int(self.record["attempt"])

    @property
    def key(self) -> tuple[int, str, int]:
        """What names the claim under which it was shown."""
        return self.loop, self.id, self.attempt


@dataclass(frozen=True)
class LoopExit:
    """How a loop ended: its exit code, negative for a signal, and its lines on standard error."""

    code: int
    said: list[str]

    def outages(self) -> list[str]:
        """What it said about outages, in order, by the words above."""
        return [
            words
            for line in self.said
            for words in (WAITS, AGAIN, ENDS)
            if re.search(f"drain: (warning: )?{words}", line)
        ]


@dataclass
class History:
    """A run from an empty server until everything is quiet. ``sent`` has what each message must be shown as, by id;
    ``left`` what the server holds at the end and should not."""

    sent: dict[str, dict[str, Any]] = field(default_factory=dict)
    shown: list[Shown] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    interruptions: list[Interruption] = field(default_factory=list)
    exits: dict[int, LoopExit] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def seen(self) -> Counter[str]:
        """Count what must not be missing from a run that is to prove something about it."""
        found = Counter(interruption.what for interruption in self.interruptions)
        found["redelivered"] = len(self.shown) - len({shown.id for shown in self.shown})
        found["late"] = self.log.late
        found["taken back"] = self.log.taken_back
        found["scripts forgotten"] = self.log.forgotten
        found["outages"] = sum(loop_exit.outages().count(WAITS) for loop_exit in self.exits.values())
        return found


def check(history: History) -> list[str]:
    """Say every promise that was broken."""
    checks = (nothing_lost, nothing_invented, repeats, claims, never_early, fencing, accounting, told, exits)
    return [f"{one.__name__}: {said}" for one in checks for said in one(history)]


def nothing_lost(history: History) -> Iterator[str]:
    """V1: what was stored is shown, and nothing of it is left."""
    shown = {shown.id for shown in history.shown}
    yield from (f"{message_id} was never shown" for message_id in history.sent if message_id not in shown)
    yield from (f"{key} is left on the server" for key in history.left)


def nothing_invented(history: History) -> Iterator[str]:
    """V2: what is shown was stored, and is the same."""
    for shown in history.shown:
        sent = history.sent.get(shown.id)
        seen = {name: shown.record.get(name) for name in sent or {}}
        if sent is None or seen != sent:
            yield f"{shown.id} was shown as {seen} and sent as {sent}"


def repeats(history: History) -> Iterator[str]:
    """V4: what was shown and not acknowledged may be shown again, and names the fault that ended its claim."""
    holders: dict[tuple[int, str, int], Claim | None] = {}  # None if it was acknowledged
    for claim in history.log.claims.values():
        for place, row in enumerate(claim.rows):
            holders[claim.loop, row.id, row.attempt] = None if place < claim.acknowledged else claim
    for shown in history.shown:
        if shown.key not in holders:
            yield f"{shown.id} was shown by {shown.loop} in attempt {shown.attempt}, and it had no such claim"
            continue
        unfinished = holders[shown.key]
        if unfinished and not explained(history, unfinished):
            yield f"{shown.id} was shown and not acknowledged under {unfinished.token}, and no fault says why"
    copies = Counter((shown.id, shown.attempt) for shown in history.shown)
    yield from (f"{one} was shown {n} times in attempt {attempt}" for (one, attempt), n in copies.items() if n > 1)


def claims(history: History) -> Iterator[str]:
    """V4 and V6: a claim is acknowledged or given back by its holder, or names the fault that made others wait for its lease."""
    for claim in history.log.claims.values():
        if not claim.is_finished and not explained(history, claim):
            yield f"{claim.loop} did not finish {claim.token}, and no fault says why"


def explained(history: History, claim: Claim) -> bool:
    return any(interruption.may_end(claim) for interruption in history.interruptions)


def never_early(history: History) -> Iterator[str]:
    """V5: by the server's clock and by that of this machine, which are one."""
    for claim in history.log.claims.values():
        early = [row.id for row in claim.rows if row.due_ms > claim.begun_ms]
        yield from (f"{message_id} was claimed early under {claim.token}" for message_id in early)
    for shown in history.shown:
        if min(shown.record["delivered_ms"], shown.read_ms) < shown.record["due_ms"]:
            yield f"{shown.id} came early: {shown.record}, read at {shown.read_ms}"


def fencing(history: History) -> Iterator[str]:
    """V7: a message is acknowledged once, after it was shown under that claim; who gets it later is told of one attempt more."""
    shown = {shown.key for shown in history.shown}
    acknowledged: dict[str, list[str]] = defaultdict(list)
    last: dict[str, int] = {}
    for claim in sorted(history.log.claims.values(), key=lambda claim: claim.begun_ms):
        for row in claim.rows[: claim.acknowledged]:
            acknowledged[row.id].append(claim.token)
            if (claim.loop, row.id, row.attempt) not in shown:
                yield f"{row.id} was acknowledged under {claim.token} and never shown by {claim.loop}"
        for row in claim.rows:
            if (claim.loop, row.id, row.attempt) in shown:
                if row.attempt <= last.get(row.id, 0):
                    yield f"{row.id} was claimed for attempt {row.attempt} after it was shown in attempt {last[row.id]}"
                last[row.id] = row.attempt
    for message_id, tokens in acknowledged.items():
        if len(tokens) > 1:
            yield f"{message_id} was acknowledged under {tokens}"


def accounting(history: History) -> Iterator[str]:
    """V8: the server counted what happened; a call of which nobody knows whether it was executed may count or not."""
    log = history.log
    bounds = {
        "stored": (len(history.sent), 0),
        "delivered": (len(history.sent), 0),
        "late_acks": (log.late, log.unknown["ack"]),
        "reclaimed": (log.taken_back, len(history.sent) if log.unknown["release"] else 0),
    }
    for name, (least, unknown) in bounds.items():
        counted = history.counters.get(name, 0)
        if not least <= counted <= least + unknown:
            yield f"the server counted {counted} {name}, and {least} to {least + unknown} would be right"


def told(history: History) -> Iterator[str]:
    """V10: a loop that can't reach the server says so once, and when it can again."""
    for loop, loop_exit in history.exits.items():
        said = loop_exit.outages()
        if any(first == second for first, second in pairwise([AGAIN, *said])):
            yield f"{loop} says {said}, where each outage has a beginning and an end"
        if loop_exit.code == 0 and said and said[-1] == WAITS:
            yield f"{loop} never said that Redis answers again"
        if loop_exit.code == 0 and history.log.failed[loop] and not said:
            yield f"{loop} had {history.log.failed[loop]} calls that failed, and said nothing"


def exits(history: History) -> Iterator[str]:
    """V10: a loop ends only by a kill or with 0, and then its last line is right."""
    killed = {interruption.loop for interruption in history.interruptions if interruption.what == KILLED}
    shown = Counter(shown.loop for shown in history.shown)
    for loop, loop_exit in history.exits.items():
        if loop in killed:
            continue
        summary = SUMMARY.search(loop_exit.said[-1]) if loop_exit.said else None
        if loop_exit.code != 0 or summary is None:
            yield f"{loop} ended with {loop_exit.code}: {loop_exit.said}"
            continue
        delivered, late_acks, _ = (int(text.replace(",", "")) for text in summary.groups())
        if delivered + late_acks != shown[loop] and ENDS not in loop_exit.outages():
            yield f"{loop} showed {shown[loop]} messages and says {delivered} delivered, {late_acks} late acks"
        acknowledged = sum(claim.acknowledged for claim in history.log.claims.values() if claim.loop == loop)
        if delivered != acknowledged and not history.log.unknown["ack"] and ENDS not in loop_exit.outages():
            yield f"{loop} says {delivered} messages delivered and acknowledged {acknowledged}"
