"""What the pipeline asks of a store, and the values that cross that border."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Group:
    """Messages of one bucket, sorted by due_ms.

    ``pairs`` is due_ms, member, due_ms, member, … as they go on the wire.
    """

    bucket_start_ms: int
    pairs: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class IdentifiedMessage:
    """A message whose caller gave it an id: stored only if that id is not known."""

    bucket_start_ms: int
    due_ms: int
    member: bytes
    caller_id: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive lines of one landing file, stored by one atomic call.

    The lines after ``previous_line`` up to ``last_line``; a line that is blank or rejected has no message here.
    """

    file_token: str
    previous_line: int
    last_line: int
    rejected: int
    groups: Sequence[Group]
    identified: Sequence[IdentifiedMessage]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """How many messages of a chunk are new, and how many were known: replayed, or the caller's id came again."""

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
    """Messages of one bucket that this loop may deliver until ``lease_until_ms`` on the server's clock."""

    lease_token: str
    bucket_start_ms: int
    lease_until_ms: int
    messages: Sequence[ClaimedMessage]


@dataclass(frozen=True, slots=True)
class ClaimReply:
    """A claim, or None and the time until which nothing can be due.

    ``next_due_ms`` is None if nothing is scheduled (with a claim: unknown, ask again). ``first_lease_ms`` is when the first
    lease of all loops ends, None if nothing is in flight. ``now_ms`` is the server's clock.
    """

    now_ms: int
    claim: Claim | None
    next_due_ms: int | None
    first_lease_ms: int | None


@dataclass(frozen=True, slots=True)
class Stats:
    """One look at a namespace; every number is of messages, times are epoch ms UTC on the server's clock."""

    now_ms: int
    scheduled: int
    in_flight: int
    next_due_ms: int | None
    overdue_ms: int
    counters: dict[str, int]


class Store(Protocol):
    """The seven verbs. Each may raise ``StoreUnavailable``: then the same call with the same arguments may be made again."""

    def schedule(self, source_id: str, chunks: Sequence[Chunk]) -> list[Scheduled]:
        """Store each chunk exactly once, whatever was stored of it before. Atomic per chunk."""
        ...

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

    def forget_fences(self, source_id: str, file_tokens: Sequence[str]) -> None:
        """Drop the fences of landing files that are gone for good."""
        ...

    def stats(self) -> Stats:
        """Count what is there."""
        ...
