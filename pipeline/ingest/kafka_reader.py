"""The records of a range of offsets, from Kafka."""

import logging
import random
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from pipeline.core.backoff import backoff_ms
from pipeline.core.errors import SourceError
from pipeline.core.records import Headers, RecordFormat, Records
from pipeline.kafka.cluster import (
    ANSWER_SEC,
    Cluster,
    KafkaAway,
    Partition,
    Reasons,
    RecordsGone,
    TopicGone,
    trouble_of,
)
from pipeline.kafka.properties import READING

POLL_SEC: Final = 0.1
CHUNK: Final = 500  # messages at once: 1.0 us of CPU each, with 5,000 it is 1.6, as they leave the processor's cache
_DEFAULTS: Final[Mapping[str, Any]] = {
    "group.id": "duetime",  # a name that the client wants; it joins no group
    "fetch.wait.max.ms": 100,  # after which a broker says that it has nothing more, as behind the last transaction of a topic
    "queued.max.messages.kbytes": 4_096,  # fetched ahead; what lies behind the end of a range is fetched in vain
    # Until it looks again whether there is room; with its default of 1,000 one worker stores 71,000 records/s, and 100,000 with 5.
    "fetch.queue.backoff.ms": 5,
}

_CLASS: Final[Any] = Message  # whose published types are those of errors, too

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """What travels to the executors beside the settings of the writer."""

    properties: dict[str, str]
    format: RecordFormat
    accept_loss: bool


@dataclass(frozen=True, slots=True)
class Range:
    """A row of a batch: the offsets of a partition from ``begin`` to before ``end``, as far as they are not stored yet."""

    partition: Partition
    begin: int
    end: int


class RecordReader:
    """Reads partitions, one at a time. What comes next is fetched meanwhile, as long as it is the same partition."""

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._servers = properties["bootstrap.servers"]
        self._reasons = Reasons(self._servers)
        self._consumer = Consumer(
            {**_DEFAULTS, **properties, **READING, "log_level": 0, "error_cb": self._reasons.note}
        )
        self._partition: Partition | None = None
        self._place = 0  # the offset up to which it was read
        self._fetched: deque[Records | Message] = deque()

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()

    def read(self, partition: Partition, begin: int, end: int, count: int, size: int) -> tuple[Records, int]:
        """Read on from an offset, waiting for the first record.

        Args:
            count: of records, at most; and about ``size`` bytes.

        Returns:
            The records that come at once, and the offset behind them. There are gaps where transactions end or were aborted, and in
            compacted topics.
        Raises:
            KafkaAway: nothing comes; ask again, from where you are.
            ConfigError, TopicGone: as ``Cluster``.
            RecordsGone: what was at ``begin`` is deleted.
        """
        if (partition, begin) != (self._partition, self._place):
            self._partition, self._place = partition, begin
            self._fetched.clear()
            self._consumer.assign([TopicPartition(partition.topic, partition.number, begin)])
        try:
            records = self._read(end, count, size)
        except BaseException:
            self._partition = None  # begin anew
            raise
        self._reasons.forget()
        return records, self._place

    def _read(self, end: int, count: int, size: int) -> Records:
        records = Records()
        silent = 0
        while self._place < end and len(records) < count and size > 0:
            if not self._fetched:
                messages = self._consumer.consume(min(CHUNK, count - len(records), end - self._place), POLL_SEC)
                self._fetched.extend(_pieces_of(messages))
                if not self._fetched:
                    if records:
                        break
                    silent += 1
                    self._reasons.check()
                    if silent * POLL_SEC >= ANSWER_SEC:
                        raise self._reasons.silence(f"sends nothing of {self._partition}")
                    continue
            piece = self._fetched.popleft()
            if not isinstance(piece, Records):
                self._pass_over(piece, end)
                continue
            wanted = min(bisect_left(piece.offsets, end), count - len(records))
            while wanted > 1 and piece.cut(0, wanted).size() > size:
                wanted //= 2
            if wanted < len(piece):
                self._fetched.appendleft(piece.cut(wanted))
                piece = piece.cut(0, wanted)
            records.extend(piece)
            size -= piece.size()
            self._place = piece.offsets[-1] + 1 if wanted else end
        return records

    def _pass_over(self, message: Message, end: int) -> None:
        """Take what comes in place of a record; raises what it says."""
        error = message.error()
        assert error is not None
        if error.code() == KafkaError._PARTITION_EOF:
            self._place = min(max(self._place, message.offset() or 0), end)
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise RecordsGone(f"{self._partition} has no offset {self._place} any more")
        # The client looks for the coordinator of its group, which we don't need.
        elif error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise trouble_of(error, self._servers, f"Read on the topic {message.topic()}")


def _pieces_of(messages: Sequence[Message]) -> list[Records | Message]:
    """Return messages as records, and apart those that are errors."""
    if messages and all(error is None for error in map(Message.error, messages)):
        return [_records_of(messages)]
    return [_records_of([message]) if message.error() is None else message for message in messages]


def _records_of(messages: Sequence[Message]) -> Records:
    """Return the columns of messages; ``map`` calls what is written in C without a step of Python for each."""
    return Records(
        list(map(_CLASS.offset, messages)),
        [timestamp_ms for _, timestamp_ms in map(_CLASS.timestamp, messages)],
        list(map(_CLASS.value, messages)),
        list(map(_CLASS.key, messages)),
        _headers_of(messages),
    )


def _headers_of(messages: Sequence[Message]) -> list[Headers | None]:
    """Return the headers of each; None where the name of one is not UTF-8.

    Each message is asked once, as after an error it answers with what is no object. And by ``map``: a call from Python itself would
    miss that the client has raised and returned None at once, and fail somewhere behind.
    """
    headers: list[Headers | None] = []
    answers = map(_CLASS.headers, messages)
    while len(headers) < len(messages):
        try:
            for found in answers:
                headers.append(found or ())
        except (SystemError, UnicodeDecodeError):
            headers.append(None)
    return headers


class RangeReader:
    """Reads one range; waits where Kafka does not answer."""

    def __init__(self, settings: ReadSettings, cluster: Cluster, reader: RecordReader, wanted: Range) -> None:
        self.format: RecordFormat = settings.format
        self.range = wanted
        self.end = wanted.end
        self._cluster, self._reader = cluster, reader
        self._accept_loss = settings.accept_loss

    def read(self, place: int, is_known: bool, end: int, count: int, size: int) -> tuple[Records, int]:
        """Return records from an offset on, and the offset behind them.

        Args:
            is_known: whether all before ``place`` was read once, so that there must be no hole behind it.
            end: where to end at the latest; and at ``count`` records or about ``size`` bytes.

        Raises:
            TopicGone: it was deleted.
            SourceError: there is a hole, and it is not accepted.
            ConfigError: the cluster does not let us in.
        """
        return self._waiting(partial(self._try, place, is_known, end, count, size))

    def _try(self, place: int, is_known: bool, end: int, count: int, size: int) -> tuple[Records, int]:
        partition = self.range.partition
        end = min(end, self.end)
        if end <= place:
            return Records(), place
        try:
            found = self._reader.read(partition, place, end, count, size)
        except (KafkaAway, TopicGone, RecordsGone) as exc:
            self._cluster.check(partition)  # the reader may know it no more, or not yet
            first = self._cluster.first_offsets([partition])[partition] if isinstance(exc, RecordsGone) else 0
            if first > place:
                self._pass_hole(place, first, is_known)
                return Records(), min(first, end)
            # An election may have cut the end of the log off, and then nothing comes: it is read when it is written again.
            self.end = min(self.end, max(place, self._cluster.end_offsets([partition])[partition]))
            if self.end > place:
                raise KafkaAway(str(exc) or f"{partition} can't be read yet") from exc
            return Records(), place
        # An id never comes back. So what was read is of this topic, if it is there still, and not of one made anew meanwhile.
        self._cluster.check(partition)
        return found

    def _pass_hole(self, place: int, first: int, is_known: bool) -> None:
        hole = f"the records {place} to {first - 1} of {self.range.partition}"
        if is_known and not self._accept_loss:
            raise SourceError(
                f"Kafka has deleted {hole} before they were read. Start again with kafka.accept_loss = true to go on behind them."
            )
        if is_known:
            log.warning("%s are lost: Kafka has deleted them", hole)

    def _waiting(self, call: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                result = call()
            except KafkaAway as exc:
                failures += 1
                if failures == 1:
                    log.warning("waiting for Kafka: %s", exc)
                threading.Event().wait(backoff_ms(failures, random.random) / 1000)
            else:
                if failures:
                    log.warning("Kafka answers again")
                return result
