"""Each code block of the documentation is run by a test, or says why not; and some that need only a server are run here."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import pytest

from pipeline.client import Duetime
from pipeline.config import ROOT
from pipeline.store.keys import Keys
from tests.client.builders import deliver_due
from tests.docs.pages import NO_CODE, PAGES, blocks_of, run_here
from tests.servers import RealServer, real_server
from tests.tls import DEBIANS, debians_server

Server = Callable[[], AbstractContextManager[None]]

WIRE = "docs/wire-format.md"


def test_each_block_has_a_language_and_is_run_or_says_why_not() -> None:
    wrong = []
    for path in PAGES:
        for block in blocks_of(path):
            if not re.fullmatch(r"[a-z]+", block.language):
                wrong.append(f"{block}: name the language in one word, or say text")
            elif not (block.run_by or block.reason or block.language in NO_CODE):
                wrong.append(f"{block}: say before it <!-- run: FILE --> or <!-- not run: WHY -->")
            elif block.run_by and not (
                (ROOT / block.run_by).is_file()
                and block.page.removeprefix("docs/") in (ROOT / block.run_by).read_text(encoding="utf-8")
            ):
                wrong.append(f"{block}: {block.run_by} is not there, or does not name the page")
    assert wrong == []


def test_no_block_is_hidden_from_these_rules() -> None:
    """Code that is only indented has no language and no mark."""
    wrong = []
    for path in PAGES:
        lines = re.sub(r"(?ms)^ *```.*?^ *```$", "", path.read_text(encoding="utf-8")).splitlines()
        wrong += [
            f"{path.relative_to(ROOT)}: {line}"
            for before, line in pairwise(lines)
            if line.startswith("    ") and not before
        ]
        wrong += [f"{path.relative_to(ROOT)}: {line}" for line in lines if "```" in line or line.startswith("~~~")]
    assert wrong == []


def test_a_mark_stands_before_a_block() -> None:
    for path in PAGES:
        marks = re.findall(r"(?m)^ *<!-- (?:not )?run: ", path.read_text(encoding="utf-8"))
        assert len(marks) == sum(bool(block.run_by or block.reason) for block in blocks_of(path)), path


SERVERS = [
    pytest.param(debians_server, marks=pytest.mark.skipif(not DEBIANS, reason="there is no redis-server here")),
    nullcontext,
]
MEMBER = 'Pexample00000000000001j{"message":"hello","topic":"mail","id":"order-17"}'


def test_any_client_can_consume_schedule_and_retry_as_the_wire_format_says(server: RealServer) -> None:
    consume, retry, schedule = run_here(WIRE, __file__, "text")
    client = server.client()
    create, create_retries, read, acknowledge = [shlex.split(line) for line in consume.text.splitlines()]
    assert [client.execute_command(*create), client.execute_command(*create_retries)] == [b"OK", b"OK"]
    for line in schedule.text.splitlines():
        client.execute_command(*line.split())
    with Duetime(server.url) as duetime:
        [waiting] = duetime.upcoming()
        assert (waiting.message.body, waiting.message.due_ms) == ("hello", 1795176001987)
        assert duetime.cancel(waiting.id).state == "cancelled"
    entry = {"id": "order-17", "message": "hello", "topic": "mail", "due_ms": "1795176001987", "attempt": "1"}
    client.xadd(create[2], entry, id=acknowledge[-1])
    assert client.execute_command(*read)
    for line in retry.text.splitlines():
        client.execute_command(*line.split())
    assert client.xpending(create[2], "billing")["pending"] == 0
    keys = Keys("duetime")
    [(member, due_ms)] = client.zrange(keys.bucket(1795176000000), 0, -1, withscores=True)
    assert due_ms == 1795176031987
    client.zadd(keys.bucket(1795176000000), {member: 0})  # so it is due, whatever the time is
    deliver_due(server)
    [[_, [(_, again)]]] = client.xreadgroup("billing", "me", {create_retries[2]: ">"})  # type: ignore[misc]
    assert {name.decode(): value.decode() for name, value in again.items()} == entry | {"attempt": "2"}
    client.flushall()


@pytest.mark.parametrize("of_server", SERVERS, ids=["debian", "bundled"])
def test_the_script_of_the_wire_format_stores_an_idempotency_key_once(of_server: Server) -> None:
    [script] = run_here(WIRE, __file__, "lua")
    assert (ROOT / "examples/schedule_once.lua").read_text(encoding="utf-8").endswith(f"counts\n{script.text}")
    keys = Keys("duetime")
    touched = [keys.bucket(1795176000000), keys.buckets(), keys.places(), keys.ids(), keys.cancelled()]
    with of_server(), real_server() as server:
        client = server.client()

        def store() -> int:
            arguments = [1795176001987, 1795176000000, MEMBER, keys.wake(), "order-17"]
            return int(client.eval(script.text, len(touched), *touched, *arguments))  # type: ignore[no-untyped-call]

        assert (store(), store()) == (1, 0)
        with Duetime(server.url) as duetime:
            found = duetime.get("order-17")
            assert found.message is not None and (found.state, found.message.body) == ("scheduled", "hello")
            assert duetime.schedule("other", delay=1, id="order-17").is_duplicate
            assert duetime.cancel("order-17").state == "cancelled"
            assert (store(), duetime.get("order-17").state) == (0, "cancelled")
        client.zadd(keys.cancelled(), {"order-17": 1})  # past its time
        client.zadd(keys.ids(), {"order-17": "+inf"})
        assert store() == 0
        client.zadd(keys.ids(), {"order-17": 1})
        assert store() == 1


def test_a_script_is_printed_with_what_it_includes(server: RealServer) -> None:
    [block] = run_here(WIRE, __file__, "console")
    [(command, _)] = block.commands()
    typed = command.replace(".venv/bin/python", sys.executable)
    printed = subprocess.run(["bash", "-c", typed], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("#!lua") and "-- include" not in printed
    server.client().script_load(printed)


def test_jobs_are_started_by_the_command_that_finds_their_modules() -> None:
    """Also in blocks that are not run: Python alone knows no ``pipeline``."""
    jobs = [
        (str(block), line)
        for path in PAGES
        for block in blocks_of(path)
        if block.language in {"bash", "console"}
        for line in re.sub(r"\\\n +", " ", block.text).splitlines()
        if re.search(r"(?<![\w/])jobs/\w+\.py", line.partition("#")[0])
    ]
    assert len(jobs) > 20
    assert [each for each in jobs if "spark-submit.sh " not in each[1].partition("jobs/")[0]] == []
