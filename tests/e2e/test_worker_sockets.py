"""Spark's Python workers talk to Java over unix sockets, and whoever of them ends first, nobody prints a trace."""

import signal
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import psutil
import pytest

from tests.e2e.commands import Checkout, Command
from tests.servers import RealServer, real_server

LINES = 20_000
IDLE_SEC = 80.0  # Spark's minute, and the time that it may take to notice


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for temporary files with a short path."""
    with TemporaryDirectory(prefix="dt-", dir="/tmp") as folder:
        yield Path(folder)


def processes(job: Command, word: str) -> list[psutil.Process]:
    """Return the processes of a job whose command line has the word, the oldest first."""
    found = []
    for process in psutil.Process(job.process.pid).children(recursive=True):
        try:
            if word in " ".join(process.cmdline()):
                found.append((process.create_time(), process.pid, process))
        except psutil.NoSuchProcess:
            continue
    return [process for *_, process in sorted(found)]


def stored(server: RealServer) -> int:
    return int(server.client().hget("{duetime:0}:counters", "stored") or 0)


def job_in_a_batch(checkout: Checkout, server: RealServer, place: Path) -> Command:
    """Start a job and return it while it stores: in small transactions, so that it is not done before it is cut off."""
    environ = {"REDIS_URL": server.url, "TMPDIR": str(place), "DUETIME_INGEST_TRANSACTION_MESSAGES": "20"}
    job = checkout.run("--master", "local[2]", "jobs/ingest.py", environ=environ)
    job.wait_for_line("ingest is up")
    before = stored(server)
    for number in range(2):
        checkout.drop(f"{number}.jsonl", *({"message": f"{number}/{line}", "delay_sec": 900} for line in range(LINES)))
    job.wait_for(lambda _: stored(server) > before + 500, "stored messages")
    return job


def test_the_sockets_are_private_and_a_restart_clears_up_after_a_kill(checkout: Checkout, place: Path) -> None:
    with real_server() as server:
        job = job_in_a_batch(checkout, server, place)
        [killed] = place.glob("duetime-workers-*")
        assert stat.S_IMODE(killed.stat().st_mode) == 0o700
        assert [path for path in killed.iterdir() if path.is_socket()], "the workers use no sockets"
        assert job.stop(signal.SIGKILL) == -signal.SIGKILL
        assert killed.exists()
        job = job_in_a_batch(checkout, server, place)
        assert not killed.exists()
        assert job.stop() == 0, job.screen()
        assert list(place.glob("duetime-workers-*")) == []


@pytest.mark.slow
def test_workers_are_kept_awake_for_the_next_file(checkout: Checkout, place: Path) -> None:
    """Spark would end them after a minute without one, looking once in a while."""
    with real_server() as server:
        job = checkout.run("jobs/ingest.py", environ={"REDIS_URL": server.url, "TMPDIR": str(place)})
        checkout.drop("one.jsonl", {"message": "one", "delay_sec": 900})
        job.wait_for(lambda _: stored(server) == 1, "the first message")
        before = {worker.pid for worker in processes(job, "quiet_daemon")}
        Event().wait(IDLE_SEC)
        assert len(before) > 1 and {worker.pid for worker in processes(job, "quiet_daemon")} == before
        checkout.drop("two.jsonl", {"message": "two", "delay_sec": 900})
        job.wait_for(lambda _: stored(server) == 2, "the second message")
        assert job.stop() == 0, job.screen()
    assert "Traceback" not in job.screen()


@pytest.mark.parametrize("who", ["java", "a worker", "the daemon", "all"])
def test_nobody_prints_a_trace_when_a_part_of_a_job_ends_first(checkout: Checkout, place: Path, who: str) -> None:
    with real_server() as server:
        job = job_in_a_batch(checkout, server, place)
        java, (daemon, *workers) = processes(job, "deploy.SparkSubmit"), processes(job, "quiet_daemon")
        assert java and workers, "the workers are not ours"
        if who == "all":  # as a service manager stops a job
            for process in [psutil.Process(job.process.pid), *java, daemon, *workers]:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
        else:
            {"java": java[0], "a worker": workers[-1], "the daemon": daemon}[who].kill()
        if who == "the daemon":  # without it the workers see the end of the job by themselves
            job.process.terminate()
        code = job.end()
        assert code == (1 if who in ("java", "a worker") else 0), job.screen()
        for word in ("Traceback", "BrokenPipe", "ConnectionReset", "Exception ignored"):
            assert word not in job.screen()
        assert list(place.glob("duetime-workers-*")) == []


def test_a_long_path_for_temporary_files_is_no_obstacle(checkout: Checkout, place: Path) -> None:
    long = place / ("x" * 120)
    long.mkdir()
    checkout.drop("one.jsonl", {"message": "one", "delay_sec": 900})
    with real_server() as server:
        job = checkout.run("jobs/ingest.py", "--once", environ={"REDIS_URL": server.url, "TMPDIR": str(long)})
        assert job.end() == 0, job.screen()
        assert stored(server) == 1
        assert "Traceback" not in job.screen()
