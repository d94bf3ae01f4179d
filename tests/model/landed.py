"""Landing files as the tests say them, and the transactions that store them."""

from dataclasses import dataclass

from pipeline.core.messages import DEFAULT_TOPIC, Message
from pipeline.store.base import NO_MARKER, Transaction
from tests.store.builders import BUCKET_MS, in_keyed_rows, in_rows, member, transaction

ALL = "all"


@dataclass(frozen=True)
class Line:
    """A line of a landing file: ``due_ms`` is None where it was rejected."""

    number: int
    due_ms: int | None
    idempotency_key: str = ""


@dataclass(frozen=True)
class LandedFile:
    """A file is stored from place to place; the store does not read a marker, so that its text is the place."""

    token: str
    lines: tuple[Line, ...]
    topics: tuple[str, ...] = ()  # that its lines take turns with; without, their messages are plain

    def member_of(self, number: int, idempotency_key: str) -> bytes:
        """Return what is stored for a line."""
        if not self.topics and not idempotency_key:
            return member(number, token=self.token)
        topic = self.topics[number % len(self.topics)] if self.topics else DEFAULT_TOPIC
        text = f"message {number} of {self.token}"
        return Message(0, text, topic, idempotency_key).to_member(f"{self.token}{number:08x}")

    def marker_at(self, place: int) -> str:
        """Return the marker that says that the lines before ``place`` are stored."""
        if place == 0:
            return NO_MARKER
        return ALL if place == len(self.lines) else str(place)

    def place_of(self, marker: str) -> int:
        """Return how many lines a marker says are stored."""
        return len(self.lines) if marker == ALL else int(marker or 0)

    def transaction(self, first: int, last: int) -> Transaction:
        """Return what stores the lines between two places."""
        part = self.lines[first:last]
        accepted = [(line.number, line.due_ms, line.idempotency_key) for line in part if line.due_ms is not None]
        return transaction(
            *((number, due_ms) for number, due_ms, idempotency_key in accepted if not idempotency_key),
            before=self.marker_at(first),
            after=self.marker_at(last),
            rejected=len(part) - len(accepted),
            identified=tuple(line for line in accepted if line[2]),
            token=self.token,
            member_of=self.member_of,
        )


def messages_of(transaction: Transaction) -> list[tuple[int, int, bytes]]:
    """Return the messages without an idempotency key, each with its bucket and its due_ms."""
    pairs = zip(transaction.rows.due_ms, transaction.rows.members, strict=True)
    return [(due_ms - due_ms % BUCKET_MS, due_ms, stored) for due_ms, stored in pairs]


def identified_of(transaction: Transaction) -> list[tuple[int, bytes, str]]:
    """Return the others, each with its due_ms and its idempotency key."""
    rows = transaction.identified
    return [*zip(rows.due_ms, rows.members, rows.idempotency_keys, strict=True)]


def together(*transactions: Transaction) -> Transaction:
    """Make one transaction of those of several files."""
    return Transaction(
        moves=[move for each in transactions for move in each.moves],
        rows=in_rows(sorted((due_ms, stored) for each in transactions for _, due_ms, stored in messages_of(each))),
        identified=in_keyed_rows([message for each in transactions for message in identified_of(each)]),
        rejected=sum(each.rejected for each in transactions),
    )
