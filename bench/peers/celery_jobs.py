"""Celery: apply_async with an ETA, from threads; a worker without results, events and gossip, which prefetches 128."""

import sys
from collections.abc import Sequence

from celery import Celery
from shared import in_threads, record, run, text_of, time_of

THREADS = 10  # as many connections as its pool has
app = Celery("bench", broker=f"redis+socket://{sys.argv[2]}")
app.conf.update(
    task_ignore_result=True,
    task_store_errors_even_if_ignored=False,
    worker_prefetch_multiplier=128,
    worker_send_task_events=False,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="remind")
def remind(text: str) -> None:
    """Be a task."""
    record(text)


def schedule(due_ms: Sequence[int]) -> None:
    """Schedule one by one."""
    in_threads(due_ms, lambda number, due: remind.apply_async((text_of(number),), eta=time_of(due)), THREADS)


def work() -> None:
    """Run a worker."""
    quiet = ["--loglevel=ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["--quiet", "worker", "--pool=solo", *quiet])


run(schedule, work)
