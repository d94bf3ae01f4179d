"""A clock that a test moves."""


class ManualClock:
    """Stands still until somebody moves it on.

    Args:
        epoch_ms: the wall clock's time when ``now_ms`` is 0; change it to set the wall clock alone.
        now_ms: the monotonic clock, which a test may also set.
    """

    def __init__(self, epoch_ms: int = 0, now_ms: float = 0) -> None:
        self.epoch_ms = epoch_ms
        self.now_ms: float = now_ms

    def wall_ms(self) -> int:
        return self.epoch_ms + round(self.now_ms)

    def monotonic_ms(self) -> float:
        return self.now_ms

    def advance_ms(self, ms: float) -> None:
        self.now_ms += ms
