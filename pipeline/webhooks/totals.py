"""What a job has posted since it started."""

import threading
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.consume.retries import Outcome
from pipeline.core.lateness import Lateness, add_up
from pipeline.core.text import count_text
from pipeline.store.entries import Entry


class Result(StrEnum):
    """What became of a request."""

    TAKEN = "taken"  # 2xx
    REFUSED = "refused"  # 410
    FAILED = "failed"  # another answer, or none
    UNAVAILABLE = "unavailable"  # no connection, or the target wants to be left in peace: no attempt of the message


@dataclass(slots=True)
class TopicTotals:
    """What was posted of one topic; the lateness is of messages that were taken at their first attempt."""

    requests: Counter[Result] = field(default_factory=Counter)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    lateness: Lateness = field(default_factory=Lateness)


class Totals:
    """Counts for all topics; threads may count at the same time."""

    def __init__(self) -> None:
        self.late_acks = 0
        self._topics: dict[str, TopicTotals] = {}
        self._lock = threading.Lock()

    def count(self, entry: Entry, result: Result, at_ms: int) -> None:
        """Count a request that ended at ``at_ms``, epoch ms."""
        with self._lock:
            topic = self._of(entry.topic)
            topic.requests[result] += 1
            if result is Result.TAKEN and entry.attempt == 1:
                topic.lateness.add(at_ms - entry.due_ms)

    def count_outcome(self, topic: str, outcome: Outcome) -> None:
        """Count what became of a message that was not taken."""
        with self._lock:
            self._of(topic).outcomes[outcome] += 1

    def count_late_acks(self, count: int) -> None:
        """Count messages that were taken after their lease."""
        with self._lock:
            self.late_acks += count

    def snapshot(self) -> dict[str, TopicTotals]:
        """Return a copy of what is counted, by topic."""
        with self._lock:
            return deepcopy(self._topics)

    @property
    def posted(self) -> int:
        """Requests that a target has taken."""
        return self._sum(Result.TAKEN)

    @property
    def refused(self) -> int:
        """Requests that were answered 410."""
        return self._sum(Result.REFUSED)

    @property
    def failed(self) -> int:
        """Requests that failed otherwise, whether that cost an attempt or not."""
        return self._sum(Result.FAILED) + self._sum(Result.UNAVAILABLE)

    @property
    def lateness(self) -> Lateness:
        """The lateness of all topics."""
        return add_up(each.lateness for each in self.snapshot().values())

    def __str__(self) -> str:
        lateness = f", lateness {each}" if (each := self.lateness).total() else ""
        tries = count_text(self.failed, "failed try", "failed tries")
        return (
            f"posted {count_text(self.posted, 'message')}{lateness}; {self.refused:,} refused, {tries}, "
            f"{self.late_acks:,} late acks"
        )

    def _sum(self, result: Result) -> int:
        return sum(each.requests[result] for each in self.snapshot().values())

    def _of(self, topic: str) -> TopicTotals:
        return self._topics.setdefault(topic, TopicTotals())
