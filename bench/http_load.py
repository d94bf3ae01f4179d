"""HTTP requests over connections that stay open, each as soon as its turn comes, with no more parsing than is needed."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

WAIT_SEC = 60.0
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)

Requests = Iterator[bytes]


@dataclass(slots=True)
class Answers:
    """What came: seconds of each answer, and how many had each status."""

    wall_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    bodies: list[bytes] = field(default_factory=list)


def request(method: str, path: str, body: bytes = b"", media_type: str = "application/json") -> bytes:
    """Return a request as it is sent."""
    kind = f"Content-Type: {media_type}\r\nContent-Length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n".encode() + body


class _Connection(asyncio.Protocol):
    def __init__(self, requests: Requests, answers: Answers, keep_bodies: bool, until: Callable[[], bool]) -> None:
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests, self._answers, self._keep_bodies, self._until = requests, answers, keep_bodies, until
        self._sent_at = 0.0
        self._read = bytearray()
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._read += data
        end = self._read.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._read, 0, end)
        whole = end + 4 + (int(length[1]) if length else 0)
        if len(self._read) < whole:
            return
        self._answers.seconds.append(time.perf_counter() - self._sent_at)
        status = int(self._read[9:12])
        self._answers.statuses[status] = self._answers.statuses.get(status, 0) + 1
        if self._keep_bodies:
            self._answers.bodies.append(bytes(self._read[end + 4 : whole]))
        self._read.clear()
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over.done():
            self.is_over.set_exception(RuntimeError("The API ended a connection."))

    def _send(self) -> None:
        sent = None if self._until() else next(self._requests, None)
        if sent is None:
            if not self.is_over.done():
                self.is_over.set_result(None)
            self._transport.close()
            return
        self._sent_at = time.perf_counter()
        self._transport.write(sent)


def send(
    port: int, requests: Requests, connections: int, seconds: float | None = None, keep_bodies: bool = False
) -> Answers:
    """Send requests over so many connections, each when it has the answer to the one before.

    Args:
        requests: shared by the connections.

        seconds: after which nothing more is sent; None: when the requests are at their end.
    """
    answers = Answers()

    async def main() -> None:
        started = time.perf_counter()
        until = (lambda: False) if seconds is None else (lambda: time.perf_counter() - started > seconds)
        loop = asyncio.get_running_loop()
        made = [
            await loop.create_connection(lambda: _Connection(requests, answers, keep_bodies, until), "127.0.0.1", port)
            for _ in range(connections)
        ]
        await asyncio.wait_for(asyncio.gather(*(each.is_over for _, each in made)), WAIT_SEC + (seconds or 0))
        answers.wall_s = time.perf_counter() - started

    asyncio.run(main())
    return answers
