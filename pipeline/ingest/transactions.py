"""What is left to store of landing files, and how far their fences have moved: one transaction at a time.

The messages of a piece of a file are stored in order of due time, which costs the server a third of any other order
(docs/adr/0004-sorted-before-stored.md), and the first to be due are there first. A fence is the place in that order up to which
everything is stored: ``<due_ms> <line>`` of the last message, so it means the same whatever the size of transactions was. The
store compares and moves the fence together with the messages.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np

from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.ids import MESSAGE_ID_LENGTH, TOKEN_LENGTH
from pipeline.ingest.parsing import ParsedPiece
from pipeline.store.base import NO_FENCE, FenceMove, Group, IdentifiedMessage, Transaction
from pipeline.store.resp import unframe_pair

ALL_STORED: Final = "all"


class PieceQueue:
    """The messages of one piece of a landing file, in order of due time, and the place up to which they are stored."""

    def __init__(self, piece: ParsedPiece) -> None:
        due_ms = np.array(piece.due_ms, dtype=np.int64)
        in_order = np.argsort(due_ms, kind="stable")
        order = in_order.tolist()
        self.fence_token = piece.fence_token
        self.due_ms: list[int] = due_ms[in_order].tolist()
        self.pairs = [piece.pairs[index] for index in order]
        self.caller_ids = {}
        if piece.caller_ids:
            self.caller_ids = {
                place: piece.caller_ids[index] for place, index in enumerate(order) if index in piece.caller_ids
            }
        self.rejected = len(piece.rejected)
        self.fence = NO_FENCE
        self.place = 0

    def resume(self, fence: str) -> int:
        """Take up at a fence, also one that went back; returns how many messages are stored already."""
        self.fence = fence
        if fence == ALL_STORED:
            self.place = len(self.pairs)
        elif fence == NO_FENCE:
            self.place = 0
        else:
            due_ms, line = fence.split(" ")
            self.place = bisect_left(self.due_ms, int(due_ms))
            while self.place < len(self.pairs) and self._position(self.place) <= (int(due_ms), line):
                self.place += 1
        return self.place

    @property
    def left(self) -> int:
        """Messages that are not stored yet."""
        return len(self.pairs) - self.place

    @property
    def is_stored(self) -> bool:
        """Whether nothing is left, the record of that included."""
        return self.fence == ALL_STORED

    def fence_at(self, place: int) -> str:
        """Return the fence that says that everything before ``place`` is stored."""
        if place == len(self.pairs):
            return ALL_STORED
        due_ms, line = self._position(place - 1)
        return f"{due_ms} {line}"

    def _position(self, place: int) -> tuple[int, str]:
        due_ms, member = unframe_pair(self.pairs[place])
        return due_ms, member[TOKEN_LENGTH:MESSAGE_ID_LENGTH].decode()


class Step:
    """The next transaction of some queues, at most ``messages_max`` messages and about ``bytes_max`` bytes of them."""

    def __init__(self, queues: Sequence[PieceQueue], messages_max: int, bytes_max: int) -> None:
        self._ends: list[tuple[PieceQueue, int]] = []
        room, room_bytes = messages_max, bytes_max
        for queue in queues:
            if queue.is_stored or (self._ends and (room <= 0 or room_bytes <= 0)):
                continue
            end = min(queue.place + room, len(queue.pairs))
            size = sum(map(len, queue.pairs[queue.place : end]))
            while size > room_bytes and end > queue.place + 1:
                end = queue.place + (end - queue.place) // 2
                size = sum(map(len, queue.pairs[queue.place : end]))
            room, room_bytes = room - (end - queue.place), room_bytes - size
            self._ends.append((queue, end))

    def __bool__(self) -> bool:
        return bool(self._ends)

    @property
    def transaction(self) -> Transaction:
        """Return what the store is asked to do."""
        return Transaction(
            moves=[FenceMove(queue.fence_token, queue.fence, queue.fence_at(end)) for queue, end in self._ends],
            groups=self._groups(),
            identified=[
                IdentifiedMessage(bucket_start_ms(queue.due_ms[i]), *unframe_pair(queue.pairs[i]), queue.caller_ids[i])
                for queue, end in self._ends
                if queue.caller_ids
                for i in range(queue.place, end)
                if i in queue.caller_ids
            ],
            rejected=sum(queue.rejected for queue, end in self._ends if end == len(queue.pairs)),
        )

    def advance(self) -> None:
        """Note that it is stored."""
        for queue, end in self._ends:
            queue.fence, queue.place = queue.fence_at(end), end

    def _groups(self) -> list[Group]:
        """Return the messages without a caller's id, in order of due_ms, cut by bucket."""
        if len(self._ends) == 1 and not self._ends[0][0].caller_ids:
            queue, end = self._ends[0]
            return _cut(queue.due_ms[queue.place : end], queue.pairs[queue.place : end])
        rows: list[tuple[int, bytes, str]] = []
        for queue, end in self._ends:
            places = (place for place in range(queue.place, end) if place not in queue.caller_ids)
            rows += ((*unframe_pair(queue.pairs[place]), queue.pairs[place]) for place in places)
        rows.sort()
        return _cut([due_ms for due_ms, _, _ in rows], [pair for _, _, pair in rows])


def _cut(due_ms: Sequence[int], pairs: Sequence[str]) -> list[Group]:
    groups, first = [], 0
    while first < len(pairs):
        start = bucket_start_ms(due_ms[first])
        end = bisect_left(due_ms, start + BUCKET_WIDTH_MS, first)
        groups.append(Group(start, pairs[first:end]))
        first = end
    return groups
