"""How long to wait before the same call is tried again."""

from collections.abc import Callable

BACKOFF_MS_FIRST = 50
BACKOFF_MS_MAX = 5_000


def backoff_ms(attempt: int, random: Callable[[], float]) -> float:
    """Return the wait in milliseconds before try ``attempt`` + 1, ``attempt`` counting from 1.

    The ceiling doubles from 50 ms to 5 s. The wait is drawn from its upper half, so that a fleet which lost one server
    does not come back in step.

    Args:
        attempt: how many tries have failed, at least 1.

        random: draws from [0, 1).
    """
    ceiling = min(BACKOFF_MS_MAX, BACKOFF_MS_FIRST * 2 ** min(attempt - 1, 16))
    return float(ceiling * (0.5 + random() / 2))
