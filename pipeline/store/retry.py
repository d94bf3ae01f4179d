"""Waiting for a server that does not answer."""

import logging
from collections.abc import Callable
from typing import TypeVar

from pipeline.core.backoff import backoff_ms
from pipeline.core.clock import Clock
from pipeline.core.errors import ColdUnavailable, DiskFull, StoreFull, StoreUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

_AWAITED = {ColdUnavailable: "the cold folder", DiskFull: "the disk"}
COMPLAIN_MS = 60_000  # an outage is told at its start and then this often


def retry_until_available(
    call: Callable[[], T],
    wait: Callable[[float], object],
    clock: Clock,
    random: Callable[[], float],
    stopping: Callable[[], bool] = lambda: False,
    waits_long: bool = True,
) -> T:
    """Make a call to a store again until the server answers it, or to a folder until it can be used.

    Every call of ``SchedulingStore``, ``DrainStore``, ``GroupStore`` and ``ColdFolder`` may be repeated.

    Args:
        wait: pauses for so many milliseconds, or less.

        random: draws from [0, 1), for the backoff's jitter.

        waits_long: also for what somebody has to put right: a server that is full, a folder of cold files that is away.
    Raises:
        StoreUnavailable, ColdUnavailable, DiskFull: ``stopping`` turned true first.
        StoreFull, ColdUnavailable: as said.
    """
    failures, complained_ms, what = 0, 0.0, ""
    while True:
        try:
            result = call()
        except (StoreUnavailable, ColdUnavailable, DiskFull) as exc:
            if stopping() or (isinstance(exc, StoreFull | ColdUnavailable) and not waits_long):
                raise
            failures += 1
            if failures == 1 or clock.monotonic_ms() - complained_ms >= COMPLAIN_MS:
                what = _AWAITED.get(type(exc), "Redis")
                log.warning("waiting for %s: %s", what, exc)
                complained_ms = clock.monotonic_ms()
            wait(backoff_ms(failures, random))
        else:
            if failures:
                log.warning("%s %s", what, "answers again" if what == "Redis" else "can be used again")
            return result
