"""What a job does beside its work, in a thread of its own."""

import logging
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from threading import Event, Thread
from typing import Final, Protocol, TypeVar

FAILED_MS: Final = 60_000  # after an error that nobody expected
STOP_SEC: Final = 2.0  # longer than a call of a task should take

log = logging.getLogger(__name__)

T = TypeVar("T")


def made_ahead(items: Iterable[T]) -> Generator[T]:
    """Yield items, each made in a thread while the one before is used; close it, and it waits for that thread."""
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1, "ahead") as beside:
        ahead = beside.submit(next, iterator, end)
        while (item := ahead.result()) is not end:
            ahead = beside.submit(next, iterator, end)
            yield item  # type: ignore[misc]


class Task(Protocol):
    """Something that is done now and then."""

    def step(self) -> float:
        """Do it, if it is time to; return after how many milliseconds it wants to be called again."""
        ...


class Background:
    """Runs tasks one after the other, in a thread between ``start`` and ``stop``; tests call ``step`` instead."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._wake = Event()
        self._is_stopping = False
        self._thread = Thread(target=self._run, name="background", daemon=True)

    def start(self) -> None:
        """Begin to run the tasks."""
        self._thread.start()

    def stop(self) -> None:
        """Return when the step that runs now has ended; one that hangs is left behind and ends with the process."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join(STOP_SEC)

    def wake(self) -> None:
        """Let the tasks have their step at once."""
        self._wake.set()

    def step(self) -> float:
        """Let each task have its step; returns after how many milliseconds the next one is due."""
        return min((task.step() for task in self._tasks), default=inf)

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                wait_ms = self.step()
            except Exception as exc:
                log.warning("work in the background failed and goes on in a minute: %s: %s", type(exc).__name__, exc)
                wait_ms = FAILED_MS
            self._wake.wait(None if wait_ms == inf else wait_ms / 1_000)
            self._wake.clear()
