"""How fast a loop may deliver: what smooths a flood."""

from dataclasses import dataclass

BURSTS_A_SECOND = 10  # a burst is what the rate allows in a tenth of a second
CLAIMS_A_BURST = 2
PAUSE_MS_MIN = 0.001  # shorter is a rounding error


@dataclass(slots=True)
class RateLimit:
    """Lets ``max_rate`` messages a second through, in bursts of at most a tenth of a second's; 0 lets everything through.

    A bucket that leaks: each message delivered fills it by one, and it empties at ``max_rate``. So in any T seconds at most
    (T + 0.1) x ``max_rate`` messages are claimed and delivered, and a load that stays below that never waits. The wait is between
    claims, when nothing is in flight whose lease could end; for that a claim must be no larger than ``claim_limit``.
    """

    max_rate: int = 0
    _level: float = 0.0
    _level_ms: float = 0.0

    def claim_limit(self, claim_limit: int) -> int:
        """Return how many messages a claim may take, if it were ``claim_limit`` without a rate."""
        return min(claim_limit, self._claim()) if self.max_rate else claim_limit

    def pause_ms(self, now_ms: float) -> float:
        """Return how long the next claim has to wait, 0 if it has not.

        Args:
            now_ms: on the monotonic clock.
        """
        if not self.max_rate:
            return 0.0
        burst = max(1.0, self.max_rate / BURSTS_A_SECOND)
        pause_ms = (self._level_at(now_ms) + self._claim() - burst) * 1000 / self.max_rate
        return pause_ms if pause_ms >= PAUSE_MS_MIN else 0.0

    def count(self, delivered: int, claimed_ms: float) -> None:
        """Take note of messages that were delivered; ``claimed_ms`` is when they were claimed, on the monotonic clock."""
        if self.max_rate:
            self._level = self._level_at(claimed_ms) + delivered
            self._level_ms = claimed_ms

    def _claim(self) -> int:
        return max(1, self.max_rate // (BURSTS_A_SECOND * CLAIMS_A_BURST))

    def _level_at(self, now_ms: float) -> float:
        return max(0.0, self._level - (now_ms - self._level_ms) * self.max_rate / 1000)
