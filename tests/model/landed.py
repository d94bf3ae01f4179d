"""Landing files as the tests say them, and the transactions that store them."""

from dataclasses import dataclass
from itertools import groupby

from pipeline.core.messages import encode_member
from pipeline.store.base import NO_FENCE, Transaction
from pipeline.store.resp import unframe_pairs
from tests.store.builders import group, member, transaction

ALL = "all"


@dataclass(frozen=True)
class Line:
    """A line of a landing file: ``due_ms`` is None where it was rejected."""

    number: int
    due_ms: int | None
    caller_id: str = ""


@dataclass(frozen=True)
class LandedFile:
    """A file is stored from place to place; the store does not read a fence, so that its text is the place."""

    token: str
    lines: tuple[Line, ...]
    topics: tuple[str, ...] = ()  # that its lines take turns with; without, their messages are plain

    def member_of(self, number: int, caller_id: str) -> bytes:
        """Return what is stored for a line."""
        if not self.topics:
            return member(number, token=self.token)
        topic = self.topics[number % len(self.topics)]
        text = f"message {number} of {self.token}"
        return encode_member(f"{self.token}{number:08x}", text, topic, caller_id or None)

    def fence_at(self, place: int) -> str:
        """Return the fence that says that the lines before ``place`` are stored."""
        if place == 0:
            return NO_FENCE
        return ALL if place == len(self.lines) else str(place)

    def place_of(self, fence: str) -> int:
        """Return how many lines a fence says are stored."""
        return len(self.lines) if fence == ALL else int(fence or 0)

    def transaction(self, first: int, last: int) -> Transaction:
        """Return what stores the lines between two places."""
        part = self.lines[first:last]
        accepted = [(line.number, line.due_ms, line.caller_id) for line in part if line.due_ms is not None]
        return transaction(
            *((number, due_ms) for number, due_ms, caller_id in accepted if not caller_id),
            before=self.fence_at(first),
            after=self.fence_at(last),
            rejected=len(part) - len(accepted),
            identified=tuple(line for line in accepted if line[2]),
            token=self.token,
            member_of=self.member_of,
        )


def messages_of(transaction: Transaction) -> list[tuple[int, int, bytes]]:
    """Return the messages without a caller's id, each with its bucket and its due_ms."""
    return [(each.bucket_start_ms, *pair) for each in transaction.groups for pair in unframe_pairs(each.wire)]


def together(*transactions: Transaction) -> Transaction:
    """Make one transaction of those of several files."""
    in_order = sorted(message for each in transactions for message in messages_of(each))
    by_bucket = groupby(in_order, key=lambda message: message[0])
    return Transaction(
        moves=[move for each in transactions for move in each.moves],
        groups=[group(start, [(due_ms, m) for _, due_ms, m in held]) for start, held in by_bucket],
        identified=[message for each in transactions for message in each.identified],
        rejected=sum(each.rejected for each in transactions),
    )
