"""A task that dies is tried again by Spark, and nobody notices."""

from collections import Counter

import psutil
import pytest

from tests.e2e.commands import Checkout, Command
from tests.servers import real_server

FILES, LINES = 4, 3_000


def python_workers(job: Command) -> list[psutil.Process]:
    """The processes that run tasks: children of Spark's Python daemons, wherever their executor runs."""
    tree = psutil.Process(job.process.pid).children(recursive=True)
    daemons = {process.pid for process in tree if "pyspark.daemon" in process.cmdline()}
    return [process for process in tree if process.pid in daemons and process.ppid() in daemons]


@pytest.mark.slow
@pytest.mark.parametrize("master", ["local[2,4]", "local-cluster[2,1,1024]"])
def test_a_worker_that_dies_in_the_middle_is_replaced_and_nothing_is_stored_twice(
    checkout: Checkout, master: str
) -> None:
    with real_server() as server:
        environ = {"REDIS_URL": server.url, "DUETIME_INGEST_TRANSACTION_MESSAGES": "20"}
        client = server.client()

        def stored(_: Command) -> bool:
            return int(client.hget("{duetime:0}:counters", "stored") or 0) > 500

        for file in range(FILES):
            checkout.drop(f"{file}.jsonl", *({"message": f"{file}/{n}", "delay_sec": 0} for n in range(LINES)))
        ingest = checkout.run("--master", master, "jobs/ingest.py", "--once", environ=environ)
        ingest.wait_for(stored, "stored messages")
        workers = python_workers(ingest)
        for worker in workers:
            worker.kill()
        assert ingest.end(180) == 0, ingest.screen()
        assert workers
        assert "lost task" in ingest.screen().lower(), "the kill came too late to show anything"

        drained = checkout.run("jobs/drain.py", "--until-empty", "--format", "json", environ=environ)
        assert drained.end() == 0
        seen = Counter(record["message"] for record in drained.records())
        assert seen == Counter(f"{file}/{n}" for file in range(FILES) for n in range(LINES))
        assert checkout.status("--redis", server.url)["stored"] == FILES * LINES
