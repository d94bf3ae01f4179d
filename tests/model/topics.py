"""Where messages go by their topics, in plain Python: the part of the reference that ``claim.lua`` has routes for."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config import TopicSettings
from pipeline.core.messages import Message

MESSAGE_ID_LENGTH = 22
BURST_MS = 100
FIRST_TARGET = 12  # of the keys of a claim
SCREEN, STREAM, OUTBOX, RETRY, HELD, DEAD, LATER = "screen", "stream", "outbox", "retry", "held", "dead", "bucket"
IN_STREAMS = (STREAM, OUTBOX, RETRY)
KAFKA = "kafka"  # the name of the outbox, which has the messages of all topics

Entry = tuple[str, str, str, int, int, str]  # id, message, topic, due_ms, attempt, why it is dead


class Naming:
    """What a call says beside its limits: how many shards there are, whether to look ahead, and the targets that it gives."""

    def __init__(self, keys: Sequence[Any], shards: int, look_ahead: int) -> None:
        self._shard = keys[0].removesuffix("buckets")
        self.shards, self.look_ahead = shards, look_ahead
        given = [key.decode().removeprefix(self._shard) for key in keys[FIRST_TARGET:]]
        self.targets = {(key.partition(":")[0], key.partition(":")[2]) for key in given}

    def keys(self, targets: Iterable[tuple[str, str]]) -> list[bytes]:
        """Return the keys of targets."""
        return [f"{self._shard}{place}:{name}".encode() for place, name in targets]


@dataclass
class Step:
    """What becomes of one message."""

    member: bytes
    score: int
    place: str = SCREEN
    name: str = ""  # of its target: kind is the place
    topic: str = ""
    group: str = ""
    id: str = ""
    idempotency_key: str = ""
    message: str = ""
    due_ms: int = 0
    attempt: int = 0
    later_ms: int = 0
    later_member: bytes = b""


@dataclass
class Plan:
    """What becomes of some messages.

    ``is_cut``: the target of the next one is not named. ``wanted``: what the next ones need.
    """

    steps: list[Step] = field(default_factory=list)
    is_cut: bool = False
    wanted: dict[tuple[str, str], None] = field(default_factory=dict)
    rate_limits: dict[str, float] = field(default_factory=dict)

    def moved(self) -> list[bytes]:
        moved, last = [], b""
        for step in self.steps:
            if step.place in IN_STREAMS:
                rest = f":{step.topic}:{step.group}:".encode() + step.member[:7]
                moved.append(str(step.due_ms).encode() + (b"" if rest == last else rest))
                last = rest
        return moved


@dataclass
class Topics:
    """Streams, dead letters, what is held, and since when a topic is paused. ``streams`` is by topic, or ``<topic>:<group>``."""

    names: set[str] = field(default_factory=set)
    streams: dict[str, list[Entry]] = field(default_factory=dict)
    outboxes: dict[str, list[Entry]] = field(default_factory=dict)
    dead: dict[str, list[Entry]] = field(default_factory=dict)
    held: dict[str, dict[bytes, int]] = field(default_factory=dict)
    pauses: dict[str, int] = field(default_factory=dict)
    rate_limits: dict[str, float] = field(default_factory=dict)
    settings: dict[str, TopicSettings] = field(default_factory=dict)

    def settings_of(self, topic: str) -> TopicSettings:
        return self.settings.get(topic) or self.settings.get("*") or TopicSettings(sink="screen")

    def plan(self, due: Sequence[tuple[bytes, int]], naming: Naming, now_ms: int) -> Plan:
        """Decide for each message; nothing is changed."""
        plan = Plan()
        for stored, score in due:
            step = self._decide(read_step(stored, score), naming, now_ms, plan.rate_limits)
            if step.place != SCREEN and (step.place, step.name) not in naming.targets:
                plan.is_cut = True
                break
            self._count_rate(step, plan.rate_limits, naming.shards, now_ms)
            plan.steps.append(step)
        return plan

    def look_ahead(self, plan: Plan, behind: Sequence[tuple[bytes, int]], naming: Naming, now_ms: int) -> None:
        """Say what the messages behind a plan need."""
        rate_limits = dict(plan.rate_limits)
        for stored, score in behind:
            step = self._decide(read_step(stored, score), naming, now_ms, rate_limits)
            if step.place == SCREEN or (step.place, step.name) in naming.targets:
                self._count_rate(step, rate_limits, naming.shards, now_ms)
            if step.place != SCREEN:
                plan.wanted[step.place, step.name] = None

    def is_plain(self) -> bool:
        """Whether the topic of a message does not matter."""
        of_all = self.settings_of("*")
        has_own = bool(self.settings.keys() - {"*"})
        return not (has_own or self.pauses or _place_of(of_all) != SCREEN or of_all.max_rate or of_all.expire_after_sec)

    def put_back(self, topic: str) -> dict[bytes, int]:
        """End a pause; returns what was held."""
        self.pauses.pop(topic, None)
        return self.held.pop(topic, {})

    def _decide(self, step: Step, naming: Naming, now_ms: int, rate_limits: dict[str, float]) -> Step:
        settings = self.settings_of(step.topic)
        step.place, step.name = SCREEN, step.topic
        if step.topic in self.pauses:
            step.place = HELD
        elif step.group and (RETRY, f"{step.topic}:{step.group}") not in naming.targets:
            # Whether the group is there can be seen only when its key is named, and that comes before everything else.
            step.place, step.name = RETRY, f"{step.topic}:{step.group}"
        elif settings.expire_after_sec and now_ms - step.due_ms > settings.expire_after_sec * 1000:
            step.place = DEAD
        elif (go_ms := self._go_ms(step, rate_limits, now_ms)) is not None and go_ms > now_ms + BURST_MS:
            step.later_ms = math.ceil(go_ms - BURST_MS)
            step.place, step.name = LATER, str(step.later_ms - step.later_ms % 600_000)
        elif step.group:
            step.place, step.name = RETRY, f"{step.topic}:{step.group}"
        else:
            step.place = _place_of(settings)
            step.name = KAFKA if step.place == OUTBOX else step.topic
        return step

    def _go_ms(self, step: Step, rate_limits: dict[str, float], now_ms: int) -> float | None:
        """Return when a message may go because of a rate limit, None where there is none."""
        if not self.settings_of(step.topic).max_rate or step.member[MESSAGE_ID_LENGTH : MESSAGE_ID_LENGTH + 1] == b"r":
            return None
        return max((self.rate_limits | rate_limits).get(step.topic, 0.0), now_ms)

    def _count_rate(self, step: Step, rate_limits: dict[str, float], shards: int, now_ms: int) -> None:
        go_ms = self._go_ms(step, rate_limits, now_ms)
        if go_ms is not None and step.place not in (HELD, DEAD):
            rate_limits[step.topic] = go_ms + 1000 * shards / self.settings_of(step.topic).max_rate

    def write(self, step: Step, attempt: int, now_ms: int) -> None:
        """Add an entry to a stream."""
        why = "expired" if step.place == DEAD else ""
        entry = (step.id, step.message, step.topic, step.due_ms, attempt, why)
        streams = {DEAD: self.dead, OUTBOX: self.outboxes}.get(step.place, self.streams)
        streams.setdefault(step.topic if step.place == DEAD else step.name, []).append(entry)


def _place_of(settings: TopicSettings) -> str:
    return STREAM if settings.webhook else {"stream": STREAM, "kafka": OUTBOX}.get(settings.sink, SCREEN)


def read_step(stored: bytes, score: int) -> Step:
    """Return what a member of our format says."""
    message = Message.from_member(stored, score, attempt=0)
    is_rescheduled = stored[MESSAGE_ID_LENGTH:][:1] == b"r"
    later = {"message": message.body, "topic": message.topic, "id": message.id, "due_ms": str(score)}
    return Step(
        stored,
        score,
        topic=message.topic,
        group=message.group,
        id=message.id,
        idempotency_key=message.id if message.id != message.message_id or is_rescheduled else "",
        message=message.body,
        due_ms=message.due_ms,
        attempt=message.attempt,
        later_member=stored[:MESSAGE_ID_LENGTH] + b"r" + json.dumps(later).encode(),
    )
