"""What a message looks like, and what happens when nobody reads it."""

import json
import os
from collections.abc import Iterator

import pytest

from pipeline.core.errors import SinkClosed
from pipeline.core.messages import Message
from pipeline.sinks.base import Delivery
from pipeline.sinks.screen import ScreenSink, visible

DUE_MS = 1_795_176_001_987  # 2026-11-20 12:00:01.987 UTC


class StoppedClock:
    def wall_ms(self) -> int:
        return DUE_MS + 13

    def monotonic_ms(self) -> float:
        return 0.0


def delivery(text: str, headers: dict[str, str] | None = None) -> Delivery:
    return Delivery(Message("P" * 22, "order-1", "mail", text, headers or {}), DUE_MS, 2)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        try:
            os.close(descriptor)
        except OSError:
            pass


def written(pipe: tuple[int, int], format: str, *deliveries: Delivery) -> bytes:
    assert ScreenSink(format, StoppedClock(), pipe[1]).deliver(deliveries, lambda: True) == len(deliveries)
    return os.read(pipe[0], 65_536)


def test_a_message_is_one_line_of_text_with_its_due_time(pipe: tuple[int, int]) -> None:
    assert written(pipe, "text", delivery("hello"), delivery("grüße 🚀")) == (
        "2026-11-20 12:00:01: hello\n2026-11-20 12:00:01: grüße 🚀\n".encode()
    )


def test_json_has_what_programs_need(pipe: tuple[int, int]) -> None:
    assert json.loads(written(pipe, "json", delivery("a\nb"))) == {
        "id": "order-1",
        "topic": "mail",
        "message": "a\nb",
        "due_ms": DUE_MS,
        "delivered_ms": DUE_MS + 13,
        "lateness_ms": 13,
        "attempt": 2,
    }


def test_json_has_headers_only_if_there_are_any(pipe: tuple[int, int]) -> None:
    assert json.loads(written(pipe, "json", delivery("m", {"k": "v"})))["headers"] == {"k": "v"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\r", r"two\nlines\r"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\x9b1m \x7f", r"\x9b1m \x7f"),
        ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
        ("a\u2028b\u2029c\x85", r"a\u2028b\u2029c\x85"),
        ("nul\0", r"nul\x00"),
        ("a\u200bb\ufeff", r"a\u200bb\ufeff"),
        ("tab\t", r"tab\t"),
        ("C:\\new", "C:\\new"),
        ("no\u00a0break\u3000wide", "no\u00a0break\u3000wide"),
        ("👩\u200d🚀", "👩\u200d🚀"),
    ],
)
def test_what_could_drive_a_terminal_is_made_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_closed_reader_ends_the_sink(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    with pytest.raises(SinkClosed, match="given back"):
        ScreenSink("text", StoppedClock(), pipe[1]).deliver([delivery("m")], lambda: True)


def test_a_reader_that_stopped_reading_does_not_hold_up_the_end(pipe: tuple[int, int]) -> None:
    deliveries = [delivery("x" * 1_000) for _ in range(500)]
    count = ScreenSink("text", StoppedClock(), pipe[1]).deliver(deliveries, lambda: False)
    os.close(pipe[1])
    with os.fdopen(pipe[0], "rb") as reader:
        whole_lines = reader.read().count(b"\n")
    assert 0 < count < 500
    assert count == whole_lines


def test_nothing_to_deliver_is_fine(pipe: tuple[int, int]) -> None:
    assert ScreenSink("text", StoppedClock(), pipe[1]).deliver([], lambda: True) == 0
