"""The screen: one line a message on standard output.

Bytes go out by ``write`` on the descriptor, not through a buffer: what ``deliver`` counts has left the process, so a kill -9
after it can't take it back.
"""

import json
import os
import select
import unicodedata
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from pipeline.core.clock import Clock
from pipeline.core.errors import SinkClosed
from pipeline.sinks.base import Delivery

PIPE_BYTES = (
    4_096  # POSIX: a pipe that is writable takes PIPE_BUF bytes (4,096 on Linux, at least 512) without blocking
)
CHECK_MS = 200  # how often a blocked write asks whether it may go on
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# One message is one line and can't drive the terminal: control, format (bidi, zero width), surrogate, and line separators.
UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
JOINERS = frozenset({"\u200c", "\u200d"})  # harmless, and words in Persian or emoji families need them


class ScreenSink:
    """Writes ``2026-11-20 12:00:01: the message``, or JSON lines.

    Args:
        format: ``text`` or ``json``.

        clock: gives ``delivered_ms`` of the JSON form.

        descriptor: where to write, standard output by default.
    """

    def __init__(self, format: str, clock: Clock, descriptor: int = 1) -> None:
        self._render = self._json_line if format == "json" else self._text_line
        self._clock = clock
        self._descriptor = descriptor

    def deliver(self, deliveries: Sequence[Delivery], may_go_on: Callable[[], bool]) -> int:
        """Write a line for each message; see ``Sink.deliver``."""
        delivered = 0
        pending = bytearray()
        for delivery in deliveries:
            pending += self._render(delivery)
            delivered += 1
            if len(pending) >= PIPE_BYTES and not self._write(pending, may_go_on):
                # The reader has had whole lines and perhaps a part of one; those of this portion are given back.
                return delivered - pending.count(b"\n")
        if pending and not self._write(pending, may_go_on):
            return delivered - pending.count(b"\n")
        return delivered

    def _write(self, pending: bytearray, may_go_on: Callable[[], bool]) -> bool:
        """Write and clear ``pending``; False, with the unwritten part in it, when it may not go on."""
        try:
            while pending:
                _, writable, _ = select.select([], [self._descriptor], [], CHECK_MS / 1000)
                if writable:
                    del pending[: os.write(self._descriptor, pending[:PIPE_BYTES])]
                elif not may_go_on():
                    return False
        except (BrokenPipeError, ConnectionResetError, OSError) as exc:
            raise SinkClosed(
                f"Nobody reads the output any more ({exc.strerror}); its messages are given back."
            ) from exc
        return True

    def _text_line(self, delivery: Delivery) -> bytes:
        return f"{utc_text(delivery.due_ms)}: {visible(delivery.message.message)}\n".encode("utf-8", "backslashreplace")

    def _json_line(self, delivery: Delivery) -> bytes:
        delivered_ms = self._clock.wall_ms()
        record: dict[str, object] = {
            "id": delivery.message.id,
            "topic": delivery.message.topic,
            "message": delivery.message.message,
            "due_ms": delivery.due_ms,
            "delivered_ms": delivered_ms,
            "lateness_ms": delivered_ms - delivery.due_ms,
            "attempt": delivery.attempt,
        }
        if delivery.message.headers:
            record["headers"] = dict(delivery.message.headers)
        return json.dumps(record).encode() + b"\n"


def utc_text(epoch_ms: int) -> str:
    """Return ``2026-11-20 12:00:01``, cut to the second."""
    return (EPOCH + timedelta(milliseconds=epoch_ms)).strftime("%Y-%m-%d %H:%M:%S")


def visible(text: str) -> str:
    r"""Return ``text`` with everything that could move a cursor, hide or split a line as ``\n`` or ``\u202e``.

    A backslash of the message itself stays as it is: the text form is for eyes, programs read JSON.
    """
    if text.isprintable():
        return text
    return "".join(_visible_character(character) if not character.isprintable() else character for character in text)


def _visible_character(character: str) -> str:
    if character in JOINERS or unicodedata.category(character) not in UNSAFE_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")
