"""What a loop does for topics in its spare time: lets go what their streams need not keep, and ends resumes that were cut off."""

import logging
from collections.abc import Callable, Sequence
from itertools import islice

from pipeline.config import TopicSettings
from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.store.keys import Keys
from pipeline.store.topics import Topics

REST_MS, BUSY_MS = 5_000, 1_000  # between two topics; the latter after one that had something to drop
TRIMS_MAX, PUT_BACKS_MAX = 100, 50  # scripts for one topic at a time, in each shard

log = logging.getLogger(__name__)


class Housekeeping:
    """An aside of the loop that looks after one topic at a time, in turn; what can't be done now is done later."""

    def __init__(
        self, topics: Topics, shards: Sequence[Keys], of_topic: Callable[[str], TopicSettings], clock: Clock
    ) -> None:
        self._topics = topics
        self._shards = shards
        self._of_topic = of_topic
        self._clock = clock
        self._waiting: list[str] = []
        self._next_ms = clock.monotonic_ms()

    def __call__(self, free_ms: float, next_ms: float | None) -> None:
        """Look after the next topic, if it is time to; see ``loop.Aside``."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + REST_MS
        try:
            if not self._waiting:
                self._waiting = self._topics.names()
            if self._waiting and self._look_after(self._waiting.pop(0)):
                self._next_ms = now_ms + BUSY_MS
        except PipelineError as exc:
            log.debug("left for later: %s", exc)  # the loop itself tells what is the matter

    def _look_after(self, topic: str) -> int:
        """Look after one topic; returns how many entries its streams lost, and messages were put back."""
        server_ms = self._topics.now_ms()
        done = 0
        for keys in self._shards:
            for _ in range(TRIMS_MAX):
                count = self._topics.trim(keys, topic, self._of_topic(topic), server_ms)
                done += count
                if count == 0:
                    break
            done += sum(islice(self._topics.put_back(keys, topic), PUT_BACKS_MAX))
        return done
