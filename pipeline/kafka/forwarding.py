"""All that a drain loop does to get messages into Kafka: a forwarder for each shard, and what they need beside them."""

import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from pipeline.config import KafkaSettings, RedisSettings, TopicSettings
from pipeline.core.background import Background
from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.kafka.cluster import Cluster, KafkaAway
from pipeline.kafka.forwarder import BLOCK_MS, Counts, Forwarder
from pipeline.kafka.properties import client_properties
from pipeline.kafka.sender import KafkaSender
from pipeline.store.keys import keys_of
from pipeline.store.layout import outbox_id
from pipeline.store.outbox import Outbox

KEEP_SHARE: Final = 1 / 4  # of a lease, after which it is renewed
TOPICS_MS: Final = 1_000  # so long the setting kafka_topic of a topic is taken for known
IN_USE_MS: Final = 300_000  # so long after its last message a topic is looked at
LOOK_MS: Final = 15_000  # between two looks for transactions that hang
STUCK_MS: Final = (
    60_000  # a transaction that is open for longer hangs: brokers end one after transaction_timeout_ms, and ten seconds
)

log = logging.getLogger(__name__)


class Forwarding:
    """Forwards the outboxes of all shards from ``start`` to ``stop``.

    Args:
        client: a ``redis.Redis``, which is asked by many threads.

        of_topic: the settings of a topic as they are now; may raise ``StoreError``.

        counts: told what happens.
    Raises:
        ConfigError: no cluster is named, or the file of its client is not fit.
    """

    def __init__(
        self,
        client: Any,
        redis: RedisSettings,
        kafka: KafkaSettings,
        of_topic: Callable[[str], TopicSettings],
        counts: Counts,
        name: str,
        clock: Clock,
    ) -> None:
        self._properties = client_properties(kafka.servers, kafka.client_config)
        self._client, self._redis, self._kafka = client, redis, kafka
        self._names = TopicNames(of_topic, clock)
        self._forwarders = [
            Forwarder(
                outbox=Outbox(client, keys, name, round(kafka.takeover_sec * 1000)),
                open_sender=partial(self._open_sender, keys.shard),
                batch_messages=kafka.batch_messages,
                standby_ms=kafka.takeover_sec * 1000 / 2,
                clock=clock,
                random=random.random,
                counts=counts,
                block_ms=max(1, min(BLOCK_MS, redis.reply_timeout_ms // 2)),  # 0 would be for ever
            )
            for keys in keys_of(redis)
        ]
        watch = _StuckWatch(self._properties, self._names, clock, counts)
        # Apart, as the one must not wait for Kafka.
        self._beside = [
            Background([_Leases(self._forwarders, kafka.takeover_sec * 1000 * KEEP_SHARE)]),
            Background([watch]),
        ]

    def start(self) -> None:
        """Begin."""
        for beside in self._beside:
            beside.start()
        for forwarder in self._forwarders:
            forwarder.start()

    def stop(self) -> None:
        """End when the batches under way are written."""
        for forwarder in self._forwarders:
            forwarder.request_stop()
        for forwarder in self._forwarders:
            forwarder.stop()
        for beside in self._beside:
            beside.stop()

    def is_done(self) -> bool:
        """Return whether all that came due is in Kafka; may raise ``StoreError``."""
        return all(each.is_done() for each in self._forwarders)

    def _open_sender(self, shard: int) -> KafkaSender:
        kafka = self._kafka
        name = f"duetime-{self._redis.namespace}-{outbox_id(self._client, self._redis)}-{shard}"
        return KafkaSender(
            self._properties,
            name,
            self._names.kafka_topic,
            kafka.exactly_once,
            kafka.transaction_timeout_ms,
            kafka.position_topic,
        )


class TopicNames:
    """The Kafka topic of each topic."""

    def __init__(self, of_topic: Callable[[str], TopicSettings], clock: Clock) -> None:
        self._of_topic = of_topic
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}

    def kafka_topic(self, topic: str) -> str:
        """Return it; may raise ``StoreError``."""
        now_ms = self._clock.monotonic_ms()
        name, asked_ms = self._known.get(topic, ("", -TOPICS_MS))
        if now_ms - asked_ms >= TOPICS_MS:
            name = self._of_topic(topic).kafka_topic or topic
            self._known[topic] = (name, now_ms)
        return name

    def in_use(self) -> set[str]:
        """Return the Kafka topics that were asked for lately, and forget the others."""
        now_ms = self._clock.monotonic_ms()
        for topic, (_, asked_ms) in list(self._known.items()):
            if now_ms - asked_ms > IN_USE_MS:
                self._known.pop(topic, None)
        return {name for name, _ in list(self._known.values())}


class _Leases:
    """Renews the leases of forwarders; see ``background.Task``."""

    def __init__(self, forwarders: Sequence[Forwarder], every_ms: float) -> None:
        self._forwarders = forwarders
        self._every_ms = every_ms

    def step(self) -> float:
        for each in self._forwarders:
            try:
                each.keep()
            except PipelineError as exc:
                log.debug("a lease is renewed later: %s", exc)  # the forwarder itself tells what is wrong
        return self._every_ms


class _StuckWatch:
    """Finds partitions that have an open transaction for too long, of whomever; see ``background.Task``."""

    def __init__(self, properties: dict[str, str], names: TopicNames, clock: Clock, counts: Counts) -> None:
        self._properties = properties
        self._names = names
        self._clock = clock
        self._counts = counts
        self._since: dict[str, tuple[int, float]] = {}
        self._cluster: Cluster | None = None

    def step(self) -> float:
        topics = self._names.in_use()
        try:
            self._cluster = self._cluster or (Cluster(self._properties) if topics else None)
            self._look(self._cluster.stuck_partitions(topics) if self._cluster and topics else {})
        except (KafkaAway, PipelineError) as exc:
            log.debug("open transactions are looked for later: %s", exc)
        return LOOK_MS

    def _look(self, found: dict[str, int]) -> None:
        now_ms = self._clock.monotonic_ms()
        before, self._since = self._since, {}
        for name, offset in found.items():
            known = before.get(name)
            self._since[name] = known if known and known[0] == offset else (offset, now_ms)
        stuck = [name for name, (_, since_ms) in self._since.items() if now_ms - since_ms >= STUCK_MS]
        for name in set(stuck) - set(self._counts.stuck_partitions):
            log.error(
                "a transaction in %s at offset %d is open for a minute: consumers that read committed stand still there; "
                "docs/kafka.md says what to do",
                *(name, self._since[name][0]),
            )
        self._counts.stuck_partitions = sorted(stuck)
