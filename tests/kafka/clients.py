"""What tests say to a Kafka broker: topics, records and transactions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import monotonic
from typing import Any

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from pipeline.runtime.process import wait_until

ANSWER_SEC = 30.0
NOW, ANY = 0, -1  # what a producer takes for no timestamp and no partition

# For clients of tests. A broker that is down is no news to a test that has killed it, and is looked for often.
CLIENT = {"log_level": 0, "reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 100}


@dataclass(frozen=True, slots=True)
class Record:
    """A record as a consumer sees it; ``headers`` in order, doubles and null values included."""

    partition: int
    offset: int
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


Headers = Sequence[tuple[str, bytes | None]]


class Clients:
    """Clients of the broker at ``bootstrap``, which are made when they are used."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    @cached_property
    def admin(self) -> AdminClient:
        """Kafka's own client for all that has no method here."""
        return AdminClient(self.client_settings())

    def make_topic(self, name: str, partitions: int = 1, **config: object) -> None:
        """Make a topic; returns when it can be written. ``config`` has ``_`` for each dot: ``retention_ms=1000``."""
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        [made] = self.admin.create_topics([NewTopic(name, partitions, 1, config=settings)]).values()
        made.result(ANSWER_SEC)
        self._await_partitions(name, partitions)

    def add_partitions(self, name: str, total: int) -> None:
        """Give a topic more partitions, until it has ``total``."""
        [made] = self.admin.create_partitions([NewPartitions(name, total)]).values()
        made.result(ANSWER_SEC)
        self._await_partitions(name, total)

    def delete_topic(self, name: str) -> None:
        """Delete a topic; returns when nobody sees it any more."""
        [deleted] = self.admin.delete_topics([name]).values()
        deleted.result(ANSWER_SEC)
        self._await_partitions(name, 0)

    def _await_partitions(self, name: str, count: int) -> None:
        def has_them() -> bool:
            topic = self.admin.list_topics(timeout=ANSWER_SEC).topics.get(name)
            return sum(it.leader >= 0 for it in topic.partitions.values()) == count if topic else count == 0

        assert wait_until(has_them, ANSWER_SEC), f"{name} never had {count} partitions"

    def client_settings(self, more: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Return settings for a client of a test."""
        return {"bootstrap.servers": self.bootstrap, **CLIENT, **(more or {})}

    def produce(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
    ) -> Record:
        """Append a record; returns it when it is acknowledged."""
        [record] = self.produce_all(topic, [value], key, headers, timestamp_ms, partition)
        return record

    def produce_all(
        self,
        topic: str,
        values: Iterable[bytes | str | None],
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
    ) -> list[Record]:
        """Append records that differ in their values alone, in order and each once; returns them when they are acknowledged."""
        sent: list[Any] = list(headers or ())
        done: list[Record] = []
        failed: list[KafkaError] = []

        def note(error: KafkaError | None, message: Any) -> None:
            if error is None:
                done.append(replace(_record(message), headers=sent))  # it doesn't come back with them
            else:
                failed.append(error)

        where = ANY if partition is None else partition
        for number, value in enumerate(values):
            self._producer.produce(topic, value, key, where, note, timestamp=timestamp_ms or NOW, headers=sent)
            if not number:  # what is sent while the producer learns where the topic is may overtake what it had before
                self._producer.flush(ANSWER_SEC)
        left = self._producer.flush(ANSWER_SEC)
        assert not failed and not left, f"{left + len(failed)} records were not acknowledged: {failed[:3]}"
        return done

    @cached_property
    def _producer(self) -> Producer:
        # An idempotent producer would take a second to begin. Without second attempts nothing is there twice, either.
        once = {"message.send.max.retries": 0, "linger.ms": 0, "queue.buffering.max.messages": 1_000_000}
        return Producer(self.client_settings(once))

    def transactional(self, name: str, more: Mapping[str, object] | None = None) -> Producer:
        """Return a producer that is ready to begin a transaction, and fences others with its transactional id."""
        producer = Producer(self.client_settings({"transactional.id": name, **(more or {})}))
        producer.init_transactions(ANSWER_SEC)
        return producer

    def prepare_transactions(self) -> None:
        """Have the broker make its topic for transactions, for which the first one would wait a second."""
        self.transactional("first")

    def read_all(
        self, topic: str, isolation: str = "read_committed", count: int | None = None, timeout_sec: float = ANSWER_SEC
    ) -> list[Record]:
        """Return all records of a topic, by partition and offset.

        Args:
            count: Wait until there are so many. Otherwise what can be read now is all, which ends before an open transaction.
        """
        reading = {"group.id": "tests", "isolation.level": isolation, "fetch.wait.max.ms": 10}
        consumer = Consumer(self.client_settings(reading | {"enable.partition.eof": True, "enable.auto.commit": False}))
        try:
            partitions = consumer.list_topics(topic, ANSWER_SEC).topics[topic].partitions
            consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
            found = _read(consumer, set(partitions), count, timeout_sec)
        finally:
            consumer.close()
        return sorted(found, key=lambda record: (record.partition, record.offset))


def _read(consumer: Consumer, unfinished: set[int], count: int | None, timeout_sec: float) -> list[Record]:
    found: list[Record] = []
    deadline_s = monotonic() + timeout_sec
    while len(found) < count if count is not None else unfinished:
        if monotonic() > deadline_s:
            wanted = "the end" if count is None else f"{count} records"
            raise AssertionError(f"{wanted} did not come in {timeout_sec} s, but {len(found)} records: {found[-3:]}")
        for message in consumer.consume(1000, 0.05):
            error = message.error()
            if error is None:
                found.append(_record(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                unfinished.discard(message.partition())
            elif not error.retriable():
                raise KafkaException(error)
    return found


def _record(message: Any) -> Record:
    kind, timestamp_ms = message.timestamp()
    known_ms = None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_ms
    headers = message.headers() or []
    return Record(message.partition(), message.offset(), known_ms, message.key(), message.value(), headers)
