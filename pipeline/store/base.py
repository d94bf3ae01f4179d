"""What the pipeline asks of a store, and the values that cross that border."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, NamedTuple, Protocol

from pipeline.core.messages import Change, Message

NO_MARKER = ""  # of a file of which nothing is stored


@dataclass(frozen=True, slots=True)
class MessageRows:
    """Messages as columns that run in parallel.

    Lists will do; who stores many passes a NumPy array of int64 and Arrow arrays of binaries, of which no row is made.
    """

    due_ms: Any
    members: Any
    idempotency_keys: Any = ()  # of all of them, or of none

    def __len__(self) -> int:
        return len(self.due_ms)

    def __getitem__(self, part: slice) -> "MessageRows":
        """Return some rows."""
        return MessageRows(self.due_ms[part], self.members[part], self.idempotency_keys[part])


NO_ROWS = MessageRows([], [], [])


@dataclass(frozen=True, slots=True)
class MarkerMove:
    """How a transaction moves one marker, from where its caller saw it. The store compares the texts and doesn't read them."""

    part_id: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Transaction:
    """Messages and the markers that say that they are stored: all of it happens, once, or nothing.

    All are in order of ``due_ms``. ``rows`` have no idempotency key; ``identified`` ones have, and are stored only if it is new.
    Those that are ``cold`` wait in a file, and are only counted here; ``cold_identified`` are those with a key, if it is new, and
    have their places (``cold.cold_place``) for members. ``rejected`` lines are only counted.
    """

    moves: Sequence[MarkerMove]
    rows: MessageRows
    identified: MessageRows
    rejected: int
    cold: MessageRows = NO_ROWS
    cold_identified: MessageRows = NO_ROWS


@dataclass(frozen=True, slots=True)
class Scheduled:
    """How many messages of a transaction are new, and which of ``identified``, and ``cold_identified`` behind them, are known."""

    stored: int
    duplicates: tuple[int, ...] = ()


class State(StrEnum):
    """Where a message is."""

    SCHEDULED = auto()
    HELD = auto()  # it is due, and its topic is paused or has used up its rate limit
    IN_FLIGHT = auto()  # a drain loop has it: it is about to be delivered
    DELIVERED = auto()  # or dead: it has left the schedule within the last ``id_retention_sec``
    CANCELLED = auto()  # within the last ``id_retention_sec``
    UNKNOWN = auto()  # never scheduled, or forgotten; of a handle: delivered, moved, or never scheduled


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a call. ``message`` is the one that waits now, or that this call has cancelled; else None.

    ``version`` of what waits is another one whenever its message, due time or state is; else "". ``is_new`` says of a replacement
    that nothing waited; a repetition after a lost reply may not know.
    """

    state: State
    message: Message | None = None
    version: str = field(default="", compare=False)
    is_new: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Changed:
    """How many rows that cancel or replace did it, changed nothing, or came when their message was in flight or delivered."""

    cancelled: int = 0
    replaced: int = 0
    duplicates: int = 0
    late: int = 0


class ClaimedMessage(NamedTuple):
    """One message in flight. ``attempt`` counts from 1; ``due_ms`` is epoch ms UTC."""

    due_ms: int
    attempt: int
    member: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """Messages of one shard that this loop may deliver until ``lease_until_ms`` on the server's clock."""

    shard: int
    lease_token: str
    bucket_start_ms: int
    lease_until_ms: int
    messages: Sequence[ClaimedMessage]


class Moved(NamedTuple):
    """Messages that went into a stream: when each was due (epoch ms UTC), and the beginning of their ids, see ``ids.arrival_ms``.

    ``group`` is "", but for what comes again for one group.
    """

    topic: str
    group: str
    id_head: str
    dues_ms: list[int]


@dataclass(frozen=True, slots=True)
class ClaimReply:
    """A claim, or None and the time until which nothing can be due.

    ``next_due_ms`` is None if nothing is scheduled (with a claim: unknown, ask again). ``first_lease_ms`` is when the first
    lease of all loops ends, None if nothing is in flight. ``now_ms`` is the server's clock. ``moved`` is what
    went into streams.
    """

    now_ms: int
    claim: Claim | None
    next_due_ms: int | None
    first_lease_ms: int | None
    moved: Sequence[Moved] = ()


class Ack(NamedTuple):
    """What is delivered of a claim: so many of its first messages, and message id and idempotency key of those that have one."""

    claim: Claim
    delivered: int
    keyed: Sequence[tuple[str, str]]


Exchange = Callable[
    [], tuple[bool | None, ClaimReply]
]  # waits for the answers to an acknowledgement, if there is one, and a claim


class SchedulingStore(Protocol):
    """What a writer asks of a shard. Each verb may raise ``StoreUnavailable``: then the same call may be made again."""

    def markers(self, source_id: str, part_ids: Sequence[str]) -> list[str]:
        """Return how far each file is stored, ``NO_MARKER`` where nothing is."""
        ...

    def schedule(self, source_id: str, transaction: Transaction) -> Scheduled | None:
        """Store a transaction, if all its markers still are where it says; None if not: then nothing was done. Atomic."""
        ...

    def wait_for_copies(self, on_disk: bool, replicas: int = 0) -> None:
        """Return when the server has on disk, and so many of its replicas have, what it has taken so far."""
        ...

    def history(self) -> str:
        """Return the ID of the server's history of writes: another one after a failover. "" if it does not say."""
        ...


class ChangingStore(Protocol):
    """What a writer asks of a shard for the rows that cancel and replace; it may raise ``StoreUnavailable``, as the others."""

    def apply(self, changes: Sequence[Change]) -> Changed:
        """Make changes, in any order; making one again changes nothing."""
        ...


class DrainStore(Protocol):
    """What a drain loop asks. Each verb may raise ``StoreUnavailable``: then the same call may be made again."""

    def claim(self, name: str) -> ClaimReply:
        """Take the oldest due messages in flight; the same ``name`` again gives the same claim."""
        ...

    def ack(self, claim: Claim, delivered: int, keyed: Sequence[tuple[str, str]]) -> bool:
        """Forget the first ``delivered`` messages of ``claim``; False if there is no such claim.

        Its lease ended, or an earlier call that got no answer acknowledged all of it.
        """
        ...

    def begin(self, name: str, ack: Ack | None) -> Exchange:
        """Send ``claim``, behind an ``ack`` if there is one, and don't wait.

        The exchange may raise ``StoreUnavailable``, too: then either may be called again.
        """
        ...

    def release(self, claim: Claim, delivered: int) -> int:
        """Give back what is not acknowledged; returns how many, 0 if the claim was already taken back."""
        ...
