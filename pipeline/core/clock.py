"""The one file that reads a clock.

Wall time is for what is stored or compared with other machines; monotonic time is for measuring and for deadlines. The due time of
a message is judged by the Redis server's clock alone, inside the scripts.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """What a loop may ask of time; tests hand in their own."""

    def wall_ms(self) -> int:
        """Return epoch milliseconds UTC."""
        ...

    def monotonic_ms(self) -> float:
        """Return milliseconds from an arbitrary start that never jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        return time.monotonic_ns() / 1_000_000
