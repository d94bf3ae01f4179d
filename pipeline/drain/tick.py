"""One pass of the drain loop: claim, deliver, acknowledge."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pipeline.core.clock import Clock
from pipeline.core.errors import SinkClosed, StoreError, StoreUnavailable
from pipeline.core.messages import Message
from pipeline.sinks.base import Sink
from pipeline.store.base import Claim, ClaimReply, DrainStore

log = logging.getLogger(__name__)

LEASE_MARGIN = 0.1  # the part of the lease that is left unused, for clocks that drift and a process that is paused

T = TypeVar("T")


class RetryCall(Protocol):
    """Makes a call to the store again until it is answered."""

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; raises ``StoreUnavailable`` when the loop has to end."""
        ...


@dataclass(frozen=True, slots=True)
class Tick:
    """What one pass did.

    ``reply`` is what the store answered, and ``asked_ms`` when it was asked for that, on the monotonic clock. ``deliveries`` is
    what the sink took of the claim, and ``delivered_ms`` when it had all of it, epoch ms UTC on the clock of this machine.
    ``is_late`` if the lease was over before these were acknowledged: then they are redelivered.
    """

    reply: ClaimReply
    asked_ms: float
    deliveries: Sequence[Message] = ()
    delivered_ms: int = 0
    is_late: bool = False

    @property
    def claimed(self) -> int:
        """How many messages were taken in flight."""
        return len(self.reply.claim.messages) if self.reply.claim else 0

    @property
    def late_acks(self) -> int:
        """How many messages were delivered and not acknowledged in time."""
        return len(self.deliveries) if self.is_late else 0

    @property
    def next_ms(self) -> int | None:
        """How long nothing can be due: 0 if something may be due now, None if nothing is scheduled."""
        if self.reply.claim is not None:
            return 0
        if self.reply.next_due_ms is None:
            return None
        return max(
            0, self.reply.next_due_ms - self.reply.now_ms
        )  # they can be of two shards, asked one after the other

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


def run_tick(
    store: DrainStore, sink: Sink, clock: Clock, name: str, stopping: Callable[[], bool], retrying: RetryCall
) -> Tick:
    """Deliver one claim, if anything is due.

    At least once: a message is acknowledged after the sink has it, so whatever ends this between the two repeats it. Nothing is
    started after the lease, and a stop does not wait for a sink that is blocked: the rest is given back.

    Args:
        name: unique to this pass, so that a claim whose reply was lost can be asked for again.

        retrying: how calls to the store are made.
    Raises:
        StoreUnavailable: the loop has to end and the server does not answer before all is acknowledged that was delivered; a claim
            is left to its lease.
        SinkClosed: the claim is given back.
    """
    question = _ClaimCall(store, clock, name)
    reply = retrying(question)
    claim = reply.claim
    if claim is None:
        return Tick(reply, question.asked_ms)
    lease = _Lease(clock, question.asked_ms, claim.lease_until_ms - reply.now_ms)
    deliveries = [Message.read_member(each.member, each.due_ms, each.attempt) for each in claim.messages]
    try:
        delivered = sink.deliver(deliveries, lease.is_running, lambda: lease.is_running() and not stopping())
    except SinkClosed as exc:
        _give_back(store, claim, min(exc.started, len(deliveries)))
        raise
    delivered_ms = clock.wall_ms()
    held = _acknowledge(store, claim, deliveries[:delivered], retrying, lease)
    if held and delivered < len(deliveries):
        try:
            retrying(lambda: store.release(claim, delivered))
        except StoreUnavailable as exc:  # the loop has to end, and what it delivered counts all the same
            log.warning("stopped while Redis does not answer, so the rest of a claim comes after its lease: %s", exc)
    return Tick(reply, question.asked_ms, deliveries[:delivered], delivered_ms, is_late=not held)


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


class _Lease:
    """How long messages may be started, measured on the monotonic clock from when the claim was asked for."""

    def __init__(self, clock: Clock, asked_ms: float, lease_ms: int) -> None:
        self._clock = clock
        self._deadline_ms = asked_ms + lease_ms * (1 - LEASE_MARGIN)

    def is_running(self) -> bool:
        return self._clock.monotonic_ms() < self._deadline_ms


@dataclass(slots=True)
class _AckCall:
    """Acknowledges the first messages of a claim, and counts how often it had to ask."""

    store: DrainStore
    claim: Claim
    delivered: Sequence[Message]
    tries: int = 0

    def __call__(self) -> bool:
        self.tries += 1
        idempotency_keys = [message.id for message in self.delivered if message.id != message.message_id]
        return self.store.ack(self.claim, len(self.delivered), idempotency_keys)


def _acknowledge(
    store: DrainStore, claim: Claim, delivered: Sequence[Message], retrying: RetryCall, lease: _Lease
) -> bool:
    """Acknowledge until there is an answer; False if the lease was over before."""
    call = _AckCall(store, claim, delivered)
    held = retrying(call)
    # Within the lease nobody else can have ended the claim, so it was this acknowledgement, whose first reply was lost.
    return held or (call.tries > 1 and lease.is_running())


def _give_back(store: DrainStore, claim: Claim, delivered: int) -> None:
    try:
        store.release(claim, delivered)
    except StoreError:
        pass  # the sink's error is the one to report; the lease gives the messages back
