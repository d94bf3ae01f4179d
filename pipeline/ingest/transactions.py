"""What is left to store of landing files, and how far their fences have moved: one transaction at a time.

The messages of a piece of a file are stored in order of due time, which costs the server a third of any other order
(docs/adr/0004-sorted-before-stored.md), and the first to be due are there first. A fence is the place in that order up to which
everything is stored: ``<due_ms> <line>`` of the last message, so it means the same whatever the size of transactions was. The
store compares and moves the fence together with the messages.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.ingest.parsing import ParsedPiece
from pipeline.ingest.plain_lines import Ints
from pipeline.store.base import NO_FENCE, FenceMove, Group, IdentifiedMessage, Transaction
from pipeline.store.shards import shard_of

ALL_STORED: Final = "all"


class PieceQueue:
    """The messages of one piece of a landing file, in order of due time, and the place up to which they are stored."""

    def __init__(self, piece: ParsedPiece) -> None:
        order = np.lexsort((piece.line_nos, piece.due_ms))
        self.fence_token = piece.fence_token
        self.line_nos = piece.line_nos[order]
        self.due_ms = piece.due_ms[order]
        self.members = piece.members.take(pa.array(order))
        self.caller_ids: dict[int, str] = {}
        if piece.caller_ids:
            places = {index: place for place, index in enumerate(order.tolist())}
            self.caller_ids = {places[index]: caller_id for index, caller_id in piece.caller_ids.items()}
        self.rejected = len(piece.rejected)
        self.fence = NO_FENCE
        self.place = 0
        self._bytes_before = np.cumsum(np.append(0, pc.binary_length(self.members)))

    def resume(self, fence: str) -> int:
        """Take up at a fence, also one that went back; returns how many messages are stored already."""
        self.fence = fence
        if fence == ALL_STORED:
            self.place = len(self)
        elif fence == NO_FENCE:
            self.place = 0
        else:
            due_ms, line = fence.split(" ")
            first = int(np.searchsorted(self.due_ms, int(due_ms), side="left"))
            last = int(np.searchsorted(self.due_ms, int(due_ms), side="right"))
            self.place = bisect_right(self.line_nos, int(line, 16), first, last)
        return self.place

    def __len__(self) -> int:
        return len(self.due_ms)

    @property
    def left(self) -> int:
        """Messages that are not stored yet."""
        return len(self) - self.place

    @property
    def is_stored(self) -> bool:
        """Whether nothing is left, the record of that included."""
        return self.fence == ALL_STORED

    def fence_at(self, place: int) -> str:
        """Return the fence that says that everything before ``place`` is stored."""
        if place == len(self):
            return ALL_STORED
        return f"{self.due_ms[place - 1]} {self.line_nos[place - 1]:08x}"

    def end_of(self, messages: int, size: int) -> int:
        """Return where a transaction ends that has room for so many messages and bytes; it takes one at least."""
        end = int(np.searchsorted(self._bytes_before, self._bytes_before[self.place] + size, side="right")) - 1
        return min(max(end, self.place + 1), self.place + messages, len(self))

    def size_to(self, end: int) -> int:
        """Return the bytes of the members from the place on, up to ``end``."""
        return int(self._bytes_before[end] - self._bytes_before[self.place])


def parts_by_shard(piece: ParsedPiece, shards: int) -> dict[int, ParsedPiece]:
    """Part a piece by the shards that its messages belong to.

    Those with an id of their caller's go by that id, all others by the piece, whose own shard also has its rejects and gets a
    part in any case.
    """
    own = shard_of(piece.fence_token, shards)
    if shards == 1 or not piece.caller_ids:
        return {own: piece}
    shard_numbers = np.full(len(piece.due_ms), own)
    for index, caller_id in piece.caller_ids.items():
        shard_numbers[index] = shard_of(caller_id, shards)
    parts = {}
    for shard in {own, *shard_numbers.tolist()}:
        indexes = np.flatnonzero(shard_numbers == shard)
        parts[shard] = replace(
            piece,
            line_nos=piece.line_nos[indexes],
            due_ms=piece.due_ms[indexes],
            members=piece.members.take(pa.array(indexes)),
            caller_ids={
                place: piece.caller_ids[index]
                for place, index in enumerate(indexes.tolist())
                if index in piece.caller_ids
            },
            rejected=piece.rejected if shard == own else [],
        )
    return parts


class Step:
    """The next transaction of some queues, at most ``messages_max`` messages and about ``bytes_max`` bytes of them."""

    def __init__(self, queues: Sequence[PieceQueue], messages_max: int, bytes_max: int) -> None:
        self._ends: list[tuple[PieceQueue, int]] = []
        room, room_bytes = messages_max, bytes_max
        for queue in queues:
            if queue.is_stored or (self._ends and (room <= 0 or room_bytes <= 0)):
                continue
            end = queue.end_of(room, room_bytes)
            room, room_bytes = room - (end - queue.place), room_bytes - queue.size_to(end)
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
                message for queue, end in self._ends if queue.caller_ids for message in _identified(queue, end)
            ],
            rejected=sum(queue.rejected for queue, end in self._ends if end == len(queue)),
        )

    def advance(self) -> None:
        """Note that it is stored."""
        for queue, end in self._ends:
            queue.fence, queue.place = queue.fence_at(end), end

    def _groups(self) -> list[Group]:
        """Return the messages without a caller's id, in order of due_ms, cut by bucket."""
        parts = [_unidentified(queue, end) for queue, end in self._ends]
        due_ms, members = np.concatenate([part[0] for part in parts]), pa.concat_arrays([part[1] for part in parts])
        if len(parts) > 1:
            order = np.argsort(due_ms, kind="stable")
            due_ms, members = due_ms[order], members.take(pa.array(order))
        return _framed(due_ms, members)


def _unidentified(queue: PieceQueue, end: int) -> tuple[Ints, pa.Array]:
    due_ms, members = queue.due_ms[queue.place : end], queue.members[queue.place : end]
    if queue.caller_ids:
        places = np.array([p - queue.place for p in range(queue.place, end) if p not in queue.caller_ids], np.int64)
        return due_ms[places], members.take(pa.array(places))
    return due_ms, members


def _identified(queue: PieceQueue, end: int) -> list[IdentifiedMessage]:
    return [
        IdentifiedMessage(
            bucket_start_ms(int(queue.due_ms[place])),
            int(queue.due_ms[place]),
            queue.members[place].as_py(),
            queue.caller_ids[place],
        )
        for place in range(queue.place, end)
        if place in queue.caller_ids
    ]


def _framed(due_ms: Ints, members: pa.Array) -> list[Group]:
    """Frame messages, which are in order, and cut them by bucket."""
    if not len(due_ms):
        return []
    scores = pa.array(due_ms).cast(pa.string()).cast(pa.binary())
    parts = (b"$", _lengths(scores), b"\r\n", scores, b"\r\n$", _lengths(members), b"\r\n", members, b"\r\n")
    frames = pc.binary_join_element_wise(*parts, b"")
    offsets = np.frombuffer(frames.buffers()[1], np.int32)
    wire = memoryview(frames.buffers()[2])
    starts = due_ms - due_ms % BUCKET_WIDTH_MS
    cuts = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(starts)]
    return [
        Group(int(starts[first]), end - first, bytes(wire[offsets[first] : offsets[end]]))
        for first, end in pairwise(cuts)
    ]


def _lengths(column: pa.Array) -> pa.Array:
    return pc.binary_length(column).cast(pa.string()).cast(pa.binary())
