"""What a drain loop has done beside its deliveries, by a thread of its own: the loop never waits for it."""

import logging
from collections.abc import Callable, Sequence
from math import inf

from pipeline.config import TopicSettings
from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.drain.stats import Totals
from pipeline.store.keys import Keys
from pipeline.store.topics import Topics

ROUND_MS = 5_000  # a round of all topics takes at least so long while there is nothing to do
REST_MS_MIN = 50  # between two topics, so that 10,000 of them cost 20 looks a second
REST_FACTOR = 9  # it rests so many times as long as it worked: its share of the server stays below a tenth
FORGET_MS = 10_000  # between two looks for idempotency keys whose time is over, while there are few
TRIMS_MAX = 100  # scripts for one topic at a time, in each shard

log = logging.getLogger(__name__)


class Reclaimer:
    """Gives back the claims whose lease is over, once the loop has seen one.

    Args:
        reclaim: gives back some and returns how many messages, 0 if nothing is left; raises ``PipelineError`` if it can't.

        notify: lets all loops look for messages at once; raises ``PipelineError`` if it can't.
    """

    def __init__(self, reclaim: Callable[[], int], notify: Callable[[], object], totals: Totals) -> None:
        self._reclaim = reclaim
        self._notify = notify
        self._totals = totals
        self._is_requested = False

    def request(self) -> None:
        """Say that a lease is over; what there is to do is done by the next ``step``."""
        self._is_requested = True

    def step(self) -> float:
        """Give back what has expired, if it was requested; see ``background.Task``."""
        if not self._is_requested:
            return inf
        self._is_requested = False
        try:
            while reclaimed := self._reclaim():
                with self._totals.lock:
                    self._totals.reclaimed += reclaimed
                log.warning("took back %d messages of a loop that did not acknowledge them in time", reclaimed)
                self._notify()
        except PipelineError as exc:
            log.debug("reclaimed later: %s", exc)  # the loop itself logs what is wrong, and requests it again
        return inf


class Forgetter:
    """Forgets idempotency keys whose time is over, some at a time, also when no other message with one comes.

    Args:
        forget: for each shard, forgets some and says whether there may be more; raises ``PipelineError`` if it can't.
    """

    def __init__(self, forget: Sequence[Callable[[], bool]], clock: Clock) -> None:
        self._forget = forget
        self._clock = clock
        self._next_ms = clock.monotonic_ms()

    def step(self) -> float:
        """Forget some in each shard, if it is time to; see ``background.Task``."""
        began_ms = self._clock.monotonic_ms()
        if began_ms < self._next_ms:
            return self._next_ms - began_ms
        are_more = False
        for forget in self._forget:
            try:
                are_more = forget() or are_more
            except PipelineError as exc:
                log.debug("forgotten later: %s", exc)  # the loop itself logs what is wrong
        done_ms = self._clock.monotonic_ms()
        rest_ms = max(REST_MS_MIN, REST_FACTOR * (done_ms - began_ms)) if are_more else FORGET_MS
        self._next_ms = done_ms + rest_ms
        return rest_ms


class Trimmer:
    """Drops what streams need not keep and has loops look at what is held, for one topic at a time.

    The latter is for a clock of the server that was set back, and for who writes settings or pauses past ``Topics``.
    """

    def __init__(
        self, topics: Topics, shards: Sequence[Keys], of_topic: Callable[[str], TopicSettings], clock: Clock
    ) -> None:
        self._topics = topics
        self._shards = shards
        self._of_topic = of_topic
        self._clock = clock
        self._waiting: list[str] = []
        self._pause_ms = float(ROUND_MS)  # between two topics that need nothing
        self._next_ms = clock.monotonic_ms()

    def step(self) -> float:
        """Look after the next topic, if it is time to; see ``background.Task``. What can't be done now is done later."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._next_ms:
            return self._next_ms - now_ms
        is_busy = False
        try:
            if not self._waiting:
                self._waiting = self._topics.names()[::-1]
                self._pause_ms = ROUND_MS / max(1, len(self._waiting))
            is_busy = bool(self._waiting) and self._look_after(self._waiting.pop()) > 0
        except PipelineError as exc:
            log.debug("trimmed later: %s", exc)  # the loop itself logs what is wrong
        done_ms = self._clock.monotonic_ms()
        rest_ms = max(REST_MS_MIN if is_busy else self._pause_ms, REST_MS_MIN, REST_FACTOR * (done_ms - now_ms))
        self._next_ms = done_ms + rest_ms
        return rest_ms

    def _look_after(self, topic: str) -> int:
        """Trim one topic; returns how many entries its streams lost."""
        settings, server_ms = self._of_topic(topic), self._topics.now_ms()
        done = 0
        for keys in self._shards:
            try:
                for _ in range(TRIMS_MAX):
                    count = self._topics.trim(keys, topic, settings, server_ms)
                    done += count
                    if count == 0:
                        break
                self._topics.look_again(keys, topic)
            except PipelineError as exc:
                log.debug("trimmed later: %s", exc)  # the other shards don't wait for this one
        return done
