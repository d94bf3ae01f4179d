"""The simulated surroundings of some drain loops: a server, an ingest and what goes wrong, all drawn from one seed."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis

from pipeline.config import TopicSettings
from pipeline.core.messages import Message
from pipeline.drain.loop import DrainLoop
from pipeline.store.base import State
from pipeline.store.by_id import MessagesById
from pipeline.store.keys import Keys
from tests.model.reference import MESSAGE_ID_LENGTH, PlainScripts, ReferenceServer
from tests.simulation.history import SERVER, Event, History, check
from tests.simulation.kernel import Kernel
from tests.simulation.process import CLAIM_LIMIT, LEASE_MS, WAIT_MS_MAX, Process
from tests.store.builders import BUCKET_MS, member, transaction

BORDER_MS = 1_700_000_400_000  # where a bucket begins, in the middle of the run
FAULTY_MS = 30_000  # then nothing goes wrong any more
START_MS = BORDER_MS - FAULTY_MS // 2
GIVE_UP_MS = 20 * FAULTY_MS
EVENTS_MAX = 50_000  # a run has some thousands
SLOTS = 3
FILES = 6
LINES_MAX = 8
RESTART_MS_MAX = 3_000
LOOK_MS = 500
DAY_MS = 86_400_000

# A fault falls where its name is used, below or in ``process``.
AT_A_CALL = ("crash", "pause", "lost request", "late request", "lost reply", "closed sink", "blocked sink")
FROM_OUTSIDE = ("outage", "forgotten scripts", "clock jump", "stop")
RINGS = "unheard ring"
KINDS = (*AT_A_CALL, *FROM_OUTSIDE, RINGS)


@dataclass(frozen=True)
class Result:
    """A run: what happened, and what was wrong with it."""

    seed: int
    kinds: tuple[str, ...]
    events: list[Event]
    seen: Counter[str]
    violations: list[str]

    def __str__(self) -> str:
        said = [f"seed {self.seed}, faults: {', '.join(self.kinds) or 'none'}"]
        return "\n".join([*said, *map(str, self.events), *self.violations])


def simulate(seed: int, loop_type: type[DrainLoop] = DrainLoop) -> Result:
    """Run the world of ``seed`` until everything is delivered; the same seed gives the same run."""
    world = World(seed, loop_type)
    violations = []
    with _silence():
        try:
            world.kernel.run(EVENTS_MAX)
        except Exception as exc:
            violations.append(f"it ended with {exc!r}")
    world.note_what_is_left()
    violations += check(world.history)
    return Result(seed, world.kinds, world.history.events, world.history.seen(), violations)


class World:
    """A run that is about to begin. Each seed has its own kinds of faults, so that some meet alone and some together."""

    def __init__(self, seed: int, loop_type: type[DrainLoop]) -> None:
        self.random = random.Random(seed)
        self._misfiles = seed % 4 == 0
        self._change = (self._cancel, self._move, self._replace)[
            seed % 3
        ]  # what a caller does with a message of each file
        self.loop_type = loop_type
        self.kernel = Kernel()
        self.keys = Keys("simulated")
        self.server = ReferenceServer(self.server_ms)
        self.history = History(LEASE_MS, WAIT_MS_MAX)
        self.server.topics.settings["*"] = TopicSettings(sink=self.random.choice(["screen", "screen", "stream"]))
        self.kinds = tuple(self.random.sample(KINDS, self.random.choice([0, 1, 1, 2, 2, 3, 5])))
        self.is_down = False
        self._rate = self.random.choice([0.01, 0.03, 0.1])
        self._healed = False
        self._over = False
        self._knows_scripts = True
        self._clock_offset_ms = 0
        self._by_key: dict[str, bytes] = {}  # what names the message that has a key now
        self._files_to_come = FILES
        self._processes: dict[int, Process] = {}
        for slot in range(SLOTS):
            self.kernel.spawn(f"slot {slot}", lambda slot=slot: self._run_slot(slot))  # type: ignore[misc]
        for number in range(FILES):
            self.kernel.at(self.random.uniform(0, FAULTY_MS), lambda number=number: self._ingest(number))  # type: ignore[misc]
        for kind in (kind for kind in self.kinds if kind in FROM_OUTSIDE):
            self.kernel.at(self.random.uniform(0, FAULTY_MS / 2), lambda kind=kind: self._strike(kind))  # type: ignore[misc]
        self.kernel.at(FAULTY_MS, self._heal)

    def server_ms(self) -> int:
        return START_MS + int(self.kernel.now_ms) + self._clock_offset_ms

    def note(self, who: str, what: str, *details: Any) -> None:
        self.history.add(self.kernel.now_ms, who, what, *details)

    def travel(self) -> None:
        """A packet is on its way."""
        self.kernel.let_pass(self.travel_ms())

    def travel_ms(self) -> float:
        return self.random.uniform(0.05, 2)

    def strikes(self, kind: str, who: str, for_ms: float = 0) -> bool:
        """Say whether a fault falls here, and note it."""
        if kind not in self.kinds or self._healed or self.random.random() >= self._rate:
            return False
        self.note(who, "fault", kind, self.kernel.now_ms + for_ms)
        return True

    def awkward_ms(self) -> float:
        """Draw a time up to some leases, often one that ends close to the end of a lease."""
        return self.random.choice([self.random.uniform(0, 3), self.random.uniform(0.85, 1.05)]) * LEASE_MS

    def misses_a_ring(self) -> bool:
        return RINGS in self.kinds and self.random.random() < 0.5

    # The server

    def execute(self, process: Process, words: tuple[Any, ...], timely: bool) -> Any:
        """Run a script for a process, unless the server has forgotten it."""
        if words[0] == "SCRIPT LOAD":
            self._knows_scripts = True
            return None
        if not self._knows_scripts:
            raise redis.exceptions.NoScriptError("NOSCRIPT")
        _, name, _, token, *rest = words
        before = self.server.claims.get(rest[0] if name == "claim" else token)
        rows = list(before.rows) if before else []
        held = self.held_by(process)
        moved_before, misfiled_before = self._moved(), self.server.counters["misfiled"]
        reply = self.server.execute_command(*words)
        if self.server.counters["misfiled"] > misfiled_before:
            self.note(SERVER, "misfiled")
        for moved in self._moved()[len(moved_before) :]:
            self.note(process.name, "moved", "", self._by_key.get(moved) or plain(moved), self.server_ms())
        if name == "claim" and reply[0] == b"OK":
            self._note_claim(process, rest[0], reply, before is None, timely, held)
        elif name == "ack":
            done = tuple(plain(m) for m, _ in rows[: reply[1]])
            self.note(process.name, *(("acknowledged", token, done) if reply[0] == b"OK" else ("late_acks", token)))
        elif name == "release" and reply[0] == b"OK":
            self.note(process.name, "gave back" if rest[0] != "" else "reclaimed", token, reply[1])
        self._check_balance()
        return reply

    def _moved(self) -> list[str]:
        return [entry[0] for entries in self.server.topics.streams.values() for entry in entries]

    def arrive_late(self, request: Callable[[bool], Any]) -> None:
        """A request that was given up arrives all the same."""
        if not self.is_down and self._knows_scripts:
            request(False)

    def held_by(self, process: Process) -> tuple[str, ...]:
        """The claims that a process asked for and whose leases are not over."""
        now_ms = self.server_ms()
        claims = self.server.claims.items()
        return tuple(token for token, lease in claims if token in process.tokens and lease.until_ms > now_ms)

    def _note_claim(
        self, process: Process, token: str, reply: list[Any], new: bool, timely: bool, held: tuple[str, ...]
    ) -> None:
        rows = tuple((plain(m), attempt + 1) for m, attempt in zip(reply[4][::2], reply[5], strict=True))
        others = tuple(other for other in held if other != token) if timely else ()
        self.note(process.name, "claimed", token, rows, new, int(reply[1]), others)
        if timely:
            process.tokens.add(token)
        elif new:
            process.tokens.discard(token)  # the process does not know of it
        assert len(rows) <= CLAIM_LIMIT

    def _check_balance(self) -> None:
        counters = self.server.counters
        held = sum(map(len, self.server.buckets.values())), sum(len(c.rows) for c in self.server.claims.values())
        if counters["stored"] != sum(held) + counters["delivered"] + counters["cancelled"]:
            self.note(SERVER, "unbalanced", *held, dict(counters))

    def note_what_is_left(self) -> None:
        if self.server.buckets or self.server.claims or self.server.attempts:
            self.note(SERVER, "left over", self.server.buckets, self.server.claims, self.server.attempts)

    # The ingest

    def _ingest(self, number: int) -> None:
        if self.is_down:
            self.kernel.at(RESTART_MS_MAX, lambda: self._ingest(number))
            return
        self._files_to_come -= 1
        now_ms, token = self.server_ms(), f"{number:014d}"
        dues = [(line, now_ms + self._delay_ms()) for line in range(1, self.random.randint(2, LINES_MAX + 1))]
        waiting = [due_ms for held in self.server.buckets.values() for due_ms in held.values()]
        keyed, others = dues[-1:], dues[:-1]  # the last one has an idempotency key
        stored = transaction(
            *others,
            identified=tuple((*row, f"key-{number}") for row in keyed),
            token=token,
            member_of=partial(_member, token),
        )
        assert self.server.schedule("s", stored) is not None
        if self._misfiles and others and self.random.random() < 0.5:
            self._misfile(*others[0], token)
        rows = [(member(line, token=token), due_ms) for line, due_ms in dues]
        self._by_key[f"key-{number}"] = rows[-1][0]
        oldest_ms = min(waiting, default=0)
        late = bool(waiting) and min(due_ms for _, due_ms in rows) < oldest_ms - oldest_ms % BUCKET_MS
        self._accept("ingest", rows, late)
        changed, due_ms = self.random.choice(rows[:-1] or rows)
        handle = f"~{changed[:MESSAGE_ID_LENGTH].decode()}~{due_ms}"
        by_key = changed == rows[-1][0] or self._change == self._replace
        name, changed = (f"key-{number}", rows[-1][0]) if by_key else (handle, changed)
        # When it is due, mostly: before, in flight, given back, and after.
        after_ms = max(0, due_ms - now_ms + self.random.uniform(-2, 2) * self.random.choice([1, LEASE_MS]))
        self.kernel.at(after_ms, lambda: self.is_down or self._change(self._messages(), name, changed))

    def _accept(self, who: str, rows: list[tuple[bytes, int]], late: bool) -> None:
        self.note(who, "accepted", rows, late, [due_ms - START_MS for _, due_ms in rows])
        if self.server.take_rings():
            self.ring()

    def _messages(self) -> MessagesById:
        return MessagesById(self.server, [self.keys], DAY_MS, PlainScripts(), self.server_ms)

    def _cancel(self, messages: MessagesById, name: str, changed: bytes) -> None:
        state = messages.cancel(name).state
        self.note("caller", "cancelled" if state is State.CANCELLED else "not cancelled", changed, state)

    def _move(self, messages: MessagesById, name: str, changed: bytes) -> None:
        due_ms = self.server_ms() + self._delay_ms()
        found = messages.reschedule(name, due_ms)
        if found.message:
            self.note("caller", "rescheduled", changed, due_ms, due_ms - START_MS)
        if self.server.take_rings():
            self.ring()

    def _replace(self, messages: MessagesById, name: str, changed: bytes) -> None:
        message_id = f"z{changed[1:MESSAGE_ID_LENGTH].decode()}"  # greater than that of any file
        due_ms = self.server_ms() + self._delay_ms()
        found = messages.replace(Message(due_ms, "instead", id=name, message_id=message_id))
        if found.message:
            self.note("caller", "cancelled", changed, found.state)
            self.note("caller", "replaced", changed)
            self._by_key[name] = plain(message_id)
            self._accept("caller", [(plain(message_id), due_ms)], late=False)

    def ring(self) -> None:
        """Notify all loops."""
        for process in self._processes.values():
            process.ring()

    def _misfile(self, line: int, due_ms: int, token: str) -> None:
        """Put a message into a bucket that is too early, as another program may do."""
        start = due_ms - due_ms % BUCKET_MS
        stored = member(line, token=token)
        del self.server.buckets[start][stored]
        if not self.server.buckets[start]:
            del self.server.buckets[start]
        self.server.buckets.setdefault(start - self.random.randint(1, 3) * BUCKET_MS, {})[stored] = due_ms

    def _delay_ms(self) -> int:
        return self.random.choice([0, 1, self.random.randint(0, FAULTY_MS), self.random.randint(0, 500), -BUCKET_MS])

    # What goes wrong from outside, and its end

    def _strike(self, kind: str) -> None:
        if self._healed:
            return
        lasts_ms = self.random.uniform(100, 2 * LEASE_MS)
        if kind == "outage":
            self.is_down = True
            for process in self._processes.values():
                process.hang_up()
            self.kernel.at(lasts_ms, self._come_back)
            self.note(SERVER, "fault", kind, self.kernel.now_ms + lasts_ms)
        elif kind == "forgotten scripts":
            self._knows_scripts = False
            self.note(SERVER, "fault", kind, self.kernel.now_ms)
        elif kind == "clock jump":
            self._set_clock(self.random.randint(-3 * LEASE_MS, 3 * LEASE_MS))
        elif self._processes:
            stopped = self._processes[self.random.choice(list(self._processes))]
            self.note(stopped.name, "fault", kind, self.kernel.now_ms)
            stopped.stop()
        self.kernel.at(lasts_ms + self.random.uniform(0, FAULTY_MS / 2), lambda: self._strike(kind))

    def _set_clock(self, offset_ms: int) -> None:
        jump_ms, self._clock_offset_ms = offset_ms - self._clock_offset_ms, offset_ms
        self.note(SERVER, "fault", "clock jump", self.kernel.now_ms, jump_ms)

    def _come_back(self) -> None:
        self.is_down = False
        self._knows_scripts = False

    def _heal(self) -> None:
        self._healed = True
        if self._clock_offset_ms:
            self._set_clock(0)
        self._look()

    def _look(self) -> None:
        """End the run when everything is delivered, or does not come to an end."""
        done = not self._files_to_come and not self.server.buckets and not self.server.claims
        if not done and self.kernel.now_ms < GIVE_UP_MS:
            self.kernel.at(LOOK_MS, self._look)
            return
        self._over = True
        for process in self._processes.values():
            process.stop()

    def _run_slot(self, slot: int) -> None:
        lives = 0
        while not self._over:
            process = self._processes[slot] = Process(self, f"{slot}.{lives}")
            process.run()
            del self._processes[slot]
            lives += 1
            self.kernel.let_pass(self.random.uniform(0, RESTART_MS_MAX))


def plain(stored: bytes | str) -> bytes:
    """Return what names a message in the history, from its member or message id: the member that it would be without a key."""
    message_id = stored[:MESSAGE_ID_LENGTH].decode() if isinstance(stored, bytes) else stored
    return member(int(message_id[14:], 16), token=message_id[:14])


def _member(token: str, line: int, key: str) -> bytes:
    if not key:
        return member(line, token=token)
    return Message(0, f"message {line}", id=key).to_member(f"{token}{line:08x}")


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the loops from logging what is meant to go wrong."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
