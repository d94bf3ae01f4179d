"""Kafka as far as forwarders see it, in plain Python: transactions, fencing, positions, and what brokers refuse.

``Producer``, ``Consumer`` and ``Cluster`` stand in for the clients of the same names. Each question passes two points, one before
it is carried out and one before its answer arrives; ``Faults`` says what happens there.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from random import Random
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from pipeline.kafka.cluster import KafkaAway

REQUEST_RECORDS = 3  # of one topic that travel together
REQUEST_BYTES_MAX = 10  # that brokers take
RECORD_BYTES_MAX = 15  # that the client takes


class Crashed(BaseException):
    """The process is gone: nothing of it runs any more."""


@dataclass
class Faults:
    """Draws what happens at a point: nothing, an error, the end of the process, or that others run meanwhile.

    Args:
        share: of the points at which something happens.

        meanwhile: lets others run.

        strike_at: the point, counting from 0, or the name of one, that gets ``strike`` instead, once.
    """

    random: Random
    share: float = 0.0
    meanwhile: Callable[[], None] = lambda: None
    strike_at: int | str = -1
    strike: Callable[[], bool] = lambda: False
    passed: list[str] = field(default_factory=list)

    def at(self, point: str) -> bool:
        """Return whether an error is to be told."""
        self.passed.append(point)
        if self.strike_at in (point, len(self.passed) - 1):
            self.strike_at = -1
            return self.strike()
        if not self.share or self.random.random() >= self.share:
            return False
        drawn = self.random.random()
        if drawn < 0.3:
            raise Crashed(point)
        if drawn < 0.6:
            return True
        self.meanwhile()
        return False


@dataclass
class Writer:
    """What brokers know of a transactional id: who may write under it, and the transaction that is open."""

    epoch: int = 0
    records: list[tuple[str, str]] = field(default_factory=list)
    position: str | None = None

    def forget(self) -> None:
        """End the transaction."""
        self.records, self.position = [], None


class Kafka:
    """The brokers. ``log`` has the topic and the id of each record that is committed."""

    def __init__(self, faults: Faults, topics: Collection[str]) -> None:
        self.faults = faults
        self.topics = {*topics}
        self.log: list[tuple[str, str]] = []
        self.writers: dict[str, Writer] = defaultdict(Writer)
        self.positions: dict[str, str] = {}

    @contextmanager
    def asked(self, question: str) -> Iterator[None]:
        """Carry out a question, unless there is an error before; it may also be lost that it was."""
        if self.faults.at(question):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{question} unheard"))
        yield
        if self.faults.at(f"{question} done"):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{question} unanswered"))


Record = tuple[str, str, int, Callable[[KafkaError, Any], None]]  # topic, id, bytes, whom to tell


class Producer:
    """See ``confluent_kafka.Producer``."""

    def __init__(self, kafka: Kafka, properties: Mapping[str, Any]) -> None:
        self._kafka = kafka
        self._id = properties.get("transactional.id")
        self._epoch = 0
        self._waiting: list[Record] = []
        self._has_failed = self._has_begun = False

    def init_transactions(self, _: float) -> None:
        with self._kafka.asked("init"):
            writer = self._kafka.writers[str(self._id)]
            writer.epoch += 1
            writer.forget()
            self._epoch = writer.epoch

    def begin_transaction(self) -> None:
        if self._has_begun:
            raise KafkaException(KafkaError(KafkaError._STATE, "a transaction is open"))
        self._has_failed, self._has_begun = False, True
        self._kafka.faults.at("begin")

    def produce(
        self, topic: str, value: bytes, key: bytes | None, on_delivery: Any, headers: Sequence[tuple[str, Any]]
    ) -> None:
        if len(value) > RECORD_BYTES_MAX:
            self._has_failed = True
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "larger than the client takes"))
        self._waiting.append((topic, dict(headers)["duetime-id"].decode(), len(value), on_delivery))

    def poll(self, _: float) -> None:
        self._kafka.faults.at("produced")
        self._perhaps_send()

    def flush(self, _: float) -> int:
        self._send()
        return int(self._kafka.faults.at("flushed"))

    def _perhaps_send(self) -> None:
        """Send what waits, or don't: nobody knows when the client does."""
        if self._kafka.faults.random.random() < 0.5:
            self._send()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for topic, found in groupby(sorted(waiting, key=lambda record: record[0]), key=lambda record: record[0]):
            records, is_cut = [*found], False
            for first in range(0, len(records), REQUEST_RECORDS):
                is_cut = self._request(topic, records[first : first + REQUEST_RECORDS], is_cut)

    def send_offsets_to_transaction(self, places: list[TopicPartition], _: object, __: float) -> None:
        self._perhaps_send()
        with self._kafka.asked("offsets"):
            if self._has_failed:
                raise KafkaException(KafkaError(KafkaError._STATE, "a record has failed"))
            self._writer().position = places[0].metadata

    def commit_transaction(self, _: float) -> None:
        self.flush(0)
        with self._kafka.asked("commit"):
            writer = self._writer()
            if self._has_failed:
                raise KafkaException(KafkaError(KafkaError._STATE, "a record has failed"))
            self._kafka.log += writer.records
            if writer.position is not None:
                self._kafka.positions[str(self._id)] = writer.position
            writer.forget()
            self._has_begun = False

    def abort_transaction(self, _: float) -> None:
        with self._kafka.asked("abort"):
            self._writer().forget()
            self._has_begun = False

    def purge(self) -> None:
        self._waiting = []

    def _writer(self) -> Writer:
        writer = self._kafka.writers[str(self._id)]
        if writer.epoch != self._epoch:
            raise KafkaException(KafkaError(KafkaError._FENCED, "another one writes"))
        return writer

    def _request(self, topic: str, records: list[Record], is_cut: bool) -> bool:
        """Write records of one topic; returns whether those behind can't be written now, either."""
        is_cut = is_cut or self._kafka.faults.at("request")
        code = KafkaError._MSG_TIMED_OUT if is_cut else self._write(topic, records)
        if self._kafka.faults.at("request done"):
            code = KafkaError._MSG_TIMED_OUT
        if code is not None:
            self._has_failed = True
            for *_, tell in records:
                tell(KafkaError(code, "as the model has it"), None)
        return is_cut

    def _write(self, topic: str, records: list[Record]) -> int | None:
        if topic not in self._kafka.topics:
            return KafkaError.UNKNOWN_TOPIC_OR_PART
        try:
            log = self._kafka.log if self._id is None else self._writer().records
        except KafkaException as exc:
            return int(exc.args[0].code())
        if sum(size for _, _, size, _ in records) > REQUEST_BYTES_MAX:
            return KafkaError.MSG_SIZE_TOO_LARGE
        log += [(topic, name) for _, name, _, _ in records]
        return None


class Consumer:
    """See ``confluent_kafka.Consumer``."""

    def __init__(self, kafka: Kafka, properties: Mapping[str, Any]) -> None:
        self._kafka = kafka
        self._group = str(properties["group.id"])

    def committed(self, places: list[TopicPartition], _: float) -> list[TopicPartition]:
        with self._kafka.asked("position"):
            position = self._kafka.positions.get(self._group)
        return [TopicPartition(places[0].topic, 0, 0, position) if position else TopicPartition(places[0].topic, 0)]

    def consumer_group_metadata(self) -> object:
        return self._group

    def close(self) -> None:
        pass


class Cluster:
    """See ``pipeline.kafka.cluster.Cluster``."""

    def __init__(self, kafka: Kafka, _: object) -> None:
        self._kafka = kafka

    def ensure_topic(self, _: str) -> None:
        pass

    def refused_topics(self, names: Collection[str]) -> dict[str, KafkaError]:
        if names and self._kafka.faults.at("topics"):
            raise KafkaAway("no answer")
        there = self._kafka.topics
        found = {name: KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, "not there") for name in {*names} - there}
        if names and self._kafka.faults.at("topics done"):
            raise KafkaAway("no answer")
        return found
