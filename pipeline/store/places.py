"""Where a message that waits is, as text: its place, its handle, its version.

A place is what ``include/places.lua`` writes: the message id and the score, and what else it says. Who has no idempotency key has a
handle, which says the place; and the version of what waits is its place, too, so that it changes with it. A message that waits
in a cold file has a place of another form (``core/cold.py``).
"""

import re
from typing import Final

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.cold import COLD_PLACE_LENGTH, read_cold_place
from pipeline.core.ids import MESSAGE_ID_LENGTH, TOKEN_LENGTH
from pipeline.core.messages import Message
from pipeline.store.keys import Keys
from pipeline.store.shards import shard_of

_HANDLE: Final = re.compile(rf"~(.{{{MESSAGE_ID_LENGTH}}})~(\d{{1,16}})", re.ASCII)  # "~" is in no idempotency key
_PLACE: Final = re.compile(rf"(.{{{MESSAGE_ID_LENGTH}}})(\d+)r?(?::(.+))?", re.ASCII | re.DOTALL)


def handle_of(message: Message) -> str:
    """Return what names a message from now on: its idempotency key, else its handle."""
    return message.id if message.id != message.message_id else handle(message.message_id, message.due_ms)


def handle(message_id: str, due_ms: int) -> str:
    """Return what names a message without an idempotency key while it is scheduled at ``due_ms``."""
    return f"~{message_id}~{due_ms}"


def shard_of_name(name: str, shards: int) -> int:
    """Return the shard that an idempotency key or a handle leads to."""
    found = _HANDLE.fullmatch(name)
    return shard_of(found[1][:TOKEN_LENGTH] if found else name, shards)


def place_of_handle(name: str) -> bytes:
    """Return where a handle leads to; nothing for an idempotency key."""
    found = _HANDLE.fullmatch(name)
    return f"{found[1]}{int(found[2])}".encode() if found else b""


def version_of(place: bytes) -> str:
    """Return the version of the message of a place, "" of no place."""
    if cold := read_cold_place(place):
        return f"{cold[0]}-cold"
    read = _PLACE.fullmatch(place.decode("utf-8", "replace"))
    return version(read[1], int(read[2]), bool(read[3])) if read else ""


def version(message_id: str, score: int, is_held: bool = False) -> str:
    """Return the version of a message that is scheduled at ``score``, epoch ms, or held."""
    return f"{message_id}-{score}{'-held' if is_held else ''}"


def bucket_or_held(keys: Keys, place: bytes) -> str:
    """Return the key that a place is in; of no place, or one in a cold file, any bucket."""
    if len(place) == COLD_PLACE_LENGTH:
        return keys.bucket(0)
    read = _PLACE.fullmatch(place.decode("utf-8", "replace"))
    if read and read[3]:
        return keys.held(read[3])
    return keys.bucket(bucket_start_ms(int(read[2])) if read else 0)
