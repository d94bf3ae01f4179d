"""docs/how-to/backup.md: a backup is taken, life goes on, and the backup is restored by the commands of the page."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

from pipeline.client import Duetime, State
from tests.client.builders import deliver_due
from tests.docs.pages import run_here
from tests.servers import real_server, server_program

PAGE = "docs/how-to/backup.md"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not shutil.which("redis-cli"), reason="there is no redis-cli here"),
]


def type_all(commands: list[tuple[str, str]], folder: Path) -> None:
    """Run commands of the page, with the server of the tests as ``redis-server``."""
    environ = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    for command, _ in commands:
        subprocess.run(["bash", "-c", command], cwd=folder, env=environ, check=True, timeout=120)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: that of a socket has at most 107 bytes."""
    with TemporaryDirectory(prefix="dt-", dir="/tmp") as name:
        yield Path(name)


def test_what_happened_since_a_backup_is_undone_and_sending_it_again_brings_it_back(folder: Path) -> None:
    taking, restoring = run_here(PAGE, __file__)
    ids = ("delivered-before", "waits", "cancelled-after", "delivered-after", "new")
    (folder / "bin").mkdir()
    (folder / "bin" / "redis-server").symlink_to(server_program())
    with real_server() as server, Duetime(server.url) as duetime:
        schedule_all(duetime, *ids[:1], delay=0)
        deliver_due(server)
        schedule_all(duetime, *ids[1:4], delay=3_600)
        [(take, _)] = taking.commands()
        type_all([(take.replace('-u "$REDIS_URL"', f"-s {server.folder}/s"), "")], folder)
        duetime.cancel("cancelled-after")
        duetime.reschedule("delivered-after", delay=0)
        deliver_due(server)
        schedule_all(duetime, "new", delay=3_600)
        now = [duetime.get(each).state for each in ids]
        assert now == [State.DELIVERED, State.SCHEDULED, State.CANCELLED, State.DELIVERED, State.SCHEDULED]
    url = f"unix://{folder}/restored/redis.sock"
    restored = redis.Redis.from_url(url)
    try:
        type_all(restoring.commands(), folder)
        with Duetime(url) as duetime:
            then = [duetime.get(each).state for each in ids]
            assert then == [State.DELIVERED, State.SCHEDULED, State.SCHEDULED, State.SCHEDULED, State.UNKNOWN]
            again = schedule_all(duetime, *ids, delay=3_600)
            assert again == [True, True, True, True, False]
            assert len(list(duetime.upcoming())) == 4
        restored.shutdown(nosave=True)
        # What the switch to the append-only file wrote is whole: the usual start finds everything.
        command = [server_program(), "--dir", f"{folder}/restored", "--port", "0", "--appendonly", "yes"]
        subprocess.run([*command, "--unixsocket", f"{folder}/restored/redis.sock", "--daemonize", "yes"], check=True)
        type_all([restoring.commands()[2]], folder)
        with Duetime(url) as duetime:
            assert len(list(duetime.upcoming())) == 4
    finally:
        restored.shutdown(nosave=True)


def schedule_all(duetime: Duetime, *ids: str, delay: int) -> list[bool]:
    """Schedule a message for each id, and return which ids were known."""
    return [duetime.schedule(f"text of {each}", delay=delay, id=each).is_duplicate for each in ids]
