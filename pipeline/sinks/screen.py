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
from functools import lru_cache

from pipeline.core.clock import Clock
from pipeline.core.errors import SinkClosed
from pipeline.sinks.base import Delivery

PIPE_BYTES = (
    4_096  # POSIX: a pipe that is writable takes PIPE_BUF bytes (4,096 on Linux, at least 512) without blocking
)
PORTION_MAX = 100  # messages rendered at a time
CHECK_MS = 200  # how often a blocked write asks whether it may go on
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CALENDAR_FIRST_MS, CALENDAR_LAST_MS = -62_135_596_800_000, 253_402_300_799_999  # years 1 to 9999, what datetime knows
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
        self._torn = b""  # the rest of a line that was begun when the reader stopped reading

    def deliver(self, deliveries: Sequence[Delivery], in_time: Callable[[], bool], patient: Callable[[], bool]) -> int:
        """Write a line for each message; see ``Sink.deliver``."""
        delivered = 0
        try:
            self._torn = self._torn[self._write(self._torn, patient) :]
            while delivered < len(deliveries) and not self._torn and in_time():
                lines = self._portion(deliveries, delivered)
                written = self._write(b"".join(lines), patient)
                for line in lines:
                    if written < len(line):
                        self._torn = line[written:] if written else b""
                        return delivered
                    written -= len(line)
                    delivered += 1
        except (BrokenPipeError, ConnectionResetError) as exc:
            raise SinkClosed(
                "Nobody reads the output any more; its messages are given back.", delivered + PORTION_MAX
            ) from exc
        except OSError as exc:
            raise SinkClosed(
                f"The output can't be written ({exc.strerror}); its messages are given back.", delivered + PORTION_MAX
            ) from exc
        return delivered

    def _portion(self, deliveries: Sequence[Delivery], first: int) -> list[bytes]:
        """Render messages until they fill what a pipe takes at a time."""
        lines: list[bytes] = []
        size = 0
        for delivery in deliveries[first : first + PORTION_MAX]:
            lines.append(self._render(delivery))
            size += len(lines[-1])
            if size >= PIPE_BYTES:
                break
        return lines

    def _write(self, data: bytes, patient: Callable[[], bool]) -> int:
        """Write ``data``; returns how much of it is out, all of it unless the reader stopped reading."""
        view = memoryview(data)
        written = 0
        while written < len(view):
            _, writable, _ = select.select([], [self._descriptor], [], CHECK_MS / 1000)
            try:
                if writable:
                    written += os.write(self._descriptor, view[written : written + PIPE_BYTES])
                    continue
            except BlockingIOError:  # somebody who shares our output made it non-blocking, and it is nearly full
                select.select([], [], [], CHECK_MS / 1000)
            if not patient():
                break
        return written

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
    """Return ``2026-11-20 12:00:01``, cut to the second; a time that no calendar has becomes the first or last one."""
    return _second_text(min(max(epoch_ms, CALENDAR_FIRST_MS), CALENDAR_LAST_MS) // 1000)


@lru_cache(maxsize=1_000)  # messages come in order of due time, so most have the second of the one before
def _second_text(epoch_sec: int) -> str:
    return (EPOCH + timedelta(seconds=epoch_sec)).replace(tzinfo=None).isoformat(" ", "seconds")


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
