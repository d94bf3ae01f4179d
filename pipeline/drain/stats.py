"""What a drain loop counts, and the heartbeat that publishes it."""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import inf
from threading import Lock

from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.core.ids import ARRIVAL_LENGTH, arrival_ms
from pipeline.core.messages import Message
from pipeline.core.text import count_text, utc_text
from pipeline.store.base import Moved
from pipeline.store.heartbeats import IDLE_BEAT_MS, LOOP_COUNTERS, LoopProgress, LoopStats, TopicStats, add_up_topics
from pipeline.store.replication import LOOK_MS, Failover, FailoverWatch

OTHER_TOPICS = "(other)"  # no topic of ours can have this name
TOPIC_LENGTH_MAX = 64  # no topic of ours is longer; other producers may store what they like
BEAT_MS = 1_000  # between two heartbeats while something is counted

# Clocks of several machines differ, and tokens of one millisecond are a little ahead. An id that another program made of
# hexadecimal digits reads as a time before 1993 or after 2053, so it says nothing about the arrival of a message of today.
ARRIVAL_AHEAD_MS = 60_000

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Totals(LoopStats):
    """What a run of the loop did.

    Lateness is measured from when a message was due, or came in if that was later, to when the sink had all of its claim, on the
    clock of this machine; of what went into a stream to that moment, on the server's clock.

    Args:
        topics_max: topics that are counted by themselves, the first that come; all others are counted together.
    """

    topics_max: int = 100
    lock: Lock = field(default_factory=Lock)  # held by whoever counts: several loops, forwarders and the reclaimer do

    def count_forwarded(self, arrived_ms: Sequence[int], at_ms: int) -> None:
        """Count messages that are in Kafka since ``at_ms``, by when they came into the outbox on the server's clock."""
        with self.lock:
            self.forwarded += len(arrived_ms)
            for came_ms, alike in Counter(arrived_ms).items():
                self.outbox.add(at_ms - came_ms, alike)

    def count_refused(self) -> None:
        """Count a message that Kafka refused."""
        with self.lock:
            self.refused += 1

    def count_delivered(self, messages: Sequence[Message], delivered_ms: int) -> None:
        """Count messages that the sink had at ``delivered_ms`` and that were acknowledged; the caller holds ``lock``."""
        self.delivered += len(messages)
        alike: dict[tuple[str, str], list[int]] = {}  # most messages of a claim came in together
        for message in messages:
            alike.setdefault((message.topic, message.message_id[:ARRIVAL_LENGTH]), []).append(message.due_ms)
        for (topic, id_head), dues_ms in alike.items():
            stats = self.of_topic(topic)
            stats.delivered += len(dues_ms)
            self._count_lateness(stats, dues_ms, id_head, delivered_ms)

    def count_moved(self, moved: Sequence[Moved], at_ms: int) -> int:
        """Count what went into streams at ``at_ms`` on the server's clock; return how much. The caller holds ``lock``.

        A retry for a group was late once: only its first delivery counts for the lateness of its topic.
        """
        total = 0
        for topic, group, id_head, dues_ms in moved:
            stats = self.of_topic(topic)
            stats.delivered += len(dues_ms)
            total += len(dues_ms)
            if not group:
                self._count_lateness(stats, dues_ms, id_head, at_ms)
        self.claimed += total
        self.delivered += total
        return total

    def _count_lateness(self, stats: TopicStats, dues_ms: Sequence[int], id_head: str, at_ms: int) -> None:
        """Count from the due time, or from the arrival if that was later: what was late on arrival is nobody's delay here."""
        came_ms = arrival_ms(id_head)
        if came_ms is None or came_ms > at_ms + ARRIVAL_AHEAD_MS:
            came_ms = 0
        since_ms = sorted(dues_ms)
        if late := bisect_left(since_ms, came_ms):
            self.late_on_arrival += late
            since_ms[:late] = repeat(came_ms, late)
        stats.lateness.add_all(since_ms, at_ms)

    def count_error(self, error: Exception) -> None:
        """Count an error of ours under the name of what caused it: a class of the client or of the system."""
        kind = type(error.__cause__ or error).__name__
        with self.lock:
            self.errors[kind] = self.errors.get(kind, 0) + 1

    def of_topic(self, topic: str) -> TopicStats:
        """Return what is counted of a topic, or of all others together."""
        if found := self.topics.get(topic):
            return found
        fits = len(topic) <= TOPIC_LENGTH_MAX and len(self.topics) < self.topics_max
        return self.topics.setdefault(topic if fits else OTHER_TOPICS, TopicStats())

    def of_all_topics(self) -> TopicStats:
        """Return what is counted of all topics together."""
        return add_up_topics(self.topics.values())

    def snapshot(self) -> LoopStats:
        """Return a copy, for a thread that reads it while the loop goes on counting."""
        topics = {
            name: TopicStats(each.delivered, replace(each.lateness, counts=list(each.lateness.counts)))
            for name, each in list(self.topics.items())
        }
        counters = {name: getattr(self, name) for name in LOOP_COUNTERS}
        outbox = replace(self.outbox, counts=list(self.outbox.counts))
        stuck, errors = list(self.stuck_partitions), dict(self.errors)
        return LoopStats(**counters, outbox=outbox, stuck_partitions=stuck, errors=errors, topics=topics)

    def version(self) -> tuple[int, ...]:
        """Return numbers of which one differs after anything was counted."""
        counters = (getattr(self, name) for name in LOOP_COUNTERS)
        return *counters, sum(self.errors.values()), len(self.stuck_partitions)


class Heartbeat:
    """Publishes ``totals`` by ``write``: once a second while something is counted, and else often enough to count as running.

    Args:
        write: raises ``PipelineError`` if it can't; then it is published later.
    """

    def __init__(self, write: Callable[[LoopProgress], None], totals: Totals, clock: Clock, loop_id: str) -> None:
        self._write = write
        self._totals = totals
        self._clock = clock
        self._loop_id = loop_id
        self._started_ms = clock.wall_ms()
        self._failover: Failover | None = None
        self._published: tuple[int, ...] = ()
        self._published_ms = -inf

    def tell(self, failover: Failover) -> None:
        """Publish, with the next heartbeat, that a failover undid something."""
        self._failover = failover
        self._published_ms = -inf

    def step(self) -> float:
        """Publish, if there is something new or it is time for a sign of life; see ``background.Task``."""
        since_ms = self._clock.monotonic_ms() - self._published_ms
        if since_ms >= IDLE_BEAT_MS or self._published != self._totals.version():
            self.publish()
        return BEAT_MS

    def publish(self, has_ended: bool = False) -> None:
        """Publish now; ``has_ended`` says that it is the last time."""
        version = self._totals.version()
        progress = LoopProgress(
            loop_id=self._loop_id,
            started_ms=self._started_ms,
            has_ended=has_ended,
            failover=self._failover,
            stats=self._totals.snapshot(),
        )
        try:
            self._write(progress)
        except PipelineError as exc:
            log.debug("the heartbeat is published later: %s", exc)  # the loop itself logs what is wrong
        else:
            self._published = version
            self._published_ms = self._clock.monotonic_ms()


class FailoverLog:
    """Says when a failover undid deliveries, so that they may come twice.

    Args:
        tell: is given each.
    """

    def __init__(self, watch: FailoverWatch, tell: Callable[[Failover], object]) -> None:
        self._watch = watch
        self._tell = tell

    def step(self) -> float:
        """Look; see ``background.Task``."""
        if (found := self._watch.look()) and found.undone_bytes:
            log.warning(
                "a failover undid at least the last %s that Redis had taken: deliveries since %s may come twice",
                *(count_text(found.undone_bytes, "byte"), utc_text(found.since_ms)),
            )
            self._tell(found)
        return LOOK_MS
