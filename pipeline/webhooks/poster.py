"""The threads that post the messages of one topic."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.config import TopicSettings
from pipeline.consume.consumer import Consumer
from pipeline.consume.handling import Breaker, Refused, run
from pipeline.core.clock import Clock
from pipeline.core.errors import ConfigError
from pipeline.core.lateness import Lateness
from pipeline.core.stop import Stop
from pipeline.core.text import count_text
from pipeline.store.entries import Entry
from pipeline.store.keys import Keys
from pipeline.webhooks.target import Target

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Totals:
    """What a job has posted; threads may count at the same time. The lateness is of messages that were taken at first."""

    posted: int = 0
    refused: int = 0
    failed: int = 0
    late_acks: int = 0
    lateness: Lateness = field(default_factory=Lateness)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_posted(self, entry: Entry, at_ms: int) -> None:
        """Count a message that its target has taken."""
        with self._lock:
            self.posted += 1
            if entry.attempt == 1:
                self.lateness.add(at_ms - entry.due_ms)

    def count(self, refused: int = 0, failed: int = 0, late_acks: int = 0) -> None:
        """Count what went otherwise."""
        with self._lock:
            self.refused += refused
            self.failed += failed
            self.late_acks += late_acks

    def __str__(self) -> str:
        lateness = f", lateness {self.lateness}" if self.lateness.total() else ""
        tries = count_text(self.failed, "failed try", "failed tries")
        return (
            f"posted {count_text(self.posted, 'message')}{lateness}; {self.refused:,} refused, {tries}, "
            f"{self.late_acks:,} late acks"
        )


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
                try:
                    run(consumer, self._post, self._breaker, self._turns)
                finally:
                    self._totals.count(late_acks=consumer.late_acks)
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
        try:
            self._target.post(entry)
        except Refused:
            self._totals.count(refused=1)
            raise
        except Exception:
            self._totals.count(failed=1)
            raise
        self._totals.count_posted(entry, self._clock.wall_ms())
