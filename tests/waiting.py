"""Waiting for what happens in another thread or process."""

import time
from collections.abc import Callable
from threading import Event

DEADLINE_SEC = 120  # far more than a slow machine needs; only a test that fails waits for so long
LOOK_SEC = 0.01


def wait_until(
    condition: Callable[[], object], wanted: str | Callable[[], str] = "it comes true", within_sec: float = DEADLINE_SEC
) -> None:
    """Return once a condition holds.

    Raises:
        AssertionError: it did not in so long; names what was ``wanted``, which may be asked for only then.
    """
    end_sec = time.monotonic() + within_sec
    while not condition():
        if time.monotonic() >= end_sec:
            raise AssertionError(f"not within {within_sec} seconds: {wanted() if callable(wanted) else wanted}")
        Event().wait(LOOK_SEC)
