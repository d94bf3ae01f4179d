"""A real server for tests: on a unix socket in a folder of its own, durable as the private server is.

``DUETIME_TEST_SERVER`` names another server program, such as Debian's ``/usr/bin/redis-server``. Code under test connects by
``RealServer.url`` as a user that has no more rights than ``docs/operations.md`` asks for; tests themselves use ``client()``, which
may do everything.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline.runtime.server import find_server_program
from tests.waiting import wait_until

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
USER = "duetime"
OPERATIONS = Path(__file__).resolve().parents[1] / "docs" / "operations.md"


def server_program() -> str:
    """Return the server that the tests run on."""
    return os.environ.get("DUETIME_TEST_SERVER") or str(find_server_program())


@cache
def server_version() -> tuple[int, ...]:
    """Return the version of that server as Redis counts; Valkey is newer than any."""
    said = subprocess.run([server_program(), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Redis server v=(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (99,)


needs_waitaof = pytest.mark.skipif(
    bool(os.environ.get("DUETIME_TEST_SERVER")) and server_version() < (7, 2), reason="Redis 7.0 has no WAITAOF"
)


def user_rights() -> list[str]:
    """Return the rights that the documentation gives the user of all jobs, for every namespace instead of one."""
    return [right.replace("{duetime:*}", "{*:*}") for right in users_of_docs()[USER]]


@cache
def users_of_docs() -> dict[str, list[str]]:
    """Return the users of the documentation and their rights, with those that only newer servers know where the server does."""
    text = OPERATIONS.read_text(encoding="utf-8").replace("\\\n", "")
    found = {name: rights.split() for name, rights in re.findall(r"^ACL SETUSER (\w+) on >secret (.*)$", text, re.M)}
    if server_version() >= (7, 2):
        for name, rights in re.findall(r"^ +ACL SETUSER (\w+) (\+.*)$", text, re.M):
            found[name] += rights.split()
    return found


class RealServer:
    """A server process that a test may kill and start again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.url = f"unix://{USER}:{USER}@{folder}/s"
        self._options = options or DURABLE
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        socket, folder = f"{self.folder}/s", str(self.folder)
        command = [server_program(), "--port", "0", "--unixsocket", socket, "--dir", folder, "--save", ""]
        user = ["--user", USER, "on", f">{USER}", *user_rights()]
        self._process = subprocess.Popen([*command, *user, *self._options], stdout=subprocess.DEVNULL)
        self._wait_until_it_answers()

    def kill(self) -> None:
        """End it as kill -9 does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def client(self) -> "redis.Redis":
        """Connect as the default user, who may do everything."""
        return redis.Redis(unix_socket_path=f"{self.folder}/s", retry=Retry(NoBackoff(), 0))

    def _wait_until_it_answers(self) -> None:
        def answers() -> bool:
            try:
                return bool(self.client().ping())
            except redis.exceptions.AuthenticationError:
                return True
            except redis.exceptions.RedisError:
                assert self._process is not None and self._process.poll() is None, "the server ended at once"
                return False

        wait_until(answers, "the server answers")


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
