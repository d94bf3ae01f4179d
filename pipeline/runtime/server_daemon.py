"""The process that runs the private server for as long as it has users, who start it; ``server.py`` says how they meet."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline.core.files import try_lock
from pipeline.runtime.process import dies_with_parent, open_lock, wait_until
from pipeline.runtime.server import STOP_TIMEOUT_S, call_server, serves

POLL_S = 0.02
RESTART_S = 0.5  # the wait before a server that ended by itself is started again

OPTIONS = (
    # A private socket, no port: nobody else on the machine or the network can reach it.
    *("--port", "0", "--unixsocketperm", "700"),
    # What the delivery guarantee needs of a server.
    *("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction", "--save", ""),
    # Plain commands, which every Redis and Valkey since 7.0 can read; their RDB formats have parted ways.
    *("--aof-use-rdb-preamble", "no"),
    # While a child writes the log anew, each page that a script changes is copied first: a claim took up to 22 ms in place of 3.
    # Below this size, instead of 64 MB, it is not worth that: to read 209 MB of what is gone already takes 0.8 s at the next start.
    *("--auto-aof-rewrite-min-size", "256mb"),
)  # fmt: skip


def main(program: str, directory: Path, path: Path) -> int:
    """Become the one server daemon of ``directory``, and run the server until its last user is gone.

    Returns:
        The exit code: 1 if the server never served, which is how users that wait for it learn so.
    """
    daemon_fd = open_lock(directory / "daemon")
    if not try_lock(daemon_fd, fcntl.LOCK_EX):
        return 0
    server_fd = open_lock(directory / "server")
    if not try_lock(server_fd, fcntl.LOCK_EX):  # a server has outlived its daemon
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
    return _run_server(command, path, server_fd, open_lock(directory / "users"))


def _run_server(command: list[str], path: Path, server_fd: int, users_fd: int) -> int:
    served = False
    while True:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(server_fd,),
            preexec_fn=dies_with_parent(),  # noqa: PLW1509 (there are no threads)
        )  # fmt: skip
        while server.poll() is None:
            if try_lock(users_fd, fcntl.LOCK_EX):
                return _stop(server)
            if not served and serves(path):
                served = True
                _say("The server answers.")
            time.sleep(POLL_S)
        # One that was killed says nothing about whether it can serve.
        if not served and server.returncode != -signal.SIGKILL:
            return 1
        _say(f"The server ended by itself ({_describe(server.returncode)}): starting it again.")
        if wait_until(lambda: try_lock(users_fd, fcntl.LOCK_EX), RESTART_S):
            return 0


def _say(line: str) -> None:
    """Write a line to the log; that its disk is full is no reason to end."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def _stop(server: subprocess.Popen[bytes]) -> int:
    server.terminate()  # it writes out what is left and removes its socket
    try:
        return 0 if server.wait(STOP_TIMEOUT_S) == 0 else 1
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        return 1


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
