"""The screen: one line a message on standard output.

Bytes go out by ``write`` on the descriptor, not through a buffer: what ``deliver`` counts has left the process, so a kill -9
after it can't take it back.
"""

import json
import os
import select
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from pipeline.core.clock import Clock
from pipeline.core.errors import SinkClosed
from pipeline.core.messages import DEFAULT_TOPIC, Message
from pipeline.core.text import utc_text, visible

PIPE_BYTES = (
    4_096  # POSIX: a pipe that is writable takes PIPE_BUF bytes (4,096 on Linux, at least 512) without blocking
)
PORTION_MAX = 100  # messages rendered at a time
_quoted: Final = json.encoder.encode_basestring_ascii
CHECK_MS = 200  # how often a blocked write asks whether it may go on


class ScreenSink:
    """Writes ``2026-11-20 12:00:01Z: the message``, ``2026-11-20 12:00:01Z mail: the message`` of topic mail, or JSON lines.

    Args:
        format: ``text`` or ``json``.

        clock: gives ``delivered_ms`` of the JSON form.

        descriptor: where to write, standard output by default.
    """

    def __init__(self, format: str, clock: Clock, descriptor: int = 1) -> None:
        self._render = self._json_line if format == "json" else self._text_line
        self._clock = clock
        self._descriptor = descriptor
        self._torn = b""  # the rest of a line that was started when the reader stopped reading
        self._written = 0  # bytes of the last write that are out

    def deliver(self, messages: Sequence[Message], in_time: Callable[[], bool], may_wait: Callable[[], bool]) -> int:
        """Write a line for each message; see ``Sink.deliver``."""
        delivered, lines = 0, list[bytes]()
        try:
            self._torn = self._torn[self._write(self._torn, may_wait) :]
            while delivered < len(messages) and not self._torn and in_time():
                lines = self._portion(messages, delivered)
                data = b"".join(lines)
                written = self._write(data, may_wait)
                if written == len(data):
                    delivered += len(lines)
                    continue
                for line in lines:
                    if written < len(line):
                        self._torn = line[written:] if written else b""
                        return delivered
                    written -= len(line)
                    delivered += 1
        except (BrokenPipeError, ConnectionResetError) as exc:
            raise SinkClosed(
                "Nobody reads the output any more; what was not written is given back.", delivered + self._begun(lines)
            ) from exc
        except OSError as exc:
            raise SinkClosed(
                f"The output can't be written ({exc.strerror}); what was not written is given back.",
                delivered + self._begun(lines),
            ) from exc
        return delivered

    def _portion(self, messages: Sequence[Message], first: int) -> list[bytes]:
        """Render messages until they fill what a pipe takes at a time."""
        lines: list[bytes] = []
        size = 0
        for message in messages[first : first + PORTION_MAX]:
            line = self._render(message)
            lines.append(line)
            size += len(line)
            if size >= PIPE_BYTES:
                break
        return lines

    def _begun(self, lines: Sequence[bytes]) -> int:
        """Return how many of the lines that were written last are out, in part at least."""
        starts = accumulate((len(line) for line in lines[:-1]), initial=0)
        return sum(start < self._written for start in starts) if lines else 0

    def _write(self, data: bytes, may_wait: Callable[[], bool]) -> int:
        """Write ``data``; returns how much of it is out, all of it unless the reader stopped reading."""
        view = memoryview(data)
        self._written = 0
        while self._written < len(view):
            _, writable, _ = select.select([], [self._descriptor], [], CHECK_MS / 1000)
            try:
                if writable:
                    self._written += os.write(self._descriptor, view[self._written : self._written + PIPE_BYTES])
                    continue
            except BlockingIOError:  # somebody who shares our output made it non-blocking, and it is nearly full
                select.select([], [], [], CHECK_MS / 1000)
            if not may_wait():
                break
        return self._written

    def _text_line(self, message: Message) -> bytes:
        topic = "" if message.topic == DEFAULT_TOPIC else f" {visible(message.topic)}"
        return f"{utc_text(message.due_ms)}{topic}: {visible(message.body)}\n".encode("utf-8", "backslashreplace")

    def _json_line(self, message: Message) -> bytes:
        delivered_ms = self._clock.wall_ms()
        lateness_ms = delivered_ms - message.due_ms
        if message.headers:
            record = message.to_record() | {"delivered_ms": delivered_ms, "lateness_ms": lateness_ms}
            return json.dumps(record).encode() + b"\n"
        # The same, as json.dumps writes it, in a quarter of the time.
        texts = f'"id": {_quoted(message.id)}, "topic": {_quoted(message.topic)}, "message": {_quoted(message.body)}'
        numbers = f'"due_ms": {message.due_ms}, "attempt": {message.attempt}, "delivered_ms": {delivered_ms}'
        return f'{{{texts}, {numbers}, "lateness_ms": {lateness_ms}}}\n'.encode()
