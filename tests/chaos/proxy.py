"""A proxy between the pipeline and a real server, which breaks things at exactly the n-th call of a kind.

    proxy.trap(running("schedule"), lose_reply, first=2)   # the second transaction is stored, and its reply lost
    proxy.trap(naming("WATCH"), before(gate.wait))         # the first WATCH waits for an event

A call is one command, or a transaction from MULTI to EXEC, which clients send in one go. Every call takes the same way: client,
proxy, server, and its replies back. A fault is a function that takes this way into its own hands: it is given the ``Exchange``
and decides when, and whether, to ``forward`` and to ``answer``.
"""

import hashlib
import select
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.store import scripts

WAIT_SEC = 60.0  # what never happens within this time does not happen


class Cut(Exception):
    """The connection ends here, for client and server."""


Command = Sequence[bytes]
Call = Sequence[Command]


class Exchange:
    """One call on its way, and later what became of it: ``said`` by the server and ``heard`` by the client, None where nothing was.

    ``was_sent`` without anything ``said`` means that nobody knows whether the server executed it.
    """

    def __init__(self, call: Call, client: socket.socket, server: socket.socket, replies: BinaryIO) -> None:
        self.call = call
        self.was_sent = False
        self.said: bytes | None = None
        self.heard: bytes | None = None
        self._client = client
        self._server = server
        self._replies = replies

    def forward(self) -> bytes:
        """Let the server execute the call; returns the raw replies to its commands."""
        self.was_sent = True
        self._server.sendall(b"".join(map(frame, self.call)))
        self.said = b"".join(read_reply(self._replies) for _ in self.call)
        return self.said

    def answer(self, replies: bytes) -> None:
        """Let the client have replies."""
        self.heard = replies  # before the client can act on them
        try:
            self._client.sendall(replies)
        except OSError:
            self.heard = None
            raise

    def wait_for_client(self) -> None:
        """Return when the client sends something more, or has gone."""
        select.select([self._client], [], [], WAIT_SEC)


Fault = Callable[[Exchange], None]
Matches = Callable[[Call], bool]


def pass_on(exchange: Exchange) -> None:
    """Be no fault at all."""
    exchange.answer(exchange.forward())


def lose_reply(exchange: Exchange) -> None:
    """Let the server execute the call, and the client never hear of it."""
    exchange.forward()
    raise Cut


def refuse(exchange: Exchange) -> None:
    """End the connection before the call reaches the server."""
    raise Cut


def swallow(exchange: Exchange) -> None:
    """Take the call and never answer, as a connection does that only its client still believes in."""
    exchange.wait_for_client()
    raise Cut


def reply_with(reply: bytes) -> Fault:
    """Answer each command of a call in the server's place, which never sees it."""
    return lambda exchange: exchange.answer(reply * len(exchange.call))


def before(action: Callable[[], object]) -> Fault:
    """Do something while the call has not reached the server."""

    def fault(exchange: Exchange) -> None:
        action()
        pass_on(exchange)

    return fault


def instead(action: Callable[[], object]) -> Fault:
    """Do something, and end the connection before the call reaches the server."""

    def fault(exchange: Exchange) -> None:
        action()
        raise Cut

    return fault


def after(action: Callable[[], object]) -> Fault:
    """Do something when the server has executed the call and the client does not know."""

    def fault(exchange: Exchange) -> None:
        reply = exchange.forward()
        action()
        exchange.answer(reply)

    return fault


def naming(command: str) -> Matches:
    """Match the calls that begin with a command."""
    return lambda call: call[0][0].upper() == command.encode()


def running(script: str) -> Matches:
    """Match the calls that run one of the pipeline's scripts, in a transaction or by itself."""
    text = scripts.read_script(script).encode()
    digest = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
    return lambda call: any(
        command[0].upper() in (b"EVAL", b"EVALSHA") and command[1] in (text, digest) for command in call
    )


class Trap:
    """A fault and the calls that meet it, counted from 1 since the trap was set: ``first`` to ``last``."""

    def __init__(self, matches: Matches, fault: Fault, first: int, last: float) -> None:
        self.fault = fault
        self.seen = 0
        self._matches = matches
        self._first, self._last = first, last
        self._sprung = threading.Event()

    def is_sprung_by(self, call: Call) -> bool:
        """Count a call; say whether it meets the fault."""
        if not self._matches(call):
            return False
        self.seen += 1
        if not self._first <= self.seen <= self._last:
            return False
        self._sprung.set()
        return True

    @property
    def was_sprung(self) -> bool:
        return self._sprung.is_set()

    def wait(self) -> None:
        """Return when a call has met the fault; a fault that never came is a failure."""
        assert self._sprung.wait(WAIT_SEC), f"the fault never came: {self.seen} calls matched"


class Proxy:
    """Listens on a unix socket and stands in for the server on another one.

    Args:
        note: is given each call as it comes, from a thread of its connection.
    """

    def __init__(self, upstream: Path, path: Path, note: Callable[[Exchange], object] = lambda _: None) -> None:
        self.url = f"unix://{path}"
        self._upstream = upstream
        self._note = note
        self._traps: list[Trap] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def trap(self, matches: Matches, fault: Fault, first: int = 1, last: float | None = None) -> Trap:
        """Set a trap for the ``first`` matching call from now on, or for all from ``first`` to ``last``."""
        trap = Trap(matches, fault, first, first if last is None else last)
        with self._lock:
            self._traps.append(trap)
        return trap

    def remove(self, trap: Trap) -> None:
        """Take one trap away."""
        with self._lock:
            self._traps.remove(trap)

    def clear(self) -> None:
        """Take all traps away."""
        with self._lock:
            self._traps.clear()

    def close(self) -> None:
        """Stop listening and cut every connection."""
        with self._lock:
            sockets = [self._listener, *self._open]
        for one in sockets:
            _shut(one)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        with self._lock:
            self._open |= {client, server}
        try:
            server.connect(str(self._upstream))
            with client.makefile("rb") as requests, server.makefile("rb") as replies:
                self._relay(client, requests, server, replies)
        except (OSError, EOFError, Cut):
            pass  # either side is gone, or a fault cut the line
        finally:
            with self._lock:
                self._open -= {client, server}
            for one in (client, server):
                _shut(one)
                one.close()

    def _relay(self, client: socket.socket, requests: BinaryIO, server: socket.socket, replies: BinaryIO) -> None:
        while True:
            call = read_call(requests)
            exchange = Exchange(call, client, server, replies)
            self._note(exchange)
            self._fault_for(call)(exchange)
            if call[0][0].upper() == b"SUBSCRIBE":  # from now on the server speaks unasked
                listener = threading.Thread(target=_pump, args=(replies, client), daemon=True)
                listener.start()
                _pump(requests, server)
                listener.join()

    def _fault_for(self, call: Call) -> Fault:
        with self._lock:
            sprung = [trap.fault for trap in self._traps if trap.is_sprung_by(call)]
        return sprung[-1] if sprung else pass_on


def read_call(stream: BinaryIO) -> list[Command]:
    """Read a command, and behind a MULTI all that belongs to it."""
    call = [read_command(stream)]
    while call[0][0].upper() == b"MULTI" and call[-1][0].upper() != b"EXEC":
        call.append(read_command(stream))
    return call


def read_command(stream: BinaryIO) -> list[bytes]:
    """Read the words of one command."""
    head = _line(stream)
    assert head[:1] == b"*", f"no command begins with {head!r}"
    return [_exactly(stream, int(_line(stream)[1:]) + 2)[:-2] for _ in range(int(head[1:]))]


def frame(command: Command) -> bytes:
    """Return a command as it goes on the wire."""
    return b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in command)


def read_reply(stream: BinaryIO) -> bytes:
    """Read one raw RESP2 value."""
    head = _line(stream)
    size = int(head[1:]) if head[:1] in b"$*" else -1
    if head[:1] == b"$" and size >= 0:
        return head + _exactly(stream, size + 2)
    return head + b"".join(read_reply(stream) for _ in range(size))


def _line(stream: BinaryIO) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _pump(source: Any, target: socket.socket) -> None:
    try:
        while data := source.read1(65536):
            target.sendall(data)
    except OSError:
        pass
    _shut(target)


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is shut already
