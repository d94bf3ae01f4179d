"""How Spark's Python workers talk to Java on this machine: where their sockets are, and what a worker that is cut off prints."""

import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from pyspark import SparkConf

from pipeline.ingest.worker_sockets import DAEMON, ENABLED, FOLDER, PREFIX, settings_for, socket_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place() -> Iterator[str]:
    """A folder with a short path, which that of a test is not."""
    with tempfile.TemporaryDirectory(prefix="dt-", dir="/tmp") as folder:
        yield folder


def test_the_folder_is_private_short_and_gone_afterwards(place: str) -> None:
    with socket_folder([place]) as folder:
        assert folder is not None
        assert folder.parent == Path(place) and stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(os.fsencode(folder)) <= 60
        (folder / ".left.sock").touch()
    assert os.listdir(place) == []


def test_a_long_folder_for_temporary_files_is_passed_over(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with socket_folder() as folder:
        assert folder is not None and folder.parent == Path("/tmp")
    with socket_folder([str(long), place]) as folder:
        assert folder is not None and folder.parent == Path(place)


def test_without_a_place_there_are_no_sockets(tmp_path: Path) -> None:
    with socket_folder([str(tmp_path / ("x" * 100)), "/tmp/is/not/there", "/proc"]) as folder:
        assert folder is None


def test_what_killed_jobs_have_left_is_removed_and_what_is_in_use_or_somebody_elses_is_not(place: str) -> None:
    left, link, file = (Path(place, f"{PREFIX}{name}") for name in ("left", "link", "file"))
    left.mkdir()
    (left / ".a.sock").touch()
    file.touch()
    (target := Path(place, "target")).mkdir()
    link.symlink_to(target)
    with socket_folder([place]) as first, socket_folder([place]) as second:
        assert first is not None and second is not None
        assert {path.name for path in Path(place).iterdir()} == {
            first.name,
            second.name,
            link.name,
            file.name,
            "target",
        }


def conf_of(**settings: str) -> SparkConf:
    conf = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        conf.set(name.replace("__", "."), value)
    return conf


@pytest.mark.parametrize("master", ["local", "local[*]", "local[2, 3]"])
def test_workers_of_a_local_master_talk_over_sockets(master: str) -> None:
    ours = settings_for(Path("/tmp/x"), conf_of(spark__master=master))
    assert ours == {ENABLED: "true", FOLDER: "/tmp/x", DAEMON: "pipeline.ingest.quiet_daemon"}


@pytest.mark.parametrize("master", ["local-cluster[1,1,900]", "spark://h:1", "yarn", "k8s://h"])
def test_executors_of_a_cluster_keep_what_spark_does(master: str) -> None:
    assert settings_for(Path("/tmp/x"), conf_of(spark__master=master)) == {}


@pytest.mark.parametrize("name", [ENABLED, FOLDER, DAEMON])
def test_what_the_user_has_set_stays(name: str) -> None:
    assert settings_for(Path("/tmp/x"), conf_of(spark__master="local[*]").set(name, "theirs")) == {}


def test_what_the_user_has_set_for_all_of_spark_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_UDS_MODE", "false")
    assert settings_for(Path("/tmp/x"), conf_of(spark__master="local[*]")) == {}


Daemon = Callable[[str, str], str]


@pytest.fixture
def cut_off(place: str) -> Daemon:
    """Start a daemon as Java does, cut its first worker off, and return what they have printed."""

    def run(daemon: str, worker: str) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", daemon, worker],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_WORKER_FACTORY_SOCK_DIR": place, "SPARK_REUSE_WORKER": "1",
                 "PYTHON_UNIX_DOMAIN_ENABLED": "True", "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1"},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            (length,) = struct.unpack("!i", process.stdout.read(4))
            with socket.socket(socket.AF_UNIX) as java:
                java.connect(process.stdout.read(length))
                (pid,) = struct.unpack("!i", java.recv(4, socket.MSG_WAITALL))
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).wait(60)
            _, printed = process.communicate(timeout=60)  # closes its stdin, with which it ends
        finally:
            process.kill()
        return printed.decode()

    return run


def test_a_worker_whose_java_is_gone_prints_nothing(cut_off: Daemon) -> None:
    assert "BrokenPipeError" in cut_off("pyspark.daemon", "pyspark.worker"), "Spark is quiet itself: ours can go"
    assert cut_off("pipeline.ingest.quiet_daemon", "pyspark.worker") == ""


def test_any_other_error_is_printed(cut_off: Daemon) -> None:
    printed = cut_off("pipeline.ingest.quiet_daemon", "pyspark.is_not_there")
    assert printed.startswith("Traceback") and "No module named 'pyspark.is_not_there'" in printed
