"""One pass of the drain loop: claim, deliver, acknowledge.

An acknowledgement travels with the next claim, in one round trip. In a flood that claim is prefetched: it is asked for while
messages are delivered.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from pipeline.core.clock import Clock
from pipeline.core.errors import SinkClosed, StoreError, StoreUnavailable
from pipeline.core.messages import Message
from pipeline.sinks.base import Sink
from pipeline.store.base import Ack, Claim, ClaimReply, DrainStore, Exchange

log = logging.getLogger(__name__)

LEASE_MARGIN = 0.1  # the part of the lease that is left unused, for clocks that drift and a process that is paused
QUICK = 0.1  # of its lease, at most, a claim takes to be delivered if the next one may be in flight meanwhile

T = TypeVar("T")


class RetryCall(Protocol):
    """Makes a call to the store again until it is answered."""

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; raises ``StoreUnavailable`` when the loop has to end."""
        ...


@dataclass(frozen=True, slots=True)
class Tick:
    """What one pass did.

    ``reply`` is what the store answered, and ``asked_ms`` when it was asked for that, on the monotonic clock. ``settled`` is what
    was delivered, in this pass or the one before, and is acknowledged now or too late for that.
    """

    reply: ClaimReply
    asked_ms: float
    settled: Sequence["Delivery"] = ()

    @property
    def claimed(self) -> int:
        """How many messages were taken in flight."""
        return len(self.reply.claim.messages) if self.reply.claim else 0

    @property
    def next_ms(self) -> int | None:
        """How long nothing can be due: 0 if something may be due now, None if nothing is scheduled."""
        if self.reply.claim is not None:
            return 0
        if self.reply.next_due_ms is None:
            return None
        return max(0, self.reply.next_due_ms - self.reply.now_ms)

    @property
    def last_due_ms(self) -> int | None:
        """The latest due time of what was claimed or moved, None if nothing was."""
        if self.reply.claim is not None:
            return self.reply.claim.messages[-1].due_ms
        return max((max(each.dues_ms) for each in self.reply.moved), default=None)

    @property
    def is_lease_over(self) -> bool:
        """Whether a claim of some loop waits to be given back."""
        return self.reply.first_lease_ms is not None and self.reply.first_lease_ms <= self.reply.now_ms


class Ticker:
    """Makes the passes of a loop. At least once: a message is acknowledged after the sink has it.

    So whatever ends a pass between the two repeats it. Nothing is started after the lease, and a stop does not wait for a sink that
    is blocked: the rest is given back.

    Args:
        loop_id: unique among all loops that ever run; it names the claims, so that one whose reply was lost can be asked for again.

        retrying: how calls to the store are made.

        prefetch_from: messages of a claim from which the next one is asked for while it is delivered; with 0 nothing is asked for
            before what is delivered is acknowledged, as the loop may wait between the two.
    """

    def __init__(
        self,
        store: DrainStore,
        sink: Sink,
        clock: Clock,
        loop_id: str,
        stopping: Callable[[], bool],
        retrying: RetryCall,
        prefetch_from: int = 0,
    ) -> None:
        self._store, self._sink, self._clock, self._loop_id = store, sink, clock, loop_id
        self._stopping, self._retrying, self._prefetch_from = stopping, retrying, prefetch_from
        self._claims = 0
        self._was_quick = False
        self._delivered: Delivery | None = None  # and not acknowledged: that goes with the next claim
        self._asked: _Asked | None = None
        self._answered: tuple[_ClaimCall, ClaimReply] | None = None

    def run(self) -> Tick:
        """Deliver one claim, if anything is due.

        Raises:
            StoreUnavailable: the loop has to end and the server does not answer before all is acknowledged that was delivered; what
                is claimed is left to its lease.
            SinkClosed: the claim is given back; ``end`` does the rest.
        """
        settled: list[Delivery] = []
        call, reply = self._take(settled)
        claim = reply.claim
        if claim is None:
            return Tick(reply, call.asked_ms, settled)
        lease = _Lease(self._clock, call.asked_ms, claim.lease_until_ms - reply.now_ms)
        self._ask_ahead(claim)
        if self._asked is None:
            self._settle(settled)
        messages = [Message.read_member(each.member, each.due_ms, each.attempt) for each in claim.messages]
        began_ms = self._clock.monotonic_ms()
        try:
            count = self._sink.deliver(messages, lease.is_running, lambda: lease.is_running() and not self._stopping())
        except SinkClosed as exc:
            with suppress(StoreError):  # the sink's error is the one to report; the lease gives the messages back
                self._store.release(claim, min(exc.started, len(messages)))
            raise
        self._was_quick = self._clock.monotonic_ms() - began_ms <= lease.lease_ms * QUICK
        self._delivered = Delivery(self._store, claim, messages[:count], self._clock.wall_ms(), lease)
        if count < len(messages) or not self._prefetch_from:
            self._settle_all(settled)
            if not settled[-1].is_late and count < len(messages):
                self._release(claim, count)
        return Tick(reply, call.asked_ms, settled)

    def end(self, *, retry: bool = True) -> Tick | None:
        """Acknowledge what is delivered, and give back what was prefetched; None if nothing was.

        Args:
            retry: ask until there is an answer; otherwise once.
        Raises:
            StoreUnavailable: the server does not answer.
        """
        if not retry:
            self._retrying = _call_once
        settled: list[Delivery] = []
        self._settle_all(settled)
        if self._answered is None:
            return Tick(ClaimReply(0, None, None, None), 0.0, settled) if settled else None
        (call, reply), self._answered = self._answered, None
        return Tick(reply, call.asked_ms, settled)

    def _take(self, settled: list["Delivery"]) -> tuple["_ClaimCall", ClaimReply]:
        """Return what was asked for before, or ask."""
        self._read_answers(settled)
        if self._delivered and not self._answered and self._prefetch_from:
            self._asked, self._delivered = _Asked(self._next_call(), self._delivered), None
            self._read_answers(settled, is_fresh=True)
        if self._answered:
            taken, self._answered = self._answered, None
            return taken
        self._settle(settled)
        call = self._next_call()
        return call, self._retrying(call)

    def _next_call(self) -> "_ClaimCall":
        self._claims += 1
        return _ClaimCall(self._store, self._clock, f"{self._loop_id}:{self._claims - 1}")

    def _ask_ahead(self, claim: Claim) -> None:
        """Send the acknowledgement of what is delivered and the next claim, if there is a flood and the sink is quick."""
        if self._stopping() or not self._was_quick or not 0 < self._prefetch_from <= len(claim.messages):
            return
        self._asked, self._delivered = _Asked(self._next_call(), self._delivered), None
        with suppress(StoreUnavailable):  # who reads the answers asks again
            self._asked.begin()

    def _read_answers(self, settled: list["Delivery"], *, is_fresh: bool = False) -> None:
        """Wait for the answers to what was asked; ``is_fresh`` if that was just now, and not while a claim was delivered."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        held, reply = self._retrying(asked)
        self._acknowledge(asked.ack, settled, held)
        if is_fresh or reply.claim or reply.moved:  # else nothing was due, but that is some time ago
            self._answered = asked.claim, reply

    def _settle(self, settled: list["Delivery"]) -> None:
        """Acknowledge what is delivered."""
        delivered, self._delivered = self._delivered, None
        self._acknowledge(delivered, settled)

    def _settle_all(self, settled: list["Delivery"]) -> None:
        """Acknowledge what is delivered and give back what was prefetched."""
        self._read_answers(settled)
        self._settle(settled)
        if self._answered and (claim := self._answered[1].claim):
            self._answered = self._answered[0], replace(self._answered[1], claim=None)
            self._release(claim, 0)

    def _acknowledge(self, call: "Delivery | None", settled: list["Delivery"], held: bool | None = None) -> None:
        """Note whether an acknowledgement is ``held``, asking until there is an answer if that is not known."""
        if call is None:
            return
        if held is None:
            held = self._retrying(call)
        # Within the lease nobody else can have ended the claim, so it was this acknowledgement, whose first reply was lost.
        held = held or (call.tries > 1 and call.lease.is_running())
        call.is_late = not held
        settled.append(call)

    def _release(self, claim: Claim, delivered: int) -> None:
        try:
            self._retrying(lambda: self._store.release(claim, delivered))
        except StoreUnavailable as exc:  # the loop has to end, and what it delivered counts all the same
            log.warning("stopped while Redis does not answer, so the rest of a claim comes after its lease: %s", exc)


def _call_once(call: Callable[[], T]) -> T:
    return call()


@dataclass(slots=True)
class _ClaimCall:
    """Asks for a claim, as often as it takes, and knows when it did so last."""

    store: DrainStore
    clock: Clock
    name: str
    asked_ms: float = 0.0

    def __call__(self) -> ClaimReply:
        self.asked_ms = self.clock.monotonic_ms()  # before the server can have started the lease
        return self.store.claim(self.name)

    def begin(self, delivered: "Delivery | None") -> Exchange:
        """Ask for it, and acknowledge what is delivered, without waiting for the answers."""
        self.asked_ms = self.clock.monotonic_ms()
        if delivered:
            delivered.tries += 1
        return self.store.begin(self.name, delivered.ack if delivered else None)


class _Lease:
    """How long messages may be started, measured on the monotonic clock from when the claim was asked for."""

    def __init__(self, clock: Clock, asked_ms: float, lease_ms: int) -> None:
        self._clock, self.lease_ms = clock, lease_ms
        self._deadline_ms = asked_ms + lease_ms * (1 - LEASE_MARGIN)

    def is_running(self) -> bool:
        return self._clock.monotonic_ms() < self._deadline_ms


@dataclass(slots=True)
class Delivery:
    """What the sink took of a claim, and the call that acknowledges it, which counts how often it had to ask.

    ``at_ms`` is when the sink had all of it, epoch ms UTC on the clock of this machine. ``is_late`` if the lease was over before it
    was acknowledged: then it is redelivered.
    """

    store: DrainStore
    claim: Claim
    messages: Sequence[Message]
    at_ms: int
    lease: _Lease
    tries: int = 0
    is_late: bool = False

    @property
    def ack(self) -> Ack:
        keyed = [(message.message_id, message.id) for message in self.messages if message.id != message.message_id]
        return Ack(self.claim, len(self.messages), keyed)

    def __call__(self) -> bool:
        self.tries += 1
        return self.store.ack(*self.ack)


@dataclass(slots=True)
class _Asked:
    """An acknowledgement, if there is one to make, and a claim: sent together, as often as it takes to get the answers."""

    claim: _ClaimCall
    ack: Delivery | None
    exchange: Exchange | None = None

    def begin(self) -> Exchange:
        """Send both, and don't wait for the answers."""
        self.exchange = self.claim.begin(self.ack)
        return self.exchange

    def __call__(self) -> tuple[bool | None, ClaimReply]:
        """Return the answers to what was sent, or send it; after ``StoreUnavailable`` it may be called again."""
        exchange = self.exchange or self.begin()
        self.exchange = None
        return exchange()
