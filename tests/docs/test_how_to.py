"""The programs and commands of docs/how-to: spark.md, python.md, curl.md, node.md, upgrade.md, and explanation/capacity.md."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.client import Duetime
from pipeline.config import ROOT
from pipeline.core.messages import Message
from pipeline.core.validation import validate_request
from tests.docs.pages import run_here
from tests.servers import RealServer, real_server
from tests.web.running import Api, running, settings_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def api(server: RealServer) -> Iterator[Api]:
    with running(settings_of(server.url)) as api:
        yield api


def bash(command: str, folder: Path, **environ: str) -> str:
    """Run a command as a user would, and return what it printed."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def test_a_dataframe_becomes_requests(spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("inbox").mkdir()
    *_, code = run_here("docs/how-to/spark.md", __file__)
    ends_at = datetime(2027, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    trials = spark.createDataFrame(
        [("ada", "gold", ends_at), ("bob", "tin", ends_at)], "user string, plan string, ends_at timestamp"
    )
    exec(code.text.replace('"staging"', f'"{tmp_path}/staging"'), {"trials": trials})
    lines = [line for part in Path("inbox").iterdir() for line in part.read_text(encoding="utf-8").splitlines()]
    messages = [validate_request(json.loads(line), arrival_ms=0) for line in lines]
    assert all(isinstance(message, Message) for message in messages)
    assert {(m.id, m.topic, m.due_ms, m.body) for m in messages if isinstance(m, Message)} == {
        (f"trial-{user}", "mail", int(ends_at.timestamp() * 1_000), f'{{"user":"{user}","plan":"{plan}"}}')
        for user, plan in (("ada", "gold"), ("bob", "tin"))
    }


def test_a_table_is_scheduled(
    spark: "SparkSession",
    server: RealServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REDIS_URL", server.url)
    monkeypatch.setenv("DUETIME_REDIS_NAMESPACE", f"test-{uuid.uuid4().hex}")
    monkeypatch.setenv("DUETIME_LOCAL_STATE", str(tmp_path))
    trials = spark.createDataFrame([("ada", "gold", None)], "user string, plan string, ends_at timestamp")
    known: dict[str, object] = {"trials": trials, "spark": spark}
    scheduling, local, writing, reading, _ = run_here("docs/how-to/spark.md", __file__)
    exec(scheduling.text, known)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 0 1" and "missing_due" in "".join(lines)
    known["reminders"] = spark.sql("select 'tea' as message, timestamp '2027-05-06 07:08:09Z' as due, 'mail' as topic")
    exec(writing.text, known)
    exec(reading.text, known)
    [row] = [line.split("|") for line in capsys.readouterr().out.splitlines() if "2027-05-06" in line]
    assert [row[1].strip(), row[3].strip()] == ["mail", "1"]

    rows = [("ada", "2027-03-27", "Europe/Berlin"), ("bob", "2027-03-28", "Europe/Berlin")]
    rows += [("cid", "2027-03-28", "America/New_York"), ("dan", "2027-03-28", "Mars/Base"), ("eve", "2027-03-28", None)]
    users = spark.createDataFrame(rows, "user string, day string, zone string")
    known["users"] = users.withColumn("day", users.day.cast("date"))
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")  # it must not matter
    try:
        exec(local.text, known)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    with Duetime() as duetime:
        due = {waiting.message.body: waiting.due for waiting in duetime.upcoming()}
    assert {user: due.get(f"good morning, {user}") for user, *_ in rows} == {
        "ada": datetime(2027, 3, 27, 8, tzinfo=UTC),
        "bob": datetime(2027, 3, 28, 7, tzinfo=UTC),
        "cid": datetime(2027, 3, 28, 13, tzinfo=UTC),
        "dan": None,
        "eve": None,
    }


def test_the_program_in_python_works(server: RealServer, tmp_path: Path) -> None:
    [code] = run_here("docs/how-to/python.md", __file__)
    environ = {"REDIS_URL": server.url, "PYTHONPATH": str(ROOT), "PATH": os.defpath}
    command = [sys.executable, "-c", code.text]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 reminder waits\ncancelled\n", "")


def test_the_program_that_measures_memory_finds_what_the_page_says(tmp_path: Path) -> None:
    [code] = run_here("docs/explanation/capacity.md", __file__)
    command = [sys.executable, "-c", code.text, "20000", "200", "16"]
    with real_server() as server:
        environ = {"REDIS_URL": f"unix://{server.folder}/s", "PYTHONPATH": str(ROOT), "PATH": os.defpath}
        done = subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    found = {name: int(number) for name, number in map(str.split, done.stdout.splitlines())}
    # A server that is nearly empty has other overheads than one of 300,000 messages.
    assert 350 < found["used_memory"] < 550
    assert 345 < found["aof_current_size"] < 380


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
def test_the_commands_with_curl_work(api: Api, tmp_path: Path) -> None:
    first, again, many = run_here("docs/how-to/curl.md", __file__)
    here = (str(api.port),)
    states = [json.loads(bash(at(command, *here), tmp_path))["state"] for command, _ in first.commands()]
    assert states == ["scheduled", "scheduled", "cancelled"]
    [(repeated, _)] = again.commands()
    assert [json.loads(bash(at(repeated, *here), tmp_path)).get("known", False) for _ in range(2)] == [False, True]
    answers = [bash(at(command, *here), tmp_path) for command, _ in many.commands()]
    assert json.loads(answers[-1]) | {"ids": 0} == json.loads(answers[-1]) | {
        "stored": 1_000,
        "known": 0,
        "rejected": [],
        "ids": 0,
    }


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node")
def test_the_program_in_node_works(api: Api, tmp_path: Path) -> None:
    [code] = run_here("docs/how-to/node.md", __file__)
    (tmp_path / "schedule.mjs").write_text(code.text)
    assert bash("node schedule.mjs", tmp_path, DUETIME_URL=f"http://127.0.0.1:{api.port}") == "scheduled\ntrue\n"


@pytest.mark.skipif(not shutil.which("redis-cli"), reason="there is no redis-cli here")
def test_the_version_of_a_namespace_is_where_the_page_says(server: RealServer, tmp_path: Path) -> None:
    [block] = run_here("docs/how-to/upgrade.md", __file__)
    [(command, written)] = block.commands()
    with Duetime(server.url) as duetime:
        duetime.schedule("tea", delay=60)
    assert bash(command.replace('-u "$REDIS_URL"', f"-s {server.folder}/s"), tmp_path) == written


def at(command: str, port: str) -> str:
    return command.replace("localhost:8601", f"127.0.0.1:{port}")
