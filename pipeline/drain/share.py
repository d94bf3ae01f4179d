"""A loop tells what it did, where ``jobs/status.py`` finds it."""

from collections.abc import Callable

from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.drain.totals import Totals
from pipeline.store.drains import DrainProgress

SHARE_MS = 1_000  # at most so often, when there is something new
SIGN_OF_LIFE_MS = 60_000  # when there is not; sooner than it is forgotten
FREE_MS = 100  # it is told while nothing can be due for so long: longer than it takes
BUSY_MS = 10_000  # a loop that never has so long tells it between two claims; after a failure it is not tried sooner


class Share:
    """Tells ``totals`` by ``write``, in moments when nothing waits for the loop. What can't be told now is told later.

    Args:
        write: raises ``PipelineError`` if it can't.
    """

    def __init__(self, write: Callable[[DrainProgress], None], totals: Totals, clock: Clock, loop_id: str) -> None:
        self._write = write
        self._totals = totals
        self._clock = clock
        self._loop_id = loop_id
        self._started_ms = clock.wall_ms()
        self._told: tuple[int, ...] = ()
        self._tried_ms = clock.monotonic_ms() - SHARE_MS
        self._failed = False

    def __call__(self, free_ms: float, next_ms: float | None) -> None:
        """Tell it, if it is time to; see ``loop.Aside``."""
        since_ms = self._clock.monotonic_ms() - self._tried_ms
        is_free = free_ms >= FREE_MS and not self._failed
        if since_ms < (SHARE_MS if is_free else BUSY_MS):
            return
        if since_ms >= SIGN_OF_LIFE_MS or self._told != self._totals.numbers():
            self.tell()

    def tell(self) -> None:
        """Tell it now."""
        totals = self._totals
        self._tried_ms = self._clock.monotonic_ms()
        progress = DrainProgress(
            loop_id=self._loop_id,
            started_ms=self._started_ms,
            seen_ms=self._clock.wall_ms(),
            claimed=totals.claimed,
            delivered=totals.delivered,
            stale=totals.stale,
            repeated=totals.repeated,
            reclaimed=totals.reclaimed,
            errors=totals.errors,
            topics=totals.topics,
        )
        try:
            self._write(progress)
        except PipelineError:
            self._failed = True  # the loop itself tells what is the matter
        else:
            self._failed = False
            self._told = totals.numbers()
