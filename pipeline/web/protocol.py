"""HTTP on a connection, with the bounds that uvicorn leaves open: pipelined requests, heads, the time of a body, slow readers."""

import re
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.config import ApiSettings
from pipeline.web.problems import raw_answer

WRITE_STALL_SEC: Final = 30.0  # a client that reads nothing of its answer for so long is gone
OVERHEAD: Final = 8  # bytes around each byte of a body that is sent in chunks
PIPELINED_MAX: Final = 8  # requests of a connection that wait while one is answered
# Headers that may come once: a proxy might act on one of them, and we on another.
ONCE: Final = frozenset(
    b"host origin authorization content-length content-type content-encoding transfer-encoding if-match if-none-match "
    b"idempotency-key sec-fetch-site sec-fetch-mode sec-fetch-dest".split()
)
_ABSOLUTE: Final = re.compile(rb"[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)


class _RefusedError(Exception):
    """Ends the reading of a connection that was answered."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. ``sweep`` must be called about every second."""

    def __init__(self, limits: ApiSettings, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._is_in_head = True
        self._is_at_edge = False  # whether a message began or ended with the bytes that are read now
        self._raw_bytes = 0  # of the message so far, without those that it began with
        self._body_bytes = 0
        self._head_since: float | None = None  # when the wait for a head began, seconds of the loop's clock
        self._message_since: float | None = None  # when the message began that is not complete
        self._is_deaf = False  # whether what comes is not read any more
        self._unsent = 0
        self._unsent_since = 0.0

    def connection_made(self, transport: Any) -> None:
        """Begin, unless there are too many connections."""
        super().connection_made(transport)
        self._head_since = self.loop.time()
        if len(self.connections) > self._limits.connections_max:
            self._refuse("busy", "There are too many connections.")

    def data_received(self, data: bytes) -> None:
        """Read bytes, of which a head, and what is around a body, may have so many."""
        if self._is_deaf or self.transport.is_closing():
            return
        super().data_received(data)
        if not self._is_at_edge:
            self._raw_bytes += len(data)
        self._is_at_edge = False
        allowed = self._limits.head_bytes_max + (0 if self._is_in_head else OVERHEAD * self._body_bytes)
        if self._raw_bytes - self._body_bytes > allowed and not self.transport.is_closing():
            self._refuse("head_too_long", f"A head may have {self._limits.head_bytes_max} bytes.")

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        if not self.transport.is_closing():
            self._refuse("bad_request", "What was sent is not HTTP/1.1.")

    def on_message_begin(self) -> None:
        """Begin to count, unless too many requests wait already; those are answered, and the connection ends."""
        if len(self.pipeline) >= PIPELINED_MAX:
            self._refuse("busy", "Too many requests were sent without waiting for an answer.")
            raise _RefusedError
        super().on_message_begin()
        self._is_in_head = self._is_at_edge = True
        self._raw_bytes = self._body_bytes = 0
        self._message_since = self.loop.time()
        self._head_since = self._head_since or self._message_since

    def on_headers_complete(self) -> None:
        """Begin with the request, if its head is neither too long nor one that a proxy may read differently."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.head_bytes_max:
            self._refuse("head_too_long", f"A head may have {self._limits.head_bytes_max} bytes.")
            raise _RefusedError
        if doubt := self._doubt():
            self._refuse("bad_request", doubt)
            raise _RefusedError
        self._is_in_head, self._head_since = False, None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count a part of a body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request; another one may follow."""
        self._message_since = None
        self._is_in_head = self._is_at_edge = True
        self._raw_bytes = self._body_bytes = 0
        super().on_message_complete()

    def _doubt(self) -> str:
        """Say what can be read in two ways, as a sentence; "" if nothing can."""
        names = [name for name, _ in self.headers]
        if twice := next((name for name in names if name in ONCE and names.count(name) > 1), None):
            return f"The header {twice.decode().title()} is there twice."
        headers = dict(self.headers)
        target = _ABSOLUTE.match(self.url)
        if target and target[1].lower() != headers.get(b"host", b"").strip().lower():
            return "The request line names another host than the header Host."
        coding = headers.get(b"transfer-encoding")
        if coding is not None and (self.parser.get_http_version() == "1.0" or coding.strip().lower() != b"chunked"):
            return "The only Transfer-Encoding that is taken is chunked, of HTTP/1.1."
        return ""

    def sweep(self) -> None:
        """End the connection if its client is too slow."""
        now = self.loop.time()
        limits = self._limits
        if self._head_since is not None and now - self._head_since > limits.head_timeout_sec:
            self._refuse("too_slow", f"A head must be there within {limits.head_timeout_sec:g} s.")
        # Of an answered request the rest is read without a use, which must end, too.
        rest_sec = limits.head_timeout_sec + 2 * limits.body_timeout_sec
        if self._message_since is not None and now - self._message_since > rest_sec:
            self.transport.abort()
        unsent = self.transport.get_write_buffer_size()
        if self._unsent == 0 or unsent < self._unsent:
            self._unsent_since = now
        elif now - self._unsent_since > WRITE_STALL_SEC:
            self.transport.abort()
        self._unsent = unsent

    def _refuse(self, word: str, detail: str) -> None:
        """Answer what can't be read, and read no more."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:  # what was read well before is answered first
                cycle.keep_alive = False
                self._is_deaf = True
                return
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started or self.pipeline:  # another answer would be taken for a part of that one
                self.transport.abort()
                return
        self.transport.write(raw_answer(word, detail))
        self.transport.close()
