"""Forwarders of one outbox, on a real server and on the model of Kafka, driven step by step in one thread.

``Process`` is a drain loop that forwards. At any point of a step it can end, see an error, or stand still while others go on: then
it goes on as one that does not know that it has been replaced.
"""

import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest
import redis

from pipeline.core.errors import PipelineError
from pipeline.core.messages import Message
from pipeline.kafka import sender
from pipeline.kafka.cluster import KafkaAway, TopicGone
from pipeline.kafka.forwarder import Forwarder
from pipeline.store import scripts
from pipeline.store.keys import Keys
from pipeline.store.outbox import Outbox
from tests.clock import ManualClock
from tests.kafka.model import Cluster, Consumer, Crashed, Faults, Kafka, Producer
from tests.model.snapshot import entry_of

TOPICS = ("a", "b", "late", "gone")  # one comes into being while messages are on their way, one goes
SMALL, LARGE, HUGE, ENDLESS = b"s", b"l" * 6, b"h" * 12, b"e" * 20  # two that are large are too large together
FIRST_ID = "99999999999999-1"  # beyond every clock, so that a server that was set back gives the same ids again
STEPS_MAX = 300
PROCESSES_MAX = 3
WORLD, SERVERS = "duetime-world", {"bootstrap.servers": "model"}


class Link:
    """A client of the server, of one process, that loses calls and answers."""

    def __init__(self, client: "redis.Redis", faults: Faults) -> None:
        self._client = client
        self._faults = faults
        self.is_cut = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._client, name)

        def asked(*args: Any, **options: Any) -> Any:
            options.pop("block", None)  # nothing would come meanwhile
            return self._ask(partial(call, *args, **options))

        return self._pipeline if name == "pipeline" else asked

    def _pipeline(self, **options: Any) -> Any:
        pipeline: Any = self._client.pipeline(**options)
        pipeline.execute = partial(self._ask, pipeline.execute)
        return pipeline

    def _ask(self, call: Callable[[], Any]) -> Any:
        if self.is_cut or self._faults.at("redis"):
            self.is_cut = False
            raise redis.exceptions.ConnectionError("unheard")
        found = call()
        if self._faults.at("redis done"):
            raise redis.exceptions.ConnectionError("unanswered")
        return found


class Tally:
    """What forwarders counted; see ``Counts``."""

    def __init__(self) -> None:
        self.stuck_partitions: list[str] = []
        self.forwarded = self.refused = self.errors = 0

    def count_forwarded(self, arrived_ms: Any, at_ms: int) -> None:
        self.forwarded += len(arrived_ms)

    def count_refused(self) -> None:
        self.refused += 1

    def count_error(self, error: Exception) -> None:
        self.errors += 1


@dataclass
class Process:
    """A loop that forwards. ``is_busy`` while a step of it is under way."""

    forwarder: Forwarder
    outbox: Outbox
    link: Link
    is_busy: bool = False


@dataclass(frozen=True)
class Sent:
    """A message that came due."""

    name: str
    topic: str
    body: bytes
    entry_id: str


@dataclass
class Snapshot:
    """What the server had at some time, when so many messages had come due."""

    sent: int
    values: dict[bytes, Any]


class World:
    """All of it. ``admin`` is a client that may do everything and never fails, ``user`` what loops have."""

    def __init__(
        self, admin: "redis.Redis", user: "redis.Redis", seed: int, exactly_once: bool, patch: pytest.MonkeyPatch
    ) -> None:
        self.random = Random(seed)
        self.faults = Faults(self.random, meanwhile=self._meanwhile)
        self.kafka = Kafka(self.faults, {*TOPICS} - {"late"})
        for client in (Producer, Consumer, Cluster):
            patch.setattr(sender, client.__name__, partial(client, self.kafka))
        self.admin, self._user = admin, user
        self.keys = Keys(f"sim-{uuid.uuid4().hex}")
        self.exactly_once = exactly_once
        self.scripts = scripts.Scripts()
        self.tally = Tally()
        self.processes: list[Process] = []
        self.sent: list[Sent] = []
        self.kinds: tuple[bytes, ...] = (SMALL,) * 7 + (LARGE,) * 3 + (HUGE, ENDLESS)
        self.forgiven: set[str] = set()  # what Redis lost, and dead letters that it lost
        self.repeated: set[str] = set()  # what Redis had again
        self.snapshots: list[Snapshot] = []
        self._names = 0
        self._depth = 0

    def start(self, batch: int = 0) -> Process:
        """Start a loop."""
        self._names += 1
        link = Link(self._user, self.faults)
        outbox = Outbox(link, self.keys, f"loop{self._names}", 600_000, self.scripts)
        opening = partial(sender.KafkaSender, SERVERS, WORLD, str, self.exactly_once, 1_000, "positions")
        size = batch or self.random.randint(1, 6)
        forwarder = Forwarder(outbox, opening, size, 1.0, ManualClock(), self.random.random, self.tally)
        self.processes.append(Process(forwarder, outbox, link))
        return self.processes[-1]

    def add(self, topic: str = "", body: bytes = b"") -> str:
        """Let a message come due; returns its name."""
        topic, body = topic or self.random.choice(TOPICS), body or self.random.choice(self.kinds)
        name = f"m{len(self.sent)}-{uuid.UUID(int=self.random.getrandbits(128)).hex[:4]}"
        fields: dict[Any, Any] = {"id": name, "message": body, "topic": topic, "due_ms": 1, "attempt": 1}
        if len(self.sent) % 2:  # the other form: as it was scheduled
            fields = {1: Message(1, body.decode(), topic, name).to_member(f"tokenoftwelve_{len(self.sent):08x}")}
        at = "*" if self.admin.exists(self.keys.outbox()) else FIRST_ID
        self.sent.append(Sent(name, topic, body, self.admin.xadd(self.keys.outbox(), fields, id=at).decode()))
        return name

    def step(self, process: Process) -> float | None:
        """Let a loop take one step, as ``Forwarder.run`` does; None if it failed or ended."""
        if process.is_busy:
            return None
        process.is_busy = True
        try:
            try:
                return process.forwarder.step()
            except (KafkaAway, TopicGone, PipelineError):
                process.forwarder._leave()
        except Crashed:
            self.processes = [other for other in self.processes if other is not process]
        finally:
            process.is_busy = False
        return None

    def take_over(self) -> None:
        """Let another loop do all that is left, while the others stand still."""
        self.end_lease()
        other = self.start()
        for _ in range(STEPS_MAX):
            self.step(other)
            if other.forwarder.is_done():
                return
        raise AssertionError("something stays in the outbox")

    def end_lease(self) -> None:
        """Let the time of the lease be over."""
        self.admin.delete(self.keys.forwarder())

    def act(self) -> None:
        """Do something that happens in such a world."""
        drawn = self.random.random()
        if drawn < 0.3:
            for _ in range(self.random.randint(1, 6)):
                self.add()
        elif drawn < 0.8:
            self._step_any()
        elif drawn < 0.9:
            self.end_lease()
        elif drawn < 0.93:
            self.kafka.topics.add("late")
        elif drawn < 0.95:
            self.kafka.topics.discard("gone")
        elif drawn < 0.98:
            self._keep_any()
        elif self.exactly_once and self.sent and self._depth == 0:
            self._set_back_or_note()

    def finish(self) -> None:
        """After the last fault, let one fresh loop do what is left; it must not take for ever."""
        self.faults.share, self.faults.strike_at = 0.0, -1
        if not self.admin.exists(self.keys.outbox()):
            return
        self.take_over()
        for process in self.processes:  # those that were replaced do not know it yet
            self.step(process)
        self.check()
        self.admin.delete(*self._all_keys())

    def dead(self) -> Counter[str]:
        """Return the dead letters, by the name of the message."""
        found = [fields for topic in TOPICS for _, fields in self.admin.xrange(self.keys.dead(topic))]
        return Counter(fields[b"id"].decode() for fields in found)

    def check(self) -> None:
        """Check the promise."""
        written, dead = Counter(name for _, name in self.kafka.log), self.dead()
        for sent in self.sent:
            found = (written[sent.name], dead[sent.name])
            is_refused = sent.body in (HUGE, ENDLESS)
            if sent.name in self.repeated:  # but for a dead letter that Redis lost
                assert sum(found) >= (sent.name not in self.forgiven), f"{sent} is lost"
            elif self.exactly_once and sent.name in self.forgiven:
                assert sum(found) <= 1, f"{sent} is there {found} times"
            elif self.exactly_once:
                assert sum(found) == 1, f"{sent} is there {found} times"
            else:
                assert sum(found) >= 1, f"{sent} is lost"
            assert not (is_refused and written[sent.name]), f"{sent} can't have been written"
            is_fine = not is_refused and sent.topic in ("a", "b")
            assert not (is_fine and dead[sent.name]), f"{sent} was refused without reason"
        if self.exactly_once or {*self.kinds} == {SMALL}:
            self._check_order()

    def _check_order(self) -> None:
        number_of = {sent.name: number for number, sent in enumerate(self.sent)}
        # Without transactions, one that was replaced may still write what the other one has made a dead letter of.
        late = set() if self.exactly_once else {*self.dead()}
        for topic in TOPICS:
            names = dict.fromkeys(name for found, name in self.kafka.log if found == topic and name not in late)
            numbers = [number_of[name] for name in names if name not in self.repeated]
            assert numbers == sorted(numbers), f"{topic} has {[*names]}"

    def _all_keys(self) -> list[bytes]:
        return list(self.admin.keys(f"{{{self.keys.namespace}:0}}*"))

    def _step_any(self) -> None:
        idle = [process for process in self.processes if not process.is_busy]
        if len(self.processes) < PROCESSES_MAX and (not idle or self.random.random() < 0.2):
            idle = [self.start()]
        if idle:
            self.step(self.random.choice(idle))

    def _keep_any(self) -> None:
        if self.processes:  # also of one that is busy: another thread does it
            share, self.faults.share = self.faults.share, 0.0
            self.random.choice(self.processes).forwarder.keep()
            self.faults.share = share

    def _meanwhile(self) -> None:
        if self._depth > 1:
            return
        self._depth += 1
        try:
            if self.random.random() < 0.7:
                self.end_lease()
            for _ in range(self.random.randint(1, 6)):
                self.act()
        finally:
            self._depth -= 1

    def _set_back_or_note(self) -> None:
        """Note what the server has, or set it back to that: it starts again without its last writes."""
        if not self.snapshots or self.random.random() < 0.5:
            self.snapshots.append(self.note())
        else:
            self.set_back(self.snapshots.pop())

    def note(self) -> Snapshot:
        """Return what the server has."""
        self.end_lease()
        return Snapshot(len(self.sent), {key: self.admin.dump(key) for key in self._all_keys()})

    def set_back(self, snapshot: Snapshot) -> None:
        """Set the server back.

        Somebody has taken over before the next message comes due: an id that this one got before would count as written. And of
        dead letters that the server lost, Kafka's position says that they are done: they are forgiven.
        """
        dead_before = self.dead()
        self.admin.delete(*self._all_keys())
        for key, value in snapshot.values.items():
            self.admin.restore(key, 0, value)
        self.forgiven |= {sent.name for sent in self.sent[snapshot.sent :]} | {*(dead_before - self.dead())}
        there = self.admin.xrange(self.keys.outbox())
        self.repeated |= {entry_of(fields)[0] for _, fields in there if fields.get(b"id") != b""}
        for process in self.processes:
            process.link.is_cut = True
        share, self.faults.share = self.faults.share, 0.0
        for process in [*self.processes]:
            self.step(process)
        self.end_lease()
        self.step(self.start())
        self.faults.share = share
