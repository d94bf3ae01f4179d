"""Messages as they go on the wire: score and member as RESP bulk strings, framed where many are made at once.

A client that packs millions of small arguments one by one costs more than all the rest of their way. The protocol is
https://redis.io/docs/latest/develop/reference/protocol-spec/, and only bulk strings are used of it.
"""

from collections.abc import Iterator, Sequence

from pipeline.store.base import Group


def unframe_pairs(wire: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield due_ms and member of pairs of bulk strings."""
    place = 0
    while place < len(wire):
        due_ms, place = _unframe(wire, place)
        member, place = _unframe(wire, place)
        yield int(due_ms), member


def frame_command(*words: str | bytes | int) -> bytes:
    """Return a command of ``words``."""
    return b"*%d\r\n%b" % (len(words), _frame(words))


def frame_zadd(key: str, group: Group) -> bytes:
    """Return the command that adds a group to a sorted set."""
    return b"".join((b"*%d\r\n" % (2 + 2 * group.count), _frame(("ZADD", key)), group.wire))


def _frame(words: Sequence[str | bytes | int]) -> bytes:
    encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)


def _unframe(wire: bytes, place: int) -> tuple[bytes, int]:
    start = wire.index(b"\r\n", place) + 2
    stop = start + int(wire[place + 1 : start - 2])
    return wire[start:stop], stop + 2
