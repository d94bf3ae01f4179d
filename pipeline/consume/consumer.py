"""One consumer of a group: it shares the messages of a topic with the other consumers of the group."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline.config import TopicSettings
from pipeline.consume.in_flight import Delivery, InFlight
from pipeline.consume.leases import KEEP_SHARE, LeaseRenewer
from pipeline.consume.pending import PendingWalk
from pipeline.consume.retries import ABANDONED, FAILED, REFUSED, Outcome, log_outcome, retry_delay_ms
from pipeline.core.clock import Clock
from pipeline.core.errors import StoreError
from pipeline.store.entries import Entry
from pipeline.store.groups import GroupStore
from pipeline.store.retry import retry_until_available

# A message that was delivered so often, and abandoned, is retried later and by itself. Once proves nothing: it may only have been
# read together with the one that killed its consumer.
STARTS_MAX = 2
TAKE_OVER_MS = 1_000  # how often it looks for messages of consumers that are silent
PAGES_MAX = 20  # of pending messages that it looks at then, or gives back when it is closed, of each stream
SWEEP_MS = 3_600_000  # how often it forgets consumers that were silent for as long

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Consumer:
    """Delivers messages, each to one consumer of its group, and to another one if this one is silent about it for too long.

    At least once: a message is the group's until it is acknowledged, or became a dead letter after ``attempts_max`` tries. Within
    one consumer messages come in order of due time, but for those that are retried.

        with open_consumer("mail", "billing") as consumer:
            for message in consumer:
                send(message.body)
                consumer.ack(message)

    For one thread; open a consumer for each. Every method but ``close`` waits for a server that does not answer, and raises
    ``StoreUnavailable`` if ``stopping`` turns true meanwhile.

    Args:
        settings: of the topic.

        wait: pauses for so many milliseconds, or less; ``random`` draws from [0, 1).

        stopping: once true, nothing more is started.

        interruptible: makes a call that only waits, and may leave it at once on a signal.

        limit: messages that it reads at a time, at most, of each stream.

        block_ms: how long it waits for a message before it looks around.

        reads_ahead: while there is a backlog, an ``ack`` of all that is in flight also reads, for who takes the next batch at once:
            that saves a round trip and an fsync. It does nothing in an ordered group.

        on_close: called when it is closed; ``enter`` before all else, until it succeeds: it makes the group known; ``on_outcome``
            when a message was not handled.
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
    reads_ahead: bool = False
    enter: Callable[[], object] | None = None
    on_close: Callable[[], object] = lambda: None
    on_outcome: Callable[[Outcome], object] = lambda outcome: None
    late_acks: int = 0
    _lease_ms: float = field(init=False)
    _renewer: LeaseRenewer = field(init=False)
    _own: PendingWalk = field(init=False)  # over what is its own and not known to it
    _others: PendingWalk = field(init=False)  # over what others left
    # All that is pending for it, as far as it knows, in the order in which it starts them.
    _in_flight: InFlight = field(default_factory=InFlight)
    # Whether the server may have messages for it that are not in this map: after a restart under the same name, or a lost reply. If
    # that was the reply to a read, they are counted and were never started; otherwise they may be what killed it.
    _may_have_more: bool = True
    _lost_a_read: bool = False
    _ahead: int = 0  # how much the next ack reads
    _is_active: bool = False
    _active_ms: float = float("-inf")  # when it was last told that it is the active consumer
    _looked_ms: float = float("-inf")
    _swept_ms: float = float("-inf")
    _closed: bool = False

    def __post_init__(self) -> None:
        self._lease_ms = self.settings.lease_sec * 1000
        self._own, self._others = PendingWalk(self.store), PendingWalk(self.store, PAGES_MAX)
        self._renewer = LeaseRenewer(self.store, self.clock, self._lease_ms, self.settings.handler_timeout_sec * 1000)

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Entry]:
        """Yield messages one by one, until ``stopping`` or ``close``; settle each by ``ack`` or ``nack``, or it is redelivered."""
        while not self._is_ending():
            self._fetch(self.limit)
            while not self._is_ending():
                self._keep_waiting()
                if not (waiting := self._in_flight.waiting()):
                    break
                if entry := self._start(waiting[0]):
                    yield entry

    def take(self, limit: int | None = None) -> list[Entry]:
        """Wait a while for messages and return some, none if there are none; settle them before the next call."""
        while self._fetch(limit or self.limit):
            self._keep_waiting()
            if found := [entry for delivery in self._in_flight.waiting() if (entry := self._start(delivery))]:
                return found
        return []

    def ack(self, *entries: Entry) -> bool:
        """Say that messages are handled; False if one was not this consumer's any more, so that another one has it, too."""
        done = self._settle(lambda: self._ack(entries), entries)
        if late := [entry.id for entry, is_done in zip(entries, done, strict=True) if not is_done]:
            self.late_acks += len(late)
            log.warning("%d of %d acks came after the lease and are redelivered: %s …", len(late), len(done), late[0])
        return not late

    def has_more(self) -> bool:
        """Say whether messages are read and not started."""
        return self._in_flight.has_waiting()

    def extend(self, *entries: Entry) -> bool:
        """Have another lease for messages; False if one is not this consumer's any more."""
        if self.store.ordered:
            self._retrying(self._keep_active)
        now_ms = self.clock.monotonic_ms()  # before the server can have started the lease
        own = self._retrying(lambda: self.store.settle("extend", entries))
        self._in_flight.renew(entries, own, now_ms)
        return all(own)

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Renew the leases of what is in flight, from a thread, while the block runs, for ``handler_timeout_sec`` at most."""
        in_flight = list(self._in_flight.values())
        entries = [delivery.entry for delivery in in_flight]
        self._renewer.begin(entries, min((delivery.since_ms for delivery in in_flight), default=float("inf")))
        try:
            yield
        finally:
            if renewal := self._renewer.end():
                self._active_ms = max(self._active_ms, renewal.asked_ms)
                self._in_flight.renew(entries, renewal.own, renewal.asked_ms)

    def nack(self, entry: Entry, detail: str = "", counts: bool = True, after_ms: float | None = None) -> Outcome:
        """Say that a message could not be handled: it is retried after a while, or becomes a dead letter after the last attempt.

        Args:
            detail: why, for the dead letter; its first line is logged.

            counts: False if the message is not to blame: then it is retried in any case.

            after_ms: how long it waits until it is retried; None means as long as the settings of its topic say.
        """
        return self._give_up(entry, FAILED, detail, counts, after_ms)

    def refuse(self, entry: Entry, detail: str = "") -> Outcome:
        """Say that a message can never be handled: it becomes a dead letter now, with the reason ``refused``."""
        return self._give_up(entry, REFUSED, detail, counts=True)

    def give_back(self, *entries: Entry) -> None:
        """Let others have messages at once, as if they had not been delivered."""
        self._settle(lambda: self.store.settle("undo", entries), entries)

    def pause(self, ms: float) -> None:
        """Wait; others get meanwhile what was not started, but in an ordered group this one stays the active consumer."""
        waiting = self._in_flight.waiting()
        self._retrying(lambda: self._release(waiting))
        self._in_flight.forget(delivery.entry for delivery in waiting)
        end_ms = self.clock.monotonic_ms() + ms
        while (left_ms := end_ms - self.clock.monotonic_ms()) > 0 and not self._is_ending():
            if self.store.ordered:
                self._retrying(self._keep_active)
                left_ms = min(left_ms, self._lease_ms * KEEP_SHARE)
            self.wait(left_ms)

    def close(self) -> None:
        """Give back what is in flight, so that others have it at once. Does not wait for a server that does not answer."""
        if self._closed:
            return
        self._closed = True
        self._renewer.close()
        try:
            if self.enter:  # it was never in the group
                return
            if not self.store.ordered or self._is_active:
                for _ in range(PAGES_MAX):
                    self._recover_own()
                self._release(self._in_flight.values())
            if self.store.ordered:
                self.store.acquire_active(0)
            self.store.leave()
        except StoreError as exc:
            log.warning("what is in flight goes to others after its lease: %s", exc)
        finally:
            self._in_flight.clear()
            self._others.tell_taken_over()
            self.on_close()

    def _is_ending(self) -> bool:
        return self._closed or self.stopping()

    def _fetch(self, limit: int) -> bool:
        """Wait a while for messages; returns whether some are there to be started."""
        self._retrying(lambda: self._look(limit))
        self._in_flight.sort_waiting()
        return bool(self._in_flight.waiting())

    def _look(self, limit: int) -> None:
        """Find messages. If it fails, what it has found is kept, and it may be called again."""
        if self.enter:
            self.enter()
            self.enter = None
        if self.store.ordered and not self._keep_active():
            self.wait(self.block_ms)
            return
        self._in_flight.forget_unsettled(self.clock.monotonic_ms() - self._lease_ms)
        for step in (self._recover_own, self._take_over, lambda: self._read(limit)):
            if not self._in_flight.waiting():
                step()

    def _recover_own(self) -> None:
        """Find what was delivered to this consumer without its knowledge; in an ordered group, also what others have left to it."""
        if self._may_have_more:
            if self._own.is_over:
                self._own.begin()
            min_idle_ms = 0 if self.store.ordered else None
            self._own.step(self._in_flight, self.clock.monotonic_ms(), self._lost_a_read, min_idle_ms)
            self._may_have_more = not self._own.is_over
            self._lost_a_read &= self._may_have_more

    def _take_over(self) -> None:
        """Find messages of consumers that were silent for a lease."""
        if (now_ms := self.clock.monotonic_ms()) - self._looked_ms < TAKE_OVER_MS:
            return
        if now_ms - self._swept_ms >= SWEEP_MS:
            self._swept_ms = now_ms
            self.store.sweep(SWEEP_MS)
        self._may_have_more = True  # until there are replies
        self._others.begin()
        found = self._others.step(self._in_flight, now_ms, False, round(self._lease_ms))
        self._may_have_more = False
        if not found or self._others.is_over:  # else there may be more, and the next look is at once
            self._looked_ms = now_ms
            self._others.tell_taken_over()

    def _read(self, limit: int) -> None:
        self.interruptible(lambda: self._reading(limit, lambda: (None, self.store.read(limit, self.block_ms))))
        if self.store.ordered and not self._in_flight:
            self.interruptible(lambda: self.store.wait(self.block_ms))

    def _reading(self, limit: int, read: Callable[[], tuple[T, list[Entry]]]) -> T:
        """Make a call that also reads, and note what it found; if it fails, more may be this consumer's."""
        self._may_have_more = self._lost_a_read = True
        asked_ms = self.clock.monotonic_ms()
        answer, found = read()
        self._in_flight.add(found, asked_ms, is_counted=True)
        self._may_have_more = self._lost_a_read = False
        self._ahead = limit if self.reads_ahead and not self.store.ordered and len(found) >= limit else 0
        return answer

    def _keep_active(self) -> bool:
        """Say whether this is the active consumer of an ordered group, for a lease from now on.

        When it becomes it, or another one may have been it meanwhile, it first takes what that one has left.
        """
        asked_ms = self.clock.monotonic_ms()
        was_active = self._is_active and asked_ms - self._active_ms < self._lease_ms
        is_active = self.store.acquire_active(round(self._lease_ms))
        if is_active and not was_active:
            self._own.begin(anew=True)  # what was left is this consumer's now
            self._may_have_more, self._lost_a_read = True, False
        elif self._is_active and not is_active:
            log.warning("another consumer is active now: this one was silent for longer than a lease")
            self._in_flight.clear()
        self._is_active, self._active_ms = is_active, asked_ms  # only now: a call that failed before this is made again
        return is_active

    def _start(self, delivery: Delivery) -> Entry | None:
        """Start a message; None if it is not this consumer's any more, or was abandoned too often to be started now."""
        if not delivery.is_counted:
            if delivery.entry.delivery_count >= STARTS_MAX:
                self._give_up(delivery.entry, ABANDONED, "its consumers did not come back", counts=True)
                return None
            [is_own] = self._surely(lambda: self.store.settle("start", [delivery.entry]), [True], delivery.since_ms)
            delivery.entry, delivery.is_counted = delivery.entry.delivered_once_more(), True
            if not is_own:
                del self._in_flight[delivery.entry.key]
                return None
        delivery.is_started = True
        return delivery.entry

    def _keep_waiting(self) -> None:
        """Extend in time the leases of what was not started yet, and forget what is another's by now."""
        waiting = self._in_flight.waiting()
        oldest_ms = min((delivery.since_ms for delivery in waiting), default=float("inf"))
        if self.clock.monotonic_ms() - oldest_ms >= self._lease_ms * KEEP_SHARE:
            self.extend(*(delivery.entry for delivery in waiting))

    def _release(self, deliveries: Iterable[Delivery]) -> None:
        """Let others have messages at once; those that were not started count as not delivered."""
        known = list(deliveries)
        self.store.settle("undo", [each.entry for each in known if each.is_counted and not each.is_started])
        self.store.settle("release", [each.entry for each in known if each.is_started or not each.is_counted])

    def _ack(self, entries: Sequence[Entry]) -> list[bool]:
        """Acknowledge, and read on if nothing else is to be done first; after a call that failed there may be more to recover."""
        has_looked = self.clock.monotonic_ms() - self._looked_ms < TAKE_OVER_MS
        is_all = len(self._in_flight) <= len(entries)
        if not (self._ahead and has_looked and is_all) or self._may_have_more or self._is_ending():
            return self.store.settle("ack", entries)
        return self._reading(self._ahead, lambda: self.store.ack_and_read(entries, self._ahead))

    def _settle(self, settle: Callable[[], list[bool]], entries: Sequence[Entry]) -> list[bool]:
        done = self._surely(settle, [True] * len(entries), self._in_flight.since_ms(entries))
        self._in_flight.forget(entries)
        return done

    def _give_up(self, entry: Entry, reason: str, detail: str, counts: bool, after_ms: float | None = None) -> Outcome:
        since_ms = self._in_flight.since_ms([entry])
        self._in_flight.forget([entry])
        now_ms = self._retrying(self.store.now_ms)
        is_dead = reason == REFUSED or (counts and entry.attempt >= self.settings.attempts_max)
        delay_ms = retry_delay_ms(entry.attempt, self.settings, self.random) if after_ms is None else round(after_ms)

        def call() -> bool:
            if is_dead:
                return self.store.dead_letter(entry, reason, detail, now_ms)
            return self.store.schedule_retry(entry, now_ms + delay_ms, entry.attempt + counts)

        is_own = self._surely(call, True, since_ms)
        self.late_acks += not is_own
        outcome = Outcome.LEASE_LOST if not is_own else Outcome.DEAD if is_dead else Outcome.RETRY
        log_outcome(outcome, entry, reason, detail, self.settings.attempts_max, delay_ms, counts)
        self.on_outcome(outcome)
        return outcome

    def _surely(self, call: Callable[[], T], done: T, since_ms: float) -> T:
        """Make a call that can be made once until there is an answer; ``done`` if it was done by one whose reply was lost."""
        tries = 0

        def counted() -> T:
            nonlocal tries
            tries += 1
            return call()

        answer = self._retrying(counted)
        # Within the lease nobody else can have touched it.
        is_sure = tries + self.store.repeated == 1 or self.clock.monotonic_ms() - since_ms >= self._lease_ms
        return answer if is_sure else done

    def _retrying(self, call: Callable[[], T]) -> T:
        return retry_until_available(call, self.wait, self.clock, self.random, self.stopping)
