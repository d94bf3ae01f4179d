"""Producers and consumers in other languages (examples/README.md), with nothing of ours but the wire format."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.client import Duetime
from pipeline.core.messages import Message
from tests.e2e.commands import ROOT, Checkout
from tests.servers import RealServer, real_server

AWKWARD = 'it\'s "quoted" \\ and ünïcode 🎉'
NAMES = ("mail", "billing")
LIMIT_SEC = 60


def run(command: list[str], **environ: str) -> list[str]:
    done = subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=LIMIT_SEC, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node here")
def test_node_schedules_and_consumes(checkout: Checkout) -> None:
    with real_server() as server:
        socket = {"REDIS_SOCKET": f"{server.folder}/s"}
        folder = ROOT / "examples" / "node"
        # The group first: it gets what is published from then on.
        register(server)
        drain = checkout.run("jobs/drain.py", "--sink", "stream", environ={"REDIS_URL": server.url})
        assert " is due at " in run(["node", f"{folder}/schedule.mjs", "0.2", "mail", AWKWARD], **socket)[0]
        [line] = run(["node", f"{folder}/consume.mjs", *NAMES, "1"], **socket)
        entry = json.loads(line)
        assert (entry["message"], entry["topic"], entry["attempt"]) == (AWKWARD, "mail", "1")
        assert drain.stop() == 0


@pytest.mark.skipif(not shutil.which("redis-cli"), reason="there is no redis-cli here")
def test_the_shell_schedules_and_consumes(checkout: Checkout) -> None:
    with real_server() as server:
        cli = {"REDIS_CLI": f"redis-cli -s {server.folder}/s"}
        folder = Path(ROOT / "examples" / "shell")
        register(server)
        drain = checkout.run("jobs/drain.py", "--sink", "stream", environ={"REDIS_URL": server.url})
        assert " is due at " in run([f"{folder}/schedule.sh", "1", "mail", AWKWARD], **cli)[0]
        assert run([f"{folder}/consume.sh", *NAMES, "1"], **cli) == [AWKWARD]
        assert drain.stop() == 0


def test_the_shell_takes_no_value_for_a_field_and_ends_after_what_it_was_asked_for(tmp_path: Path) -> None:
    cli = tmp_path / "cli"
    first, second = "{duetime:0}:stream:message", "{duetime:0}:retry:message:g"
    lines = [first, "1-0", "id", "message", "message", "hello", "topic", "message", second, "2-0", "message", "world"]
    reply = "\\n".join(lines)
    cli.write_text(
        f'#!/bin/sh\ncase $1 in XREADGROUP) printf "{reply}\\n" ;; XACK) echo "$@" >>{tmp_path}/acks ;; esac\n'
    )
    cli.chmod(0o755)
    assert run([f"{ROOT}/examples/shell/consume.sh", "message", "g", "1"], REDIS_CLI=str(cli)) == ["hello", "world"]
    assert (tmp_path / "acks").read_text() == f"XACK {first} g 1-0\nXACK {second} g 2-0\n"


def register(server: RealServer) -> None:
    topic, group = NAMES
    client = server.client()
    client.xgroup_create(f"{{duetime:0}}:stream:{topic}", group, "0", mkstream=True)
    client.xgroup_create(f"{{duetime:0}}:retry:{topic}:{group}", group, "0", mkstream=True)


SCHEDULERS = [
    pytest.param(
        [f"{ROOT}/examples/shell/schedule.sh"],
        marks=pytest.mark.skipif(not shutil.which("redis-cli"), reason="there is no redis-cli here"),
        id="shell",
    ),
    pytest.param(
        ["node", f"{ROOT}/examples/node/schedule.mjs"],
        marks=pytest.mark.skipif(not shutil.which("node"), reason="there is no node here"),
        id="node",
    ),
    pytest.param([sys.executable, f"{ROOT}/examples/python/schedule.py"], id="python"),
]


def attempt(command: list[str], server: RealServer) -> "subprocess.CompletedProcess[str]":
    socket = f"{server.folder}/s"
    environ = {"REDIS_URL": server.url, "REDIS_SOCKET": socket, "REDIS_CLI": f"redis-cli -s {socket}"}
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=LIMIT_SEC, check=False
    )


@pytest.mark.parametrize("command", SCHEDULERS)
def test_a_producer_says_when_redis_refuses_and_takes_only_what_a_file_may_hold(command: list[str]) -> None:
    with real_server("--appendonly", "no", "--maxmemory-policy", "noeviction") as server:
        done = attempt([*command, "0.25", "mail", AWKWARD], server)
        assert (done.returncode, done.stderr) == (0, "")
        [bucket] = server.client().keys("{duetime:0}:bucket:*")
        [member] = server.client().zrange(bucket, 0, -1)
        message = Message.from_member(b"P" * 14 + b"00000001" + member[22:], 0)
        assert (message.topic, message.body) == ("mail", AWKWARD)
        for wrong in (
            [],
            ["1", "mail"],
            ["x", "mail", "m"],
            ["-1", "mail", "m"],
            ["1", 'ma/il x"', "m"],
            ["1", "mail", ""],
        ):
            done = attempt([*command, *wrong], server)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.startswith("schedule.") and done.stderr.count("\n") == 1
        server.client().config_set("maxmemory", 1)
        done = attempt([*command, "1", "mail", "m"], server)
        assert (done.returncode, done.stdout) == (1, "")
        assert "scheduled: " in done.stderr and "maxmemory" in done.stderr
        assert server.client().zcard(bucket) == 1


def test_the_producer_in_python_schedules_once_for_an_id() -> None:
    command = [sys.executable, f"{ROOT}/examples/python/schedule.py", "60", "mail"]
    with real_server() as server:
        said = [attempt([*command, text, "tea-17"], server).stdout for text in ("tea", "tea", "other")]
        assert said == ["tea-17 is scheduled\n"] + ["tea-17 is known: the first message with it counts\n"] * 2
        with Duetime(server.url) as duetime:
            assert [waiting.message.body for waiting in duetime.upcoming()] == ["tea"]
            assert duetime.cancel("tea-17").state == "cancelled"
        assert attempt([*command, "tea", "a b"], server).returncode == 2
