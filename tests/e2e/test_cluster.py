"""The ingest job on a cluster: a standalone master with workers on this machine."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from pipeline.runtime.submit import spark_environ
from tests.e2e.commands import Checkout, Command
from tests.servers import RealServer, real_server

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark-cluster")]

FILES = 8
JOB_SEC = 300.0  # four more JVMs on a machine that is busy with other tests
OPTIONS = {
    "spark.executor.cores": 1,
    "spark.executor.memory": "512m",
    "spark.cores.max": 2,
    "spark.task.maxFailures": 1,  # else a task may find its way to the other executor
    # Both executors are there before the first task, so that each gets one.
    "spark.scheduler.minRegisteredResourcesRatio": 1,
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}


def can_mount() -> bool:
    """Whether a process of ours may have a view of the file system of its own."""
    found = shutil.which("unshare") and shutil.which("nsenter")
    return found is not None and subprocess.run(["unshare", "-rm", "true"], check=False).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs mount namespaces (unshare -rm)")


class Worker(Command):
    """A worker of one core, with a view of the file system of its own, from which folders can be hidden at any time."""

    def hide(self, *folders: Path) -> None:
        enter = ["nsenter", "-t", str(self.process.pid), "-U", "-m", "--preserve-credentials"]
        for folder in folders:
            subprocess.run([*enter, "mount", "-t", "tmpfs", "none", str(folder)], check=True)

    def kill(self) -> None:
        """End it and its executors as a power cut does."""
        for process in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
            process.kill()
        self.end()


class Cluster:
    """A standalone master, and its workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environ = {**os.environ, **spark_environ(os.environ), "SPARK_LOCAL_IP": "127.0.0.1"}
        self._environ["SPARK_DAEMON_MEMORY"] = "256m"
        self._environ["SPARK_CONF_DIR"] = str(folder)  # ours would keep the lines from being logged that are waited for
        for name in ("PYTHONPATH", "PYSPARK_PYTHON"):  # of the machine that the tests run on, not of a worker
            self._environ.pop(name, None)
        self._started: list[Command] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"spark://127.0.0.1:{port}"
        self._port = str(port)

    def start(self) -> None:
        master = Command(self._daemon("master.Master", "--port", self._port), self._environ, self._folder)
        self._started.append(master)
        master.wait_for_line("I have been elected leader")

    def add_worker(self) -> Worker:
        work = self._folder / f"work-{len(self._started)}"
        daemon = self._daemon("worker.Worker", "--cores", "1", "--memory", "768m", "--work-dir", str(work), self.url)
        worker = Worker(["unshare", "-rm", *daemon], self._environ, self._folder)
        self._started.append(worker)
        worker.wait_for_line("Successfully registered with master")
        return worker

    def _daemon(self, name: str, *arguments: str) -> list[str]:
        program = str(Path(self._environ["SPARK_HOME"], "bin", "spark-class"))
        return [program, f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1", "--webui-port", "0", *arguments]

    def close(self) -> None:
        for command in reversed(self._started):
            if command.process.poll() is None:
                command.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path)
        stack.callback(cluster.close)
        cluster.start()
        yield cluster


class Ingest:
    """Runs the ingest job on a cluster."""

    def __init__(self, cluster: Cluster, checkout: Checkout, server: RealServer) -> None:
        self._cluster = cluster
        self._checkout = checkout
        self._environ = {"REDIS_URL": server.url, "SPARK_LOCAL_IP": "127.0.0.1"}

    def start(self, *arguments: str, options: Mapping[str, object] = OPTIONS, **environ: str) -> Command:
        """Start it; arguments before ``jobs/ingest.py`` are for Spark, if it is named."""
        words = [word for name, value in options.items() for word in ("--conf", f"{name}={value}")]
        if "jobs/ingest.py" not in arguments:
            arguments = ("jobs/ingest.py", *arguments)
        given = ("--master", self._cluster.url, *words, *arguments)
        return self._checkout.run(*given, environ={**self._environ, **environ})

    def run(self, *arguments: str, options: Mapping[str, object] = OPTIONS, **environ: str) -> tuple[int, str]:
        """Return how it ended, and what it said."""
        job = self.start(*arguments, options=options, **environ)
        code = job.end(JOB_SEC)
        return code, job.screen()

    def scheduled(self) -> int:
        command = self._checkout.run("jobs/status.py", "--format", "json", environ=self._environ)
        assert command.end(30) == 0, command.screen()
        return command.records()[0]["scheduled"]


def landed(checkout: Checkout) -> list[Path]:
    return list((checkout.inbox / ".landing").glob("[!.]*"))


@pytest.fixture
def ingest(cluster: Cluster, checkout: Checkout) -> Iterator[Ingest]:
    with real_server() as server:
        yield Ingest(cluster, checkout, server)


@needs_mounts
def test_an_executor_that_does_not_see_the_folders_is_named_and_nothing_is_lost(
    cluster: Cluster, checkout: Checkout, ingest: Ingest
) -> None:
    checkout.inbox.mkdir()
    rejects = checkout.root / "rejects"
    rejects.mkdir()
    host = re.escape(socket.gethostname())
    cluster.add_worker()
    worker = cluster.add_worker()

    job = ingest.start()
    job.wait_for_line("ingest is up")
    assert "2 executors have what they need" in job.screen()
    worker.hide(checkout.inbox)  # as a mount that fails
    for number in range(FILES):
        checkout.drop(f"{number}.jsonl", {"message": "m", "delay_sec": 3600}, "no JSON")
    assert job.end(JOB_SEC) == 1, job.screen()
    sentence = rf"ingest: An executor on {host} does not see \S+/inbox/\.landing/\S+\+jsonl: .* nothing of this batch was deleted\."
    assert re.search(sentence, job.screen()), job.screen()
    assert len(landed(checkout)) == FILES, job.screen()

    worker.hide(rejects)
    code, screen = ingest.run("--once")
    assert code == 1, screen
    folders = r"the driver's input folder at \S+/inbox/\.landing, and the driver's rejects folder at \S+/rejects\."
    lacks = rf"An executor on {host} lacks {folders}"
    assert re.search(lacks, screen), screen
    assert len(landed(checkout)) == FILES, screen

    worker.stop()
    code, screen = ingest.run("--once", options={**OPTIONS, "spark.cores.max": 1})
    assert code == 0, screen
    assert landed(checkout) == []
    assert ingest.scheduled() == FILES
    assert len(checkout.rejects()) == FILES
