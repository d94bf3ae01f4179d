"""A program that schedules a table is killed in the middle, and started again with other cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import ROOT
from pipeline.runtime.process import wait_until
from pipeline.runtime.submit import spark_environ
from pipeline.store.keys import Keys
from tests.e2e.commands import kill_tree
from tests.servers import real_server

pytestmark = [pytest.mark.slow, pytest.mark.process]

ROWS = 600_000
PROGRAM = """
import sys
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pipeline.spark import register, schedule

spark = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").getOrCreate()
text = F.concat("id", F.rand())  # other texts each time it is asked
table = spark.range(0, int(sys.argv[2]), 1, int(sys.argv[3])).select(text.alias("message"), F.lit(3_600).alias("delay_sec"))
if sys.argv[5] == "save":
    register(spark)
    options = {"name": "sale", "staging": sys.argv[4], "changedRows": "ignore"}
    table.write.format("duetime").options(**options).mode("append").save()
done = schedule(table, "sale", staging=sys.argv[4])
print(done.stored, done.known, done.refused_count)
"""


def start(url: str, folder: Path, master: str, partitions: int, way: str) -> subprocess.Popen[str]:
    environ = {**os.environ, **spark_environ(os.environ), "PYTHONPATH": str(ROOT), "REDIS_URL": url}
    environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-P", "-c", PROGRAM, master, str(ROWS), str(partitions), str(folder / "staging"), way]
    return subprocess.Popen(command, env=environ, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True)


def kill(program: subprocess.Popen[str]) -> None:
    """End it, its JVM and all Python processes of that, as a power cut does."""
    kill_tree(program.pid)
    program.communicate()


@pytest.mark.parametrize(("way", "next_way"), [("schedule", "schedule"), ("save", "save"), ("save", "schedule")])
def test_each_row_is_stored_once_by_a_program_that_was_killed(tmp_path: Path, way: str, next_way: str) -> None:
    with real_server() as server:
        client, counters = server.client(), Keys("duetime").counters()

        def stored() -> int:
            return int(client.hget(counters, "stored") or 0)

        killed = start(server.url, tmp_path, "local[2]", 4, way)
        assert wait_until(lambda: stored() > 0 or killed.poll() is not None, 120)
        kill(killed)
        assert wait_until(lambda: not client.client_list(_type="normal")[1:], 30), "a worker of it lives on"
        before = stored()
        assert 0 < before < ROWS
        output, _ = start(server.url, tmp_path, "local[1]", 3, next_way).communicate(timeout=240)
        left = ROWS - before if next_way == "schedule" else 0
        assert output.split() == [str(left), str(ROWS - left), "0"]
        assert sum(client.zcard(key) for key in client.scan_iter("{duetime:0}:bucket:*")) == ROWS
