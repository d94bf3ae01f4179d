"""What an executor is asked before the first batch, and what is said of its answers."""

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config import RedisSettings
from pipeline.core.errors import PipelineError
from pipeline.core.files import mark_folder
from pipeline.ingest import executors
from pipeline.ingest.cold_folder import ColdFolder
from pipeline.ingest.executors import check_workers, command_of, judge, question
from pipeline.landing.folder import SOURCE_ID_NAME
from tests.servers import RealServer

ROOT = Path(__file__).resolve().parents[2]
HOST = re.escape(socket.gethostname())


@pytest.fixture
def asked(tmp_path: Path, server: RealServer) -> dict[str, Any]:
    """A question to an executor that has everything."""
    inbox, rejects = tmp_path / "inbox", tmp_path / "rejects"
    for folder in (inbox, rejects):
        folder.mkdir()
    (inbox / SOURCE_ID_NAME).write_text("0123456789abcdef")
    source: Any = SimpleNamespace(location=str(inbox), source_id="0123456789abcdef")
    made = question(RedisSettings(url=server.url), source, rejects, mark_folder(rejects), ["msgspec", "redis"])
    return made | {"paths": [str(ROOT)]}


def answer(asked: dict[str, Any], folder: Path, python: str = sys.executable) -> dict[str, Any]:
    """Return what an executor says whose working directory is the folder."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run(
        command_of(python), input=json.dumps(asked) + "\n", cwd=folder, env=environ, text=True, capture_output=True, check=True
    )  # fmt: skip
    return {"skew_ms": 0, **json.loads(said.stdout)}


def sentence_of(*answers: dict[str, Any]) -> str:
    with pytest.raises(PipelineError) as raised:
        judge(answers, 1_000)
    return str(raised.value)


def test_an_executor_that_has_everything_lacks_nothing_and_tells_its_time(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    said = answer(asked, tmp_path)
    assert said["missing"] == []
    assert said["now_ms"] > 1_700_000_000_000
    assert judge([said], 1_000) == []


def test_an_executor_without_python_is_named(asked: dict[str, Any], tmp_path: Path) -> None:
    said = answer(asked, tmp_path, "/nowhere/python")
    assert re.match(
        rf"An executor on {HOST} lacks Python \(/nowhere/python is not there, or does not run\)\. docs/\S+ says how",
        sentence_of(said),
    )


def test_a_python_that_does_not_run_counts_as_none(asked: dict[str, Any], tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert "lacks Python" in sentence_of(answer(asked, tmp_path, str(broken)))


def test_another_python_is_named_with_its_version(asked: dict[str, Any], tmp_path: Path) -> None:
    said = sentence_of(answer(asked | {"python": [3, 99]}, tmp_path))
    assert re.search(
        rf"lacks Python 3\.99, which the driver has \({re.escape(sys.executable)} is Python 3\.\d+\)\.", said
    )


def test_code_of_ours_that_did_not_arrive_is_named(asked: dict[str, Any], tmp_path: Path) -> None:
    # The Python of another machine: without site, which leads that of this checkout to our code.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={sysconfig.get_path("purelib")} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    said = answer(asked | {"paths": [str(tmp_path)]}, tmp_path, str(python))
    assert "lacks the project's own code (No module named 'pipeline'" in sentence_of(said)


def test_packages_folders_and_redis_that_are_missing_are_one_sentence(asked: dict[str, Any], tmp_path: Path) -> None:
    said = answer(asked | {"packages": ["json", "no_such", "nor_this"]}, tmp_path)
    assert "lacks the Python packages no_such, nor_this." in sentence_of(said)

    # Folders of the same names on another machine are not those of the driver.
    Path(asked["input"][0], SOURCE_ID_NAME).write_text("fedcba9876543210")
    asked["rejects"][1] = "another mark"
    inbox, rejects = re.escape(asked["input"][0]), re.escape(asked["rejects"][0])
    said = answer(asked, tmp_path)
    assert re.search(
        f"lacks the driver's input folder at {inbox}, and the driver's rejects folder at {rejects}\\.",
        sentence_of(said),
    )


def test_a_cold_folder_that_is_not_there_is_missing(asked: dict[str, Any], tmp_path: Path) -> None:
    folder = ColdFolder(str(tmp_path / "cold"))
    folder.write_identity({"id": "one", "namespace": "n"})
    assert answer(asked | {"cold": [folder.url, "one"]}, tmp_path)["missing"] == []
    said = answer(asked | {"cold": [folder.url, "another"]}, tmp_path)
    assert f"lacks the driver's cold folder at {folder.url}." in sentence_of(said)


def test_a_redis_that_is_not_reached_from_there_is_said_with_its_reason(tmp_path: Path, asked: dict[str, Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        away = RedisSettings(url=f"redis://:secret@127.0.0.1:{taken.getsockname()[1]}")
        source: Any = SimpleNamespace(location=asked["input"][0], source_id=asked["input"][1])
        elsewhere = question(away, source, Path(asked["rejects"][0]), asked["rejects"][1], ["msgspec"])
        said = sentence_of(answer(elsewhere | {"paths": asked["paths"]}, tmp_path))
    assert "lacks a way to Redis (" in said
    assert "refused" in said
    assert "secret" not in said


def test_each_host_has_one_sentence_with_all_that_its_executors_lack() -> None:
    said = [
        {"host": "b", "missing": ["x", "y"], "skew_ms": 0},
        {"host": "a", "missing": ["x"], "skew_ms": 0},
        {"host": "b", "missing": ["x", "z"], "skew_ms": 0},
        {"host": "c", "missing": [], "skew_ms": 0},
    ]
    assert sentence_of(*said).startswith(
        "An executor on a lacks x. An executor on b lacks x, and y, and z. docs/how-to/spark-cluster.md says"
    )


def test_a_clock_that_is_wrong_is_a_warning() -> None:
    said = [{"host": host, "missing": [], "skew_ms": skew_ms} for host, skew_ms in (("a", 1_000), ("b", 1_001))]
    assert judge(said, 1_000) == [
        "The clock of the executor on b differs by 1001 ms from the driver's; synchronise both with NTP."
    ]


def test_workers_are_asked_for_redis_also_when_they_were_asked_for_packages_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by ``register``, which stores nothing on executors, and then ``schedule``."""
    asked: list[bool] = []
    monkeypatch.setattr(executors, "_checked", set())
    monkeypatch.setattr(executors, "_ask", lambda _, text, __: asked.append("redis" in json.loads(text)) or [])
    context = SimpleNamespace(
        applicationId="app-1", master="spark://host:7077", _python_includes=[], pythonExec="python3"
    )
    spark: Any = SimpleNamespace(sparkContext=context)
    for redis in (None, RedisSettings(url="redis://host"), None, RedisSettings(url="redis://host")):
        check_workers(spark, redis)
    assert asked == [False, True]
    context.applicationId = "app-2"
    check_workers(spark, RedisSettings(url="redis://host"))
    check_workers(spark)
    assert asked == [False, True, True]
