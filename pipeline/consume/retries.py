"""What becomes of a message that could not be handled, and when it is retried."""

from collections.abc import Callable
from enum import StrEnum

from pipeline.config import TopicSettings

FAILED, ABANDONED = "failed", "abandoned"  # why a message is a dead letter; claim.lua has others: expired, dropped
JITTER = 0.25  # of the wait, up or down, so that what failed together is not retried together


class Outcome(StrEnum):
    """What became of a message that was not handled."""

    RETRY = "retry"
    DEAD = "dead"
    LEASE_LOST = "lease_lost"


def retry_delay_ms(attempt: int, settings: TopicSettings, random: Callable[[], float]) -> int:
    """Return the wait in milliseconds between the failure of ``attempt``, counting from 1, and the next one.

    It is never longer than ``backoff_ms_max``: there, the jitter only shortens it.

    Args:
        random: draws from [0, 1).
    """
    middle: int = min(settings.backoff_ms_max, settings.backoff_ms * 2 ** min(attempt - 1, 32))
    shortest, longest = middle * (1 - JITTER), min(settings.backoff_ms_max, middle * (1 + JITTER))
    return round(shortest + (longest - shortest) * random())
