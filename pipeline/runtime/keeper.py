"""The process that runs the private server as long as somebody uses it; see ``server.py``, whose users start it."""

import contextlib
import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from enum import Enum
from pathlib import Path

from pipeline.runtime.process import dies_with_parent, open_lock, try_lock, wait_until
from pipeline.runtime.server import PING_S, STOP_TIMEOUT_S, call_server, serves

RESTART_S = (0.5, 5.0)  # the second and the longest wait before a server that ended by itself is started again
STEADY_S = 60.0  # one that has run for this long is started again at once

OPTIONS = (
    # A private socket, no port: nobody else on the machine or the network can reach it.
    *("--port", "0", "--unixsocketperm", "700"),
    # What the delivery guarantee needs of a server.
    *("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction", "--save", ""),
    # Plain commands, which every Redis and Valkey since 7.0 can read; their RDB formats have parted ways.
    *("--aof-use-rdb-preamble", "no"),
)  # fmt: skip


def keep(program: str, directory: Path, path: Path) -> int:
    """Be the keeper: run the server until its last user is gone. Returns the exit code."""
    keeper_fd = open_lock(directory / "keeper")
    if not try_lock(keeper_fd, fcntl.LOCK_EX):
        return 0
    server_fd = open_lock(directory / "server")
    if not try_lock(server_fd, fcntl.LOCK_EX):  # a server has outlived its keeper
        call_server(path, b"SHUTDOWN")
        if not wait_until(lambda: try_lock(server_fd, fcntl.LOCK_EX), STOP_TIMEOUT_S):
            print(f"An earlier server still uses {directory} and doesn't stop.", flush=True)
            return 1
    path.unlink(missing_ok=True)
    # The starter waits for this process, so from here on only the new server can answer. The child keeps the locks; being
    # nobody's child after that, it won't become a zombie of a user that lives on.
    if os.fork() > 0:
        return 0
    command = [program, *OPTIONS, "--unixsocket", str(path), "--dir", str(directory)]
    os._exit(_Keeper(command, directory, path, server_fd).run())


class _Event(Enum):
    ENDED = "the server has ended"
    LEFT = "the last user is gone"


class _Keeper:
    """Runs the server, again whenever it ends by itself, until its last user is gone."""

    def __init__(self, command: list[str], directory: Path, path: Path, server_fd: int) -> None:
        self._command = command
        self._directory = directory
        self._path = path
        self._server_fd = server_fd
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._server: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Return the exit code: 1 if the server ended before it ever served, which is how users waiting for it learn that.

        One that was killed says nothing about whether it can serve, and a user may have seen it serve before this process did.
        """
        self._start()
        threading.Thread(target=self._await_last_user, daemon=True).start()
        served, delay_s = False, 0.0
        while True:
            started_s = time.monotonic()
            while (event := self._next_event(None if served else PING_S)) is None:
                served = serves(self._path)
            if event is _Event.LEFT:
                return self._stop()
            if not served and not self._was_killed():
                return 1
            if time.monotonic() - started_s >= STEADY_S:
                delay_s = 0.0
            self._log(f"The server ended by itself, {self._tell_how()}: starting it again in {delay_s:g} s.")
            if self._next_event(delay_s) is _Event.LEFT:
                return 0
            delay_s = min(max(2 * delay_s, RESTART_S[0]), RESTART_S[1])
            try:
                self._start()
            except OSError as error:  # no memory, or the program has been removed
                self._log(f"The server can't be started ({error.strerror}).")
                self._server = None
                self._events.put(_Event.ENDED)

    def _start(self) -> None:
        """Start the server; only in the main thread, as the kernel stops the server with the thread that started it."""
        self._server = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, pass_fds=(self._server_fd,),
            preexec_fn=dies_with_parent(),  # noqa: PLW1509 (our threads wait in the kernel, with no lock of Python's)
        )  # fmt: skip
        threading.Thread(target=self._await_end, args=(self._server,), daemon=True).start()

    def _await_end(self, server: subprocess.Popen[bytes]) -> None:
        server.wait()
        self._events.put(_Event.ENDED)

    def _await_last_user(self) -> None:
        fcntl.flock(open_lock(self._directory / "users"), fcntl.LOCK_EX)
        self._events.put(_Event.LEFT)

    def _next_event(self, timeout_s: float | None) -> _Event | None:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _stop(self) -> int:
        if self._server is None:
            return 0
        self._server.terminate()  # it writes out what is left and removes its socket
        if self._next_event(STOP_TIMEOUT_S) is None:
            self._server.kill()
            self._next_event(None)
        return 0 if self._server.returncode == 0 else 1

    def _was_killed(self) -> bool:
        return self._server is not None and self._server.returncode == -signal.SIGKILL

    def _tell_how(self) -> str:
        code = self._server.returncode if self._server else None
        return "before it ran" if code is None else f"with exit code {code}" if code >= 0 else f"by signal {-code}"

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason to end
            print(text, flush=True)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
