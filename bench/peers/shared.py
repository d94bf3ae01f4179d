"""What the programs in Python here share: python NAME_jobs.py VERB SOCKET.

``schedule`` reads due times in epoch ms as a JSON list from stdin, schedules job 0, 1, 2, ... for them, and says how many seconds
that took: {"seconds": 1.5}. ``work`` runs a worker until SIGTERM, whose handler writes a line a job: epoch µs, space, its text.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

_OUT = os.dup(1)  # what libraries print goes to stderr instead
os.dup2(2, 1)


def text_of(number: int) -> str:
    """Return the text of a job: 33 bytes."""
    return f"reminder {number:09d} for a customer"


def time_of(due_ms: int) -> datetime:
    """Return a time with a zone."""
    return datetime.fromtimestamp(due_ms / 1000, UTC)


def record(text: str) -> None:
    """Handle a job: note when it came. One write of a short line is never torn, whoever else writes."""
    os.write(_OUT, b"%d %s\n" % (time.time_ns() // 1000, text.encode()))


def in_threads(due_ms: Sequence[int], schedule: Callable[[int, int], object], threads: int) -> None:
    """Call ``schedule(number, due_ms)`` for each job, from so many threads: they share the waits for the disk."""
    left: Iterator[tuple[int, int]] = iter(list(enumerate(due_ms)))  # an iterator of a list may be shared

    def work() -> None:
        for number, due in left:
            schedule(number, due)

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()


def tell(answer: object) -> None:
    """Write the answer of a verb."""
    os.write(_OUT, json.dumps(answer).encode() + b"\n")


def run(schedule: Callable[[Sequence[int]], object], work: Callable[[], object]) -> None:
    """Do what the command line says."""
    if sys.argv[1] == "work":
        work()
        return
    due_ms = json.load(sys.stdin)
    started = time.perf_counter()
    schedule(due_ms)
    tell({"seconds": time.perf_counter() - started})
