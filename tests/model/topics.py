"""Where messages go by their topics, in plain Python: the part of the reference that ``claim.lua`` has routes for."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.core.messages import decode_member

MESSAGE_ID_LENGTH = 22
BURST_MS = 100
SCREEN, STREAM, HELD, DEAD, LATER = "screen", "stream", "held", "dead", "later"

Entry = tuple[str, str, str, int, int, str]  # id, message, topic, due_ms, attempt, why it is dead


class Routing:
    """What a call names: routes, and the starts of later buckets."""

    def __init__(self, words: Sequence[Any]) -> None:
        self.all_to_screen, count = bool(words[0]), int(words[1])
        each = [words[2 + 4 * index : 6 + 4 * index] for index in range(count)]
        self.routes = {name: (bool(streams), int(expire), float(interval)) for name, streams, expire, interval in each}
        self.later = {int(start) for start in words[2 + 4 * count :]}


@dataclass
class Step:
    """What becomes of one message."""

    member: bytes
    score: int
    place: str = SCREEN
    name: str = ""
    topic: str = ""
    group: str = ""
    id: str = ""
    caller_id: str = ""
    message: str = ""
    due_ms: int = 0
    attempt: int = 0
    later_ms: int = 0
    later_member: bytes = b""


@dataclass
class Plan:
    """What becomes of some messages; ``missing`` is the status and what the caller has to name before it can go on."""

    steps: list[Step] = field(default_factory=list)
    missing: tuple[bytes, str] | None = None
    paces: dict[str, float] = field(default_factory=dict)

    def moved(self) -> list[Any]:
        dues: dict[str, list[int]] = {}
        for step in self.steps:
            if step.place == STREAM:
                dues.setdefault(step.name, []).append(step.due_ms)
        return [value for name, times in dues.items() for value in (name.encode(), times)]


@dataclass
class Topics:
    """Streams, dead letters, what is held, and since when a topic is paused. ``streams`` is by name of route."""

    names: set[str] = field(default_factory=set)
    streams: dict[str, list[Entry]] = field(default_factory=dict)
    dead: dict[str, list[Entry]] = field(default_factory=dict)
    held: dict[str, dict[bytes, int]] = field(default_factory=dict)
    pauses: dict[str, int] = field(default_factory=dict)
    paces: dict[str, float] = field(default_factory=dict)

    def plan(self, due: Sequence[tuple[bytes, int]], routing: Routing, now_ms: int) -> Plan:
        """Decide for each message; nothing is changed."""
        plan = Plan()
        for stored, score in due:
            step = read_step(stored, score)
            if not routing.all_to_screen or self.pauses or step.group:
                self._decide(plan, step, routing, now_ms)
            if plan.missing:
                break
            plan.steps.append(step)
        return plan

    def put_back(self, topic: str) -> dict[bytes, int]:
        """End a pause; returns what was held."""
        self.pauses.pop(topic, None)
        return self.held.pop(topic, {})

    def _decide(self, plan: Plan, step: Step, routing: Routing, now_ms: int) -> None:
        if step.name not in routing.routes:
            plan.missing = (b"ROUTE", step.name)
            return
        streams, expire_ms, interval_ms = routing.routes[step.name]
        step.place = STREAM if streams else SCREEN
        if step.topic in self.pauses:
            step.place = HELD
        elif expire_ms and now_ms - step.due_ms > expire_ms:
            step.place = DEAD
        elif interval_ms and step.member[MESSAGE_ID_LENGTH : MESSAGE_ID_LENGTH + 1] != b"r":
            paces = self.paces | plan.paces
            go_ms = max(paces.get(step.topic, 0.0), now_ms)
            if go_ms > now_ms + BURST_MS:
                step.place, step.later_ms = LATER, math.ceil(go_ms - BURST_MS)
                start = step.later_ms - step.later_ms % 600_000
                if start not in routing.later:
                    plan.missing = (b"LATER", str(start))
                    return
            plan.paces[step.topic] = go_ms + interval_ms

    def write(self, step: Step, attempt: int, now_ms: int) -> None:
        """Add an entry to a stream."""
        why = "expired" if step.place == DEAD else ""
        entry = (step.id, step.message, step.topic, step.due_ms, attempt, why)
        streams, name = (self.dead, step.topic) if step.place == DEAD else (self.streams, step.name)
        streams.setdefault(name, []).append(entry)


def read_step(stored: bytes, score: int) -> Step:
    """Say what a member of our format is about."""
    message = decode_member(stored)
    fields = json.loads(stored[MESSAGE_ID_LENGTH + 1 :]) if stored[MESSAGE_ID_LENGTH:][:1] == b"r" else {}
    group = fields.get("group", "")
    later = {"message": message.message, "topic": message.topic, "id": message.id, "due_ms": str(score)}
    return Step(
        stored,
        score,
        name=f"{message.topic}:{group}" if group else message.topic,
        topic=message.topic,
        group=group,
        id=message.id,
        caller_id=message.id if message.id != message.message_id or fields else "",
        message=message.message,
        due_ms=score if message.due_ms is None else message.due_ms,
        attempt=int(fields.get("attempt", 0)),
        later_member=stored[:MESSAGE_ID_LENGTH] + b"r" + json.dumps(later).encode(),
    )
