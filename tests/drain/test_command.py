"""``jobs/drain.py`` as a process, on a server of its own, and what ``jobs/status.py`` tells of it."""

import json
import os
import socket
import subprocess
import sys

from jobs.drain import topic_rules
from pipeline.config import ROOT, RedisSettings, Settings
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from tests.servers import RealServer
from tests.store.builders import transaction

DUE_MS = 1_700_000_000_000  # long over


def run(server: RealServer, job: str, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", str(ROOT / "jobs" / f"{job}.py"), "--redis", server.url, *options]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def schedule(server: RealServer, *dues: int) -> None:
    with server.client() as client:
        RedisStore(client, Keys("duetime")).schedule("s", transaction(*enumerate(dues, start=1)))


def test_status_adds_up_what_the_loops_told(server: RealServer) -> None:
    schedule(server, *[DUE_MS] * 5)
    for wanted, said in (
        (5, "delivered 5 messages, lateness p50 "),
        (0, "delivered 0 messages; 0 stale, 0 reclaimed\n"),
    ):
        ended = run(server, "drain", "--until-empty")
        assert (ended.returncode, len(ended.stdout.splitlines())) == (0, wanted), ended.stderr
        assert f"drain: {said}" in ended.stderr
    told = json.loads(run(server, "status", "--format", "json").stdout)["drain"]
    late_ms = told["lateness"].pop("max_ms")
    assert late_ms > 86_400_000
    assert told.pop("topics") == {"default": {**told["lateness"], "max_ms": late_ms}}
    assert told.pop("lateness") == {"delivered": 5, "p50_ms": late_ms, "p99_ms": late_ms}
    assert abs(told.pop("seen_ms") - DUE_MS - late_ms) < 60_000
    wanted_counts = {"delivered": 5, "claimed": 5, "stale": 0, "repeated": 0, "reclaimed": 0}
    assert told == {"loops": 2, **wanted_counts, "errors": {}}
    text = run(server, "status").stdout
    assert "drain: 2 loops in the last hour, seen " in text
    assert "\n  5 delivered, 5 claimed, 0 stale, 0 repeated, 0 reclaimed\n" in text
    assert "\n  topic default: 5 delivered, p50 " in text


def test_status_says_nothing_of_loops_that_never_ran(server: RealServer) -> None:
    told = json.loads(run(server, "status", "--format", "json").stdout)["drain"]
    assert (told["loops"], told["seen_ms"], told["topics"]) == (0, None, {})
    assert "drain" not in run(server, "status").stdout


def test_the_shards_share_what_a_topic_may_send() -> None:
    assert topic_rules(Settings(redis=RedisSettings(shards=4))).shards == 4


def test_a_port_that_is_taken_is_wrong_use(server: RealServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run(server, "drain", "--until-empty", "--metrics-port", str(port))
    assert (ended.returncode, ended.stdout) == (2, "")
    said = f"drain: The metrics can't be served on 127.0.0.1 port {port} (Address already in use)"
    assert ended.stderr.splitlines() == [f"{said}; choose another --metrics-port."]


def test_the_library_of_the_metrics_is_loaded_for_them_alone() -> None:
    code = "import sys, jobs.drain; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_the_last_line_comes_also_when_nobody_reads_any_more(server: RealServer) -> None:
    schedule(server, *[DUE_MS] * 5_000)
    command = [sys.executable, "-P", str(ROOT / "jobs" / "drain.py"), "--redis", server.url]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | head -1', "bash", *command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, len(ended.stdout.splitlines())) == (1, 1)
    summary, complaint = ended.stderr.splitlines()
    assert "drain: delivered " in summary
    assert complaint == "drain: Nobody reads the output any more; its messages are given back."
