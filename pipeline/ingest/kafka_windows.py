"""Windows of a Kafka partition: records that are stored in order of due time, and the marker that says how far that has come.

Order by due time costs the server a third of any other order (docs/adr/0004-sorted-before-stored.md), but the offsets that are
stored then have holes. So the marker of a partition has a second half while a window is stored: ``<next> <end> <due_ms> <offset>``
says that everything before ``next`` is stored, and from there to before ``end`` what is not behind (``due_ms``, ``offset``). When
all of the window is stored, ``next`` is its end, and stands alone. The first marker of a partition has an empty window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from pipeline.ingest.parsing import ParsedPart
from pipeline.ingest.transactions import PartQueue

WINDOW_TRANSACTIONS: Final = 20  # of 5,000: what ADR 4 measured for sorted runs of 50,000 is reached


@dataclass(frozen=True, slots=True)
class PartitionMarker:
    """How far a partition is stored in one shard. Without an open window, ``end`` is ``next``."""

    next: int
    end: int
    due_ms: int = 0
    offset: int = 0

    @classmethod
    def of(cls, text: str) -> Self:
        """Read a marker; raises ``ValueError`` if it is none."""
        next_offset, *window = map(int, text.split(" "))
        return cls(next_offset, *window) if window else cls(next_offset, next_offset)

    def __str__(self) -> str:
        return f"{self.next} {self.end} {self.due_ms} {self.offset}" if self.is_open else f"{self.next}"

    @property
    def is_open(self) -> bool:
        """Whether a part of a window is stored."""
        return self.end > self.next


def first_marker(offset: int) -> str:
    """Return the marker of a partition of which nothing is stored yet: an empty window, so that it differs from all later ones."""
    return f"{offset} {offset} 0 0"


def is_begun(markers: Sequence[str], shards: int) -> bool:
    """Tell by the markers of the shards that answer whether all have one of a partition: each has its first before any stores."""
    return all(markers) and (
        len(markers) == shards or any(each != first_marker(PartitionMarker.of(each).next) for each in markers)
    )


class WindowQueue(PartQueue):
    """What one shard gets of the records before ``end``, in order of due time, and the place up to which it is stored.

    ``part`` has all records from the marker's ``next`` on. If the window of the marker ends behind ``end``, all of this queue goes
    into one transaction.
    """

    def __init__(self, part: ParsedPart, begin: int, end: int, marker: str) -> None:
        """Make one.

        Args:
            begin: where a partition without marker begins.
        """
        super().__init__(part)
        self._begin, self._end = begin, end
        self._made_at = self._marker_of(marker)
        self._is_stale = False
        self.resume(marker)

    def _marker_of(self, text: str) -> PartitionMarker:
        return PartitionMarker.of(text or str(self._begin))

    def resume(self, marker: str) -> int:
        """Go on from a marker. If another writer has a window with another end, nothing is left to do here."""
        self.marker = marker
        at = self._marker_of(marker)
        if at.next >= self._end:
            self.place = len(self)
            return self.place
        self._is_stale = at.next != self._made_at.next or (at.is_open and at.end not in (self._end, self._made_at.end))
        if not self._is_stale:
            self.place = self.place_behind(at.due_ms, at.offset) if at.is_open else 0
        return self.place

    @property
    def is_stored(self) -> bool:
        """Whether nothing is left to do here."""
        return self._is_stale or self._marker_of(self.marker).next >= self._end

    @property
    def is_begun(self) -> bool:
        """Whether some of the window that it lies in is stored, and so all its changes are made."""
        return self._marker_of(self.marker).is_open

    def marker_at(self, place: int) -> str:
        """Return the marker that says that everything before ``place`` is stored."""
        at = self._marker_of(self.marker)
        if place < len(self):
            return str(PartitionMarker(at.next, self._end, int(self.due_ms[place - 1]), int(self.line_nos[place - 1])))
        return str(PartitionMarker(self._end, max(at.end, self._end), at.due_ms, at.offset))

    def end_of(self, messages: int, size: int) -> int:
        """Return where a transaction ends."""
        is_within_another = self._marker_of(self.marker).end > self._end
        return len(self) if is_within_another else PartQueue.end_of(self, messages, size)
