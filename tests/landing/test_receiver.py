"""What a line server sends lands once, line by line, whatever breaks: the connection, the disk, the process."""

import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import ConfigError, SourceError
from pipeline.core.validation import REQUEST_BYTES_MAX
from pipeline.landing import parts, receiver
from pipeline.landing.lines import LINE_CUT_BYTES
from pipeline.landing.names import parse_landing_name
from pipeline.landing.receiver import LineReceiver
from tests.clock import ManualClock
from tests.landing.conftest import NOW_MS

OpenReceiver = Callable[..., LineReceiver]


class LineServer:
    """A listening socket, and the connection that it accepted last."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(20)
        self.port = self.listener.getsockname()[1]
        self._peer: socket.socket | None = None

    @property
    def peer(self) -> socket.socket:
        assert self._peer is not None
        return self._peer

    def accept(self) -> None:
        if self._peer:
            self._peer.close()
        self._peer, _ = self.listener.accept()

    def close(self) -> None:
        self.listener.close()
        if self._peer:
            self._peer.close()


@pytest.fixture
def server() -> Iterator[LineServer]:
    made = LineServer()
    yield made
    made.close()


@pytest.fixture
def landing(tmp_path: Path) -> Path:
    return tmp_path / "landing"


@pytest.fixture
def open_receiver(server: LineServer, landing: Path, clock: ManualClock) -> Iterator[OpenReceiver]:
    opened: list[LineReceiver] = []

    def make(**options: Any) -> LineReceiver:
        options = {"clock": clock, "rng": random.Random(1), **options}
        opened.append(LineReceiver("127.0.0.1", options.pop("port", server.port), landing, **options))
        return opened[-1]

    yield make
    for made in opened:
        made._disconnect()
        made._folder.close()


@pytest.fixture
def connect(server: LineServer, open_receiver: OpenReceiver) -> OpenReceiver:
    def make(**options: Any) -> LineReceiver:
        made = open_receiver(**options)
        made.step(0)
        server.accept()
        return made

    return make


def published(landing: Path) -> list[Path]:
    return sorted(path for path in landing.iterdir() if not path.name.startswith("."))


def stamped(landing: Path) -> list[tuple[int, bytes]]:
    lines = [line for path in published(landing) for line in path.read_bytes().splitlines(keepends=True)]
    return [(int(stamp), line) for stamp, line in (line.split(b"\t", 1) for line in lines)]


def hidden(landing: Path) -> list[Path]:
    """Files that are not published yet."""
    return sorted(path for path in landing.iterdir() if path.name.startswith((".part", ".tmp")))


def received(landing: Path) -> int:
    """How many lines have been written, published or not."""
    return sum(path.read_bytes().count(b"\n") for path in [*published(landing), *hidden(landing)])


def is_connected(made: LineReceiver) -> bool:
    return made._socket is not None


def until(condition: Callable[[], object], step: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        step()


def test_lines_are_stamped_with_their_arrival_and_published_when_old_enough(
    server: LineServer, connect: OpenReceiver, landing: Path, clock: ManualClock
) -> None:
    made = connect(roll_ms=100)
    server.peer.sendall(b"one\ntw")
    made.step(5)
    assert published(landing) == []
    assert [path.read_bytes() for path in hidden(landing)] == [b"%d\tone\n" % NOW_MS]
    clock.advance_ms(99)
    server.peer.sendall(b"o\r\n\nthree\n")
    made.step(5)
    clock.advance_ms(1)
    made.step(0)
    (path,) = published(landing)
    name = parse_landing_name(path.name)
    assert name is not None
    assert (name.kind, name.first_line, name.original_name) == ("sock", 1, f"127.0.0.1:{server.port}")
    assert path.name.endswith(f".1.sock.127+0+0+1=3A{server.port}"), "its dots are + as in any landing name"
    assert stamped(landing) == [
        (NOW_MS, b"one\n"), (NOW_MS + 99, b"two\r\n"), (NOW_MS + 99, b"\n"), (NOW_MS + 99, b"three\n"),
    ]  # fmt: skip
    assert hidden(landing) == []


def test_a_packet_boundary_anywhere_changes_nothing(
    server: LineServer, connect: OpenReceiver, landing: Path, clock: ManualClock
) -> None:
    text = "größe ☃ 𝄞\nä\n\nx\n".encode()
    made = connect()
    server.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in text:
        server.peer.sendall(bytes([byte]))
        made.step(5)
    assert received(landing) == 4
    clock.advance_ms(200)
    made.step(0)
    assert b"".join(line for _, line in stamped(landing)) == text


def test_a_large_amount_rolls_by_size(server: LineServer, connect: OpenReceiver, landing: Path) -> None:
    made = connect(roll_bytes=10_000)
    data = b"".join(b"%d\n" % number for number in range(200_000))
    sender = threading.Thread(target=server.peer.sendall, args=(data,))
    sender.start()
    until(lambda: received(landing) == 200_000, lambda: made.step(1))
    sender.join()
    made.close()
    assert b"".join(line for _, line in stamped(landing)) == data and len(published(landing)) > 1


def test_while_spark_is_behind_a_file_grows_instead_of_more_files(
    server: LineServer, connect: OpenReceiver, landing: Path, clock: ManualClock
) -> None:
    made = connect(unread_max=1, roll_ms_behind=2000)
    for name in ("x", "y"):
        (landing / name).touch()
    server.peer.sendall(b"1\n")
    made.step(5)
    clock.advance_ms(1999)
    made.step(0)
    assert len(published(landing)) == 2
    (landing / "x").unlink()
    made.step(0)
    assert len(published(landing)) == 2
    (landing / "x").touch()
    server.peer.sendall(b"2\n")
    made.step(5)
    assert len(published(landing)) == 3
    clock.advance_ms(2000)
    made.step(0)
    assert len(published(landing)) == 4


def test_the_last_line_lands_when_the_server_closes_and_the_next_connection_goes_on(
    server: LineServer, connect: OpenReceiver, landing: Path, clock: ManualClock
) -> None:
    made = connect()
    server.peer.sendall(b"one\nlast")
    server.peer.close()
    until(lambda: made.has_ended, lambda: made.step(5))
    assert received(landing) == 2
    clock.advance_ms(5000)
    until(lambda: is_connected(made), lambda: made.step(0.01))
    server.accept()
    server.peer.sendall(b"new\n")
    made.step(5)
    made.close()
    assert [line for _, line in stamped(landing)] == [b"one\n", b"last\n", b"new\n"]


def test_close_lands_what_the_kernel_holds_and_an_unterminated_line(
    server: LineServer, connect: OpenReceiver, landing: Path
) -> None:
    made = connect()
    server.peer.sendall(b"one\n")
    made.step(5)
    server.peer.sendall(b"two\nthr")
    connection = made._socket
    assert connection is not None
    until(lambda: connection.recv(7, socket.MSG_PEEK | socket.MSG_WAITALL) == b"two\nthr", lambda: None)
    made.close()
    assert len(published(landing)) == 1
    assert [line for _, line in stamped(landing)] == [b"one\n", b"two\n", b"thr\n"] and hidden(landing) == []


def test_a_restart_in_the_middle_loses_and_doubles_nothing(
    server: LineServer, open_receiver: OpenReceiver, landing: Path, clock: ManualClock
) -> None:
    sent = []
    for run in range(3):
        made = open_receiver()
        made.step(0)
        server.accept()
        for number in range(5):
            line = b"%d %d\n" % (run, number)
            sent.append(line)
            server.peer.sendall(line)
            made.step(5)
        made.close()
    assert [line for _, line in stamped(landing)] == sent


def test_a_line_that_is_too_long_is_cut_and_logged(
    server: LineServer, connect: OpenReceiver, landing: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = connect(line_bytes_max=1000)
    server.peer.sendall(b"a\n" + b"x" * 5000 + b"\nb\n" + b"y" * 1000 + b"\n" + b"z" * 1001)
    server.peer.close()
    until(lambda: made.has_ended, lambda: made.step(5))
    made.close()
    assert [line for _, line in stamped(landing)] == [
        b"a\n",
        b"x" * 1000 + b"\n",
        b"b\n",
        b"y" * 1000 + b"\n",
        b"z" * 1000 + b"\n",
    ]
    assert caplog.text.count("was cut to") == 2
    assert "A line of 5000 bytes" in caplog.text and "A line of 1001 bytes" in caplog.text


def test_an_absent_server_is_complained_of_once_a_minute(
    server: LineServer, open_receiver: OpenReceiver, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    server.listener.close()
    made = open_receiver()
    for _ in range(50):
        clock.advance_ms(1000)
        made.step(0)
        assert not is_connected(made)
    assert caplog.text.count("can't be reached") == 1
    clock.advance_ms(20_000)
    made.step(0)
    assert caplog.text.count("can't be reached") == 2


class FakePoller:
    """Nothing ever becomes readable; the time goes by as it is asked to."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.waits_ms: list[float] = []

    def register(self, descriptor: int, events: int) -> None:
        pass

    def poll(self, timeout_ms: float) -> list[object]:
        self.waits_ms.append(timeout_ms)
        self.clock.advance_ms(math.ceil(timeout_ms))
        return []


@pytest.fixture
def poller(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> FakePoller:
    made = FakePoller(clock)
    monkeypatch.setattr(receiver.select, "poll", lambda: made)
    return made


def test_the_wait_before_the_next_try_grows(
    server: LineServer, open_receiver: OpenReceiver, poller: FakePoller
) -> None:
    server.listener.close()
    made = open_receiver()
    for _ in range(12):
        made.step(0)
        made.wait(60)
    assert poller.waits_ms[0] <= 50 and 2500 <= poller.waits_ms[-1] <= 5000
    made.wait(0.2)
    made.step(0)
    made.wait(0.2)
    assert poller.waits_ms[-1] == 200


def test_a_wait_ends_when_there_is_something_to_receive_and_takes_nothing(
    server: LineServer, connect: OpenReceiver, landing: Path
) -> None:
    made = connect()
    server.peer.sendall(b"one\n")
    for _ in range(3):
        made.wait(60)
    assert received(landing) == 0
    made.step(0)
    assert received(landing) == 1


def test_a_wait_ends_when_the_file_is_old_enough(
    server: LineServer, connect: OpenReceiver, poller: FakePoller, landing: Path
) -> None:
    made = connect(roll_ms=100)
    server.peer.sendall(b"one\n")
    made.step(0)
    made.wait(60)
    assert poller.waits_ms == [100]
    made.step(0)
    assert len(published(landing)) == 1


def test_no_wait_is_a_busy_one(
    server: LineServer, connect: OpenReceiver, landing: Path, poller: FakePoller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while Spark is behind nor while the disk is full, however much there is to receive."""
    made = connect(roll_ms=100, unread_max=0, roll_ms_behind=2000)
    (landing / "x").touch()
    server.peer.sendall(b"one\n")
    landed = False
    while not landed:
        made.step(0)
        landed = len(published(landing)) == 2
        made.wait(0.2 if landed else 60)
    assert poller.waits_ms == [100] * 20 + [200]
    server.peer.sendall(b"two\n")
    with monkeypatch.context() as patch:
        patch.setattr(parts.os, "write", full_disk)
        with pytest.raises(SourceError):
            made.step(0)
    monkeypatch.setattr(poller, "register", None)  # what can be received is no reason to wake up
    made.wait(0.2)
    assert poller.waits_ms[-1] == 200


def test_quiet_for_counts_from_the_last_byte_or_the_first_connection_to_the_last_look(
    server: LineServer, open_receiver: OpenReceiver, clock: ManualClock
) -> None:
    made = open_receiver()
    clock.advance_ms(9000)
    assert not made.has_connected
    made.step(0)
    server.accept()
    assert made.has_connected and made.quiet_for_ms == 0
    clock.advance_ms(500)
    made.step(0)
    clock.advance_ms(500)
    assert made.quiet_for_ms == 500
    server.peer.sendall(b"x")
    made.step(5)
    assert made.quiet_for_ms == 0 and not made.has_ended
    server.peer.close()
    until(lambda: made.has_ended, lambda: made.step(5))


def full_disk(*args: object) -> int:
    raise OSError(28, "No space left on device")


def test_closing_twice_is_fine(server: LineServer, connect: OpenReceiver, landing: Path) -> None:
    made = connect()
    server.peer.sendall(b"one\n")
    made.step(5)
    made.close()
    made.close()
    assert [line for _, line in stamped(landing)] == [b"one\n"]


@pytest.mark.parametrize("call", ["fsync", "rename", "close"])
def test_closing_after_a_failed_publish_lands_what_was_received(
    server: LineServer,
    connect: OpenReceiver,
    landing: Path,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    made = connect()
    server.peer.sendall(b"one\n")
    made.step(5)
    clock.advance_ms(200)
    real = getattr(os, call)

    def fail(*args: Any) -> None:
        if call == "close":
            real(*args)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(parts.os, call, fail)
        if call == "close":
            made.step(0)
        else:
            with pytest.raises(SourceError):
                made.step(0)
    made.close()
    assert [line for _, line in stamped(landing)] == [b"one\n"] and hidden(landing) == []


def test_a_full_disk_at_close_is_said_once_and_what_is_written_lands_at_the_next_start(
    server: LineServer,
    open_receiver: OpenReceiver,
    connect: OpenReceiver,
    landing: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = connect()
    server.peer.sendall(b"one\n")
    made.step(5)
    server.peer.sendall(b"two\nthree\nfou")
    with monkeypatch.context() as patch:
        patch.setattr(parts.os, "write", full_disk)
        made.wait(5)
        made.close()
        made.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "3 lines are lost" in warnings[0] and "No space left" in warnings[0]
    open_receiver().step(0)
    assert [line for _, line in stamped(landing)] == [b"one\n"]


def test_a_disk_that_fails_at_close_after_all_is_written_loses_nothing(
    server: LineServer,
    open_receiver: OpenReceiver,
    connect: OpenReceiver,
    landing: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = connect()
    server.peer.sendall(b"one\n")
    made.step(5)
    with monkeypatch.context() as patch:
        patch.setattr(parts.os, "fsync", full_disk)
        made.close()
    assert "0 lines are lost" in caplog.text
    open_receiver().step(0)
    assert [line for _, line in stamped(landing)] == [b"one\n"]


def test_a_full_disk_stops_the_reading_and_loses_nothing(
    server: LineServer, connect: OpenReceiver, landing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = connect()
    server.peer.sendall(b"one\ntwo\n")
    write = os.write
    with monkeypatch.context() as patch:
        written: list[int] = []

        def nearly_full(descriptor: int, data: bytes) -> int:
            if written:
                raise OSError(28, "No space left on device")
            written.append(1)
            return write(descriptor, data[:5])

        patch.setattr(parts.os, "write", nearly_full)
        with pytest.raises(SourceError, match="full"):
            made.step(0)
        server.peer.sendall(b"three\n")
        with pytest.raises(SourceError, match="full"):
            made.step(0)
    made.step(0)
    assert received(landing) == 3
    made.close()
    assert [line for _, line in stamped(landing)] == [b"one\n", b"two\n", b"three\n"]


def test_a_finished_receiver_has_landed_all_and_keeps_the_folder_until_it_is_closed(
    server: LineServer, open_receiver: OpenReceiver, connect: OpenReceiver, landing: Path
) -> None:
    made = connect()
    server.peer.sendall(b"one\ntwo")
    made.wait(5)
    made.finish()
    assert [line for _, line in stamped(landing)] == [b"one\n", b"two\n"]
    with pytest.raises(ConfigError, match="another ingest job"):
        open_receiver()
    made.finish()
    made.close()
    open_receiver()


def test_a_second_receiver_of_the_folder_is_refused_and_the_source_id_lasts(open_receiver: OpenReceiver) -> None:
    made = open_receiver()
    with pytest.raises(ConfigError, match=r"another ingest job \(pid \d+\) reads 127\.0\.0\.1:"):
        open_receiver()
    made.close()
    assert open_receiver().source_id == made.source_id


@pytest.mark.parametrize(
    ("left", "adopted"),
    [
        (b"5\tone\n6\ttwo\n", [(5, b"one\n"), (6, b"two\n")]), (b"5\tone\n6\ttw", [(5, b"one\n"), (6, b"tw\n")]),
        (b"5\tone\n17", [(5, b"one\n")]), (b"17", []), (b"", []),
    ],
    ids=["whole", "torn line", "torn stamp", "only a torn stamp", "empty"],
)  # fmt: skip
def test_what_a_killed_receiver_left_is_published(
    open_receiver: OpenReceiver, landing: Path, left: bytes, adopted: list[tuple[int, bytes]]
) -> None:
    open_receiver().close()
    (landing / ".part-PBNM4--0000000.old=3A9999").write_bytes(left)
    open_receiver().step(0)
    assert stamped(landing) == adopted
    assert hidden(landing) == []
    names = [parse_landing_name(path.name) for path in published(landing)]
    assert [name and name.original_name for name in names] == ["old:9999"] * bool(adopted)


KILLED = """
import sys
from pipeline.landing.receiver import LineReceiver
made = LineReceiver("127.0.0.1", int(sys.argv[1]), sys.argv[2], roll_ms=1e9)
while True:
    made.step(0.05)
"""


def test_lines_read_before_a_kill_are_adopted(server: LineServer, open_receiver: OpenReceiver, landing: Path) -> None:
    time_to_receive = threading.Event()
    command = [sys.executable, "-c", KILLED, str(server.port), str(landing)]
    with subprocess.Popen(command) as process:
        server.accept()
        server.peer.sendall(b"".join(b"%d\n" % number for number in range(1000)) + b"started")
        until(lambda: received(landing) == 1000, lambda: time_to_receive.wait(0.01))
        with pytest.raises(ConfigError, match=f"pid {process.pid}"):
            open_receiver()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    open_receiver().step(0)
    assert [line for _, line in stamped(landing)] == [b"%d\n" % number for number in range(1000)] and hidden(
        landing
    ) == []


def test_a_cut_line_is_longer_than_any_that_is_accepted() -> None:
    assert LINE_CUT_BYTES > REQUEST_BYTES_MAX
