"""A web server on this machine that answers as a test tells it to."""

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PATIENCE_SEC = 20.0


@dataclass(frozen=True)
class Posted:
    """A request as it came."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: tuple[str, int]

    def header(self, name: str) -> str:
        [value] = [value for key, value in self.headers if key.lower() == name]
        return value

    @property
    def attempt(self) -> int:
        return int(self.header("duetime-attempt"))


@dataclass(frozen=True)
class Answer:
    """What to answer.

    Args:
        length: that the headers claim; None means that of the body.
        until: is waited for before the answer begins.
        hangs_up: close the connection without any answer.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None
    until: threading.Event | None = None
    hangs_up: bool = False


class Receiver:
    """Keeps what it was sent; ``answer`` may be replaced at any time."""

    def __init__(self) -> None:
        self.answer: Callable[[Posted], Answer] = lambda posted: Answer()
        self.posted: list[Posted] = []
        self.at_a_time = 0  # the most requests that were in hand at once
        self._in_hand = 0
        self._changed = threading.Condition()
        self.url = ""

    def bodies(self) -> list[str]:
        return [posted.body.decode() for posted in self.posted]

    def wait_for(self, seen: Callable[[], bool], what: str = "requests") -> None:
        with self._changed:
            assert self._changed.wait_for(seen, PATIENCE_SEC), f"no {what}: {self.bodies()}"

    def wait_for_posts(self, count: int) -> None:
        self.wait_for(lambda: len(self.posted) >= count, f"{count} requests")

    def take(self, posted: Posted) -> Answer:
        with self._changed:
            self.posted.append(posted)
            self._in_hand += 1
            self.at_a_time = max(self.at_a_time, self._in_hand)
            answer = self.answer(posted)
            self._changed.notify_all()
        if answer.until:
            answer.until.wait(PATIENCE_SEC)
        with self._changed:
            self._in_hand -= 1
        return answer


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is no error here."""


def _handler_of(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            answer = receiver.take(Posted(self.path, self.headers.items(), body, self.client_address))
            if answer.hangs_up:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if answer.status != 204:
                self.send_header("content-length", str(len(answer.body) if answer.length is None else answer.length))
            self.end_headers()
            self.wfile.write(answer.body)
            self.close_connection = self.close_connection or answer.length is not None

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler


@contextmanager
def receiving(receiver: Receiver, port: int = 0, context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Let a receiver listen while the block lasts."""
    server = _Server(("127.0.0.1", port), _handler_of(receiver))
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    receiver.url = f"{'https' if context else 'http'}://127.0.0.1:{server.server_address[1]}/hook"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
