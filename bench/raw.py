"""ZADD at the speed of the server: commands packed beforehand, sent down one connection while the replies are counted."""

import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby, islice

from bench.workload import bucket_start_ms
from pipeline.core.ids import MESSAGE_ID_LENGTH
from pipeline.store.keys import Keys

PAIRS_PER_COMMAND = 500
SEND_BYTES = 1024 * 1024
REPLY_SEC_MAX = 120.0

Pair = tuple[int, bytes]
Buffer = tuple[bytes, int]  # commands, and how many they are


def pack_command(*words: bytes) -> bytes:
    """Write one command as the protocol wants it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def pack_zadd(key: str, pairs: Iterable[tuple[float, bytes]], at_once: int | None = None) -> Iterator[bytes]:
    """Yield variadic ZADDs of (score, member) pairs, so many each."""
    left = iter(pairs)
    while some := list(islice(left, at_once or PAIRS_PER_COMMAND)):
        words = [word for score, member in some for word in (str(score).encode(), member)]
        yield pack_command(b"ZADD", key.encode(), *words)


def pack_zadds(pairs: Sequence[Pair], keys: Keys) -> Iterator[bytes]:
    """Yield variadic ZADDs of (due_ms, member) pairs that are sorted by due_ms, and the index entry of each bucket."""
    for start_ms, members in groupby(pairs, key=lambda pair: bucket_start_ms(pair[0])):
        yield from pack_zadd(keys.bucket(start_ms), members)
        yield from pack_zadd(keys.buckets(), [(start_ms, b"%d" % start_ms)])


def pack_buckets(messages: Iterable[tuple[int, bytes, str]], keys: Keys) -> Iterator[bytes]:
    """Yield the same of (due_ms, member, idempotency key), by one ZADD for each bucket, and an HSET of places if they have keys."""
    for start_ms, group in groupby(messages, key=lambda message: bucket_start_ms(message[0])):
        rows = list(group)
        if rows[0][2]:
            words = [
                word for due, member, key in rows for word in (key.encode(), member[:MESSAGE_ID_LENGTH] + b"%d" % due)
            ]
            yield pack_command(b"HSET", keys.places().encode(), *words)
        yield from pack_zadd(keys.bucket(start_ms), ((due_ms, member) for due_ms, member, _ in rows), len(rows))
        yield from pack_zadd(keys.buckets(), [(start_ms, b"%d" % start_ms)])


def pack_zrems(pairs: Sequence[Pair], keys: Keys) -> Iterator[bytes]:
    """Yield what takes the same pairs out again; an index entry may stay behind."""
    for start_ms, members in groupby(pairs, key=lambda pair: bucket_start_ms(pair[0])):
        group = [member for _, member in members]
        for first in range(0, len(group), PAIRS_PER_COMMAND):
            yield pack_command(b"ZREM", keys.bucket(start_ms).encode(), *group[first : first + PAIRS_PER_COMMAND])


def fill_buffers(commands: Iterable[bytes]) -> Iterator[Buffer]:
    """Join commands into portions that are worth a system call."""
    waiting: list[bytes] = []
    size = 0
    for command in commands:
        waiting.append(command)
        size += len(command)
        if size >= SEND_BYTES:
            yield b"".join(waiting), len(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting), len(waiting)


def send_buffers(path: str, buffers: Iterable[Buffer]) -> int:
    """Send all, wait for all replies, and return how many commands there were.

    Raises:
        RuntimeError: the server answered something that is no number.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REPLY_SEC_MAX)
        connection.connect(path)
        expected = answered = 0

        def send() -> None:
            nonlocal expected
            with suppress(OSError):  # who reads has given up, and says why
                for commands, count in buffers:
                    expected += count
                    connection.sendall(commands)
                connection.sendall(pack_command(b"PING"))  # its reply is the last one

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        rest = b""
        while not rest.endswith(b"+PONG\r\n"):
            received = connection.recv(1 << 16)
            if not received:
                raise RuntimeError("The server closed the connection.")
            *lines, rest = (rest + received).split(b"\r\n")
            if lines and lines[-1] == b"+PONG":
                rest = lines.pop() + b"\r\n"
            wrong = next((line for line in lines if not line.startswith(b":")), None)
            if wrong is not None:
                raise RuntimeError(f"The server answered {wrong.decode(errors='replace')}.")
            answered += len(lines)
        sender.join()
    if answered != expected:
        raise RuntimeError(f"{expected} commands had {answered} replies.")
    return answered
