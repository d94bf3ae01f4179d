"""The ingest job on a cluster: a standalone master with workers on this machine, one of which lacks the input folder."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.runtime.submit import spark_environ
from tests.e2e.commands import Checkout, Command
from tests.servers import real_server

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
    return (
        shutil.which("unshare") is not None and subprocess.run(["unshare", "-rm", "true"], check=False).returncode == 0
    )


class Cluster:
    """A standalone master, and workers of one core each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environ = {**os.environ, **spark_environ(os.environ), "SPARK_LOCAL_IP": "127.0.0.1"}
        self._environ["SPARK_DAEMON_MEMORY"] = "256m"
        self._environ["SPARK_CONF_DIR"] = str(folder)  # ours would keep the lines from being logged that are waited for
        self._started: list[Command] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"spark://127.0.0.1:{port}"
        self._port = str(port)

    def start(self) -> None:
        self._start("master.Master", "--port", self._port).wait_for_line("I have been elected leader")

    def add_worker(self, blind_to: Path | None = None) -> Command:
        """Start a worker, from whose view of the file system one folder may be hidden."""
        hide = (
            ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(blind_to)] if blind_to else []
        )
        work = self._folder / f"work-{len(self._started)}"
        arguments = ("--cores", "1", "--memory", "768m", "--work-dir", str(work), self.url)
        worker = self._start("worker.Worker", *arguments, through=hide)
        worker.wait_for_line("Successfully registered with master")
        return worker

    def _start(self, name: str, *arguments: str, through: list[str] | None = None) -> Command:
        program = Path(self._environ["SPARK_HOME"], "bin", "spark-class")
        daemon = [
            str(program),
            f"org.apache.spark.deploy.{name}",
            "--host",
            "127.0.0.1",
            "--webui-port",
            "0",
            *arguments,
        ]
        started = Command([*(through or []), *daemon], self._environ, self._folder)
        self._started.append(started)
        return started

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


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs mount namespaces (unshare -rm)")
def test_files_that_an_executor_does_not_see_fail_the_batch_and_none_is_lost(
    cluster: Cluster, checkout: Checkout
) -> None:
    for number in range(FILES):
        checkout.drop(f"{number}.jsonl", *({"message": f"{number}/{line}", "delay_sec": 3600} for line in range(2)))
    cluster.add_worker()
    blind = cluster.add_worker(blind_to=checkout.inbox)
    options = [word for name, value in OPTIONS.items() for word in ("--conf", f"{name}={value}")]

    with real_server() as server:
        environ = {"REDIS_URL": server.url, "SPARK_LOCAL_IP": "127.0.0.1"}

        def take_in(*more: str) -> tuple[int, str]:
            job = checkout.run("--master", cluster.url, *options, *more, "jobs/ingest.py", "--once", environ=environ)
            code = job.end(JOB_SEC)
            return code, job.screen()

        code, screen = take_in()
        assert code == 1, screen
        sentence = (
            rf"ingest: An executor on {re.escape(socket.gethostname())} does not see \S+/inbox/\.landing/\S+\+jsonl: .*"
            r"nothing of this batch was deleted\."
        )
        assert re.search(sentence, screen), screen
        assert len(list((checkout.inbox / ".landing").glob("[!.]*"))) == FILES, screen

        blind.stop()
        code, screen = take_in("--conf", "spark.cores.max=1")
        assert code == 0, screen
        assert list((checkout.inbox / ".landing").glob("[!.]*")) == []
        command = checkout.run("jobs/status.py", "--format", "json", environ=environ)
        assert command.end(30) == 0, command.screen()
        assert command.records()[0]["scheduled"] == 2 * FILES
