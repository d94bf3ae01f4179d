"""Handling messages with a function: a message is retried when it raises, and a target that is down is left in peace."""

import logging
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.consume.consumer import Consumer
from pipeline.core.due import DELAY_SEC_MAX
from pipeline.core.errors import StoreUnavailable
from pipeline.store.entries import Entry

SENT_MAX, SENT_MS_MAX = 50, 100  # messages, and how long, that an answer to their acknowledgement is not waited for
FAILURES_MAX = 5  # of different messages in a row; then it is not the messages
PAUSE_MS_FIRST, PAUSE_MS_MAX = 1_000, 60_000  # between two tries while the target is down; the pause doubles
DOWN_MS_MAX = 3_600_000  # then failures count again: messages that nobody can handle would else never end
FRAMES_MAX = 8  # of a traceback that a dead letter keeps, the innermost ones
DETAIL_CHARACTERS_MAX = 4_000  # of the last failure that a dead letter keeps
FIRST_LINE_CHARACTERS_MAX = 200

log = logging.getLogger(__name__)


class Refused(Exception):
    """Raised by a handler: the message can never be handled, so it becomes a dead letter at once, with the reason ``refused``."""


class Gone(Refused):
    """Raised by a handler: the message is refused as its target is gone, which counts as a failure of the target."""


class RetryLater(Exception):
    """Raised by a handler: the message failed, as if anything else was raised, but the handler says when it is retried.

    Args:
        after_sec: how long it waits, 0 to 366 days; None means as long as the settings of its topic say.

        detail: why, for the log and the dead letter.
    Raises:
        ValueError: ``after_sec`` is out of its range.
    """

    def __init__(self, after_sec: float | None, detail: str = "") -> None:
        super().__init__(detail)
        self.after_sec = after_sec if after_sec is None else _checked(after_sec)


class TargetDown(Exception):
    """Raised by a handler: the message is not to blame, its target does not work.

    Args:
        detail: why, for the log.

        after_sec: how long nothing is tried, 0 to 366 days, if the target said so.
    Raises:
        ValueError: ``after_sec`` is out of its range.
    """

    def __init__(self, detail: str = "", after_sec: float | None = None) -> None:
        super().__init__(detail)
        self.after_sec = after_sec if after_sec is None else _checked(after_sec)


@dataclass(slots=True)
class Breaker:
    """Knows whether a target is down: after failures of several different messages in a row, until one is handled.

    While it is down, one message at a time is tried, after pauses that grow. The consumers of several threads may share one, so
    that a target that goes down fails no more messages of theirs than of a single consumer. All times are milliseconds on the
    monotonic clock.
    """

    _pause_ms: float = 0.0  # between two tries; 0 while the target works
    _paused_ms: float = 0.0  # when the pause began
    _until_ms: float = 0.0
    _is_tried: bool = False  # whether a message is tried now, though the target is down
    _down_since_ms: float = 0.0
    _failed: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_down(self) -> bool:
        """Whether the target seems to be down."""
        return self._pause_ms > 0

    def wait_ms(self, now_ms: float) -> float:
        """Return how long to leave the target in peace; 0 means that a message may be tried."""
        with self._lock:
            return self._wait_ms(now_ms)

    def begin(self, now_ms: float) -> bool:
        """Say whether a message may be tried now; then its failure or success must be counted."""
        with self._lock:
            if self._wait_ms(now_ms) > 0:
                return False
            self._is_tried = self._pause_ms > 0
            return True

    def count_failure(self, entry: Entry, exc: Exception, began_ms: float, now_ms: float) -> bool:
        """Take note of what was raised for a message that was tried at ``began_ms``; returns whether the message is to blame."""
        with self._lock:
            self._failed.add(entry.id)
            if not self._pause_ms:
                if not isinstance(exc, TargetDown) and len(self._failed) <= FAILURES_MAX:
                    return True
                self._down_since_ms = now_ms
                self._pause(PAUSE_MS_FIRST, now_ms)
                log.warning(
                    "the target seems to be down (%s); trying again with one message of topic %s at a time",
                    *(_first_line(exc), entry.topic),
                )
            elif began_ms >= self._paused_ms:  # what was tried before tells nothing new
                self._pause(min(PAUSE_MS_MAX, self._pause_ms * 2), now_ms)
            if isinstance(exc, TargetDown) and exc.after_sec is not None:
                self._until_ms = max(self._until_ms, now_ms + exc.after_sec * 1000)
            return now_ms - self._down_since_ms > DOWN_MS_MAX

    def count_success(self, entry: Entry, began_ms: float) -> None:
        """Take note that the target works, as it did with a message that was tried at ``began_ms``."""
        with self._lock:
            if self._pause_ms:
                if began_ms < self._paused_ms:  # it has failed, or asked for a pause, since
                    return
                log.warning("the target works again (topic %s)", entry.topic)
            self._failed.clear()
            self._pause_ms, self._is_tried = 0.0, False

    def _pause(self, pause_ms: float, now_ms: float) -> None:
        self._pause_ms, self._paused_ms, self._is_tried = pause_ms, now_ms, False
        self._until_ms = now_ms + pause_ms

    def _wait_ms(self, now_ms: float) -> float:
        if not self._pause_ms:
            return 0.0
        return PAUSE_MS_FIRST if self._is_tried else max(0.0, self._until_ms - now_ms)


@dataclass(slots=True)
class Acks:
    """Acknowledgements of messages that were handled: each is sent at once, and the answers are waited for together."""

    consumer: Consumer
    _sent: list[Entry] = field(default_factory=list)
    _since_ms: float = 0.0

    def add(self, entry: Entry) -> None:
        """Acknowledge a message that was handled. In an ordered group, the next one has to wait for the answer."""
        if self.consumer.store.ordered:
            self.consumer.ack(entry)
            return
        now_ms = self.consumer.clock.monotonic_ms()
        self.consumer.store.send_ack(entry)
        self._since_ms = self._since_ms if self._sent else now_ms
        self._sent.append(entry)
        if len(self._sent) >= SENT_MAX or now_ms - self._since_ms >= SENT_MS_MAX:
            self.confirm()

    def confirm(self) -> None:
        """Wait for the answers; what may be lost is acknowledged again."""
        sent, self._sent = self._sent, []
        if sent:
            self.consumer.ack(*sent)


def run(
    consumer: Consumer,
    handler: Callable[[Entry], object],
    breaker: Breaker | None = None,
    turns: threading.Semaphore | None = None,
) -> None:
    """Call ``handler`` for each message and acknowledge it, until the consumer stops or is closed.

    While the handler works, the leases of its message and of those that wait behind it are renewed, for ``handler_timeout_sec`` at
    most. What the handler raises never ends this: the message is retried, as ``Consumer.nack`` says. ``RetryLater`` says when, and
    ``Refused`` that it is not retried. When more than ``FAILURES_MAX`` different messages failed in a row, or the handler raises
    ``TargetDown``, the target is taken for down: then one message at a time is tried, with growing pauses, and for the first hour
    that costs it no attempt.

    Args:
        breaker: shared with the consumers of other threads that have the same target.

        turns: shared with those, too: so many messages are handled at a time.
    Raises:
        PipelineError: what the consumer raises of ours.
    """
    breaker, turns, limit, acks = breaker or Breaker(), turns or threading.Semaphore(), consumer.limit, Acks(consumer)
    try:
        for entry in consumer:
            _handle(consumer, handler, entry, breaker, turns, acks)
            consumer.limit = 1 if breaker.is_down else limit
            if not consumer.has_more():  # the next step may wait
                acks.confirm()
            if wait_ms := breaker.wait_ms(consumer.clock.monotonic_ms()):
                acks.confirm()
                consumer.pause(wait_ms)
        acks.confirm()
    except StoreUnavailable as exc:
        if not consumer.stopping():
            raise
        log.warning("stopped while Redis does not answer, so what is in flight is redelivered after its lease: %s", exc)


def _handle(
    consumer: Consumer,
    handler: Callable[[Entry], object],
    entry: Entry,
    breaker: Breaker,
    turns: threading.Semaphore,
    acks: Acks,
) -> None:
    began_ms = None
    try:
        with consumer.renewing():
            began_ms = _begin(consumer, breaker, turns)
            if began_ms is not None:
                try:
                    handler(entry)
                finally:
                    turns.release()
    except Refused as exc:
        if isinstance(exc, Gone):
            breaker.count_failure(entry, exc, began_ms or 0.0, consumer.clock.monotonic_ms())
        else:
            breaker.count_success(entry, began_ms or 0.0)  # whoever refuses works
        consumer.refuse(entry, _said(exc))
    except Exception as exc:
        log.debug("the handler raised", exc_info=True)
        now_ms = consumer.clock.monotonic_ms()
        is_to_blame = breaker.count_failure(entry, exc, now_ms if began_ms is None else began_ms, now_ms)
        if isinstance(exc, RetryLater | TargetDown):
            after_ms = None if exc.after_sec is None else exc.after_sec * 1000
            consumer.nack(entry, _said(exc), counts=is_to_blame, after_ms=after_ms)
        else:
            consumer.nack(entry, f"{_first_line(exc)}\n{_short_traceback(exc)}", counts=is_to_blame)
    else:
        if began_ms is None:
            consumer.give_back(entry)
        else:
            breaker.count_success(entry, began_ms)
            acks.add(entry)


def _begin(consumer: Consumer, breaker: Breaker, turns: threading.Semaphore) -> float | None:
    """Hold a message while it is the turn of others, or another thread has found that the target is down.

    Returns:
        When it may be tried, on the monotonic clock, with a turn; None if the consumer stops first, or can't hold it any longer.
    """
    first_ms = now_ms = consumer.clock.monotonic_ms()
    has_turn = turns.acquire(blocking=False)
    while not (has_turn and breaker.begin(now_ms)):
        timeout_ms = consumer.settings.handler_timeout_sec * 1000  # then its lease is not renewed any more
        if consumer.stopping() or 0 < timeout_ms < 2 * (now_ms - first_ms):
            if has_turn:
                turns.release()
            return None
        if has_turn:
            consumer.wait(min(PAUSE_MS_FIRST, breaker.wait_ms(now_ms)))
        else:
            has_turn = turns.acquire(timeout=PAUSE_MS_FIRST / 1000)
        now_ms = consumer.clock.monotonic_ms()
    return now_ms


def _checked(after_sec: float) -> float:
    if not 0 <= after_sec <= DELAY_SEC_MAX:
        raise ValueError(f"after_sec must be 0 to {DELAY_SEC_MAX}, but is {after_sec!r}.")
    return after_sec


def _first_line(exc: Exception) -> str:
    return f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"[:FIRST_LINE_CHARACTERS_MAX]


def _said(exc: Exception) -> str:
    """Return what a handler said on purpose, which needs no traceback."""
    return str(exc)[:DETAIL_CHARACTERS_MAX] or type(exc).__name__


def _short_traceback(exc: Exception) -> str:
    """Return the innermost frames of the handler, and what it raised."""
    frames = exc.__traceback__ and exc.__traceback__.tb_next  # the first one is ours
    text = "".join(traceback.format_exception(type(exc), exc, frames, limit=-FRAMES_MAX, chain=False))
    return text[-DETAIL_CHARACTERS_MAX:]
