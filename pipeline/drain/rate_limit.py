"""How fast a loop may deliver: what smooths a flood."""

from dataclasses import dataclass, field
from threading import Lock

BURSTS_A_SECOND = 10  # a burst is what the rate allows in a tenth of a second
CLAIMS_A_BURST = 2
PAUSE_MS_MIN = 0.001  # shorter is a rounding error
TAKEN_MS = 1_000  # a claim that takes longer is of a shard that is away: it no longer counts before it is delivered


@dataclass(slots=True)
class RateLimit:
    """Lets ``max_rate`` messages a second through, in bursts of at most a tenth of a second's; 0 lets everything through.

    A bucket that leaks: each message delivered fills it by one, and it empties at ``max_rate``. So in any T seconds at most
    (T + 0.1) x ``max_rate`` messages are claimed and delivered, and a load that stays below that never waits. The wait is between
    claims, when nothing is in flight whose lease could end; for that a claim must be no larger than ``claim_limit``. The loops of
    several shards may share it: a claim counts as full from when it may begin.
    """

    max_rate: int = 0
    _level: float = 0.0
    _level_ms: float = 0.0
    _taken_ms: list[float] = field(default_factory=list)  # when each claim began that is not counted yet
    _lock: Lock = field(default_factory=Lock)

    def claim_limit(self, claim_limit: int) -> int:
        """Return how many messages a claim may take, if it were ``claim_limit`` without a rate."""
        return min(claim_limit, self._claim()) if self.max_rate else claim_limit

    def pause_ms(self, now_ms: float) -> float:
        """Return how long the next claim has to wait, 0 if it may begin; then ``count`` has to follow.

        Args:
            now_ms: on the monotonic clock.
        """
        if not self.max_rate:
            return 0.0
        burst = max(1.0, self.max_rate / BURSTS_A_SECOND)
        with self._lock:
            self._taken_ms = [taken_ms for taken_ms in self._taken_ms if now_ms - taken_ms < TAKEN_MS]
            level = self._level_at(now_ms) + (1 + len(self._taken_ms)) * self._claim()
            pause_ms = (level - burst) * 1000 / self.max_rate
            if pause_ms >= PAUSE_MS_MIN:
                return pause_ms
            self._taken_ms.append(now_ms)
        return 0.0

    def count(self, delivered: int, claimed_ms: float) -> None:
        """Take note of messages that were delivered; ``claimed_ms`` is when they were claimed, on the monotonic clock."""
        if self.max_rate:
            with self._lock:
                del self._taken_ms[:1]
                at_ms = max(self._level_ms, claimed_ms)
                self._level, self._level_ms = self._level_at(at_ms) + delivered, at_ms

    def _claim(self) -> int:
        return max(1, self.max_rate // (BURSTS_A_SECOND * CLAIMS_A_BURST))

    def _level_at(self, now_ms: float) -> float:
        return max(0.0, self._level - (now_ms - self._level_ms) * self.max_rate / 1000)
