import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest

from pipeline.core.errors import ConfigError, StoreError
from pipeline.runtime import server
from pipeline.runtime.process import open_lock
from pipeline.runtime.server import PrivateServer, call_server, private_server

Wait = Callable[..., None]
Processes = Callable[[str], list]
User = Callable[..., subprocess.Popen[bytes]]

# A user: says the URL, then leaves when its stdin ends.
USER = """
import signal, sys; from pathlib import Path; from pipeline.runtime.server import private_server
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests behind itself ignores it for them all
with private_server(Path(sys.argv[1])) as url:
    print(url, flush=True)
    sys.stdin.read()
print("left", flush=True)
"""


def get_socket(url: str) -> Path:
    assert url.startswith("unix:///")
    return Path(unquote(url.removeprefix("unix://")))


def ping(url: str) -> bytes:
    return call_server(get_socket(url), b"PING")


def write_much_data(state_dir: Path) -> None:
    data = state_dir / "server" / "appendonlydir"
    data.mkdir(parents=True)
    (data / "appendonly.aof.manifest").write_text("file appendonly.aof.1.incr.aof seq 1 type i\n")
    command = b"*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n"
    (data / "appendonly.aof.1.incr.aof").write_bytes(command * 1_000_000)


@pytest.fixture
def start_user(tmp_path: Path, spawn: Callable, wait_for: Wait, processes: Processes) -> User:
    """Start a user in a process of its own; with ``wait``, return when it has the server."""

    def start(name: str, *, wait: bool = True) -> subprocess.Popen[bytes]:
        user = spawn([sys.executable, "-c", USER, str(tmp_path / "state")], name=name)
        if wait:
            wait_for(
                lambda: "unix:" in (tmp_path / f"{name}stdout").read_text() or user.poll() is not None,
                f"{name} has a server",
            )
        return user

    return start


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/state/server/redis.sock"


def test_the_server_serves_in_the_block_and_is_gone_when_it_ends(tmp_path: Path, processes: Processes) -> None:
    with private_server(tmp_path) as url:
        assert ping(url) == b"+PONG\r\n"
        assert len(processes("valkey-server unixsocket")) == 1
    assert processes("") == []
    assert not get_socket(url).exists()


def test_what_was_stored_is_there_again_at_the_next_start(tmp_path: Path) -> None:
    with private_server(tmp_path) as url:
        assert call_server(get_socket(url), b"SET key value") == b"+OK\r\n"
    with private_server(tmp_path) as url:
        assert call_server(get_socket(url), b"GET key") == b"$5\r\nvalue\r\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("appendonly", "yes"), ("appendfsync", "always"), ("maxmemory-policy", "noeviction"), ("port", "0"),
        ("auto-aof-rewrite-min-size", "268435456"),
    ],
)  # fmt: skip
def test_the_server_keeps_the_guarantee_and_claims_short(tmp_path: Path, name: str, value: str) -> None:
    with private_server(tmp_path) as url:
        assert call_server(get_socket(url), f"CONFIG GET {name}".encode()).split(b"\r\n")[-2] == value.encode()


def test_the_server_stays_until_the_last_of_two_users_has_left(
    start_user: User, url: str, wait_for: Wait, processes: Processes
) -> None:
    first, second = start_user("first"), start_user("second")
    first.stdin.close()
    assert first.wait(60) == 0
    assert ping(url) == b"+PONG\r\n"
    second.stdin.close()
    assert second.wait(60) == 0
    assert processes("valkey-server unixsocket") == [], "the last one leaves when the server is gone"


def test_a_user_that_is_killed_counts_as_gone(start_user: User, url: str, wait_for: Wait, processes: Processes) -> None:
    first, second = start_user("first"), start_user("second")
    first.kill()
    first.wait()
    assert ping(url) == b"+PONG\r\n"
    second.kill()
    second.wait()
    wait_for(lambda: not processes("valkey-server"), "daemon and server are gone")


def test_nobody_else_comes_near_it(tmp_path: Path) -> None:
    """The folder of all state is made with it where nothing else has made it, as from the wheel."""
    before = os.umask(0)
    try:
        made = PrivateServer(tmp_path / "new" / "state")
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in (made.directory, made.directory.parent)] == [0o700] * 2


def test_ctrl_c_in_the_terminal_of_a_user_does_not_reach_the_server(
    start_user: User, url: str, processes: Processes
) -> None:
    first, second = start_user("first"), start_user("second")
    assert {os.getsid(process.pid) for process in processes("valkey-server")}.isdisjoint({first.pid, second.pid})
    os.killpg(first.pid, signal.SIGINT)
    first.wait()
    assert ping(url) == b"+PONG\r\n"
    second.stdin.close()
    assert second.wait(60) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the server outlives its daemon until the next start")
def test_the_server_goes_with_its_daemon(start_user: User, url: str, wait_for: Wait, processes: Processes) -> None:
    start_user("first")
    (daemon,) = processes("-m pipeline.runtime.server_daemon")
    daemon.kill()
    wait_for(lambda: not processes("valkey-server unixsocket"), "the server is gone")
    assert ping(url) != b"+PONG\r\n"


@pytest.mark.parametrize("times", [1, 3])
def test_a_server_that_is_killed_under_its_users_is_started_again_with_its_data(
    start_user: User, url: str, wait_for: Wait, processes: Processes, times: int
) -> None:
    user = start_user("first")
    assert call_server(get_socket(url), b"SET key value") == b"+OK\r\n"
    (daemon,) = processes("-m pipeline.runtime.server_daemon")
    for _ in range(times):
        (victim,) = processes("valkey-server unixsocket")
        victim.kill()
        victim.wait(60)
        wait_for(lambda: ping(url) == b"+PONG\r\n", "the same URL answers again", timeout_s=10.0)
        assert call_server(get_socket(url), b"GET key") == b"$5\r\nvalue\r\n"
    assert processes("-m pipeline.runtime.server_daemon") == [daemon]
    log = (get_socket(url).parent / "server.log").read_text()
    assert log.count("ended by itself (signal 9): starting it again") == times
    user.stdin.close()
    assert user.wait(60) == 0
    assert processes("") == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the server outlives its daemon until the next start")
def test_a_server_that_was_started_again_goes_with_its_daemon_too(
    start_user: User, url: str, wait_for: Wait, processes: Processes
) -> None:
    start_user("first")
    (victim,) = processes("valkey-server unixsocket")
    victim.kill()
    victim.wait(60)
    wait_for(lambda: ping(url) == b"+PONG\r\n", "it is started again")
    (daemon,) = processes("-m pipeline.runtime.server_daemon")
    daemon.kill()
    wait_for(lambda: not processes("valkey-server unixsocket"), "the server is gone")
    assert ping(url) != b"+PONG\r\n"


def is_user(pid: int) -> bool:
    """Whether a process holds the lock of users, which they share."""
    try:
        return any("FLOCK  ADVISORY  READ" in each.read_text() for each in Path(f"/proc/{pid}/fdinfo").iterdir())
    except OSError:  # it has just closed a file
        return False


def wait_until_seen(directory: Path, wait_for: Wait) -> None:
    """Return when the daemon has seen that its server has answered: one that never did is not started again."""
    wait_for(lambda: "The server answers." in (directory / "server.log").read_text(), "the daemon has seen an answer")


def test_a_daemon_whose_server_cannot_be_started_again_tries_until_the_last_user_leaves(
    start_user: User, url: str, wait_for: Wait, processes: Processes
) -> None:
    first, arriving = start_user("first"), None
    directory = get_socket(url).parent
    manifest = directory / "appendonlydir" / "appendonly.aof.manifest"
    good = manifest.read_bytes()
    manifest.write_text("nonsense\n")
    wait_until_seen(directory, wait_for)
    processes("valkey-server unixsocket")[0].kill()
    wait_for(lambda: (directory / "server.log").read_text().count("starting it again") >= 3, "it is tried repeatedly")
    arriving = start_user("second", wait=False)
    wait_for(lambda: is_user(arriving.pid), "the second one is a user")  # else the first one may be the last
    first.stdin.close()
    assert first.wait(60) == 0, "who leaves doesn't wait for who waits for the server"
    manifest.write_bytes(good)
    wait_for(lambda: ping(url) == b"+PONG\r\n", "it serves again as soon as it can")
    arriving.stdin.close()
    assert arriving.wait(60) == 0
    assert processes("") == []


def test_the_last_user_can_leave_while_its_server_cannot_be_started_again(
    start_user: User, url: str, wait_for: Wait, processes: Processes
) -> None:
    user = start_user("first")
    directory = get_socket(url).parent
    (directory / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    wait_until_seen(directory, wait_for)
    processes("valkey-server unixsocket")[0].kill()
    wait_for(lambda: (directory / "server.log").read_text().count("starting it again") >= 3, "it is tried repeatedly")
    user.stdin.close()
    assert user.wait(60) == 0
    assert processes("") == []


@pytest.mark.parametrize("name", ["change", "users"])
def test_who_waits_for_a_lock_stops_waiting_when_asked_to(tmp_path: Path, name: str) -> None:
    """Handlers that only set a flag don't interrupt a lock."""
    asked = iter([False, False, True])
    (tmp_path / "server").mkdir()
    fd = open_lock(tmp_path / "server" / name)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(StoreError, match="asked to stop"), private_server(tmp_path, lambda: next(asked)):
        pass
    os.close(fd)
    with private_server(tmp_path, lambda: False) as url:
        assert ping(url) == b"+PONG\r\n"


def test_who_waits_for_a_server_that_reads_much_data_stops_waiting_when_asked_to(
    tmp_path: Path, processes: Processes
) -> None:
    write_much_data(tmp_path)

    def should_stop() -> bool:
        return call_server(tmp_path / "server" / "redis.sock", b"PING").startswith(b"-LOADING")

    with pytest.raises(StoreError, match="asked to stop"), private_server(tmp_path, should_stop):
        pass
    assert processes("") == []


def test_after_a_killed_daemon_and_server_the_next_user_starts_a_new_one(
    start_user: User, url: str, processes: Processes
) -> None:
    first = start_user("first")
    for process in (*processes("-m pipeline.runtime.server_daemon"), *processes("valkey-server unixsocket")):
        with contextlib.suppress(Exception):  # the server may have followed its daemon already
            process.kill()
    start_user("second")
    assert ping(url) == b"+PONG\r\n"
    assert len(processes("valkey-server unixsocket")) == 1
    first.stdin.close()
    assert first.wait(60) == 0
    assert ping(url) == b"+PONG\r\n"


def test_a_server_that_outlived_its_daemon_is_stopped_before_a_new_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawn: Callable, wait_for: Wait, processes: Processes
) -> None:
    """Two servers on one set of files would ruin it. As on macOS, where the kernel doesn't stop the server."""
    directory = tmp_path / "state" / "server"
    directory.mkdir(parents=True)
    program = str(server.find_server_program())
    command = f"exec 9>{directory}/server; flock 9; exec {program} --port 0 --unixsocket {directory}/redis.sock --dir {directory}"
    orphan = spawn(["bash", "-c", command])
    wait_for(lambda: call_server(directory / "redis.sock", b"PING") == b"+PONG\r\n", "the orphan serves")
    with private_server(tmp_path / "state") as url:
        assert orphan.wait(60) == 0
        assert ping(url) == b"+PONG\r\n"


def test_four_users_that_start_at_once_share_one_server(
    start_user: User, tmp_path: Path, url: str, wait_for: Wait, processes: Processes
) -> None:
    names = ["a", "b", "c", "d"]
    users = [start_user(name, wait=False) for name in names]
    wait_for(lambda: all((tmp_path / f"{name}stdout").read_text() == url + "\n" for name in names), "all four have it")
    assert len(processes("valkey-server unixsocket")) == 1
    assert len(processes("-m pipeline.runtime.server_daemon")) == 1
    for user in users:
        user.stdin.close()
    assert [user.wait(60) for user in users] == [0, 0, 0, 0]
    assert processes("valkey-server") == []


def test_users_that_come_and_go_all_the_time_always_find_a_server(tmp_path: Path, processes: Processes) -> None:
    answers: list[bytes] = []

    def come_and_go() -> None:
        for _ in range(5):
            with private_server(tmp_path) as url:
                answers.append(ping(url))

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [b"+PONG\r\n"] * 15
    assert processes("") == []


def test_who_comes_waits_for_who_is_coming_or_going(tmp_path: Path) -> None:
    arrived = threading.Event()

    def come() -> None:
        with private_server(tmp_path):
            arrived.set()

    with private_server(tmp_path):
        change_fd = open_lock(tmp_path / "server" / "change")
        fcntl.flock(change_fd, fcntl.LOCK_EX)
        arriving = threading.Thread(target=come)
        arriving.start()
        assert not arrived.wait(0.3), "with the server running, it takes some milliseconds"
        os.close(change_fd)
        assert arrived.wait(60)
        arriving.join(60)


def test_of_users_that_leave_at_once_the_last_one_waits_until_the_server_is_gone(
    tmp_path: Path, processes: Processes
) -> None:
    together = threading.Barrier(4)

    def use() -> None:
        with private_server(tmp_path):
            together.wait(60)

    for _ in range(5):
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert processes("") == []


def test_a_long_or_odd_path_is_no_obstacle(tmp_path: Path) -> None:
    with private_server(tmp_path / "it's odd %41") as url:
        assert ping(url) == b"+PONG\r\n"
    with private_server(tmp_path / ("x" * 120)) as url:
        assert ping(url) == b"+PONG\r\n"
        folder = get_socket(url).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def test_a_folder_for_the_socket_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("y" * 120)
    with private_server(long) as url:
        folder = get_socket(url).parent
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=str(folder)), private_server(long):
        pass
    folder.rmdir()


def test_a_server_that_fails_to_start_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    data = tmp_path / "server" / "appendonlydir"
    data.mkdir(parents=True)
    (data / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(StoreError, match=str(tmp_path / "server" / "server.log")), private_server(tmp_path):
        pass
    assert "manifest" in (tmp_path / "server" / "server.log").read_text()


def test_a_server_that_reads_much_data_is_waited_for_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_much_data(tmp_path)
    monkeypatch.setattr(server, "REPORT_S", 0.05)
    with private_server(tmp_path) as url:
        assert call_server(get_socket(url), b"GET n") == b"$7\r\n1000000\r\n"
    assert "still reading its data" in capsys.readouterr().err


def test_a_state_folder_that_cannot_be_used_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="REDIS_URL"), private_server(tmp_path / "file"):
        pass


@pytest.mark.parametrize(("version", "accepted"), [("6.2.14", False), ("7.0.15", True), ("8.1.0", True)])
def test_a_server_on_path_is_used_from_version_7_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, accepted: bool
) -> None:
    program = tmp_path / "redis-server"
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0:0 malloc=libc bits=64'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    if accepted:
        assert server.find_server_program() == program
    else:
        with pytest.raises(ConfigError, match="install one, or set REDIS_URL"):
            server.find_server_program()
