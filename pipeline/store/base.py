"""What the pipeline asks of a store, and the values that cross that border."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

NO_FENCE = ""  # of a file of which nothing is stored


@dataclass(frozen=True, slots=True)
class Group:
    """``count`` messages of one bucket, sorted by due_ms; of each, ``wire`` holds the score and the member as RESP bulk strings."""

    bucket_start_ms: int
    count: int
    wire: bytes


@dataclass(frozen=True, slots=True)
class IdentifiedMessage:
    """A message whose caller gave it an id: stored only if that id is not known."""

    bucket_start_ms: int
    due_ms: int
    member: bytes
    caller_id: str


@dataclass(frozen=True, slots=True)
class FenceMove:
    """How a transaction moves one fence, from where its caller saw it. The store compares the texts and doesn't read them."""

    fence_token: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Transaction:
    """Messages and the fences that say that they are stored: all of it happens, once, or nothing.

    ``rejected`` lines are only counted. ``groups`` come in order of time; their messages have no caller's id.
    """

    moves: Sequence[FenceMove]
    groups: Sequence[Group]
    identified: Sequence[IdentifiedMessage]
    rejected: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """How many messages of a transaction are new, and of how many the caller's id was known."""

    stored: int
    known: int


@dataclass(frozen=True, slots=True)
class ClaimedMessage:
    """One message in flight. ``attempt`` counts from 1; ``due_ms`` is epoch ms UTC."""

    due_ms: int
    attempt: int
    member: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """Messages of one bucket of one shard that this loop may deliver until ``lease_until_ms`` on the server's clock."""

    shard: int
    lease_token: str
    bucket_start_ms: int
    lease_until_ms: int
    messages: Sequence[ClaimedMessage]


@dataclass(frozen=True, slots=True)
class ClaimReply:
    """A claim, or None and the time until which nothing can be due.

    ``next_due_ms`` is None if nothing is scheduled (with a claim: unknown, ask again). ``first_lease_ms`` is when the first
    lease of all loops ends, None if nothing is in flight. ``now_ms`` is the server's clock. ``moved`` has the due times of what
    went into streams, by topic, or ``<topic>:<group>`` for what comes again for one group.
    """

    now_ms: int
    claim: Claim | None
    next_due_ms: int | None
    first_lease_ms: int | None
    moved: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stats:
    """One look at a namespace; every number is of messages, times are epoch ms UTC on the server's clock.

    ``held`` is of paused topics, and counted as ``scheduled``, too; ``dead`` are the dead letters that are there.
    """

    now_ms: int
    scheduled: int
    held: int
    in_flight: int
    dead: int
    next_due_ms: int | None
    overdue_ms: int
    counters: dict[str, int]


class SchedulingStore(Protocol):
    """What a writer asks of a shard. Each verb may raise ``StoreUnavailable``: then the same call may be made again."""

    def fences(self, source_id: str, fence_tokens: Sequence[str]) -> list[str]:
        """Return how far each file is stored, ``NO_FENCE`` where nothing is."""
        ...

    def schedule(self, source_id: str, transaction: Transaction) -> Scheduled | None:
        """Store a transaction, if all its fences still are where it says; None if not: then nothing was done. Atomic."""
        ...

    def wait_for_disk(self) -> None:
        """Return when the server has on disk what it has taken so far."""
        ...


class DrainStore(Protocol):
    """What a drain loop asks. Each verb may raise ``StoreUnavailable``: then the same call may be made again."""

    def claim(self, name: str) -> ClaimReply:
        """Take the oldest due messages in flight; the same ``name`` again gives the same claim."""
        ...

    def ack(self, claim: Claim, delivered: int, caller_ids: Sequence[str]) -> bool:
        """Forget the first ``delivered`` messages of ``claim``; False if its lease is over."""
        ...

    def release(self, claim: Claim, delivered: int) -> int:
        """Give back what is not acknowledged; returns how many, 0 if the lease is over."""
        ...

    def reclaim(self) -> int:
        """Give back the claims whose lease is over, some at a time; returns how many messages."""
        ...
