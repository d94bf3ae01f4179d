"""One instance of a logical consumer: it shares the messages of a topic with the other instances of its group."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from pipeline.config import TopicSettings
from pipeline.consume.intake import Held, Intake
from pipeline.consume.retries import ABANDONED, FAILED, retry_delay_ms
from pipeline.core.clock import Clock
from pipeline.core.errors import StoreError
from pipeline.store.entries import Entry
from pipeline.store.groups import GroupStore
from pipeline.store.patience import call_patiently

KEEP_SHARE = 1 / 3  # of the lease, after which it says that it still has what it has not given out yet
# A message that was handed out so often, and abandoned, comes again later and by itself. Once proves nothing: it may only have been
# read together with the one that killed its consumer.
BEGUN_MAX = 2

log = logging.getLogger(__name__)

T = TypeVar("T")


class Outcome(StrEnum):
    """What became of a message that was not handled."""

    AGAIN = "again"
    DEAD = "dead"
    STALE = "stale"


@dataclass(slots=True)
class Consumer:
    """Gives out messages, each to one instance of its group, and again to another one if this one is silent about it for too long.

    At least once: a message is the group's until it is acknowledged, or became a dead letter after ``attempts_max`` tries. Within
    one instance messages come in order of due time, but for those that come again.

        with open_consumer("mail", "billing") as consumer:
            for message in consumer:
                send(message.message)
                consumer.ack(message)

    Not for use by several threads at a time; open one for each. Every method but ``close`` waits for a server that does not answer,
    and raises ``StoreUnavailable`` if ``stopping`` turns true meanwhile.

    Args:
        settings: of the topic.

        wait: pauses for so many milliseconds, or less.

        random: draws from [0, 1).

        stopping: once true, nothing more is given out.

        interruptible: makes a call that only waits, and may leave it at once on a signal.

        limit: messages that it reads at a time, at most, of each stream.

        block_ms: how long it waits for a message before it looks around.

        ordered: whether one instance of the group at a time has the turn, and the others stand by.
    """

    store: GroupStore
    settings: TopicSettings
    clock: Clock
    wait: Callable[[float], object]
    random: Callable[[], float]
    stopping: Callable[[], bool] = lambda: False
    interruptible: Callable[[Callable[[], None]], None] = lambda wait: wait()
    limit: int = 100
    block_ms: int = 1_000
    ordered: bool = False
    stale: int = 0
    _intake: Intake = field(init=False)
    _ready: deque[Entry] = field(default_factory=deque)
    _closed: bool = False

    def __post_init__(self) -> None:
        lease_ms = self.settings.lease_sec * 1000
        self._intake = Intake(
            self.store, self.clock, lease_ms, self.block_ms, self.wait, self.interruptible, self.ordered
        )

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Entry]:
        """Yield messages one by one, until ``stopping`` or ``close``; settle each by ``ack`` or ``nack``, or it comes again."""
        while not self.stopping() and not self._closed:
            self._ready.extend(self._fetch(self.limit))
            while self._ready and not self.stopping() and not self._closed:
                self._keep()
                entry = self._begin(self._ready.popleft()) if self._ready else None
                if entry:
                    yield entry

    def take(self, limit: int | None = None) -> list[Entry]:
        """Wait a while for messages and return some, none if there are none; settle them before the next call."""
        while found := self._fetch(limit or self.limit):
            if begun := [entry for each in found if (entry := self._begin(each))]:
                return begun
        return []

    def ack(self, *entries: Entry) -> bool:
        """Say that messages are handled; False if one was not this instance's any more, so that another one has it, too."""
        return all(self._settle("ack", entries))

    def extend(self, *entries: Entry) -> bool:
        """Have another lease for messages; False if one is not this instance's any more."""
        if self.ordered:
            self._patiently(self._intake.keep_turn)
        now_ms = self.clock.monotonic_ms()  # before the server can have started the lease
        own = self._patiently(lambda: self.store.settle("extend", entries))
        for entry, is_own in zip(entries, own, strict=True):
            held = self._intake.in_hand.get(entry.key)
            if held and is_own:
                held.since_ms = now_ms
            elif held:
                del self._intake.in_hand[entry.key]
        return all(own)

    def nack(self, entry: Entry, detail: str = "", counts: bool = True) -> Outcome:
        """Say that a message could not be handled: it comes again after a while, or becomes a dead letter after the last attempt.

        Args:
            detail: why, for the dead letter.

            counts: False if the message is not to blame: then it comes again in any case.
        """
        return self._give_up(entry, FAILED, detail, counts)

    def give_back(self, *entries: Entry) -> None:
        """Let others have messages at once, as if they had not been given out."""
        self._settle("release", entries)

    def hand_back(self) -> None:
        """Let others have what was read and not yet given out."""
        waiting = [held for held in self._intake.in_hand.values() if not held.begun]
        self._patiently(lambda: self._intake.give_back(waiting))
        for held in waiting:
            del self._intake.in_hand[held.entry.key]
        self._ready.clear()

    def close(self) -> None:
        """Give back what is in hand, so that others have it at once. Does not wait for a server that does not answer."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self.ordered or self._intake.has_turn:
                self._intake.gather_own()
                self._intake.give_back(self._intake.in_hand.values())
            if self.ordered:
                self.store.take_turn(0)
            self.store.leave()
        except StoreError as exc:
            log.warning("what was in hand goes to others after its lease: %s", exc)
        self._intake.in_hand.clear()
        self._ready.clear()

    def _fetch(self, limit: int) -> list[Entry]:
        found = self._patiently(lambda: self._intake.look(limit))
        # Those of several streams, or that come again, in one order.
        return sorted(found, key=lambda entry: entry.due_ms) if len({entry.stream for entry in found}) > 1 else found

    def _begin(self, entry: Entry) -> Entry | None:
        """Give out a message; None if it is not this instance's any more, or was abandoned too often to be given out now."""
        held = self._intake.in_hand.get(entry.key)
        if held is None:
            return None
        if not held.counted:
            if entry.handed_out >= BEGUN_MAX:
                self._give_up(entry, ABANDONED, "its consumers did not come back", counts=True)
                return None
            if not self._count(held):
                del self._intake.in_hand[entry.key]
                return None
        held.begun = True
        return held.entry

    def _count(self, held: Held) -> bool:
        """Let the server count a message that was taken over as handed out once more; False if it is not this instance's."""
        [is_own] = self._surely(lambda: self.store.settle("begin", [held.entry]), [True], held.since_ms)
        held.entry = replace(held.entry, handed_out=held.entry.handed_out + 1)
        held.counted = True
        return is_own

    def _keep(self) -> None:
        """Say in time that it still has what it has not given out yet, and forget what it has not."""
        waiting = [held for held in self._intake.in_hand.values() if not held.begun]
        oldest_ms = min((held.since_ms for held in waiting), default=float("inf"))
        if self.clock.monotonic_ms() - oldest_ms >= self._intake.lease_ms * KEEP_SHARE:
            self.extend(*(held.entry for held in waiting))
            self._ready = deque(entry for entry in self._ready if entry.key in self._intake.in_hand)

    def _settle(self, verb: str, entries: Sequence[Entry]) -> list[bool]:
        done = self._surely(lambda: self.store.settle(verb, entries), [True] * len(entries), self._since_ms(*entries))
        for entry in entries:
            self._intake.in_hand.pop(entry.key, None)
        self.stale += done.count(False)
        return done

    def _give_up(self, entry: Entry, reason: str, detail: str, counts: bool) -> Outcome:
        since_ms = self._since_ms(entry)
        self._intake.in_hand.pop(entry.key, None)
        now_ms = self._patiently(self.store.now_ms)
        is_dead = counts and entry.attempt >= self.settings.attempts_max
        due_ms = now_ms + retry_delay_ms(entry.attempt, self.settings, self.random)

        def call() -> bool:
            if is_dead:
                return self.store.bury(entry, reason, detail, now_ms)
            return self.store.schedule_again(entry, due_ms, entry.attempt + counts)

        if not self._surely(call, True, since_ms):
            self.stale += 1
            return Outcome.STALE
        return Outcome.DEAD if is_dead else Outcome.AGAIN

    def _since_ms(self, *entries: Entry) -> float:
        """Since when the first of some messages is in hand; since ever if one is not."""
        held = [self._intake.in_hand.get(entry.key) for entry in entries]
        return min((each.since_ms if each else float("-inf") for each in held), default=float("-inf"))

    def _surely(self, call: Callable[[], T], done: T, since_ms: float) -> T:
        """Make a call that can be made once until there is an answer; ``done`` if it was done by one whose reply was lost."""
        tries = 0

        def counted() -> T:
            nonlocal tries
            tries += 1
            return call()

        answer = self._patiently(counted)
        # Within the lease nobody else can have touched it.
        return done if tries > 1 and self.clock.monotonic_ms() - since_ms < self._intake.lease_ms else answer

    def _patiently(self, call: Callable[[], T]) -> T:
        return call_patiently(call, self.wait, self.clock, self.random, self.stopping)
