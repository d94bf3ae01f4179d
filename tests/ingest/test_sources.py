"""Sources: a wait can be left anywhere, trouble never ends the job, --once always ends, and one job reads an input."""

import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.config import IngestSettings
from pipeline.core.errors import ConfigError, SourceError
from pipeline.ingest import sources
from pipeline.ingest.loop import run_once
from pipeline.ingest.sources import DirectSource, FilesSource, SocketSource
from pipeline.landing import folder, parts
from tests.clock import ManualClock

LINE = b'{"message":"m","delay_sec":1}\n'
GO_ON = lambda: False  # noqa: E731


class LeftAnywhere(BaseException):
    """What a signal raises."""


def call_and_leave_at(moment: int, call: Callable[[], object]) -> bool:
    """Call, and raise at the ``moment``-th instruction; False if it was over before."""
    left = moment

    def trace(frame, event, arg):
        nonlocal left
        if "pipeline" not in frame.f_code.co_filename:
            return None  # a callback of the garbage collector, say, which no signal can end either
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise LeftAnywhere
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except LeftAnywhere:
        return True
    finally:
        sys.settrace(before)
    return False


@dataclass
class LineServer:
    listener: socket.socket
    peer: socket.socket | None = None

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def accept(self) -> None:
        self.peer, _ = self.listener.accept()

    def send(self, data: bytes) -> None:
        assert self.peer is not None
        self.peer.sendall(data)  # on the loopback it can be received when this returns

    def close(self) -> None:
        self.listener.close()
        if self.peer:
            self.peer.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_800_000_000_000, 5_000)


@pytest.fixture
def server() -> Iterator[LineServer]:
    made = LineServer(socket.create_server(("127.0.0.1", 0)))
    made.listener.settimeout(20)
    yield made
    made.close()


@pytest.fixture
def open_socket(server: LineServer, tmp_path: Path) -> Iterator[Callable[..., SocketSource]]:
    opened = []

    def make(**options: object) -> SocketSource:
        roll_ms = int(options.pop("roll_ms", 1))
        settings = IngestSettings(source="socket", host="127.0.0.1", port=server.port, socket_roll_ms=roll_ms)
        opened.append(SocketSource(settings, tmp_path, **options))
        return opened[-1]

    yield make
    for source in opened:
        source.close()


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    (tmp_path / "inbox").mkdir()
    return tmp_path / "inbox"


@pytest.fixture
def open_files(inbox: Path, tmp_path: Path) -> Iterator[Callable[..., FilesSource]]:
    opened = []

    def make(*, segment_bytes: int = 1 << 20, **options: object) -> FilesSource:
        settings = IngestSettings(input=str(inbox), rejects=str(tmp_path / "rejects"), segment_bytes=segment_bytes)
        opened.append(FilesSource(settings, **options))
        return opened[-1]

    yield make
    for source in opened:
        source.close()


def landed(location: str) -> list[bytes]:
    """All lines that Spark finds, without the stamps of a socket."""
    paths = sorted(path for path in Path(location).iterdir() if not path.name.startswith("."))
    lines = [line for path in paths for line in path.read_bytes().splitlines(keepends=True)]
    return [re.sub(rb"^\d+\t", b"", line) for line in lines]


def full_disk(*args: object) -> int:
    raise OSError(28, "No space left on device")


def waits(clock: ManualClock, each: Callable[[], object] = lambda: None) -> Callable[[Callable[[], object]], None]:
    """The waits of a run in which ``each`` happens and 200 ms go by; it has to end within five minutes."""
    end_ms = clock.now_ms + 300_000

    def wait(_: Callable[[], object]) -> None:
        assert clock.now_ms < end_ms, "it runs for ever"
        clock.advance_ms(200)
        each()

    return wait


# --- a wait can be left anywhere


def test_a_socket_wait_left_at_any_instruction_loses_and_doubles_no_line(
    open_socket: Callable[..., SocketSource], server: LineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOOK_MS", 5)
    source = open_socket()
    source.step(GO_ON)
    server.accept()
    sent, moment, left = [], 0, True
    while left or moment < 30:
        # Whole lines, the end of one, the beginning of another: whatever can be in flight.
        data = b"%d a\n%d b\n%d " % (moment, moment, moment)
        sent.append(data)
        server.send(data)
        left = call_and_leave_at(moment, source.wait)
        if moment % 3 == 0:
            source.step(GO_ON)
        moment += 1
        assert moment < 5_000
    source.close()
    assert b"".join(landed(source.location)) == b"".join(sent) + b"\n"


def test_a_socket_wait_left_at_any_instruction_can_be_followed_by_close_at_once(
    open_socket: Callable[..., SocketSource], server: LineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOOK_MS", 5)
    moment, left = 0, True
    while left:
        source = open_socket()
        source.step(GO_ON)
        server.accept()
        sent = [b"%d one\n" % moment, b"%d two\n" % moment]
        for data in sent:
            server.send(data)
            left = call_and_leave_at(moment, source.wait)
        source.close()
        server.peer.close()
        assert landed(source.location) == sent
        for path in Path(source.location).glob("[!.]*"):
            path.unlink()
        moment += 1
        assert moment < 5_000


def test_a_files_wait_left_at_any_instruction_forgets_nothing_that_was_seen(
    open_files: Callable[..., FilesSource], inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOOK_MS", 5)
    source = open_files()
    source.step(GO_ON)
    if source._watcher._inotify is None:
        pytest.skip("no inotify here")
    moment, left = 0, True
    while left:
        with open(inbox / f"{moment}.json", "wb") as writer:
            left = call_and_leave_at(moment, source.wait)
            source.step(GO_ON)
            assert source._watcher.closed(f"{moment}.json") is False
            writer.write(LINE)
        source.step(GO_ON)
        moment += 1
        assert moment < 5_000
    assert len(landed(source.location)) == moment


# --- trouble


def test_a_full_disk_is_said_once_and_the_socket_feed_goes_on_when_there_is_room(
    open_socket: Callable[..., SocketSource],
    server: LineServer,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = open_socket(clock=clock)
    source.step(GO_ON)
    server.accept()
    server.send(b"one\ntwo\n")
    with monkeypatch.context() as patch:
        patch.setattr(parts.os, "write", full_disk)
        for _ in range(3):
            source.step(GO_ON)
            clock.advance_ms(200)
            server.send(b"more\n")
    assert caplog.text.count("is full") == 1
    source.step(GO_ON)
    source.close()
    assert landed(source.location) == [b"one\n", b"two\n"] + [b"more\n"] * 3


# --- --once


def test_once_takes_what_is_whole_and_ends(
    open_files: Callable[..., FilesSource], inbox: Path, clock: ManualClock
) -> None:
    (inbox / "large.json").write_bytes(LINE * 100)
    (inbox / "small.json").write_bytes(LINE)
    source = open_files(clock=clock, segment_bytes=100)
    run_once(source, GO_ON, waits(clock))
    assert landed(source.location) == [LINE] * 101 and clock.now_ms < 6_000


def test_once_gives_a_file_that_is_being_written_a_moment_then_leaves_it(
    open_files: Callable[..., FilesSource], inbox: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pipeline")
    source = open_files(clock=clock)
    (inbox / "whole.json").write_bytes(LINE)
    with open(inbox / "soon.json", "wb") as soon, open(inbox / "held.jsonl", "wb", buffering=0) as held:

        def finish_one_keep_the_other() -> None:
            held.write(LINE)
            if clock.now_ms > 7_000 and not soon.closed:
                soon.write(LINE)
                soon.close()

        run_once(source, GO_ON, waits(clock, finish_one_keep_the_other))
    assert landed(source.location) == [LINE] * 2
    assert (inbox / "held.jsonl").exists() and clock.now_ms < 15_000
    assert caplog.text.count("being written") == 1 and "left for the next run: 1" in caplog.text


def test_once_ends_although_large_files_keep_coming(
    open_files: Callable[..., FilesSource], inbox: Path, clock: ManualClock
) -> None:
    source = open_files(clock=clock, segment_bytes=100)
    numbers = iter(range(10**6))

    def drop() -> None:
        (inbox / f"{next(numbers)}.json").write_bytes(LINE * 20)

    drop()
    source._gatekeeper._slice_ms = 0
    run_once(source, GO_ON, waits(clock, drop))
    assert len(landed(source.location)) % 20 == 0
    assert [path for path in Path(source.location).iterdir() if path.name.startswith(".work")] == []
    assert any(path.suffix == ".json" for path in inbox.iterdir())


def test_once_raises_trouble_with_files_that_lasts(
    open_files: Callable[..., FilesSource], inbox: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (inbox / "a.json").write_bytes(LINE)
    source = open_files(clock=clock)
    monkeypatch.setattr(folder.os, "fsync", full_disk)
    with pytest.raises(SourceError, match="is full: make room"):
        run_once(source, GO_ON, waits(clock))


def test_once_gets_over_trouble_with_files_that_passes(
    open_files: Callable[..., FilesSource], inbox: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (inbox / "a.json").write_bytes(LINE)
    source = open_files(clock=clock)
    patch = pytest.MonkeyPatch()
    patch.setattr(folder.os, "fsync", full_disk)
    try:
        run_once(source, GO_ON, waits(clock, lambda: patch.undo() if clock.now_ms > 6_000 else None))
    finally:
        patch.undo()
    assert landed(source.location) == [LINE]


def test_once_reads_a_socket_until_it_is_silent(
    open_socket: Callable[..., SocketSource], server: LineServer, clock: ManualClock
) -> None:
    source = open_socket(clock=clock)
    clock.advance_ms(10_000)  # Spark starts in between
    numbers = iter(range(100))

    def talk() -> None:
        if server.peer is None:
            server.accept()
        if (number := next(numbers)) % 4 == 2 and number < 20:
            server.send(b"%d\n" % number)

    run_once(source, GO_ON, waits(clock, talk))
    assert landed(source.location) == [b"%d\n" % number for number in range(2, 20, 4)]


def test_once_takes_a_close_after_lines_as_the_end_of_a_socket(
    open_socket: Callable[..., SocketSource], server: LineServer, clock: ManualClock
) -> None:
    source = open_socket(clock=clock)

    def talk_and_close() -> None:
        if server.peer is None:
            server.accept()
            server.send(b"1\n2\n3")
            server.close()

    run_once(source, GO_ON, waits(clock, talk_and_close))
    assert landed(source.location) == [b"1\n", b"2\n", b"3\n"] and clock.now_ms < 6_000


def test_once_leaves_a_socket_that_is_never_silent(
    open_socket: Callable[..., SocketSource], server: LineServer, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pipeline")
    source = open_socket(clock=clock)
    sent = []

    def talk() -> None:
        if server.peer is None:
            server.accept()
        sent.append(b"%d\n" % len(sent))
        server.send(sent[-1])

    run_once(source, GO_ON, waits(clock, talk))
    assert landed(source.location) == sent and 60_000 <= clock.now_ms - 5_000 <= 61_000
    assert "still sends after 60 s" in caplog.text


def test_once_says_that_a_line_server_was_never_reached(
    open_socket: Callable[..., SocketSource], server: LineServer, clock: ManualClock
) -> None:
    source = open_socket(clock=clock)
    server.listener.shutdown(socket.SHUT_RDWR)
    with pytest.raises(SourceError, match=r"127\.0\.0\.1:\d+ can't be reached: start it"):
        run_once(source, GO_ON, waits(clock))
    assert clock.now_ms < 15_000


def test_once_raises_trouble_with_a_socket_that_lasts(
    open_socket: Callable[..., SocketSource],
    server: LineServer,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = open_socket(clock=clock)
    source.step(GO_ON)
    server.accept()
    server.send(LINE)
    with monkeypatch.context() as patch:
        patch.setattr(parts.os, "write", full_disk)
        with pytest.raises(SourceError, match="is full: make room"):
            run_once(source, GO_ON, waits(clock))
    source.close()
    assert landed(source.location) == [LINE]


def test_once_ends_at_a_stop(open_socket: Callable[..., SocketSource], server: LineServer, clock: ManualClock) -> None:
    source = open_socket(clock=clock)
    asked = iter([False, True, True, True])
    run_once(source, lambda: next(asked), waits(clock))
    assert os.listdir(source.location)


def test_once_has_nothing_to_do_for_what_spark_reads_itself() -> None:
    waited: list[float] = []
    run_once(DirectSource(IngestSettings(input="hdfs://x/y"), waited.append), GO_ON, lambda wait: wait())
    assert waited == []


# --- one job reads an input, and no other than the one that was meant


def test_no_second_job_opens_the_input_before_the_query_over_it_has_ended(
    open_files: Callable[..., FilesSource], inbox: Path, clock: ManualClock
) -> None:
    (inbox / "a.json").write_bytes(LINE)
    source = open_files(clock=clock)
    run_once(source, GO_ON, waits(clock))
    assert landed(source.location) == [LINE]
    with pytest.raises(ConfigError, match="another ingest job"):  # the query runs
        open_files(clock=clock)
    source.close()
    open_files(clock=clock)


def test_no_second_job_receives_from_a_socket_before_the_query_has_ended_and_all_lines_have_landed(
    open_socket: Callable[..., SocketSource], server: LineServer, clock: ManualClock
) -> None:
    source = open_socket(clock=clock, roll_ms=10**9)

    def talk() -> None:
        if server.peer is None:
            server.accept()
            server.send(b"1\n2")

    run_once(source, GO_ON, waits(clock, talk))
    assert landed(source.location) == [b"1\n", b"2\n"]
    with pytest.raises(ConfigError, match="another ingest job"):
        open_socket(clock=clock)
    source.close()
    open_socket(clock=clock)


def test_a_missing_input_folder_is_refused_and_not_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = IngestSettings(input=str(tmp_path / "typo" / "inbox"), rejects=str(tmp_path / "rejects"))
    with pytest.raises(ConfigError, match=r"/typo/inbox does not exist; make it, or correct --input\."):
        FilesSource(settings)
    assert not (tmp_path / "typo").exists()
    assert caplog.records == []


def test_the_default_input_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    source = FilesSource(IngestSettings(input=str(tmp_path / "inbox"), rejects=str(tmp_path / "rejects")))
    assert (tmp_path / "inbox").is_dir()
    source.close()


def test_a_file_name_can_neither_drive_the_terminal_nor_forge_a_line_of_the_log(
    open_files: Callable[..., FilesSource], inbox: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    name = "\x1b]0;owned\x07\n2026-01-01 ingest: forged"
    (inbox / f"{name}.txt").touch()
    (inbox / f"{name}.json").mkdir()
    source = open_files(clock=clock)
    source.step(GO_ON)
    clock.advance_ms(60_000)
    source.step(GO_ON)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert any(m.startswith("left ") for m in messages) and any(m.startswith("moved ") for m in messages)
    assert all(message.isprintable() and r"\x1b]0;owned\x07\n2026-01-01" in message for message in messages)
