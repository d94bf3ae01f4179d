"""The threads that post the messages of one topic."""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from pipeline.config import TopicSettings
from pipeline.consume.consumer import Consumer
from pipeline.consume.handling import Breaker, Refused, TargetDown, run
from pipeline.core.clock import Clock
from pipeline.core.errors import ConfigError
from pipeline.core.stop import Stop
from pipeline.store.entries import Entry
from pipeline.store.keys import Keys
from pipeline.webhooks.target import Target
from pipeline.webhooks.totals import Result, Totals

log = logging.getLogger(__name__)


class Poster:
    """Posts the messages of one topic, as consumers of its group, from ``start`` on until it is stopped.

    Each thread has a consumer of its own, and all share the target and the knowledge whether it is down.

    Args:
        settings: of the topic.

        secrets: that sign what is posted.

        open_consumer: makes a consumer of the group that reads some shards, and ends when the stop is requested.

        shares: the shards that each of the consumers reads, see ``opening.shards_of_consumers``.
    """

    def __init__(
        self,
        topic: str,
        settings: TopicSettings,
        secrets: Sequence[bytes],
        open_consumer: Callable[[str, TopicSettings, Stop, Sequence[Keys]], Consumer],
        shares: Sequence[Sequence[Keys]],
        totals: Totals,
        clock: Clock,
    ) -> None:
        self.topic, self.settings = topic, settings
        self.is_wrong = False  # whether it ended because of what only a person can change
        self._target = Target(settings, secrets, clock)
        self._open_consumer = open_consumer
        self._totals = totals
        self._clock = clock
        self._breaker, self._turns = Breaker(), threading.Semaphore(settings.webhook_concurrency)
        self._stop = Stop()
        # Threads of a target that never ends its answer must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._work, args=(shards,), name=f"webhook-{topic}", daemon=True)
            for shards in shares
        ]

    @property
    def is_target_down(self) -> bool:
        """Whether the target seems to be down."""
        return self._breaker.is_down

    def start(self) -> None:
        """Begin to post."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each thread finish what it has in hand; returns at once."""
        self._stop.requested = True

    def runs(self) -> bool:
        """Say whether any thread still works."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, until_ms: float) -> bool:
        """Wait until all threads have ended, at most until a time on the monotonic clock; returns whether they have."""
        for thread in self._threads:
            thread.join(max(0.0, until_ms - self._clock.monotonic_ms()) / 1000)
        return not self.runs()

    def _work(self, shards: Sequence[Keys]) -> None:
        try:
            with self._open_consumer(self.topic, self.settings, self._stop, shards) as consumer:
                if self.settings.webhook_concurrency > 1:
                    consumer.limit = 1  # what one thread read ahead, the others could not post
                consumer.on_outcome = partial(self._totals.count_outcome, self.topic)
                try:
                    run(consumer, self._post, self._breaker, self._turns)
                finally:
                    self._totals.count_late_acks(consumer.late_acks)
        except Exception as exc:  # of a thread nobody else would hear it
            if not self._stop.requested:
                self.is_wrong = isinstance(exc, ConfigError)
                then = "" if self.is_wrong else "; this is tried again"
                log.error(
                    "posting the messages of topic %s failed: %s: %s%s", self.topic, type(exc).__name__, exc, then
                )
                log.debug("the whole trace", exc_info=True)
        finally:
            self._stop.requested = True  # one that fails ends the others

    def _post(self, entry: Entry) -> None:
        result = Result.FAILED
        try:
            self._target.post(entry)
            result = Result.TAKEN
        except Refused:
            result = Result.REFUSED
            raise
        except TargetDown:
            result = Result.UNAVAILABLE
            raise
        finally:
            self._totals.count(entry, result, self._clock.wall_ms())
