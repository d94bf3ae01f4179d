"""Kafka as the ingest job needs it: which topics there are, how far they go, and the records of a range."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from pipeline.core.errors import ConfigError
from pipeline.ingest.parsing import as_half
from pipeline.ingest.plain_lines import Ints

ANSWER_SEC: Final = 10.0  # for one question to the cluster
OFFSET_BITS: Final = 32  # of an offset that a message id has in place of a line's number

# What correctness rests on; nobody may set these.
READING: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
}
_OWN: Final = frozenset(READING) | {"bootstrap.servers", "metadata.broker.list"}
_PROPERTY: Final = re.compile(r"\s*([A-Za-z0-9._]+)\s*=\s*(.*?)\s*")


class KafkaAway(Exception):
    """The cluster does not answer, or not yet: ask again."""


class TopicGone(Exception):
    """The topic was deleted, and perhaps made anew under its name: what it held is gone."""


class RecordsGone(Exception):
    """Kafka has deleted records before they were read."""


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """A partition of a topic. A topic that is made anew has another ``topic_id``, and its offsets begin at 0."""

    topic: str
    topic_id: str
    number: int

    @property
    def part_id(self) -> str:
        """What its progress marker is called."""
        return f"{self.topic_id}.{self.number}"

    def __str__(self) -> str:
        return f"{self.topic}/{self.number}"


def tokens_of(partition: Partition, offsets: Ints, timestamps_ms: Ints) -> pa.Array:
    """Return the first parts of the message ids of records, to which 32 bits of their offsets belong.

    They sort by the time of the record, as all ids do by the time of arrival, and for one time by offset. The rest tells topics and
    partitions apart: 20 bits of the topic id, 14 of the partition, 8 more of the offset.
    """
    place = (int(partition.topic_id, 16) & 0xFFFFF) << 22 | (partition.number & 0x3FFF) << 8
    return pc.binary_join_element_wise(as_half(timestamps_ms), as_half(place | offsets >> OFFSET_BITS & 0xFF), b"")


def client_properties(servers: str, file: str) -> dict[str, str]:
    """Return how clients reach the cluster.

    Raises:
        ConfigError: no server is named, or the file is not fit.
    """
    if not servers:
        raise ConfigError("Name the Kafka cluster with --kafka-servers, such as --kafka-servers localhost:9092.")
    properties = {"bootstrap.servers": servers}
    if not file:
        return properties
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The file kafka.client_config, {file}, can't be read ({exc}).") from exc
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _PROPERTY.fullmatch(line)
        if found is None:
            raise ConfigError(f"{file}, line {number}, is no property; write name=value.")
        if found[1] in _OWN:
            raise ConfigError(f"{file}, line {number}: {found[1]} is not for you to set; what is stored rests on it.")
        properties[found[1]] = found[2]
    return properties


class Cluster:
    """Answers questions about topics.

    Raises:
        ConfigError: the client refuses a property.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._servers = properties["bootstrap.servers"]
        self._denied: KafkaError | None = None
        try:
            self._admin = AdminClient({**properties, "log_level": 0, "error_cb": self._note})  # type: ignore[dict-item]
        except KafkaException as exc:
            raise ConfigError(f"The Kafka client refuses its configuration: {exc.args[0].str()}.") from exc

    def cluster_id(self) -> str:
        """Return the id of the cluster.

        Raises:
            KafkaAway: no answer.
            ConfigError: it does not let us in.
        """
        return str(self._ask(self._admin.describe_cluster(request_timeout=ANSWER_SEC)).cluster_id)

    def partitions_of(self, wanted: str) -> list[Partition]:
        """Return the partitions of the topics that a list names, of those that there are.

        Raises:
            KafkaAway, ConfigError: as above, or a pattern is none.
        """
        names = [*dict.fromkeys(name.strip() for name in wanted.split(",") if name.strip())]
        patterns = [name for name in names if name.startswith("^")]
        if patterns:
            names = [name for name in names if name not in patterns]
            try:
                are_wanted = [re.compile(pattern).search for pattern in patterns]
            except re.error as exc:
                raise ConfigError(f"kafka.topics has a pattern that is none ({exc}).") from exc
            try:
                there = self._admin.list_topics(timeout=ANSWER_SEC).topics
            except KafkaException as exc:
                raise self._trouble(exc) from exc
            names += sorted(
                name for name in there.keys() - {*names} if any(is_wanted(name) for is_wanted in are_wanted)
            )
        return self._describe(names)

    def _describe(self, names: Collection[str]) -> list[Partition]:
        if not names:
            return []
        found = []
        for name, answer in self._admin.describe_topics(
            TopicCollection(list(names)), request_timeout=ANSWER_SEC
        ).items():
            try:
                topic = self._ask(answer)
            except TopicGone:
                continue
            if topic.is_internal:
                continue
            topic_id = topic.topic_id
            bits = topic_id.get_most_significant_bits() % (1 << 64) << 64 | topic_id.get_least_significant_bits() % (
                1 << 64
            )
            if not bits:
                raise ConfigError(f"Kafka gives the topic {name} no id, as brokers do from version 2.8 on.")
            for partition in topic.partitions:
                found.append(Partition(name, f"{bits:032x}", partition.id))
        return sorted(found)

    def check(self, partition: Partition) -> None:
        """Check that a partition still is the one that it was.

        Raises:
            TopicGone: it is not.
            KafkaAway, ConfigError: as above.
        """
        if partition not in self._describe([partition.topic]):
            raise TopicGone

    def first_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the first offset that each still has; raises as ``partitions_of``, and ``TopicGone``."""
        return self._offsets(partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]

    def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the offset behind the last record that no open transaction can still take back; raises as above."""
        return self._offsets(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]

    def _offsets(self, partitions: Iterable[Partition], spec: OffsetSpec) -> dict[Partition, int]:
        asked = {(each.topic, each.number): each for each in partitions}
        if not asked:
            return {}
        answers = self._admin.list_offsets(
            {TopicPartition(*name): spec for name in asked},
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=ANSWER_SEC,
        )
        return {asked[at.topic, at.partition]: self._ask(answer).offset for at, answer in answers.items()}

    def _ask(self, answer: Any) -> Any:
        try:
            return answer.result(ANSWER_SEC + 1)
        except TimeoutError:
            raise KafkaAway(f"{self._servers} does not answer") from None
        except KafkaException as exc:
            raise self._trouble(exc) from exc

    def _note(self, error: KafkaError) -> None:
        self._denied = error if error.code() in DENIED else self._denied

    def _trouble(self, exc: KafkaException) -> Exception:
        self._admin.poll(0)  # which tells why nobody answers
        return trouble_of(self._denied or exc.args[0], self._servers)


DENIED: Final = (
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
_GONE: Final = (KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION)


def trouble_of(error: KafkaError, servers: str) -> Exception:
    """Return what an error of the client means for us."""
    if error.code() in DENIED:
        return ConfigError(f"Kafka at {servers} does not let us in ({error.str()}); see kafka.client_config.")
    if error.code() in _GONE:
        return TopicGone()
    return KafkaAway(f"{servers} says {error.name()}: {error.str()}")
