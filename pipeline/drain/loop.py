"""The drain loop: ticks, and exact waits between them."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pipeline.core.clock import Clock
from pipeline.core.errors import SinkClosed, StoreError, StoreProtocolError, StoreUnavailable
from pipeline.drain.rate_limit import RateLimit
from pipeline.drain.stats import Totals
from pipeline.drain.tick import Tick, Ticker
from pipeline.sinks.base import Sink
from pipeline.store.base import DrainStore
from pipeline.store.retry import retry_until_available

log = logging.getLogger(__name__)

T = TypeVar("T")


class Waiter(Protocol):
    """Waits, and ends the wait early for a new message or a stop."""

    def wait(self, timeout_ms: float) -> None:
        """Return after ``timeout_ms``, or before: when a message is there that is due earlier, or on a stop."""
        ...


@dataclass(slots=True)
class DrainLoop:
    """Delivers what is due until it has to stop.

    It sleeps until exactly the next due time, at most ``wait_ms_max``: the cap bounds what a lost wake-up can cost.

    Args:
        loop_id: unique among all loops that ever run; it names the claims.

        until: None to run for ever, ``now`` to end when nothing is due, ``empty`` to end when nothing is scheduled or in
            flight.

        stopping: true once the loop has to end.

        request_reclaim: called when a lease is over; it returns at once, and a wake-up says when its messages are back.

        rate_limit: how fast it may deliver; the claims of ``store`` must be small enough for it.

        prefetch_from: see ``Ticker``.
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
    request_reclaim: Callable[[], object]
    rate_limit: RateLimit = field(default_factory=RateLimit)
    totals: Totals = field(default_factory=Totals)
    prefetch_from: int = 0
    _started_ms: int = 0

    def run(self) -> Totals:
        """Run until ``stopping`` or ``until``. A server that does not answer is waited for.

        Raises:
            SinkClosed: nobody reads any more; the claims are given back.
            StoreProtocolError: the server holds something else than we know.
        """
        ticker = Ticker(
            self.store, self.sink, self.clock, self.loop_id, self.stopping, self._retrying, self.prefetch_from
        )
        try:
            while not self.stopping():
                pause_ms = self.rate_limit.pause_ms(self.clock.monotonic_ms())
                if pause_ms > 0:
                    self.waiter.wait(pause_ms)
                    continue  # a new message may have ended the wait before
                tick = ticker.run()
                self._count(tick)
                if self._is_done(tick):
                    break
                if tick.next_ms != 0:
                    self.waiter.wait(self._idle_ms(tick))
            if last := ticker.end():
                self._count(last)
        except StoreUnavailable as exc:
            log.warning(
                "stopped while Redis does not answer, so what is in flight is redelivered after its lease: %s", exc
            )
        except (SinkClosed, StoreProtocolError) as exc:
            self.totals.count_error(exc)
            with suppress(StoreError):
                if last := ticker.end(retry=False):
                    self._count(last)
            raise
        return self.totals

    def _count(self, tick: Tick) -> None:
        delivered = sum(len(each.messages) for each in tick.settled)
        with self.totals.lock:
            moved = self.totals.count_moved(tick.reply.moved, tick.reply.now_ms)
            self.totals.claimed += tick.claimed
            for each in tick.settled:
                self.totals.redelivered += sum(message.attempt > 1 for message in each.messages)
                if each.is_late:  # messages whose lease was lost are counted when they are redelivered
                    self.totals.late_acks += len(each.messages)
                    log.warning(
                        "%d messages took longer than the lease, so they will be delivered again", len(each.messages)
                    )
                else:
                    self.totals.count_delivered(each.messages, each.at_ms)
        self.rate_limit.count(delivered + moved, tick.asked_ms)
        if tick.is_lease_over:
            self.request_reclaim()

    def _is_done(self, tick: Tick) -> bool:
        """Whether what ``until`` asks for is reached; "now" is the time of the first pass, or it might never be."""
        if self.until == "now":
            self._started_ms = self._started_ms or tick.reply.now_ms
            is_past_it = tick.next_ms != 0 or (tick.last_due_ms or 0) > self._started_ms
            return is_past_it and not tick.is_lease_over  # what a dead loop had in flight is due, too
        return self.until == "empty" and tick.next_ms is None and tick.reply.first_lease_ms is None

    def _idle_ms(self, tick: Tick) -> float:
        idle_ms = self.wait_ms_max
        if tick.next_ms is not None:
            idle_ms = min(idle_ms, tick.next_ms)
        if tick.reply.first_lease_ms is not None and not tick.is_lease_over:
            idle_ms = min(idle_ms, tick.reply.first_lease_ms - tick.reply.now_ms)
        return max(idle_ms, 0.0)

    def _retrying(self, call: Callable[[], T]) -> T:
        def counted() -> T:
            try:
                return call()
            except StoreUnavailable as exc:
                self.totals.count_error(exc)
                raise

        return retry_until_available(counted, self.waiter.wait, self.clock, self.random, self.stopping)
