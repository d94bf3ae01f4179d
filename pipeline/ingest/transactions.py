"""What is left to store of landing files, and how far their markers have moved: one transaction at a time.

The messages of a part of a file are stored in order of due time, which costs the server a third of any other order
(docs/adr/0004-sorted-before-stored.md), and the first to be due are there first. A marker is the place in that order up to which
everything is stored: ``<due_ms> <line>`` of the last message, so it means the same whatever the size of transactions was. The
store compares and moves the marker together with the messages.

**Cold messages** (docs/adr/0031-cold-messages.md) are the last ones of that order: those that are due at or after ``cold_from_ms``.
A transaction only counts them, as they wait in a file. Where they begin is agreed on before any is counted: it is the third word
of the marker, ``<due_ms> <line> <cold_from_ms>``, so all who write a part split it in the same way, whatever their settings.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.ingest.parsing import ParsedPart, cold_places
from pipeline.ingest.plain_lines import Ints
from pipeline.store.base import NO_MARKER, MarkerMove, MessageRows, Transaction

ALL_STORED: Final = "all"
_NO_ROWS: Final = MessageRows(np.empty(0, np.int64), pa.array([], pa.binary()), pa.array([], pa.binary()))


class PartQueue:
    """The messages of one part of a landing file, in order of due time, and the place up to which they are stored.

    ``changes``, what its other lines cancel and replace, have no place in that order: they come before the first message.
    ``is_repeated`` says that it is read again, ``has_waited`` that this is for a shard that was away, and not after a failover.
    ``cold_begin`` is the place of the first cold message, behind the last one if there is none.

    Args:
        cold_from_ms: from which due time on messages are cold, if the marker does not say it; None: none is.
    """

    def __init__(
        self, part: ParsedPart, is_repeated: bool = False, has_waited: bool = False, cold_from_ms: int | None = None
    ) -> None:
        order = np.lexsort((part.line_nos, part.due_ms))
        self.part_id = part.part_id
        self.line_nos = part.line_nos[order]
        self.due_ms = part.due_ms[order]
        self.members = part.members.take(pa.array(order))
        self.keys = part.idempotency_keys.take(pa.array(order))
        self.changes = part.changes
        self.rejected = len(part.rejected)
        self.is_repeated = is_repeated
        self.has_waited = has_waited
        self.marker = NO_MARKER
        self.place = 0
        self._bytes_before = np.cumsum(np.append(0, pc.binary_length(self.members)))
        self._wanted_cold_from_ms = cold_from_ms
        self._split_at(cold_from_ms)

    def _split_at(self, cold_from_ms: int | None) -> None:
        begin = len(self) if cold_from_ms is None else int(np.searchsorted(self.due_ms, cold_from_ms, side="left"))
        self.cold_from_ms = cold_from_ms if begin < len(self) else None
        self.cold_begin = begin

    def resume(self, marker: str) -> int:
        """Go on from a marker, also one that went back; returns how many messages are stored already."""
        self.marker = marker
        if marker == ALL_STORED:
            self.place = len(self)
        elif marker == NO_MARKER:
            self._split_at(self._wanted_cold_from_ms)
            self.place = 0
        else:
            due_ms, line, *cold_from_ms = marker.split(" ")
            self._split_at(int(cold_from_ms[0]) if cold_from_ms else None)
            self.place = self.place_behind(int(due_ms), int(line, 16))
        return self.place

    def place_behind(self, due_ms: int, line_no: int) -> int:
        """Return the place behind a message, which need not be there."""
        first = int(np.searchsorted(self.due_ms, due_ms, side="left"))
        last = int(np.searchsorted(self.due_ms, due_ms, side="right"))
        return bisect_right(self.line_nos, line_no, first, last)

    def __len__(self) -> int:
        return len(self.due_ms)

    @property
    def left(self) -> int:
        """Messages that are not stored yet."""
        return len(self) - self.place

    @property
    def lines_left(self) -> int:
        """Lines that may have done nothing yet: messages, and what changes others."""
        return self.left + (0 if self.is_begun else len(self.changes))

    @property
    def is_stored(self) -> bool:
        """Whether nothing is left, the record of that included."""
        return self.marker == ALL_STORED

    @property
    def is_begun(self) -> bool:
        """Whether something of it is stored, and so all its changes are made."""
        return self.marker != NO_MARKER

    def marker_at(self, place: int) -> str:
        """Return the marker that says that everything before ``place`` is stored."""
        if place == len(self):
            return ALL_STORED
        last = f"{self.due_ms[place - 1]} {self.line_nos[place - 1]:08x}" if place else f"0 {0:08x}"
        return last if self.cold_from_ms is None else f"{last} {self.cold_from_ms}"

    def end_of(self, messages: int, size: int) -> int:
        """Return where a transaction ends that has room for so many messages and bytes; it takes one at least.

        It has either cold messages or others. Before the first cold one the marker must say where they begin: if nothing else does
        it, a transaction with no messages.
        """
        if self.is_at_cold:
            return self.place if self.marker == NO_MARKER else self._end_of_cold(messages)
        end = int(np.searchsorted(self._bytes_before, self._bytes_before[self.place] + size, side="right")) - 1
        return min(max(end, self.place + 1), self.place + messages, self.cold_begin)

    def _end_of_cold(self, messages: int) -> int:
        """Return where a transaction of cold messages ends: those without idempotency key cost the server nothing each."""
        keyed = np.flatnonzero(self.keys[self.place :].is_valid())
        return self.place + int(keyed[messages]) if len(keyed) > messages else len(self)

    @property
    def is_at_cold(self) -> bool:
        """Whether the next message is a cold one."""
        return self.cold_begin <= self.place < len(self)

    def is_cold(self, end: int) -> bool:
        """Tell whether the messages from the place on, up to ``end``, are cold."""
        return self.cold_begin <= self.place < end

    def cut(self, end: int, has_key: bool) -> tuple[Ints, pa.Array, pa.Array]:
        """Return due times, members and keys from the place on, up to ``end``, of the messages with a key, or without."""
        part = slice(self.place, end)
        due_ms, members, keys = self.due_ms[part], self.members[part], self.keys[part]
        if keys.null_count == (0 if has_key else len(keys)):
            return due_ms, members, keys
        wanted = keys.is_valid() if has_key else keys.is_null()
        return due_ms[wanted.to_numpy(zero_copy_only=False)], members.filter(wanted), keys.filter(wanted)

    def cost_to(self, end: int) -> tuple[int, int]:
        """Return how many messages the server gets from the place on, up to ``end``, and the bytes of their members."""
        if self.is_cold(end):
            return len(self.keys[self.place : end].drop_null()), 0
        return end - self.place, int(self._bytes_before[end] - self._bytes_before[self.place])


def _common_ends(queues: Sequence[PartQueue], messages_max: int) -> list[tuple[PartQueue, int]]:
    """Return where a transaction ends that has the messages of several queues that are due first, so many at most.

    Queues that it takes nothing of are left out, but for those that have nothing left: their markers move.
    """
    heads = [queue.due_ms[queue.place : min(queue.place + messages_max, queue.cold_begin)] for queue in queues]
    owners = np.repeat(np.arange(len(heads)), [len(head) for head in heads])
    first = np.argsort(np.concatenate([*heads, np.empty(0, np.int64)]), kind="stable")[:messages_max]
    counts = np.bincount(owners[first], minlength=len(heads)).tolist()
    return [(each, each.place + taken) for each, taken in zip(queues, counts, strict=True) if taken or not each.left]


class Step:
    """The next transaction of some queues, at most ``messages_max`` messages and about ``bytes_max`` bytes of them.

    Of several queues it has the messages that are due first, so that it meets few buckets, however small their parts are.
    """

    def __init__(self, queues: Sequence[PartQueue], messages_max: int, bytes_max: int) -> None:
        left = [queue for queue in queues if not queue.is_stored]
        hot = [queue for queue in left if not queue.is_at_cold]  # the others go last: they take no place in a bucket
        self._ends = [(queue, queue.end_of(messages_max, bytes_max)) for queue in (hot or left)[:1]]
        if len(hot) > 1:
            messages_max = min(messages_max, sum(queue.left for queue in hot))
            self._ends = _common_ends(hot, messages_max)
            while messages_max > 1 and sum(queue.cost_to(end)[1] for queue, end in self._ends) > bytes_max:
                messages_max //= 2
                self._ends = _common_ends(hot, messages_max)
        elif not hot:
            room = messages_max - sum(queue.cost_to(end)[0] for queue, end in self._ends)
            for queue in left[1:]:
                if room > 0:
                    self._ends.append((queue, queue.end_of(room, bytes_max)))
                    room -= queue.cost_to(self._ends[-1][1])[0]

    def __bool__(self) -> bool:
        return bool(self._ends)

    @property
    def opens_cold(self) -> list[PartQueue]:
        """The parts whose first cold messages it has: those must be in a file before."""
        return [queue for queue, end in self._ends if queue.is_cold(end) and queue.place == queue.cold_begin]

    @property
    def transaction(self) -> Transaction:
        """Return what the store is asked to do."""
        keyed = self._rows(has_key=True, is_cold=True)
        return Transaction(
            moves=self._moves(),
            rows=self._rows(has_key=False),
            identified=self._rows(has_key=True),
            cold=self._rows(has_key=False, is_cold=True),
            cold_identified=replace(keyed, members=cold_places(keyed.members, keyed.due_ms)),
            rejected=sum(queue.rejected for queue, end in self._ends if end == len(queue)),
        )

    def advance(self) -> tuple[int, int]:
        """Record that the transaction is stored.

        Returns:
            How many messages of it are from files that are read again, and how many of these were stored before.
        """
        repeated = [(queue.has_waited, end - queue.place) for queue, end in self._ends if queue.is_repeated]
        for queue, end in self._ends:
            queue.marker, queue.place = queue.marker_at(end), end
        return sum(count for _, count in repeated), sum(count for has_waited, count in repeated if not has_waited)

    def _moves(self) -> list[MarkerMove]:
        return [MarkerMove(queue.part_id, queue.marker, queue.marker_at(end)) for queue, end in self._ends]

    def _rows(self, has_key: bool, is_cold: bool = False) -> MessageRows:
        """Return the messages with an idempotency key, or without, in order of due_ms."""
        cuts = [queue.cut(end, has_key) for queue, end in self._ends if queue.is_cold(end) == is_cold]
        if not cuts:
            return _NO_ROWS
        columns = zip(*cuts, strict=True)
        due_ms, members, keys = (list(column) for column in columns)
        rows = MessageRows(np.concatenate(due_ms), pa.concat_arrays(members), pa.concat_arrays(keys))
        if len(cuts) == 1:
            return rows
        order = np.argsort(rows.due_ms, kind="stable")
        return MessageRows(
            rows.due_ms[order], rows.members.take(pa.array(order)), rows.idempotency_keys.take(pa.array(order))
        )
