"""The drain loop: ticks, and exact waits between them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pipeline.core.clock import Clock
from pipeline.core.errors import SinkClosed, StoreProtocolError, StoreUnavailable
from pipeline.drain.pace import Pace
from pipeline.drain.tick import Tick, run_tick
from pipeline.drain.totals import Totals
from pipeline.sinks.base import Sink
from pipeline.store.base import DrainStore
from pipeline.store.patience import call_patiently

log = logging.getLogger(__name__)

T = TypeVar("T")


class Waiter(Protocol):
    """Waits, and ends the wait early for a newcomer or a stop."""

    def wait(self, timeout_ms: float) -> None:
        """Return after ``timeout_ms``, or before: when a message was scheduled that is due earlier, or on a stop."""
        ...


class Aside(Protocol):
    """Something that is done beside the deliveries: quickly, and without raising."""

    def __call__(self, free_ms: float, next_ms: float | None) -> None:
        """Do it, or leave it for later.

        Args:
            free_ms: the loop is about to wait so long; 0 between two claims.

            next_ms: how long nothing can be due, None if nothing is scheduled.
        """
        ...


@dataclass(slots=True)
class DrainLoop:
    """Delivers what is due until it is told to stop.

    It sleeps until exactly the next due time, at most ``wait_ms_max``: the cap bounds what a lost wake-up can cost.

    Args:
        loop_id: unique among all loops that ever run; it names the claims.

        until: None to run for ever, ``now`` to end when nothing is due, ``empty`` to end when nothing is scheduled or in
            flight.

        stopping: true once the loop has to end.

        asides: called after each pass, when nothing is in hand.

        pace: how fast it may deliver; the claims of ``store`` must be small enough for it.
    """

    store: DrainStore
    sink: Sink
    clock: Clock
    waiter: Waiter
    loop_id: str
    wait_ms_max: float
    until: str | None
    stopping: Callable[[], bool]
    random: Callable[[], float]
    pace: Pace = field(default_factory=Pace)
    totals: Totals = field(default_factory=Totals)
    asides: Sequence[Aside] = ()
    _passes: int = 0
    _started_ms: int = 0

    def run(self) -> Totals:
        """Run until ``stopping`` or ``until``. A server that does not answer is waited for.

        Raises:
            SinkClosed: nobody reads any more; the claims are given back.
            StoreProtocolError: the server holds something else than we know.
        """
        try:
            while not self.stopping():
                pause_ms = self.pace.pause_ms(self.clock.monotonic_ms())
                if pause_ms > 0:
                    self._rest(pause_ms, 0.0)
                    continue  # a newcomer may have ended the wait before
                tick = self._tick()
                if self._is_done(tick):
                    break
                if tick.next_ms != 0:
                    self._rest(self._idle_ms(tick), tick.next_ms)
                else:
                    self._do_asides(0.0, 0.0)
        except StoreUnavailable as exc:
            log.warning("stopped while Redis does not answer, so what was in hand comes again after its lease: %s", exc)
        except (SinkClosed, StoreProtocolError) as exc:
            self.totals.count_error(exc)
            raise
        return self.totals

    def _tick(self) -> Tick:
        name = f"{self.loop_id}:{self._passes}"
        self._passes += 1
        tick = run_tick(self.store, self.sink, self.clock, name, self.stopping, self._patiently)
        moved = self.totals.count_moved(tick.moved, tick.now_ms)
        self.totals.delivered += tick.delivered - tick.stale
        self.totals.stale += tick.stale
        self.totals.claimed += tick.claimed
        self.totals.repeated += sum(delivery.attempt > 1 for delivery in tick.handed)
        if not tick.stale:  # what is stale will be delivered, and then counted
            self.totals.count_lateness(tick.handed, tick.handed_ms)
        self.pace.count(tick.delivered + moved, tick.asked_ms)
        if tick.stale:
            log.warning("%d messages took longer than the lease, so they will be delivered again", tick.stale)
        if tick.first_lease_ms is not None and tick.first_lease_ms <= tick.now_ms:
            reclaimed = self._patiently(self.store.reclaim)
            self.totals.reclaimed += reclaimed
            if reclaimed:
                log.warning("took back %d messages of a loop that did not acknowledge them in time", reclaimed)
                return Tick(tick.delivered, tick.stale, tick.now_ms, 0, None)
        return tick

    def _is_done(self, tick: Tick) -> bool:
        """Whether what ``until`` asks for is reached; "now" is the time of the first pass, or it might never be."""
        if self.until == "now":
            self._started_ms = self._started_ms or tick.now_ms
            return tick.next_ms != 0 or (tick.last_due_ms or 0) > self._started_ms
        return self.until == "empty" and tick.next_ms is None and tick.first_lease_ms is None

    def _idle_ms(self, tick: Tick) -> float:
        idle_ms = self.wait_ms_max
        if tick.next_ms is not None:
            idle_ms = min(idle_ms, tick.next_ms)
        if tick.first_lease_ms is not None:
            idle_ms = min(idle_ms, tick.first_lease_ms - tick.now_ms)
        return max(idle_ms, 0.0)

    def _rest(self, free_ms: float, next_ms: float | None) -> None:
        started_ms = self.clock.monotonic_ms()
        self._do_asides(free_ms, next_ms)
        self.waiter.wait(max(0.0, free_ms - (self.clock.monotonic_ms() - started_ms)))

    def _do_asides(self, free_ms: float, next_ms: float | None) -> None:
        for aside in self.asides:
            aside(free_ms, next_ms)

    def _patiently(self, call: Callable[[], T]) -> T:
        def counted() -> T:
            try:
                return call()
            except StoreUnavailable as exc:
                self.totals.count_error(exc)
                raise

        return call_patiently(counted, self.waiter.wait, self.clock, self.random, self.stopping)
