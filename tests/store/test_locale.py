"""Ids are compared by their bytes, whatever the locale of the server: Lua's ``<`` follows it, and Redis does not."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.store.base import Found, State
from pipeline.store.by_id import MessagesById
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.scripts import Scripts, read_script
from tests.planting import replace_once
from tests.servers import RealServer, real_server
from tests.store.builders import transaction

KEYS = Keys("duetime")
DUE_MS = 4_102_444_800_000  # 2100-01-01
HEADS, LINES = "-09AZ_az", range(1, 20)  # in the order of their bytes
LOCALE = "en_US.UTF-8"

pytestmark = pytest.mark.process


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealServer]:
    """A server that sorts as American English does, where letters of both cases mix."""
    if not shutil.which("localedef") or not Path("/usr/share/i18n/locales/en_US").exists():
        pytest.skip("no locale can be made here (apt-get install locales)")
    subprocess.run(
        ["localedef", "-i", "en_US", "-f", "UTF-8", str(tmp_path / LOCALE)], check=False, capture_output=True
    )
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    monkeypatch.setenv("LC_ALL", LOCALE)
    with real_server() as server:
        if server.client().eval("return 'a' < 'B' and 1 or 0", 0) != 1:
            pytest.skip(f"this server does not take the locale of its environment ({os.environ['LC_ALL']})")
        yield server


def cancel_all(server: RealServer, scripts: Scripts | None = None) -> list[Found]:
    """Schedule messages of one millisecond, and cancel each."""
    client = server.client()
    names = []
    for number, head in enumerate(HEADS):
        rows = tuple((line, DUE_MS, f"{number}:{line}") for line in LINES)
        names += [key for _, _, key in rows]
        RedisStore(client, KEYS).schedule("s", transaction(identified=rows, token=head + "P" * 13))
    messages = MessagesById(client, [KEYS], 1_000, scripts)
    return [messages.cancel(name) for name in names]


def test_each_message_is_found_under_any_locale(server: RealServer) -> None:
    assert {found.state for found in cancel_all(server)} == {State.CANCELLED}


def test_a_comparison_by_the_locale_would_be_noticed(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(name: str) -> str:
        source = read_script(name)
        if name != "by_id":
            return source
        old = "if is_before(redis.call('ZRANGE', set, middle, middle)[1], message_id) then"
        return replace_once(source, old, "if redis.call('ZRANGE', set, middle, middle)[1] < message_id then", "locale")

    monkeypatch.setattr("pipeline.store.scripts.read_script", read)
    assert State.IN_FLIGHT in {found.state for found in cancel_all(server, Scripts())}
