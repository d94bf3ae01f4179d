"""huey: schedule from threads; a consumer whose scheduler looks each second, which is its finest interval, and 16 threads."""

import logging
import sys
from collections.abc import Sequence

from huey import RedisHuey
from shared import in_threads, record, run, text_of, time_of

THREADS, WORKERS = 16, 16
huey = RedisHuey("bench", url=f"unix://{sys.argv[2]}", results=False)


@huey.task()
def remind(text: str) -> None:
    """Be a task."""
    record(text)


def schedule(due_ms: Sequence[int]) -> None:
    """Schedule one by one."""
    in_threads(
        due_ms,
        lambda number, due: remind.schedule((text_of(number),), eta=time_of(due)),
        THREADS,
    )


def work() -> None:
    """Run a consumer."""
    logging.disable(logging.INFO)
    huey.create_consumer(workers=WORKERS, scheduler_interval=1, periodic=False, graceful_signal="TERM").run()


run(schedule, work)
