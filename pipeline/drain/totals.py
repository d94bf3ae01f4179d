"""What a loop counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.core.lateness import Lateness, add_up
from pipeline.sinks.base import Delivery

OTHER_TOPICS = "(other)"  # no topic of ours can have this name
TOPIC_LENGTH_MAX = 64  # no topic of ours is longer; other producers may store what they like


@dataclass(slots=True)
class Totals:
    """What a run of the loop did, in messages.

    ``claimed`` is what it took; ``delivered`` what it handed over and acknowledged, or moved into a stream; ``stale`` what it
    handed over, but did not acknowledge before its lease was over. ``repeated`` is what it handed over and somebody may have
    before, under a claim that ended without acknowledgement; ``reclaimed`` what it gave back for loops that did not. ``errors``
    counts by the name of the cause.

    ``topics`` tells how late came what is delivered: from when it was due to when the sink had all of its claim, on the clock of
    this machine, as ``delivered_ms`` on the screen; of what went into a stream, to that moment on the server's clock.

    Args:
        topics_max: topics that are counted by themselves, the first that come; all others are counted together.
    """

    topics_max: int = 100
    claimed: int = 0
    delivered: int = 0
    stale: int = 0
    repeated: int = 0
    reclaimed: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    topics: dict[str, Lateness] = field(default_factory=dict)

    def count_lateness(self, deliveries: Sequence[Delivery], delivered_ms: int) -> None:
        """Take note of messages that were out at ``delivered_ms``."""
        # In a flood many are due in one millisecond; so counted, they cost next to nothing.
        for (topic, due_ms), messages in Counter((d.message.topic, d.due_ms) for d in deliveries).items():
            lateness = self.topics.get(topic) or self._topic(topic)
            lateness.add(delivered_ms - due_ms, messages)

    def count_moved(self, moved: Mapping[str, Sequence[int]], at_ms: int) -> int:
        """Take note of what went into streams at ``at_ms`` on the server's clock, by topic or ``<topic>:<group>``; return how much.

        What comes again for a group was late once: only its first time counts for the lateness of its topic.
        """
        for name, dues in moved.items():
            self.claimed += len(dues)
            self.delivered += len(dues)
            topic, _, group = name.partition(":")
            if not group:
                lateness = self.topics.get(topic) or self._topic(topic)
                for due_ms, messages in Counter(dues).items():
                    lateness.add(at_ms - due_ms, messages)
        return sum(map(len, moved.values()))

    def count_error(self, error: Exception) -> None:
        """Take note of an error of ours, under the name of what caused it: a class of the client or of the system."""
        kind = type(error.__cause__ or error).__name__
        self.errors[kind] = self.errors.get(kind, 0) + 1

    def lateness(self) -> Lateness:
        """Return how late the messages of all topics came."""
        return add_up(self.topics.values())

    def numbers(self) -> tuple[int, ...]:
        """Return numbers of which one differs after anything was counted."""
        return self.claimed, self.delivered, self.stale, self.repeated, self.reclaimed, sum(self.errors.values())

    def _topic(self, topic: str) -> Lateness:
        fits = len(topic) <= TOPIC_LENGTH_MAX and len(self.topics) < self.topics_max
        return self.topics.setdefault(topic if fits else OTHER_TOPICS, Lateness())
