"""``format("duetime")`` where Spark runs tasks more than once: each row is scheduled once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.config import ROOT
from pipeline.runtime.submit import spark_environ
from tests.e2e.test_cluster import Cluster, Worker
from tests.servers import RealServer

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("spark-cluster")]

# The first attempt of a task fails after it has written all its rows, or is so slow that Spark starts a second one beside it.
PROGRAM = """
import os, sys, threading, traceback
from pathlib import Path
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
import pipeline.spark
from pipeline.ingest.data_source import DuetimeSource, TableWriter
from pipeline.ingest.staged_rows import stage_rows

master, staging, notes, kind = sys.argv[1:5]

class Troubled(TableWriter):
    def write(self, iterator):
        attempt, task = TaskContext.get().attemptNumber(), TaskContext.get().partitionId()
        done = stage_rows(iterator, self._target)
        Path(notes, f"{task}-{attempt}").touch()
        if task == 1 and attempt == 0:
            if kind == "retry":
                raise RuntimeError("the first attempt of task 1")
            if kind == "speculation":
                threading.Event().wait(6)  # so that another attempt is faster
            if kind == "abort":
                threading.Event().wait(1)
        if task == 2 and kind == "abort":
            raise RuntimeError("this task fails always")
        return done

class TroubledSource(DuetimeSource):
    def writer(self, schema, overwrite):
        return Troubled(self._target(schema, overwrite))

pipeline.spark.DuetimeSource = TroubledSource
builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
if "speculation" in kind:
    builder = (builder.config("spark.speculation", "true").config("spark.speculation.interval", "100ms")
        .config("spark.speculation.quantile", "0.5").config("spark.speculation.multiplier", "1.1")
        .config("spark.speculation.minTaskRuntime", "500ms").config("spark.executor.memory", "512m")
        .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.scheduler.minRegisteredResourcesRatio", "1")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"]))
spark = builder.getOrCreate()
pipeline.spark.register(spark)
if kind.startswith("schedule"):
    def trouble(batches):
        yield from batches
        attempt, task = TaskContext.get().attemptNumber(), TaskContext.get().partitionId()
        if task == 1 and attempt == 0 and not Path(notes, "1-0").exists():  # the table is read once, and written down meanwhile
            Path(notes, "1-0").touch()
            if kind == "schedule retry":
                raise RuntimeError("the first attempt of task 1")
            threading.Event().wait(6)
        Path(notes, f"{task}-{attempt}").touch()

    table = spark.range(0, 40_000, 1, 4).mapInArrow(trouble, "id long")
    table = table.select(F.concat("id", F.rand()).alias("message"), F.when(F.rand() < 0.9, 60).alias("delay_sec"))
    done = pipeline.spark.schedule(table, "sale", staging=f"file://{staging}")
    print("saved", done.stored + done.refused_count == 40_000 and done.refused.count() == done.refused_count > 3_000)
    sys.exit()
text = F.concat("id", F.rand())  # other texts each time it is asked
table = spark.range(0, 40_000, 1, 4).select(text.alias("message"), F.lit(3_600).alias("delay_sec"))
writing = table.write.format("duetime").option("name", "sale").option("staging", staging).mode("append")
if kind == "again":
    writing = writing.option("changedRows", "ignore")
try:
    writing.save()
except Exception as exc:
    traceback.print_exc()
    print("failed", "fails always" in str(exc))
else:
    print("saved")
"""


class TwoHosts(Cluster):
    """A cluster whose workers are on hosts of different names: Spark starts no second attempt on the host of the first."""

    def _start(self, number: int) -> Worker:
        daemon = self._daemon("worker.Worker", "--cores", "1", "--memory", "768m", self.url)
        daemon[daemon.index("--host") + 1] = f"127.0.0.{number + 2}"
        return Worker(daemon, self._environ, self.folder)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    cluster = TwoHosts(tmp_path_factory.mktemp("cluster"))
    with closing(cluster):
        cluster.workers()
        yield cluster.url


def run(server: RealServer, folder: Path, master: str, kind: str) -> tuple[str, set[str]]:
    """Return how it ended, and which attempts of which tasks have written."""
    notes = folder / f"notes-{kind}"
    notes.mkdir()
    environ = {**os.environ, **spark_environ(os.environ), "PYTHONPATH": str(ROOT), "REDIS_URL": server.url}
    environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-P", "-c", PROGRAM, master, str(folder / "staging"), str(notes), kind]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    said = done.stderr[done.stderr.find("Traceback") :][:5_000]
    print(said)  # for whoever looks why a test failed
    assert done.returncode == 0, said
    return done.stdout.strip(), {path.name for path in notes.iterdir()}


def stored(server: RealServer) -> int:
    client = server.client()
    return sum(client.zcard(key) for key in client.scan_iter("{duetime:0}:bucket:*"))


def left_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("part-*") if path.is_file()]


def test_rows_of_a_task_that_ran_twice_are_scheduled_once(server: RealServer, tmp_path: Path) -> None:
    assert run(server, tmp_path, "local[2,3]", "retry") == ("saved", {"0-0", "1-0", "1-1", "2-0", "3-0"})
    assert stored(server) == 40_000
    assert left_in(tmp_path) == []


def test_rows_that_two_attempts_wrote_side_by_side_are_scheduled_once(
    server: RealServer, tmp_path: Path, cluster: str
) -> None:
    done, attempts = run(server, tmp_path, cluster, "speculation")
    assert done == "saved" and {"1-0", "1-1"} <= attempts, "or nothing was tested"
    assert stored(server) == 40_000
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("kind", ["schedule retry", "schedule speculation"])
def test_rows_that_were_written_down_twice_are_counted_once(
    server: RealServer, tmp_path: Path, cluster: str, kind: str
) -> None:
    """Each attempt has other rows, and other numbers of those that are refused: the counts are those of what is there."""
    done, attempts = run(server, tmp_path, cluster if kind == "schedule speculation" else "local[2,3]", kind)
    assert done == "saved True" and {"1-0", "1-1"} <= attempts
    assert 35_000 < stored(server) < 37_000


def test_a_write_that_fails_schedules_nothing_and_can_be_made_again(server: RealServer, tmp_path: Path) -> None:
    done, attempts = run(server, tmp_path, "local[2,1]", "abort")
    assert done == "failed True" and "0-0" in attempts
    assert stored(server) == 0
    assert run(server, tmp_path, "local[2,1]", "none")[0] == "saved"
    assert stored(server) == 40_000
    assert run(server, tmp_path, "local[1,1]", "again")[0] == "saved"
    assert stored(server) == 40_000, "which the name is known for"
