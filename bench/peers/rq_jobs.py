"""rq: enqueue_at in pipelines of 1,000; a SimpleWorker, which doesn't fork for each job, and its scheduler, once a second."""

import sys
from collections.abc import Sequence

from redis import Redis
from rq import Queue, SimpleWorker
from shared import record, run, text_of, time_of

PIPELINE_JOBS = 1_000
connection = Redis(unix_socket_path=sys.argv[2])
queue = Queue("bench", connection=connection)


def schedule(due_ms: Sequence[int]) -> None:
    """Schedule in pipelines."""
    for first in range(0, len(due_ms), PIPELINE_JOBS):
        with connection.pipeline() as pipeline:
            for number, due in enumerate(due_ms[first : first + PIPELINE_JOBS], first):
                queue.enqueue_at(time_of(due), record, text_of(number), result_ttl=0, pipeline=pipeline)
            pipeline.execute()


def work() -> None:
    """Run a worker."""
    SimpleWorker([queue], connection=connection).work(with_scheduler=True, logging_level="WARNING")


run(schedule, work)
