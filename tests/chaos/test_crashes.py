"""The job as users run it, killed at every point that matters; ``long.py`` goes on with points and settings drawn at random."""

from pathlib import Path

import pyspark
import pytest

from tests.chaos.proxy import after, before, running
from tests.chaos.scenario import LINES, RUN_SEC, Crash, Kill, Moment, Scenario, Victim
from tests.e2e.commands import Checkout
from tests.servers import RealServer, real_server

ONE_FILE_A_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch=1"
ONE_FILE_A_TASK = "spark.sql.files.maxPartitionBytes=3000"

STORING = (
    Crash(Moment.LANDING, Victim.DRIVER, master="local[2]"),
    Crash(Moment.BEFORE, Victim.JVM, number=3, master="local[2]", transaction_messages=20, once=True),
    Crash(Moment.STORED, Victim.WORKERS, number=5, master="local[1]", transaction_messages=7, conf=(ONE_FILE_A_BATCH,)),
    Crash(Moment.BETWEEN, Victim.DRIVER, number=4, master="local[3]", transaction_messages=50, conf=(ONE_FILE_A_TASK,)),
)
COMMITTING = (
    Crash(Moment.ALL_STORED, Victim.WORKERS, master="local[2]", transaction_messages=20, once=True),
    Crash(Moment.COMMITTING, Victim.JVM, master="local[1]", transaction_messages=50, conf=(ONE_FILE_A_TASK,)),
    Crash(Moment.COMMITTED, Victim.ALL, master="local[3]", transaction_messages=7, once=True, conf=(ONE_FILE_A_BATCH,)),
)
LAST = Crash(Moment.ANY, Victim.ALL, master="local[2]", transaction_messages=1_000, once=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crashes", "shards"), [(STORING, 1), (COMMITTING, 3)], ids=["while storing", "around the commit"]
)
def test_killed_again_and_again_every_request_is_delivered_once(
    checkout: Checkout, crashes: tuple[Crash, ...], shards: int
) -> None:
    with real_server() as server:
        scenario = Scenario(checkout, server, seed=1, shards=shards)
        scenario.start_drain()
        for crash in crashes:
            scenario.crash(crash)
        scenario.settle(LAST)
        scenario.close()


@pytest.mark.slow
@pytest.mark.parametrize("master", ["local[2,4]", "local-cluster[2,1,1024]"])
def test_a_run_survives_what_spark_and_the_writer_can_try_again(checkout: Checkout, master: str) -> None:
    """Workers killed, Redis full, Redis killed, all in one batch: the tasks are tried again, the writer waits and says so."""
    with real_server() as server:
        scenario = Scenario(checkout, server, seed=2)
        # No drain yet: it may rightly repeat messages when Redis dies, and here only storing is judged.
        scenario.workload.drop(checkout.inbox, lines=LINES)
        spark_home = spark_home_in(checkout.root)
        run = Crash(Moment.BEFORE, Victim.WORKERS, master=master, once=True)
        job = scenario.run(run, SPARK_HOME=str(spark_home))
        kill = Kill(job, Victim.WORKERS)
        client = server.client()
        stores = running("schedule")
        scenario.proxy.trap(stores, before(kill), first=3)
        filled = scenario.proxy.trap(stores, before(lambda: client.config_set("maxmemory", 1)), first=8)
        freed = scenario.proxy.trap(stores, before(lambda: client.config_set("maxmemory", 0)), first=14)
        restarted = scenario.proxy.trap(stores, after(lambda: restart(server)), first=15)
        assert job.end(RUN_SEC) == 0, job.screen()
        assert kill.landed.is_set() and filled.was_sprung and freed.was_sprung and restarted.was_sprung
        told = "\n".join([job.screen(), *(path.read_text() for path in spark_home.glob("work/*/*/stderr"))])
        assert "waiting for Redis: Redis can't do it now" in told
        assert "waiting for Redis: Redis does not answer" in told
        assert "Redis answers again" in told
        scenario.expect_each_once(scenario.drain_the_rest())
        scenario.close()


def spark_home_in(folder: Path) -> Path:
    """Make a Spark home of links, since a local cluster writes its executors' logs into the home."""
    home = folder / "spark"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":  # the logs: these must be the test's own
            (home / entry.name).symlink_to(entry)
    return home


def restart(server: RealServer) -> None:
    server.kill()
    server.start()
