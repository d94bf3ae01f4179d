"""Writes messages to Kafka: in transactions that also say how far it has come, or without."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread
from typing import Any, Final, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from pipeline.core.dead import DeadReason
from pipeline.core.records import outgoing
from pipeline.kafka.cluster import ANSWER_SEC, Cluster, KafkaAway, trouble_of
from pipeline.kafka.properties import WRITING
from pipeline.store.entries import entry_id_of
from pipeline.store.outbox import BEGINNING, OutboxEntry

# A transaction that follows another at once is told CONCURRENT_TRANSACTIONS until the brokers have ended that one; the client then
# waits so long before it asks again. Its default of 100 ms makes p99 two to three times what it is with 2.
RETRY_BACKOFF_MS: Final = 2
LINGER_MS: Final = 50  # longer than a batch takes to be handed over: each is then flushed, which sends it at once

# What Kafka has against a single record: it would say so again, while all others are fine.
REASONS: Final[Mapping[int, DeadReason]] = {
    KafkaError.MSG_SIZE_TOO_LARGE: DeadReason.TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE: DeadReason.TOO_LARGE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: DeadReason.NOT_ALLOWED,
    KafkaError.TOPIC_EXCEPTION: DeadReason.UNKNOWN_TOPIC,
    KafkaError.UNKNOWN_TOPIC_OR_PART: DeadReason.UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_TOPIC: DeadReason.UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION: DeadReason.UNKNOWN_TOPIC,
    KafkaError.INVALID_RECORD: DeadReason.INVALID,
    KafkaError.INVALID_MSG: DeadReason.INVALID,
    KafkaError.INVALID_TIMESTAMP: DeadReason.INVALID,
    KafkaError.POLICY_VIOLATION: DeadReason.INVALID,
}

# The client raises errors of its own for some names that no topic can have, and takes others for shorter ones.
_POSSIBLE: Final = re.compile(r"[A-Za-z0-9._-]{1,249}").fullmatch
_IMPOSSIBLE: Final = KafkaError(KafkaError.TOPIC_EXCEPTION, "no topic can have this name")

# A topic that is not there any more is told by the next sender, before it writes.
_OF_A_RECORD: Final = REASONS.keys() - {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}


# What a broker that is new, or has just taken over, says for a moment when it is asked for the position; the client gives up then.
_COORDINATOR_MOVES: Final = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}
COORDINATOR_TRIES: Final = 50  # more after the first
COORDINATOR_SEC: Final = 0.1  # between them


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why Kafka does not take a message: one of the values of ``REASONS``, and what it said."""

    reason: str
    detail: str


class Sender(Protocol):
    """Writes entries of one outbox to Kafka."""

    position: str
    """The last entry that is known to be there, "" if none is."""
    is_atomic: bool
    """Whether nothing of a call of ``send`` is written if something is refused."""

    def refusals(self, entries: Sequence[OutboxEntry]) -> dict[str, Refusal]:
        """Return, by entry id, what can be told to be refused before it is sent."""
        ...

    def send(
        self, entries: Sequence[OutboxEntry], meanwhile: Callable[[], object] = lambda: None
    ) -> dict[str, Refusal]:
        """Write entries in order, and return, by entry id, those that Kafka refuses.

        Args:
            meanwhile: called once while the brokers work.

        If some are refused, none is written with ``is_atomic``, and all others without. Then ``position`` is the last one.

        Raises:
            KafkaAway, ConfigError: whether they are written is unknown; a new sender knows.
        """
        ...

    def close(self) -> None:
        """End it; what is not committed is given up."""
        ...


class KafkaSender:
    """A producer of one outbox; see ``Sender``.

    Args:
        properties: of the cluster, see ``client_properties``.

        name: with ``exactly_once`` the transactional id and the group that has the position: of this outbox alone. Another sender
            of that name can't commit from now on.

        topic_of: the Kafka topic of a topic.
    Raises:
        KafkaAway: no answer; try again.
        ConfigError: Kafka does not let us in.
    """

    def __init__(
        self,
        properties: Mapping[str, str],
        name: str,
        topic_of: Callable[[str], str],
        exactly_once: bool,
        transaction_timeout_ms: int,
        position_topic: str,
    ) -> None:
        self.position = ""
        self.is_atomic = exactly_once
        self._servers = properties["bootstrap.servers"]
        self._cluster = Cluster(properties)
        self._topic_of = topic_of
        self._known: set[str] = set()  # topics that were there when this sender met them
        self._failed: list[tuple[str, KafkaError]] = []
        self._position_topic = position_topic
        self._group: Consumer | None = None
        more: dict[str, Any] = {"linger.ms": LINGER_MS, "partitioner": "murmur2_random", **properties, **WRITING}
        more |= {"log_level": 0, "message.timeout.ms": transaction_timeout_ms}
        more |= {"error_cb": lambda _: None}  # what is wrong is told by the calls themselves
        if exactly_once:
            more |= {"transactional.id": name, "transaction.timeout.ms": transaction_timeout_ms}
            more |= {"retry.backoff.ms": RETRY_BACKOFF_MS}
        try:
            self._producer = Producer(more)
            if exactly_once:
                self._cluster.ensure_topic(position_topic)
                self._producer.init_transactions(transaction_timeout_ms / 1000)
                self._group = Consumer({**properties, "group.id": name, "enable.auto.commit": False, "log_level": 0})
                [found] = self._committed(self._group)
                if found.error:
                    raise KafkaException(found.error)
                self.position = found.metadata or ""
        except KafkaException as exc:
            raise self._trouble(exc) from exc

    def refusals(self, entries: Sequence[OutboxEntry]) -> dict[str, Refusal]:
        """Look whether the topics are there: they are not made by being written to."""
        topics = {entry.topic: self._topic_of(entry.topic) for entry in entries}
        names = {*topics.values()} - self._known
        possible = {name for name in names if _POSSIBLE(name)}
        refused = self._cluster.refused_topics(possible) | dict.fromkeys(names - possible, _IMPOSSIBLE)
        self._known |= {*topics.values()} - refused.keys()
        return {
            entry.entry_id: Refusal(REASONS[refused[name].code()], f"{name}: {refused[name].str()}")
            for entry in entries
            if (name := topics[entry.topic]) in refused
        }

    def send(
        self, entries: Sequence[OutboxEntry], meanwhile: Callable[[], object] = lambda: None
    ) -> dict[str, Refusal]:
        """Write entries; see ``Sender``."""
        try:
            try:
                return self._send(entries, meanwhile)
            except KafkaException as exc:
                if not self._group or exc.args[0].code() != KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER:
                    raise
            # The client counts on behind records that were refused in a transaction before, and the brokers take this for a hole.
            # With the end of this transaction, too, it begins anew to count.
            self._producer.abort_transaction(ANSWER_SEC)
            return self._send(entries, lambda: None)
        except KafkaException as exc:
            raise self._trouble(exc) from exc

    def close(self) -> None:
        """End it. A transaction that is open is left to the next sender of this name, or to the brokers."""
        self._producer.purge()
        if self._group:
            self._group.close()

    def _send(self, entries: Sequence[OutboxEntry], meanwhile: Callable[[], object]) -> dict[str, Refusal]:
        self._failed.clear()
        if self._group:
            self._producer.begin_transaction()
        self._produce(entries)
        last = entries[-1].entry_id
        if self._group and not self._failed:
            # Beside the records, as they need not wait for each other.
            at, group = TopicPartition(self._position_topic, 0, 0, last), self._group.consumer_group_metadata()
            send = partial(self._producer.send_offsets_to_transaction, [at], group, ANSWER_SEC)
            self._unless_refused(lambda: self._limited(send))
        meanwhile()
        self._flush()
        passing = [error for _, error in self._failed if error.code() not in _OF_A_RECORD]
        refused = {
            entry_id: Refusal(REASONS[error.code()], error.str())
            for entry_id, error in self._failed
            if error.code() in _OF_A_RECORD
        }
        if passing and not (self._group and refused):
            raise KafkaException(passing[0])
        if self._group and refused:
            self._producer.abort_transaction(ANSWER_SEC)
            return refused
        if self._group:
            self._producer.commit_transaction(ANSWER_SEC)
        self.position = max(self.position or BEGINNING, last, key=entry_id_of)  # a record may be tried again alone
        return refused

    def _committed(self, group: Consumer) -> list[TopicPartition]:
        for tries in range(COORDINATOR_TRIES, -1, -1):
            try:
                return group.committed([TopicPartition(self._position_topic, 0)], ANSWER_SEC)
            except KafkaException as exc:
                code = exc.args[0].code()
                if code == KafkaError._TIMED_OUT:
                    raise KafkaAway(
                        f"{self._servers} does not tell the position of this outbox; is the right to Describe its group granted?"
                    ) from exc
                if code not in _COORDINATOR_MOVES or not tries:
                    raise
            Event().wait(COORDINATOR_SEC)
        raise AssertionError("the last try returns or raises")

    def _produce(self, entries: Sequence[OutboxEntry]) -> None:
        produce, topic_of = self._producer.produce, self._topic_of
        for entry in entries:
            value, key, headers = outgoing(entry.body, entry.headers, entry.id, entry.due_ms)
            failed = partial(self._fail, entry.entry_id)
            try:
                produce(topic_of(entry.topic), value, key, on_delivery=failed, headers=headers)
            except KafkaException as exc:
                self._fail(entry.entry_id, exc.args[0], None)
                if self._group:
                    return  # none of them is committed
        self._producer.poll(0)

    def _unless_refused(self, call: Callable[[], object]) -> None:
        """Make a call that fails, too, when a record was refused meanwhile; then that is the reason."""
        try:
            call()
        except KafkaException:
            self._flush()
            if not self._failed:
                raise

    def _limited(self, call: Callable[[], object]) -> None:
        """Make a call that may not keep its time limit: it is left behind then, with its producer, which the next one fences.

        A client that lost the broker of its group waits until any connection changes (librdkafka 5456).
        """
        failed: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as exc:
                failed.append(exc)

        thread = Thread(target=run, name="send-offsets", daemon=True)
        thread.start()
        thread.join(ANSWER_SEC + 1)
        if thread.is_alive():
            raise KafkaAway(f"{self._servers} does not take the position")
        if failed:
            raise failed[0]

    def _flush(self) -> None:
        try:
            left = self._producer.flush(ANSWER_SEC)
        except SystemError as exc:  # of a client that was fenced: it calls back with an error of its own under way
            raise KafkaAway(f"{self._servers} knows a newer sender of this outbox") from exc
        if left:
            raise KafkaAway(f"{self._servers} does not take records")

    def _fail(self, entry_id: str, error: KafkaError, _: object) -> None:
        if error.code() not in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):  # of an aborted transaction
            self._failed.append((entry_id, error))

    def _trouble(self, exc: KafkaException) -> Exception:
        return trouble_of(exc.args[0], self._servers)
