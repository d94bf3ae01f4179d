"""How late messages came: a histogram, small enough to keep one for each topic and to send about."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pipeline.core.text import span_text

# A lateness belongs to the first bound that it is not above; what is later than all has a place of its own at the end.
BOUNDS_MS: Final = (
    *(1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500),
    *(1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 600_000, 3_600_000, 86_400_000),
)


@dataclass(slots=True)
class Lateness:
    """How many messages were how late; ``counts`` has one number for each of ``BOUNDS_MS``, and one for what is later."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    sum_ms: int = 0
    max_ms: int = 0

    def add(self, lateness_ms: int, messages: int = 1) -> None:
        """Count messages; what seems early, on a clock that differs from the server's, counts as 0 ms late."""
        lateness_ms = max(0, lateness_ms)
        self.counts[bisect_left(BOUNDS_MS, lateness_ms)] += messages
        self.sum_ms += lateness_ms * messages
        self.max_ms = max(self.max_ms, lateness_ms)

    def add_all(self, since_ms: Sequence[int], at_ms: int) -> None:
        """Count one message for each of ``since_ms``, in order of time, that came at ``at_ms``; as ``add`` does it.

        Of many it looks for the bounds among the messages, not for each message among the bounds.
        """
        if not since_ms:
            return
        in_time = bisect_left(since_ms, at_ms)  # those behind it seem early
        later = len(since_ms)  # those before it are later than the bounds so far
        for index, bound_ms in enumerate(BOUNDS_MS):
            first = bisect_left(since_ms, at_ms - bound_ms, hi=later)
            self.counts[index] += later - first
            later = first
        self.counts[-1] += later
        self.sum_ms += in_time * at_ms - sum(since_ms[:in_time])
        self.max_ms = max(self.max_ms, at_ms - since_ms[0])

    def total(self) -> int:
        """Return how many messages are counted."""
        return sum(self.counts)

    def quantile_ms(self, share: float) -> int:
        """Return a time that at least ``share`` (0 to 1) of the messages were not later than; never less than the true one.

        It is a bound of the histogram, or the maximum if that is less; 0 if nothing is counted.
        """
        wanted, seen = share * self.total(), 0
        for count, bound_ms in zip(self.counts, BOUNDS_MS, strict=False):
            seen += count
            if seen >= wanted:
                return min(bound_ms, self.max_ms)
        return self.max_ms

    def __str__(self) -> str:
        p50, p99, most = (span_text(ms) for ms in (self.quantile_ms(0.5), self.quantile_ms(0.99), self.max_ms))
        return f"p50 {p50}, p99 {p99}, max {most}"


def add_up(parts: Iterable[Lateness]) -> Lateness:
    """Return one histogram of all the messages that are counted in ``parts``."""
    whole = Lateness()
    for part in parts:
        whole.counts = [ours + theirs for ours, theirs in zip(whole.counts, part.counts, strict=True)]
        whole.sum_ms += part.sum_ms
        whole.max_ms = max(whole.max_ms, part.max_ms)
    return whole
