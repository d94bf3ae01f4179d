"""What becomes of a message that could not be handled, and when it is retried."""

import logging
from collections.abc import Callable
from enum import StrEnum

from pipeline.config import TopicSettings
from pipeline.core.dead import DeadReason
from pipeline.core.text import span_text, visible
from pipeline.store.entries import Entry

# Why a message is a dead letter; claim.lua has others: expired, dropped.
FAILED, ABANDONED, REFUSED = DeadReason.FAILED, DeadReason.ABANDONED, DeadReason.REFUSED
JITTER = 0.25  # of the wait, up or down, so that what failed together is not retried together

log = logging.getLogger(__name__)


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


def log_outcome(
    outcome: Outcome, entry: Entry, reason: str, detail: str, attempts_max: int, delay_ms: int, counts: bool
) -> None:
    """Log what became of a message, with the first line of why.

    Args:
        counts: whether it cost an attempt.
    """
    why = f": {visible(detail.partition(chr(10))[0])}" if detail else ""
    if outcome == Outcome.LEASE_LOST:
        log.warning("message %s %s, after its lease, so it is redelivered%s", entry.id, reason, why)
    elif outcome == Outcome.DEAD and reason == REFUSED:
        log.warning("message %s is a dead letter: it was refused at attempt %d%s", entry.id, entry.attempt, why)
    elif outcome == Outcome.DEAD:
        log.warning("message %s is a dead letter after %d attempts%s", entry.id, entry.attempt, why)
    else:
        of = f"attempt {entry.attempt} of {attempts_max}" if counts else "which costs no attempt"
        log.warning("message %s %s (%s), next try in %s%s", entry.id, reason, of, span_text(delay_ms), why)
