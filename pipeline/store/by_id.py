"""One message at a time: get, cancel or reschedule what waits, by its idempotency key or by its handle.

A message without an idempotency key has a handle, which says where it is scheduled: it costs no memory, and leads to the message
as long as nothing has moved it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, Final

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.ids import MESSAGE_ID_LENGTH, TOKEN_LENGTH
from pipeline.core.messages import Message
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys
from pipeline.store.scripts import Scripts, run_script
from pipeline.store.shards import shard_of

MOVES_MAX = 10  # places that a message can be followed to within one call; each move of it takes seconds

_HANDLE: Final = re.compile(rf"~(.{{{MESSAGE_ID_LENGTH}}})~(\d+)", re.ASCII)  # "~" is in no idempotency key
_PLACE: Final = re.compile(rf".{{{MESSAGE_ID_LENGTH}}}(\d+)(?::(.+))?", re.ASCII | re.DOTALL)


class State(StrEnum):
    """Where a message is."""

    SCHEDULED = auto()
    HELD = auto()  # it came due while its topic was paused
    IN_FLIGHT = auto()  # a drain loop has it: it is about to be delivered
    DELIVERED = auto()  # or dead: it has left the schedule within the last ``id_retention_sec``
    CANCELLED = auto()  # within the last ``id_retention_sec``
    UNKNOWN = auto()  # never scheduled, or forgotten; of a handle: delivered, moved, or never scheduled


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a call. ``message`` is the one that waits, or that this call has cancelled; else None."""

    state: State
    message: Message | None = None


def handle_of(message: Message) -> str:
    """Return what names a message from now on: its idempotency key, else its handle."""
    return message.id if message.id != message.message_id else f"~{message.message_id}~{message.due_ms}"


class MessagesById:
    """The messages of a namespace that wait, by idempotency key or handle. A verb that is cut off may be called again.

    Args:
        shards: the keys of each shard.

        id_retention_ms: how long it is known that a message was cancelled.

        now_ms: tests give their own time; None means the server's.
    """

    def __init__(
        self,
        client: Any,
        shards: Sequence[Keys],
        id_retention_ms: int,
        scripts: Scripts | None = None,
        now_ms: int | None = None,
    ) -> None:
        self._client = client
        self._shards = shards
        self._id_retention_ms = id_retention_ms
        self._scripts = scripts or Scripts()
        self.now_ms = now_ms

    def get(self, name: str) -> Found:
        """Look for a message.

        Raises:
            StoreError: no answer, or an error.
        """
        return self._call("get", name, None)

    def cancel(self, name: str) -> Found:
        """Take a message out of the schedule: it is never delivered, also not when its file is read again.

        Returns:
            ``CANCELLED``, with the message if it was this call that did it; any other state says why it was not possible.
        Raises:
            StoreError: no answer, or an error; it may be cancelled.
        """
        found = self._call("cancel", name, None)
        return Found(State.CANCELLED, found.message) if found.message else found

    def reschedule(self, name: str, due_ms: int) -> Found:
        """Give a message that waits another due time, epoch ms UTC; it keeps its place among those of the same time.

        Returns:
            ``SCHEDULED``, with the message as it is now; any other state says why it was not possible.
        Raises:
            StoreError: no answer, or an error; it may be rescheduled.
        """
        found = self._call("reschedule", name, due_ms)
        return Found(State.SCHEDULED, found.message) if found.message else found

    def _call(self, verb: str, name: str, due_ms: int | None) -> Found:
        handle = _HANDLE.fullmatch(name)
        if not handle:
            keys = self._shards[shard_of(name, len(self._shards))]
            with translated_errors():
                place = self._client.hget(keys.places(), name) or b""
            return self._call_shard(keys, verb, name, place, due_ms, is_handle=False)
        # A message of a large file's later part is in another shard than the handle's token says.
        first = shard_of(handle[1][:TOKEN_LENGTH], len(self._shards))
        place = f"{handle[1]}{int(handle[2])}".encode()
        for keys in [*self._shards[first:], *self._shards[:first]]:
            found = self._call_shard(keys, verb, name, place, due_ms, is_handle=True)
            if found.state is not State.UNKNOWN:
                break
        return found

    def _call_shard(self, keys: Keys, verb: str, name: str, place: bytes, due_ms: int | None, is_handle: bool) -> Found:
        for _ in range(MOVES_MAX):
            here, topic = _key_of(keys, place)
            there = here if due_ms is None else keys.bucket(bucket_start_ms(due_ms))
            status, member, score = run_script(
                self._client,
                self._scripts,
                "by_id",
                [
                    *(keys.places(), keys.ids(), keys.cancelled(), keys.buckets()),
                    *(here, there, keys.attempts(), keys.counters()),
                ],
                [
                    *(verb, name, place, int(is_handle), "" if due_ms is None else due_ms),
                    *(self._id_retention_ms, "" if self.now_ms is None else self.now_ms, keys.wake()),
                ],
            )
            if status == b"OK":
                return Found(State.HELD if topic else State.SCHEDULED, _read(member, int(float(score))))
            if status != b"MOVED":
                return Found(State(status.decode().lower()))
            place = member
        return Found(State.IN_FLIGHT)


def _key_of(keys: Keys, place: bytes) -> tuple[str, str]:
    """Return the key that a place is in, and the topic if it is held; of no place any bucket."""
    read = _PLACE.fullmatch(place.decode("utf-8", "replace"))
    if read and read[2]:
        return keys.held(read[2]), read[2]
    return keys.bucket(bucket_start_ms(int(read[1])) if read else 0), ""


def _read(member: bytes, due_ms: int) -> Message:
    """Read a member; one of another program is a message as it stands."""
    try:
        return Message.from_member(member, due_ms)
    except ValueError:
        return Message(due_ms, member.decode("utf-8", "replace"))
