"""Handling messages with a function: a message is retried when it raises, and a target that is down is left in peace."""

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.consume.consumer import Consumer
from pipeline.core.errors import StoreUnavailable
from pipeline.store.entries import Entry

FAILURES_MAX = 5  # of different messages in a row; then it is not the messages
PAUSE_MS_FIRST, PAUSE_MS_MAX = 1_000, 60_000  # between two tries while the target is down; the pause doubles
DOWN_MS_MAX = 3_600_000  # then failures count again: messages that nobody can handle would else never end
FRAMES_MAX = 8  # of a traceback that a dead letter keeps, the innermost ones
DETAIL_CHARACTERS_MAX = 4_000  # of the last failure that a dead letter keeps
FIRST_LINE_CHARACTERS_MAX = 200

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


def run(consumer: Consumer, handler: Callable[[Entry], object]) -> None:
    """Call ``handler`` for each message and acknowledge it, until the consumer stops or is closed.

    While the handler works, the leases of its message and of those that wait behind it are renewed, for ``handler_timeout_sec`` at
    most. What the handler raises never ends this: the message is retried, as ``Consumer.nack`` says. When more than
    ``FAILURES_MAX`` different messages failed in a row, or the handler raises ``TargetDown``, the target is taken for down:
    then one message at a time is tried, with growing pauses, and for the first hour that costs it no attempt.

    Raises:
        PipelineError: what the consumer raises of ours.
    """
    try:
        _run(consumer, handler)
    except StoreUnavailable as exc:
        if not consumer.stopping():
            raise
        log.warning("stopped while Redis does not answer, so what is in flight is redelivered after its lease: %s", exc)


def _run(consumer: Consumer, handler: Callable[[Entry], object]) -> None:
    breaker, limit = Breaker(), consumer.limit
    for entry in consumer:
        try:
            with consumer.renewing():
                handler(entry)
        except Exception as exc:
            log.debug("the handler raised", exc_info=True)
            first_line = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"[:FIRST_LINE_CHARACTERS_MAX]
            worked = not breaker.pause_ms
            is_to_blame = breaker.count_failure(entry, isinstance(exc, TargetDown), consumer.clock.monotonic_ms())
            consumer.nack(entry, f"{first_line}\n{_short_traceback(exc)}", counts=is_to_blame)
            if breaker.pause_ms:
                if worked:
                    log.warning("the target seems to be down (%s); trying again with one message at a time", first_line)
                consumer.limit = 1
                consumer.pause(breaker.pause_ms)
        else:
            if breaker.pause_ms:
                log.warning("the target works again")
                consumer.limit = limit
            breaker.count_success()
            consumer.ack(entry)


def _short_traceback(exc: Exception) -> str:
    """Return the innermost frames of the handler, and what it raised."""
    frames = exc.__traceback__ and exc.__traceback__.tb_next  # the first one is ours
    text = "".join(traceback.format_exception(type(exc), exc, frames, limit=-FRAMES_MAX, chain=False))
    return text[-DETAIL_CHARACTERS_MAX:]
