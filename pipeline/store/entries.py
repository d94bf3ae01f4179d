"""A message as it stands in a stream: pending for a group, or dead."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pipeline.core.messages import Message, value_type

EntryId = tuple[int, int]
NO_ENTRY: Final[EntryId] = (0, 0)
BEGINNING: Final = "0-0"
LAST_OF_A_MS: Final = 2**64 - 1  # the highest number of an entry's id


def entry_id_of(text: str) -> EntryId:
    """Return the id of an entry, ``<epoch ms>-<number>``, as numbers that can be compared."""
    ms, _, number = text.partition("-")
    return int(ms), int(number)


def place_before(time_ms: int) -> str:
    """Return the place just before all entries that came into a stream at a time (epoch ms) or later."""
    return f"{time_ms - 1}-{LAST_OF_A_MS}" if time_ms > 0 else BEGINNING


@value_type(kw_only=True)
class Entry(Message):
    """A message that one group has.

    Args:
        stream: the key it is in, and ``entry_id`` its id there, ``<epoch ms>-<number>``.

        delivery_count: how often it was delivered from there.
    """

    shard: int
    stream: str
    entry_id: str
    delivery_count: int

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from every other entry."""
        return self.stream, self.entry_id

    def delivered_once_more(self) -> "Entry":
        """Return it as it is after one more delivery; the first one is the attempt that it has already."""
        return replace(self, delivery_count=self.delivery_count + 1, attempt=self.attempt + (self.delivery_count > 0))


@value_type(kw_only=True)
class DeadLetter(Message):
    """A message that was given up.

    Args:
        detail: what the last failure said; ``group`` gave it up after ``attempt`` tries, "" if it never got to a group.

        died_ms: epoch ms UTC.
    """

    shard: int
    entry_id: str
    reason: str
    detail: str
    died_ms: int

    @property
    def name(self) -> str:
        """What tells it from all others, for a command line."""
        return f"{self.topic}/{self.shard}/{self.entry_id}"

    def to_record(self) -> dict[str, Any]:
        """Return what users see of it."""
        why = {"reason": self.reason, "detail": self.detail, "group": self.group, "died_ms": self.died_ms}
        return Message.to_record(self) | why


def by_stream(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return entries by their stream."""
    of_stream: dict[str, list[Entry]] = {}
    for entry in entries:
        of_stream.setdefault(entry.stream, []).append(entry)
    return of_stream


def in_order(
    entries: Sequence[Entry], of_stream: Mapping[str, Sequence[Entry]], answers: Sequence[Sequence[int]]
) -> list[bool]:
    """Bring the answers about the entries of each stream into the order of all."""
    done: dict[tuple[str, str], bool] = {}
    for some, answered in zip(of_stream.values(), answers, strict=True):
        done.update(zip((entry.key for entry in some), map(bool, answered), strict=True))
    return [done[entry.key] for entry in entries]
