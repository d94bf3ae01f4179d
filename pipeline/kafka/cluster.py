"""Which topics a Kafka cluster has, how far they go, and why it does not answer."""

import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AclOperation, AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from pipeline.core.errors import ConfigError

ANSWER_SEC: Final = 10.0  # for one question to the cluster
REASON_SEC: Final = 0.5  # of silence, after which it counts that the cluster does not let us in
_left: Final[list[AdminClient]] = []  # clients that nobody needs any more


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


class Cluster:
    """Answers questions about topics.

    Raises:
        ConfigError: the client refuses a property.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._servers = properties["bootstrap.servers"]
        self._reasons = Reasons(self._servers)
        try:
            self._admin = AdminClient({**properties, "log_level": 0, "error_cb": self._reasons.note})  # type: ignore[dict-item]
        except KafkaException as exc:
            raise ConfigError(f"The Kafka client refuses its configuration: {exc.args[0].str()}.") from exc
        _left.clear()

    def __del__(self) -> None:
        # A client runs Python in a thread of its own, when an answer comes. If the client is garbage and is collected there,
        # librdkafka aborts the process. So it is let go by who makes the next one.
        if admin := self.__dict__.get("_admin"):
            _left.append(admin)

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
                topic = self._ask(answer, f"Describe on the topic {name}")
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

    def refused_topics(self, names: Collection[str]) -> dict[str, KafkaError]:
        """Return those of some topics that can't be written to, as they are not there or nobody lets us, with the reason.

        Raises:
            KafkaAway, ConfigError: as above.
        """
        found: dict[str, KafkaError] = {}
        if not names:
            return found
        for name, answer in self._admin.describe_topics(
            TopicCollection(list(names)), request_timeout=ANSWER_SEC, include_authorized_operations=True
        ).items():
            try:
                allowed = self._ask(answer).authorized_operations
                if (
                    allowed and AclOperation.WRITE not in allowed
                ):  # else it is told of a whole transaction, not of a record
                    found[name] = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
            except (TopicGone, ConfigError) as exc:
                cause = exc.__cause__
                error = cause.args[0] if isinstance(cause, KafkaException) else None
                if error is None or error.code() not in (*_GONE, KafkaError.TOPIC_AUTHORIZATION_FAILED):
                    raise
                found[name] = error
        return found

    def ensure_topic(self, name: str) -> None:
        """Make a topic with one partition, if it is not there.

        Raises:
            KafkaAway: as above.
            ConfigError: as above, or it may not be made.
        """
        if self._describe([name]):
            return
        [made] = self._admin.create_topics([NewTopic(name, 1, -1)], request_timeout=ANSWER_SEC).values()
        try:
            self._ask(made)
        except ConfigError as exc:
            raise ConfigError(
                f"Kafka has no topic {name}, and does not let us make it: create it with one partition."
            ) from exc
        except KafkaAway:
            if not self._describe([name]):  # else another loop has made it
                raise

    def stuck_partitions(self, names: Collection[str]) -> dict[str, int]:
        """Return, by ``topic/partition``, where a reader that wants only what is committed can't go on now, and at which offset.

        An open transaction begins there; raises as ``partitions_of``.
        """
        partitions = self._describe(names)
        stable = self.end_offsets(partitions)
        ends = self._offsets(partitions, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)  # type: ignore[no-untyped-call]
        return {str(each): stable[each] for each in partitions if stable[each] < ends[each]}

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

    def _offsets(
        self,
        partitions: Iterable[Partition],
        spec: OffsetSpec,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> dict[Partition, int]:
        asked = {(each.topic, each.number): each for each in partitions}
        if not asked:
            return {}
        answers = self._admin.list_offsets(
            {TopicPartition(*name): spec for name in asked},
            isolation_level=isolation,
            request_timeout=ANSWER_SEC,
        )
        return {asked[at.topic, at.partition]: self._ask(answer).offset for at, answer in answers.items()}

    def _ask(self, answer: Future[Any], needed: str = "") -> Any:
        for _ in range(int((ANSWER_SEC + 1) / REASON_SEC)):
            if wait([answer], REASON_SEC).done:
                break
            self._admin.poll(0)  # which tells why nobody answers
            self._reasons.check()
        else:
            raise self._reasons.silence("does not answer")
        try:
            found = answer.result()
        except KafkaException as exc:
            raise self._trouble(exc, needed) from exc
        self._admin.poll(0)
        self._reasons.forget()
        return found

    def _trouble(self, exc: KafkaException, needed: str = "") -> Exception:
        self._admin.poll(0)
        error: KafkaError = exc.args[0]
        trouble = trouble_of(error, self._servers, needed)
        if error.code() > 0 or not isinstance(trouble, KafkaAway):
            return trouble  # as Kafka itself says
        self._reasons.check()
        return self._reasons.silence(f"says {error.name()}: {error.str()}")


class Reasons:
    """Why nobody answers: a client tells it beside its answers, whenever it fails to connect."""

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._denied: KafkaError | None = None
        self._last: KafkaError | None = None

    def note(self, error: KafkaError) -> None:
        """Note what the client tells."""
        if error.code() in DENIED:
            self._denied = error
        elif error.code() != KafkaError._ALL_BROKERS_DOWN:  # which does not say why
            self._last = error

    def forget(self) -> None:
        """Forget it all, as there is an answer."""
        self._denied = self._last = None

    def check(self) -> None:
        """Check that the cluster lets us in.

        Raises:
            ConfigError: it does not.
        """
        if self._denied is not None:
            raise trouble_of(self._denied, self._servers)

    def silence(self, seen: str) -> KafkaAway:
        """Return the error for who waits in vain: the reason if there is one, and otherwise what was seen."""
        return KafkaAway(f"{self._servers} " + (f"does not answer: {self._last.str()}" if self._last else seen))


DENIED: Final = (
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)
_GONE: Final = (
    KafkaError._UNKNOWN_TOPIC,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_EXCEPTION,  # no topic can have such a name
)


def trouble_of(error: KafkaError, servers: str, needed: str = "") -> Exception:
    """Return what an error of the client means for us; ``needed`` is the right without which a topic is refused."""
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and needed:
        return ConfigError(
            f"Kafka at {servers} refuses {needed} ({error.str()}); grant it to the user of kafka.client_config."
        )
    if error.code() in DENIED:
        return ConfigError(f"Kafka at {servers} does not let us in ({error.str()}); see kafka.client_config.")
    if error.code() in _GONE:
        return TopicGone(f"{servers} says {error.name()}: {error.str()}")
    return KafkaAway(f"{servers} says {error.name()}: {error.str()}")
