"""When a message that could not be handled comes again."""

from collections.abc import Callable

from pipeline.config import TopicSettings

FAILED, ABANDONED = "failed", "abandoned"  # why a message is a dead letter; a third, "expired", is said by claim.lua
JITTER = 0.25  # of the wait, up or down, so that what failed together does not come again together


def retry_delay_ms(attempt: int, settings: TopicSettings, random: Callable[[], float]) -> int:
    """Return the wait in milliseconds between the failure of ``attempt``, counting from 1, and the next one.

    Args:
        random: draws from [0, 1).
    """
    ceiling: int = min(settings.backoff_ms_max, settings.backoff_ms * 2 ** min(attempt - 1, 32))
    return round(ceiling * (1 - JITTER + 2 * JITTER * random()))
