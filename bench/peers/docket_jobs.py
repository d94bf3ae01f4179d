"""docket: add_many; a worker of 50 jobs at a time that looks for due ones every 50 ms and has free slots checked every 10 ms.

The further verb ``verbs`` measures single calls, for bench/client.py: python docket_jobs.py verbs SOCKET COUNT.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta

from docket import Docket, Worker
from shared import record, run, tell, text_of, time_of

AT_ONCE = 32
# With 100 its client runs out of connections, and jobs wait five minutes for a second try.
JOBS_AT_ONCE, DUE_LOOK, SLOT_LOOK = 50, timedelta(milliseconds=50), timedelta(milliseconds=10)


async def remind(text: str) -> None:
    """Be a job."""
    record(text)


def open_docket() -> Docket:
    """Return the docket; what is done is forgotten at once."""
    return Docket("bench", f"unix://{sys.argv[2]}", execution_ttl=timedelta(0))


async def schedule(due_ms: Sequence[int]) -> None:
    """Schedule in bulk."""
    async with open_docket() as docket:
        docket.register(remind)
        await docket.add_many(
            docket.call(remind, when=time_of(due))(text_of(number)) for number, due in enumerate(due_ms)
        )


async def work() -> None:
    """Run a worker."""
    logging.disable(logging.INFO)
    async with open_docket() as docket:
        docket.register(remind)
        async with Worker(
            docket, concurrency=JOBS_AT_ONCE, scheduling_resolution=DUE_LOOK, minimum_check_interval=SLOT_LOOK
        ) as worker:
            forever = asyncio.create_task(worker.run_forever())
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, forever.cancel)
            await asyncio.gather(forever, return_exceptions=True)


async def timed(work: Awaitable[object]) -> float:
    """Return the seconds that some work takes."""
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def in_turn(numbers: Iterable[int], call: Callable[[int], Awaitable[object]], at_once: int = 1) -> None:
    """Make calls, so many at a time."""
    left = iter(numbers)

    async def work() -> None:
        for number in left:
            await call(number)

    await asyncio.gather(*(work() for _ in range(at_once)))


async def measure_verbs(count: int) -> None:
    """Measure single calls, and adding in bulk."""
    when = datetime.now(UTC) + timedelta(hours=1)
    async with Docket("bench", f"unix://{sys.argv[2]}") as docket:

        async def add(number: int) -> None:
            await docket.add(remind, when=when, key=f"job-{number}")(f"Hello {number}")

        async def cancel(number: int) -> None:
            await docket.cancel(f"job-{number}")

        async def get(number: int) -> None:
            await docket.get_execution(f"job-{number}")

        docket.register(remind)
        calls = (docket.call(remind, when=when, key=f"job-{n}")(f"Hello {n}") for n in range(2 * count, 3 * count))
        tell(
            {
                "one": await timed(in_turn(range(count), add)),
                "at_once": await timed(in_turn(range(count, 2 * count), add, AT_ONCE)),
                "many": await timed(docket.add_many(calls)),
                "get": await timed(in_turn(range(count), get)),
                "cancel": await timed(in_turn(range(count), cancel)),
            }
        )


if sys.argv[1] == "verbs":
    asyncio.run(measure_verbs(int(sys.argv[3])))
else:
    run(lambda due_ms: asyncio.run(schedule(due_ms)), lambda: asyncio.run(work()))
