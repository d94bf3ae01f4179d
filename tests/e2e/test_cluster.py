"""The ingest job on a cluster: a standalone master with workers on this machine."""

import os
import re
import socket
import subprocess
import venv
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.runtime.sending import PYTHON
from pipeline.runtime.submit import spark_environ
from tests.e2e.commands import CAN_MOUNT, Checkout, Command, kill_tree
from tests.ports import free_port
from tests.servers import RealServer, user_rights

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark-cluster")]

HOST = re.escape(socket.gethostname())
FILES = 8
PASSWORD = "of-the-user-9Zr"
LINES = 30_000  # of a large file
JOB_SEC = 300.0  # four more JVMs on a machine that is busy with other tests
OPTIONS = {
    "spark.executor.cores": 1,
    "spark.executor.memory": "512m",
    "spark.cores.max": 2,
    "spark.task.maxFailures": 1,  # else a task may find its way to the other executor
    # Both executors are there before the first task, so that each gets one.
    "spark.scheduler.minRegisteredResourcesRatio": 1,
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # as short a life as in other tests
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}


class Worker(Command):
    """A worker of one core, with a view of the file system of its own, from which folders can be hidden at any time."""

    def hide(self, *folders: Path) -> None:
        enter = ["nsenter", "-t", str(self.process.pid), "-U", "-m", "--preserve-credentials"]
        for folder in folders:
            subprocess.run([*enter, "mount", "-t", "tmpfs", "none", str(folder)], check=True)

    def kill(self) -> None:
        """End it and its executors as a power cut does."""
        kill_tree(self.process.pid)
        self.end()


class Cluster:
    """A standalone master and its workers, on whose PATH is a Python of this version without any package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "bare", symlinks=True)
        self._environ = {**os.environ, **spark_environ(os.environ), "SPARK_LOCAL_IP": "127.0.0.1"}
        self._environ["SPARK_DAEMON_MEMORY"] = "256m"
        self._environ["SPARK_CONF_DIR"] = str(folder)  # ours would keep the lines from being logged that are waited for
        self._environ["PATH"] = f"{folder}/bare/bin:{self._environ['PATH']}"
        for name in ("PYTHONPATH", "PYSPARK_PYTHON"):  # of the machine that the tests run on, not of a worker
            self._environ.pop(name, None)
        self._workers: list[Worker] = []
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self._master = Command(self._daemon("master.Master", "--port", str(port)), self._environ, self.folder)

    def workers(self) -> tuple[Worker, Worker]:
        """Return two that live, starting what is missing."""
        self._master.wait_for_line("I have been elected leader")
        living = [worker for worker in self._workers if worker.process.poll() is None]
        fresh = [self._start(len(self._workers) + number) for number in range(2 - len(living))]
        self._workers += fresh
        for worker in fresh:
            worker.wait_for_line("Successfully registered with master")
        one, other = [*living, *fresh]
        return one, other

    def _start(self, number: int) -> Worker:
        work = str(self.folder / f"work-{number}")
        daemon = self._daemon("worker.Worker", "--cores", "1", "--memory", "768m", "--work-dir", work, self.url)
        return Worker([*(["unshare", "-rm"] if CAN_MOUNT else []), *daemon], self._environ, self.folder)

    def _daemon(self, name: str, *arguments: str) -> list[str]:
        program = str(Path(self._environ["SPARK_HOME"], "bin", "spark-class"))
        return [program, f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1", "--webui-port", "0", *arguments]

    def close(self) -> None:
        for command in (*self._workers, self._master):
            if command.process.poll() is None:
                command.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests here: each start of Java on a busy machine takes seconds."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    with ExitStack() as stack:
        stack.callback(cluster.close)
        yield cluster


class Ingest:
    """Runs the ingest job on a cluster."""

    def __init__(self, cluster: Cluster, checkout: Checkout, server: RealServer) -> None:
        self._cluster = cluster
        self._checkout = checkout
        server.client().execute_command("ACL", "SETUSER", "shy", "on", f">{PASSWORD}", *user_rights())
        url = f"unix://shy:{PASSWORD}@{server.folder}/s"
        self._environ = {"REDIS_URL": url, "SPARK_LOCAL_IP": "127.0.0.1"}

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
        assert PASSWORD not in job.screen()
        return code, job.screen()


def landed(checkout: Checkout) -> list[Path]:
    return list((checkout.inbox / ".landing").glob("[!.]*"))


@pytest.fixture
def ingest(cluster: Cluster, checkout: Checkout, server: RealServer) -> Iterator[Ingest]:
    yield Ingest(cluster, checkout, server)
    shown = [path for path in cluster.folder.rglob("std*") if PASSWORD in path.read_text(errors="replace")]
    assert list(cluster.folder.rglob("stderr")) and not shown, "these begin with the command lines of the executors"


def stored(server: RealServer) -> list[int]:
    """Return the numbers of the messages that are scheduled, one for each."""
    with server.client() as client:
        members = [each for key in client.scan_iter("*:bucket:*", _type="zset") for each in client.zrange(key, 0, -1)]
    return sorted(int(member.rpartition(b"#")[2]) for member in members)


def test_a_worker_without_the_packages_is_named_and_one_option_sends_them(
    cluster: Cluster, checkout: Checkout, ingest: Ingest, server: RealServer
) -> None:
    cluster.workers()
    for number in range(FILES):
        checkout.drop(f"{number}.jsonl", {"message": f"#{number}", "delay_sec": 3600})
    options = {**OPTIONS, "spark.cores.max": 1}
    code, screen = ingest.run("--once", options=options, PYSPARK_PYTHON=PYTHON)
    assert code == 1, screen
    lacks = rf"ingest: An executor on {HOST} lacks the Python packages numpy, pandas, pyarrow, msgspec, redis\."
    assert re.search(lacks, screen), screen

    code, screen = ingest.run("--pack-executors", "packages.tar.gz", "jobs/ingest.py", "--once", options=options)
    assert code == 0, screen
    assert "1 executor has what is needed" in screen
    assert stored(server) == list(range(FILES))


@pytest.mark.skipif(not CAN_MOUNT, reason="needs mount namespaces (unshare -rm)")
def test_an_executor_that_does_not_see_the_folders_is_named_and_nothing_is_lost(
    cluster: Cluster, checkout: Checkout, ingest: Ingest, server: RealServer
) -> None:
    checkout.inbox.mkdir()
    rejects = checkout.root / "rejects"
    rejects.mkdir()
    _, worker = cluster.workers()

    job = ingest.start()
    job.wait_for_line("ingest is up")
    assert "2 executors have what is needed" in job.screen()
    worker.hide(checkout.inbox)  # as a mount that fails
    for number in range(FILES):
        checkout.drop(f"{number}.jsonl", {"message": f"#{number}", "delay_sec": 3600}, "no JSON")
    assert job.end(JOB_SEC) == 1, job.screen()
    sentence = rf"ingest: An executor on {HOST} does not see \S+/inbox/\.landing/\S+\+jsonl: .* nothing of this batch was deleted\."
    assert re.search(sentence, job.screen()), job.screen()
    assert len(landed(checkout)) == FILES, job.screen()

    worker.hide(rejects)
    code, screen = ingest.run("--once")
    assert code == 1, screen
    folders = r"the driver's input folder at \S+/inbox/\.landing, and the driver's rejects folder at \S+/rejects\."
    lacks = rf"An executor on {HOST} lacks {folders}"
    assert re.search(lacks, screen), screen
    assert len(landed(checkout)) == FILES, screen

    worker.stop()
    code, screen = ingest.run("--once", options={**OPTIONS, "spark.cores.max": 1})
    assert code == 0, screen
    assert landed(checkout) == []
    assert stored(server) == list(range(FILES))
    assert len(checkout.rejects()) == FILES


def test_a_worker_that_is_killed_in_mid_batch_costs_no_message_and_doubles_none(
    cluster: Cluster, checkout: Checkout, ingest: Ingest, server: RealServer
) -> None:
    for file in range(FILES):
        numbers = range(file * LINES, (file + 1) * LINES)
        checkout.drop(f"{file}.jsonl", *(f'{{"message":"#{number}","delay_sec":3600}}' for number in numbers))
    _, worker = cluster.workers()

    small = {"DUETIME_INGEST_TRANSACTION_MESSAGES": "20"}  # so that the batch takes seconds on any machine
    job = ingest.start("--once", options={**OPTIONS, "spark.task.maxFailures": 4}, **small)
    job.wait_for(lambda _: len(stored(server)) > 0, "message", JOB_SEC)
    worker.kill()
    before = len(stored(server))
    assert job.end(JOB_SEC) == 0, job.screen()
    assert "Lost executor" in job.screen()
    assert before < FILES * LINES, "the batch was over before the worker"
    assert stored(server) == list(range(FILES * LINES))
