"""Calls to Redis from a thread, for as long as its caller may wait."""

import random
import threading
from collections.abc import Callable
from typing import TypeVar

from pipeline.core.clock import Clock
from pipeline.store.retry import retry_until_available

T = TypeVar("T")


class Patience:
    """Makes a call again until it is answered, for at most so many seconds.

    A full server is told at once, and so is a cold folder that is away.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._ms = seconds * 1000

    def __call__(self, call: Callable[[], T]) -> T:
        """Make a call that may be repeated.

        Raises:
            StoreError: no answer, or an error.
            ColdUnavailable: it takes the cold folder, which is away.
        """
        end_ms = self._clock.monotonic_ms() + self._ms
        return retry_until_available(
            call,
            lambda ms: threading.Event().wait(ms / 1000),
            self._clock,
            random.random,
            lambda: self._clock.monotonic_ms() >= end_ms,
            waits_long=False,
        )
