"""Where messages go by their topics, in plain Python: the part of the reference that ``claim.lua`` has routes for."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config import TopicSettings
from pipeline.core.messages import Message

MESSAGE_ID_LENGTH = 22
BURST_MS, BACKLOG_MS, LOOK_MS = 100, 1_000, 10
FIRST_TARGET = 14  # of the keys of a claim
SCREEN, STREAM, OUTBOX, RETRY, HELD, DEAD, BUCKET = "screen", "stream", "outbox", "retry", "held", "dead", "bucket"
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
    turn_of: str = ""  # the topic of which it was held


@dataclass
class Plan:
    """What becomes of some messages.

    ``turns`` are those that were held, by their topic, and ``steps`` those of the bucket. ``is_cut``: the target of the next one is
    not named. ``wanted``: what the next ones need. ``emptied`` are topics of which all that was held goes. ``go_ms`` is when the
    next message of a topic with a limit may go.
    """

    turns: dict[str, list[Step]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    is_cut: bool = False
    wanted: dict[tuple[str, str], None] = field(default_factory=dict)
    emptied: set[str] = field(default_factory=set)
    go_ms: dict[str, float] = field(default_factory=dict)

    def all_steps(self) -> list[Step]:
        return [*(step for steps in self.turns.values() for step in steps), *self.steps]

    def moved(self) -> list[bytes]:
        moved, last = [], b""
        for step in self.all_steps():
            if step.place in IN_STREAMS:
                rest = f":{step.topic}:{step.group}:".encode() + step.member[:7]
                moved.append(str(step.due_ms).encode() + (b"" if rest == last else rest))
                last = rest
        return moved


@dataclass
class Topics:
    """Streams, dead letters, what is held, and since when a topic is paused. ``streams`` is by topic, or ``<topic>:<group>``.

    ``held_topics`` says of topics that are not paused when the next message that is held of it may go.
    """

    names: set[str] = field(default_factory=set)
    streams: dict[str, list[Entry]] = field(default_factory=dict)
    outboxes: dict[str, list[Entry]] = field(default_factory=dict)
    dead: dict[str, list[Entry]] = field(default_factory=dict)
    held: dict[str, dict[bytes, int]] = field(default_factory=dict)
    held_topics: dict[str, int] = field(default_factory=dict)
    pauses: dict[str, int] = field(default_factory=dict)
    rate_limits: dict[str, float] = field(default_factory=dict)
    settings: dict[str, TopicSettings] = field(default_factory=dict)

    def settings_of(self, topic: str) -> TopicSettings:
        return self.settings.get(topic) or self.settings.get("*") or TopicSettings(sink="screen")

    def take_turns(self, naming: Naming, now_ms: int, limit: int) -> Plan:
        """Decide what may go of what is held; nothing is changed."""
        plan = Plan()
        due = sorted((at_ms, topic) for topic, at_ms in self.held_topics.items() if at_ms <= now_ms)
        for _, topic in due:
            left = limit - sum(map(len, plan.turns.values()))
            if left == 0:
                break
            turn = plan.turns.setdefault(topic, [])
            held = self.held.get(topic, {})
            rows = sorted((score, stored) for stored, score in held.items() if score <= now_ms)
            for score, stored in rows[:left]:
                step = self._decide(read_step(stored, score), naming, now_ms, plan, topic)
                if step.place == HELD:
                    break
                self._count_rate(step, plan.go_ms, naming.shards, now_ms)
                turn.append(step)
            else:
                if len(rows) < left:
                    plan.emptied.add(topic)
        return plan

    def plan(self, plan: Plan, due: Sequence[tuple[bytes, int]], naming: Naming, now_ms: int) -> None:
        """Decide for each message of the bucket; nothing is changed."""
        for stored, score in due:
            step = self._decide(read_step(stored, score), naming, now_ms, plan)
            if step.place != SCREEN and (step.place, step.name) not in naming.targets:
                plan.is_cut = True
                break
            self._count_rate(step, plan.go_ms, naming.shards, now_ms)
            plan.steps.append(step)

    def look_ahead(self, plan: Plan, behind: Sequence[tuple[bytes, int]], naming: Naming, now_ms: int) -> None:
        """Say what the messages behind a plan need."""
        ahead = Plan(emptied=plan.emptied, go_ms=dict(plan.go_ms))
        for stored, score in behind:
            step = self._decide(read_step(stored, score), naming, now_ms, ahead)
            if step.place == SCREEN or (step.place, step.name) in naming.targets:
                self._count_rate(step, ahead.go_ms, naming.shards, now_ms)
            if step.place != SCREEN:
                plan.wanted[step.place, step.name] = None

    def note_turns(self, plan: Plan, naming: Naming, now_ms: int) -> None:
        """Note when something may go next of the topics that a plan is about; it was carried out."""
        for topic in {*plan.turns, *(step.topic for step in plan.steps if step.place == HELD)}:
            go_ms = self._go_ms(topic, naming.shards, now_ms, plan.go_ms)
            if topic in self.pauses or topic not in self.held:
                self.held_topics.pop(topic, None)
            else:
                next_ms = now_ms if go_ms <= now_ms else max(math.ceil(go_ms), now_ms + LOOK_MS)
                self.held_topics[topic] = max(next_ms, min(self.held[topic].values()))
        self.rate_limits |= {topic: round(go_ms, 3) for topic, go_ms in plan.go_ms.items()}

    def is_plain(self) -> bool:
        """Whether the topic of a message does not matter."""
        of_all = self.settings_of("*")
        has_own = bool(self.settings.keys() - {"*"})
        return not (has_own or self.pauses or _place_of(of_all) != SCREEN or of_all.max_rate or of_all.expire_after_sec)

    def resume(self, topic: str) -> int:
        """End a pause; returns how many messages are held."""
        self.pauses.pop(topic, None)
        if topic in self.held:
            self.held_topics[topic] = 0
        return len(self.held.get(topic, {}))

    def _decide(self, step: Step, naming: Naming, now_ms: int, plan: Plan, turn_of: str = "") -> Step:
        settings = self.settings_of(step.topic)
        step.place, step.name, step.turn_of = SCREEN, step.topic, turn_of
        if step.topic in self.pauses:
            step.place = HELD
        elif step.group and not turn_of and (RETRY, f"{step.topic}:{step.group}") not in naming.targets:
            # Whether the group is there can be seen only when its key is named, and that comes before everything else.
            step.place, step.name = RETRY, f"{step.topic}:{step.group}"
        elif settings.expire_after_sec and now_ms - step.due_ms > settings.expire_after_sec * 1000:
            step.place = DEAD
        elif not is_rescheduled(step.member) and (
            (not turn_of and step.topic in self.held_topics.keys() - plan.emptied)
            or self._go_ms(step.topic, naming.shards, now_ms, plan.go_ms) > now_ms
        ):
            step.place = HELD
        elif step.group:
            step.place, step.name = RETRY, f"{step.topic}:{step.group}"
        else:
            step.place = _place_of(settings)
            step.name = KAFKA if step.place == OUTBOX else step.topic
        return step

    def _go_ms(self, topic: str, shards: int, now_ms: int, go_ms: dict[str, float]) -> float:
        """Return when the next message of a topic may go, and note it if it has a rate limit."""
        max_rate = self.settings_of(topic).max_rate
        if not max_rate:
            return 0
        if topic not in go_ms:
            interval_ms = 1000 * shards / max_rate
            reserve_ms = max(BURST_MS, BACKLOG_MS - interval_ms) if topic in self.held_topics else BURST_MS
            go_ms[topic] = min(max(self.rate_limits.get(topic, 0.0), now_ms - reserve_ms), now_ms + interval_ms)
        return go_ms[topic]

    def _count_rate(self, step: Step, go_ms: dict[str, float], shards: int, now_ms: int) -> None:
        max_rate = self.settings_of(step.topic).max_rate
        if max_rate and step.place not in (HELD, DEAD) and not is_rescheduled(step.member):
            go_ms[step.topic] += 1000 * shards / max_rate

    def write(self, step: Step, attempt: int, now_ms: int) -> None:
        """Add an entry to a stream."""
        why = "expired" if step.place == DEAD else ""
        entry = (step.id, step.message, step.topic, step.due_ms, attempt, why)
        streams = {DEAD: self.dead, OUTBOX: self.outboxes}.get(step.place, self.streams)
        streams.setdefault(step.topic if step.place == DEAD else step.name, []).append(entry)


def _place_of(settings: TopicSettings) -> str:
    return STREAM if settings.webhook else {"stream": STREAM, "kafka": OUTBOX}.get(settings.sink, SCREEN)


def is_rescheduled(stored: bytes) -> bool:
    return stored[MESSAGE_ID_LENGTH:][:1] == b"r"


def read_step(stored: bytes, score: int) -> Step:
    """Return what a member of our format says."""
    message = Message.from_member(stored, score, attempt=0)
    return Step(
        stored,
        score,
        topic=message.topic,
        group=message.group,
        id=message.id,
        idempotency_key=message.id if message.id != message.message_id or is_rescheduled(stored) else "",
        message=message.body,
        due_ms=message.due_ms,
        attempt=message.attempt,
    )
