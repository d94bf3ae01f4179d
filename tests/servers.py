"""A real server for tests: on a unix socket in a folder of its own, durable as the private server is."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import redis

from pipeline.runtime.server import find_server_program

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class RealServer:
    """A server process that a test may kill and start again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/s"
        self._options = options or DURABLE
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(find_server_program()),
            "--port",
            "0",
            "--unixsocket",
            f"{self.folder}/s",
            "--dir",
            str(self.folder),
            "--save",
            "",
        ]
        self._process = subprocess.Popen([*command, *self._options], stdout=subprocess.DEVNULL)
        self._wait_until_it_answers()

    def kill(self) -> None:
        """End it as kill -9 does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(self.url)

    def _wait_until_it_answers(self) -> None:
        for _ in range(500):
            try:
                if self.client().ping():
                    return
            except redis.exceptions.AuthenticationError:
                return
            except redis.exceptions.RedisError:
                Event().wait(0.01)
        raise AssertionError("the server did not answer within 5 seconds")


@contextmanager
def real_server(*options: str) -> Iterator[RealServer]:
    """Run a server while the block lasts."""
    with TemporaryDirectory(prefix="dt-", dir="/tmp") as folder:
        server = RealServer(Path(folder), *options)
        try:
            server.start()
            yield server
        finally:
            server.kill()
