"""A namespace whose messages go to Kafka, and forwarders of it in this process: for tests."""

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from pipeline.client import Request
from pipeline.client.sync import Duetime
from pipeline.config import ALL_TOPICS, DrainSettings, KafkaSettings, RedisSettings, Settings
from pipeline.core.clock import SystemClock
from pipeline.drain.stats import Totals
from pipeline.kafka.forwarding import Forwarding
from pipeline.runtime.process import wait_until
from pipeline.store.connection import connect
from pipeline.store.dead_letters import DeadLetters
from pipeline.store.entries import DeadLetter
from pipeline.store.keys import keys_of
from pipeline.store.namespace import change_topic_settings, current_topic_settings, open_namespace
from pipeline.store.shards import open_shards
from tests.kafka.broker import Broker
from tests.kafka.clients import Record
from tests.servers import RealServer

PAST_MS = 1_700_000_000_000
WAIT_SEC = 60.0


class Outflow:
    """Messages that come due, and what is in Kafka of them."""

    def __init__(self, broker: Broker, server: RealServer, shards: int = 1, namespace: str = "") -> None:
        self.broker = broker
        self.redis = RedisSettings(url=server.url, namespace=namespace or f"test-{uuid.uuid4().hex}", shards=shards)
        self._folder = server.folder
        self.client = connect(self.redis)
        self.shards = keys_of(self.redis)
        self.settings = Settings(redis=self.redis)
        open_namespace(self.client, self.redis, may_create=True)
        self.set(ALL_TOPICS, sink="kafka")
        self.duetime = Duetime.over(self.client, self.settings)
        self.letters = DeadLetters(self.client, self.shards)

    def set(self, topic: str, **settings: str) -> None:
        """Change settings of a topic."""
        change_topic_settings(self.client, self.redis, topic, settings)

    def topic(self, partitions: int = 1, **config: object) -> str:
        """Make a Kafka topic; returns its name."""
        name = f"t-{uuid.uuid4().hex}"
        self.broker.make_topic(name, partitions, **config)
        return name

    def client_file(self, properties: Mapping[str, str]) -> str:
        """Write a file of properties for the client; returns its name."""
        path = self._folder / f"{uuid.uuid4().hex}.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        return str(path)

    def come_due(self, requests: Iterable[Request]) -> None:
        """Let messages come due: they are in the outbox then."""
        self.duetime.schedule_many(requests)
        self.claim()

    def claim(self) -> None:
        """Move what is due."""
        for store in open_shards(self.client, self.redis, DrainSettings()):
            while (reply := store.claim("test:1:1")).moved:
                assert reply.claim is None

    @contextmanager
    def forwarding(self, name: str = "one", **kafka: object) -> Iterator[Totals]:
        """Forward while the block lasts; gives what is counted."""
        with self.running(name, **kafka) as (_, totals):
            yield totals

    @contextmanager
    def running(self, name: str = "one", **kafka: object) -> Iterator[tuple[Forwarding, Totals]]:
        """The same, with the forwarding itself."""
        chosen = KafkaSettings(servers=self.broker.bootstrap, **kafka)  # type: ignore[arg-type]
        of_topic, totals = partial(current_topic_settings, self.client, self.settings), Totals()
        client = connect(self.redis)
        forwarding = Forwarding(client, self.redis, chosen, of_topic, totals, name, SystemClock())
        forwarding.start()
        try:
            yield forwarding, totals
        finally:
            forwarding.stop()
            client.close()

    def forward(self, **kafka: object) -> Totals:
        """Forward until the outbox is empty."""
        with self.forwarding(**kafka) as totals:
            self.wait_until_empty()
        return totals

    def wait_until_empty(self, timeout_sec: float = WAIT_SEC) -> None:
        assert wait_until(lambda: self.left() == 0, timeout_sec), f"{self.left()} messages are still in the outbox"

    def left(self) -> int:
        return sum(self.client.xlen(keys.outbox()) for keys in self.shards)

    def dead(self, topic: str) -> list[DeadLetter]:
        return list(self.letters.of_topic(topic))

    def close(self) -> None:
        self.duetime.close()
        self.client.close()


def texts(records: Iterable[Record]) -> list[str]:
    return [(record.value or b"").decode() for record in records]
