"""arq: enqueue_job from many tasks, as there is no bulk; a worker of 1,000 jobs at a time that looks every 50 ms."""

import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker
from shared import record, run, text_of, time_of

AT_ONCE, JOBS_AT_ONCE, POLL_SEC = 32, 1_000, 0.05
SETTINGS = RedisSettings(unix_socket_path=sys.argv[2])


async def remind(context: dict, text: str) -> None:
    """Be a job."""
    record(text)


async def enqueue(due_ms: Sequence[int]) -> None:
    """Schedule from so many tasks."""
    redis = await create_pool(SETTINGS)
    left: Iterator[tuple[int, int]] = iter(enumerate(due_ms))

    async def work() -> None:
        for number, due in left:
            await redis.enqueue_job("remind", text_of(number), _defer_until=time_of(due))

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    await redis.aclose()


def work() -> None:
    """Run a worker."""
    logging.disable(logging.INFO)
    Worker(
        [remind], redis_settings=SETTINGS, max_jobs=JOBS_AT_ONCE, poll_delay=POLL_SEC, keep_result=0, log_results=False
    ).run()


run(lambda due_ms: asyncio.run(enqueue(due_ms)), work)
