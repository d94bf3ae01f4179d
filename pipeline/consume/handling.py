"""Handling messages with a function: what it raises makes the message come again, and a target that is down is left in peace."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.consume.consumer import Consumer, Outcome
from pipeline.store.entries import Entry

FAILURES_MAX = 5  # of different messages in a row; then it is not the messages
PAUSE_MS_FIRST, PAUSE_MS_MAX = 1_000, 60_000  # between two tries while the target is down; the pause doubles
DOWN_MS_MAX = 3_600_000  # then failures count again: messages that nobody can handle would else never end

log = logging.getLogger(__name__)


class TargetDown(Exception):
    """Raised by a handler: the message is not to blame, its target does not work."""


@dataclass(slots=True)
class Breaker:
    """Knows whether a target is down: after failures of several different messages in a row, until one is handled.

    ``pause_ms`` is how long to leave it in peace, 0 while it works.
    """

    pause_ms: float = 0.0
    _failed: set[str] = field(default_factory=set)
    _down_since_ms: float = 0.0

    def count_failure(self, entry: Entry, is_certain: bool, now_ms: float) -> bool:
        """Take note of a failure at a time on the monotonic clock; returns whether the message is to blame."""
        self._failed.add(entry.id)
        if not self.pause_ms and (is_certain or len(self._failed) > FAILURES_MAX):
            self._down_since_ms = now_ms
            self.pause_ms = PAUSE_MS_FIRST
        elif self.pause_ms:
            self.pause_ms = min(PAUSE_MS_MAX, self.pause_ms * 2)
        return not self.pause_ms or now_ms - self._down_since_ms > DOWN_MS_MAX

    def count_success(self) -> None:
        """Take note that the target works."""
        self._failed.clear()
        self.pause_ms = 0.0


def handle_all(consumer: Consumer, handler: Callable[[Entry], object]) -> None:
    """Give each message to ``handler`` and acknowledge it, until the consumer stops or is closed.

    What the handler raises never ends this: the message comes again, as ``Consumer.nack`` says. When more than ``FAILURES_MAX``
    different messages failed in a row, or the handler raises ``TargetDown``, the target is taken for down: then one message at a
    time is tried, with growing pauses, and for the first hour that costs it no attempt.

    Raises:
        PipelineError: what the consumer raises of ours.
    """
    breaker, limit = Breaker(), consumer.limit
    for entry in consumer:
        try:
            handler(entry)
        except Exception as exc:
            detail = f"{type(exc).__name__}: {exc}"
            worked = not breaker.pause_ms
            is_to_blame = breaker.count_failure(entry, isinstance(exc, TargetDown), consumer.clock.monotonic_ms())
            outcome = consumer.nack(entry, detail, counts=is_to_blame)
            if outcome is Outcome.DEAD:
                log.warning("message %s is a dead letter after %d attempts: %s", entry.id, entry.attempt, detail)
            if breaker.pause_ms:
                if worked:
                    log.warning("the target seems to be down (%s); trying again with one message at a time", detail)
                consumer.limit = 1
                consumer.hand_back()
                consumer.wait(breaker.pause_ms)
        else:
            if breaker.pause_ms:
                log.warning("the target works again")
                consumer.limit = limit
            breaker.count_success()
            consumer.ack(entry)
