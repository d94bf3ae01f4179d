"""``jobs/drain.py`` as a process, on a server of its own, and what ``jobs/status.py`` shows of it."""

import json
import os
import socket
import subprocess
import sys

import pytest
import redis

from pipeline.config import ROOT, RedisSettings
from pipeline.store.keys import Keys
from pipeline.store.namespace import open_namespace
from pipeline.store.redis_store import RedisStore
from tests.servers import RealServer
from tests.store.builders import transaction

DUE_MS = 1_700_000_000_000  # long over
pytestmark = pytest.mark.process


def run(server: RealServer, job: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(job, *options), env=environ(server), capture_output=True, text=True, timeout=60, check=False
    )


def command(job: str, *options: str) -> list[str]:
    return [sys.executable, "-P", str(ROOT / "jobs" / f"{job}.py"), *options]


def environ(server: RealServer) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "REDIS_URL": server.url}


def schedule(server: RealServer, *dues: int) -> None:
    with server.client() as client:
        RedisStore(client, Keys("duetime")).schedule("s", transaction(*enumerate(dues, start=1)))


def test_status_adds_up_what_the_loops_did(server: RealServer) -> None:
    schedule(server, *[DUE_MS] * 5)
    for wanted, said in (
        (5, "delivered 5 messages, lateness p50 "),
        (0, "delivered 0 messages; 0 late acks, 0 reclaimed\n"),
    ):
        ended = run(server, "drain", "--until-empty")
        assert (ended.returncode, len(ended.stdout.splitlines())) == (0, wanted), ended.stderr
        assert f"drain: {said}" in ended.stderr
    shown = json.loads(run(server, "status", "--format", "json").stdout)["drain"]
    late_ms = shown["lateness"].pop("max_ms")
    assert late_ms > 86_400_000
    assert shown.pop("topics") == {"default": {**shown["lateness"], "max_ms": late_ms}}
    assert shown.pop("lateness") == {"delivered": 5, "p50_ms": late_ms, "p99_ms": late_ms}
    assert abs(shown.pop("seen_ms") - DUE_MS - late_ms) < 60_000
    wanted_counts = {
        "delivered": 5,
        "claimed": 5,
        "late_acks": 0,
        "redelivered": 0,
        "reclaimed": 0,
        "late_on_arrival": 0,
        "forwarded": 0,
        "refused": 0,
    }
    assert shown.pop("outbox") == {"delivered": 0, "p50_ms": 0, "p99_ms": 0, "max_ms": 0}
    assert shown == {"loops": 2, "running": 0, **wanted_counts, "stuck_partitions": [], "errors": {}}
    text = run(server, "status").stdout
    assert "drain: 2 loops in the last hour, 0 running, seen " in text
    assert "\n  5 delivered, 5 claimed, 0 late acks, 0 redelivered, 0 reclaimed, 0 late on arrival\n" in text
    assert "\n  topic default: 5 delivered, p50 " in text


def test_status_says_nothing_of_loops_that_never_ran(server: RealServer) -> None:
    shown = json.loads(run(server, "status", "--format", "json").stdout)["drain"]
    assert (shown["loops"], shown["seen_ms"], shown["topics"]) == (0, None, {})
    assert run(server, "status").stdout == "nothing is known of namespace duetime: no job has used it so far\n"
    schedule(server, DUE_MS)
    assert "\ndrain:" not in run(server, "status").stdout


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
    ended = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | head -1', "bash", *command("drain")],
        env=environ(server),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, len(ended.stdout.splitlines())) == (1, 1)
    _, summary, complaint = ended.stderr.splitlines()
    assert "drain: delivered " in summary
    assert complaint == "drain: Nobody reads the output any more; what was not written is given back."


def test_a_loop_goes_by_the_namespace_and_one_that_is_given_something_else_does_not_start(server: RealServer) -> None:
    assert run(server, "drain", "--once", "--sink", "stream").returncode == 0
    schedule(server, DUE_MS)
    refused = run(server, "drain", "--once", "--sink", "screen")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        "drain: The namespace duetime has other settings of topics than this job was given: sink is stream there, "
        "not screen (./spark-submit.sh jobs/topics.py set sink=screen changes it).\n"
    )
    as_it_is = run(server, "drain", "--once")
    assert (as_it_is.returncode, as_it_is.stdout) == (0, "")
    with server.client() as client:
        assert client.xlen(Keys("duetime").stream("default")) == 1
        assert "sink=screen" in run(server, "topics", "set", "sink=screen").stdout
        RedisStore(client, Keys("duetime")).schedule("s", transaction((1, DUE_MS), token="Q" * 14))
    assert len(run(server, "drain", "--once").stdout.splitlines()) == 1


@pytest.mark.parametrize("sink", ["screen", "stream"])
def test_a_loop_that_starts_on_a_full_server_delivers(server: RealServer, sink: str) -> None:
    """It is the first one: only the ingest job was there before."""
    with server.client() as client:
        open_namespace(client, RedisSettings(), may_create=True)
        schedule(server, *[DUE_MS] * 5)
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("full", 1)
        try:
            ended = run(server, "drain", "--until-empty", "--sink", sink)
        finally:
            client.config_set("maxmemory", 0)
    assert (ended.returncode, len(ended.stdout.splitlines())) == (0, 5 * (sink == "screen")), ended.stderr
    assert "drain: delivered 5 messages" in ended.stderr
    assert "waiting for Redis" not in ended.stderr


def test_a_loop_says_at_its_start_what_it_delivers_from_where(server: RealServer) -> None:
    assert run(server, "topics", "set", "mail", "sink=stream").returncode == 0
    ended = run(server, "drain", "--once")
    [line] = [line for line in ended.stderr.splitlines() if "delivering from" in line]
    assert line.endswith(f"{server.folder}/s, namespace duetime; sink screen, of some topics stream")
    assert ":duetime@" not in ended.stderr
