"""What a user of docket writes to schedule and cancel jobs. Prints seconds as JSON: python docket.py SOCKET COUNT."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

sys.path.remove(str(Path(__file__).parent))  # this file has the name of the library
from docket import Docket

AT_ONCE = 32


async def remind(message: str) -> None:
    """Be a job."""


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


async def main(socket: str, count: int) -> None:
    """Measure all."""
    when = datetime.now(UTC) + timedelta(hours=1)
    async with Docket("bench", f"unix://{socket}") as docket:

        async def add(number: int) -> None:
            await docket.add(remind, when=when, key=f"job-{number}")(f"Hello {number}")

        async def cancel(number: int) -> None:
            await docket.cancel(f"job-{number}")

        async def get(number: int) -> None:
            await docket.get_execution(f"job-{number}")

        docket.register(remind)
        seconds = {
            "one": await timed(in_turn(range(count), add)),
            "at_once": await timed(in_turn(range(count, 2 * count), add, AT_ONCE)),
            "get": await timed(in_turn(range(count), get)),
            "cancel": await timed(in_turn(range(count), cancel)),
        }
    print(json.dumps(seconds))


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
