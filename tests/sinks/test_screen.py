"""What a message looks like, and what happens when nobody reads it."""

import json
import os
import threading
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import SINKS
from pipeline.core.errors import SinkClosed
from pipeline.core.messages import Message
from pipeline.core.text import utc_text
from pipeline.sinks import DELIVERING, MOVED_BY_CLAIM, SinkName
from pipeline.sinks.screen import ScreenSink

DUE_MS = 1_795_176_001_987  # 2026-11-20 12:00:01.987 UTC


def always() -> bool:
    return True


def never() -> bool:
    return False


def iter_all(descriptor: int) -> Iterator[int]:
    while part := os.read(descriptor, 65_536):
        yield from part


class StoppedClock:
    def wall_ms(self) -> int:
        return DUE_MS + 13

    def monotonic_ms(self) -> float:
        return 0.0


def delivery(text: str, headers: dict[str, str] | None = None, topic: str = "mail") -> Message:
    return Message(DUE_MS, text, topic, "order-1", headers or {}, message_id="P" * 22, attempt=2)


class Pipe:
    """The ends of a pipe. Each is closed once: its number may be another thread's by the time it is closed again."""

    def __init__(self) -> None:
        self.ends = os.pipe()
        self._open = set(self.ends)

    def __getitem__(self, end: int) -> int:
        return self.ends[end]

    def close(self, end: int) -> None:
        self._open.remove(self.ends[end])
        os.close(self.ends[end])

    def close_all(self) -> None:
        while self._open:
            os.close(self._open.pop())


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    both = Pipe()
    yield both
    both.close_all()


def written(pipe: Pipe, format: str, *messages: Message) -> bytes:
    assert ScreenSink(format, StoppedClock(), pipe[1]).deliver(messages, always, always) == len(messages)
    return os.read(pipe[0], 65_536)


def test_a_message_is_one_line_of_text_with_its_due_time_in_utc(pipe: Pipe) -> None:
    assert written(pipe, "text", delivery("hello", topic="default"), delivery("grüße 🚀", topic="default")) == (
        "2026-11-20 12:00:01Z: hello\n2026-11-20 12:00:01Z: grüße 🚀\n".encode()
    )


def test_a_line_of_text_names_a_topic_that_is_not_the_default(pipe: Pipe) -> None:
    assert written(pipe, "text", delivery("tea", topic="reminders")) == b"2026-11-20 12:00:01Z reminders: tea\n"
    assert written(pipe, "text", delivery("tea", topic="a\nb")) == rb"2026-11-20 12:00:01Z a\nb: tea" + b"\n"


def test_json_has_what_programs_need(pipe: Pipe) -> None:
    assert json.loads(written(pipe, "json", delivery("a\nb"))) == {
        "id": "order-1",
        "topic": "mail",
        "message": "a\nb",
        "due_ms": DUE_MS,
        "delivered_ms": DUE_MS + 13,
        "lateness_ms": 13,
        "attempt": 2,
    }


@given(
    st.text(),
    st.text(max_size=3),
    st.text(max_size=3),
    st.dictionaries(st.text(), st.text(), max_size=1),
    st.integers(0, 2**53),
)
def test_json_is_the_record_of_a_message_and_when_it_was_delivered(
    text: str, topic: str, key: str, headers: dict[str, str], due_ms: int
) -> None:
    message = Message(due_ms, text, topic, key, headers, message_id="P" * 22, attempt=2)
    delivered = {"delivered_ms": DUE_MS + 13, "lateness_ms": DUE_MS + 13 - due_ms}
    line = ScreenSink("json", StoppedClock(), 1)._render(message)
    assert line == json.dumps(message.to_record() | delivered).encode() + b"\n"


def test_json_has_headers_only_if_there_are_any(pipe: Pipe) -> None:
    assert json.loads(written(pipe, "json", delivery("m", {"k": "v"})))["headers"] == {"k": "v"}


def test_a_closed_reader_ends_the_sink(pipe: Pipe) -> None:
    pipe.close(0)
    with pytest.raises(SinkClosed, match="given back"):
        ScreenSink("text", StoppedClock(), pipe[1]).deliver([delivery("m")], always, always)


def test_what_a_closed_reader_can_not_have_seen_is_not_counted_as_started(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = ScreenSink("text", StoppedClock(), pipe[1])
    write, room = os.write, 0

    def write_some(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise BrokenPipeError
        room -= (written := write(descriptor, data[:room]))
        return written

    monkeypatch.setattr(os, "write", write_some)
    line = len(sink._render(delivery("0")))
    started = {}
    for space in (0, 1, line, line + 1, 3 * line):
        room = space
        with pytest.raises(SinkClosed) as caught:
            sink.deliver([delivery(f"{n}") for n in range(9)], always, always)
        started[space] = caught.value.started
    assert started == {0: 0, 1: 1, line: 1, line + 1: 2, 3 * line: 3}


def test_a_reader_that_stopped_reading_does_not_hold_up_the_end_and_no_line_stays_torn(pipe: Pipe) -> None:
    sink = ScreenSink("json", StoppedClock(), pipe[1])
    texts = [f"{n} " + "x" * 10_000 for n in range(50)]
    first = sink.deliver([delivery(text) for text in texts], always, never)
    assert 0 < first < 50
    received = bytearray()
    reading = threading.Thread(target=lambda: received.extend(iter_all(pipe[0])))
    reading.start()
    assert sink.deliver([delivery(text) for text in texts[first:]], always, always) == 50 - first
    pipe.close(1)
    reading.join()
    seen = [json.loads(line)["message"] for line in received.splitlines()]
    assert [text for n, text in enumerate(seen) if text not in seen[:n]] == texts
    assert len(seen) <= 51  # the line that was torn is whole now, and its message came again


def test_nothing_is_begun_out_of_time(pipe: Pipe) -> None:
    assert ScreenSink("text", StoppedClock(), pipe[1]).deliver([delivery("m")], never, always) == 0


def test_an_output_that_can_not_be_written_says_why() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(SinkClosed, match="No space left") as caught:
        ScreenSink("text", StoppedClock(), full).deliver([delivery("m")], always, always)
    os.close(full)
    assert caught.value.started == 0


def test_an_output_that_does_not_block_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe[1], False)
    received = bytearray()
    reading = threading.Thread(target=lambda: received.extend(iter_all(pipe[0])))
    sink = ScreenSink("text", StoppedClock(), pipe[1])
    reading.start()
    assert sink.deliver([delivery("x" * 1_000) for _ in range(500)], always, always) == 500
    pipe.close(1)
    reading.join()
    assert received.count(b"\n") == 500


@pytest.mark.parametrize("due_ms", [-(10**17), 10**17, 0])
def test_a_due_time_that_no_calendar_has_can_be_shown(due_ms: int) -> None:
    assert len(utc_text(due_ms)) == 20


def test_nothing_to_deliver_is_fine(pipe: Pipe) -> None:
    assert ScreenSink("text", StoppedClock(), pipe[1]).deliver([], always, always) == 0


def test_every_sink_is_delivered_to_or_moved_by_the_claim() -> None:
    assert set(get_args(SinkName)) == DELIVERING.keys() | MOVED_BY_CLAIM
    assert not DELIVERING.keys() & MOVED_BY_CLAIM
    assert get_args(SinkName) == SINKS
