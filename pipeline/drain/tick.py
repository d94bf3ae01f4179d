"""One pass of the drain loop: claim, deliver, acknowledge."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pipeline.core.clock import Clock
from pipeline.core.errors import SinkClosed, StoreError, StoreUnavailable
from pipeline.core.messages import Message, decode_member
from pipeline.sinks.base import Delivery, Sink
from pipeline.store.base import Claim, ClaimedMessage, ClaimReply, DrainStore

log = logging.getLogger(__name__)

LEASE_MARGIN = 0.1  # the part of the lease that is left unused, for clocks that drift and a process that is paused

T = TypeVar("T")


class Patience(Protocol):
    """Makes a call to the store again until it is answered."""

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; raises ``StoreUnavailable`` when the loop has to end."""
        ...


@dataclass(frozen=True, slots=True)
class Tick:
    """What one pass did.

    ``next_ms`` is how long nothing can be due, None if nothing is scheduled; ``last_due_ms`` the latest due time delivered;
    ``asked_ms`` when the claim was asked for, on the monotonic clock. ``handed`` is what the sink took, and ``handed_ms`` when it
    had all of it, on the clock of this machine. ``moved`` has the due times of what the claim moved into streams, by topic, or
    ``<topic>:<group>`` for what comes again for a group; ``delivered`` does not count it.
    """

    delivered: int
    stale: int
    now_ms: int
    next_ms: int | None
    first_lease_ms: int | None
    last_due_ms: int | None = None
    asked_ms: float = 0.0
    claimed: int = 0
    handed: Sequence[Delivery] = ()
    handed_ms: int = 0
    moved: Mapping[str, Sequence[int]] = field(default_factory=dict)


def run_tick(
    store: DrainStore, sink: Sink, clock: Clock, name: str, stopping: Callable[[], bool], patiently: Patience
) -> Tick:
    """Deliver one claim, if anything is due.

    At least once: a message is acknowledged after the sink has it, so whatever ends this between the two repeats it. Nothing is
    begun after the lease, and a stop does not wait for a sink that is blocked: the rest is given back.

    Args:
        name: unique to this pass, so that a claim whose reply was lost can be asked for again.

        patiently: how calls to the store are made.
    Raises:
        StoreUnavailable: the loop has to end and the server does not answer before all is acknowledged that was delivered; a claim
            is left to its lease.
        SinkClosed: the claim is given back.
    """
    asked_ms = 0.0

    def ask() -> ClaimReply:
        nonlocal asked_ms
        asked_ms = clock.monotonic_ms()  # before the server can have started the lease
        return store.claim(name)

    reply = patiently(ask)
    claim = reply.claim
    if claim is None:
        next_ms = None if reply.next_due_ms is None else reply.next_due_ms - reply.now_ms
        last_due_ms = max((due_ms for dues in reply.moved.values() for due_ms in dues), default=None)
        return Tick(
            0, 0, reply.now_ms, next_ms, reply.first_lease_ms, last_due_ms, asked_ms=asked_ms, moved=reply.moved
        )

    deadline_ms = asked_ms + (claim.lease_until_ms - reply.now_ms) * (1 - LEASE_MARGIN)

    def in_time() -> bool:
        return clock.monotonic_ms() < deadline_ms

    deliveries = [_delivery(claimed) for claimed in claim.messages]
    try:
        delivered = sink.deliver(deliveries, in_time, lambda: in_time() and not stopping())
    except SinkClosed as exc:
        _give_back(store, claim, min(exc.begun, len(deliveries)))
        raise
    handed_ms = clock.wall_ms()
    held = _acknowledge(store, claim, deliveries[:delivered], patiently, in_time)
    if held and delivered < len(deliveries):
        try:
            patiently(lambda: store.release(claim, delivered))
        except StoreUnavailable as exc:  # the loop has to end, and what it delivered counts all the same
            log.warning("stopped while Redis does not answer, so the rest of a claim comes after its lease: %s", exc)
    return Tick(
        delivered=delivered,
        stale=0 if held else delivered,
        now_ms=reply.now_ms,
        next_ms=0,
        first_lease_ms=reply.first_lease_ms,
        last_due_ms=claim.messages[-1].due_ms,
        asked_ms=asked_ms,
        claimed=len(deliveries),
        handed=deliveries[:delivered],
        handed_ms=handed_ms,
        moved=reply.moved,
    )


def _acknowledge(
    store: DrainStore,
    claim: Claim,
    delivered: Sequence[Delivery],
    patiently: Patience,
    within_lease: Callable[[], bool],
) -> bool:
    """Acknowledge until there is an answer; False if the lease was over before."""
    caller_ids = [d.message.id for d in delivered if d.message.id != d.message.message_id]
    tries = 0

    def call() -> bool:
        nonlocal tries
        tries += 1
        return store.ack(claim, len(delivered), caller_ids)

    held = patiently(call)
    # Within the lease nobody else can have ended the claim, so it was this acknowledgement, whose first reply was lost.
    return held or (tries > 1 and within_lease())


def _give_back(store: DrainStore, claim: Claim, delivered: int) -> None:
    try:
        store.release(claim, delivered)
    except StoreError:
        pass  # the sink's error is the one to tell; the lease gives the messages back


def _delivery(claimed: ClaimedMessage) -> Delivery:
    """Read a member; one that is not in our format, say from a hand-made ZADD, is delivered as it stands."""
    try:
        message = decode_member(claimed.member)
    except ValueError:
        text = claimed.member.decode("utf-8", "replace")
        message = Message(message_id=text[:22], id=text[:22], topic="default", message=text, headers={})
    return Delivery(message, claimed.due_ms if message.due_ms is None else message.due_ms, claimed.attempt)
