"""The records of a range of offsets, from Kafka."""

from collections import deque
from collections.abc import Mapping
from operator import methodcaller
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

from pipeline.core.records import Record
from pipeline.kafka.cluster import ANSWER_SEC, Partition, Reasons, RecordsGone, trouble_of
from pipeline.kafka.properties import READING

POLL_SEC: Final = 0.1
_DEFAULTS: Final[Mapping[str, Any]] = {
    "group.id": "duetime",  # a name that the client wants; it joins no group
    "fetch.wait.max.ms": 100,  # after which a broker says that it has nothing more, as behind the last transaction of a topic
    "queued.max.messages.kbytes": 4_096,  # fetched ahead; what lies behind the end of a range is fetched in vain
    # Until it looks again whether there is room; with its default of 1,000 one worker stores 71,000 records/s, and 100,000 with 5.
    "fetch.queue.backoff.ms": 5,
}

# A call from Python itself would miss that the client has raised and returned None at once, and fail somewhere behind.
_read_headers: Final = methodcaller("headers")


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
        self._fetched: deque[Any] = deque()

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()

    def read(self, partition: Partition, begin: int, end: int, count: int, size: int) -> tuple[list[Record], int]:
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

    def _read(self, end: int, count: int, size: int) -> list[Record]:
        records: list[Record] = []
        silent = 0
        while self._place < end and len(records) < count and size > 0:
            if not self._fetched:
                self._fetched.extend(self._consumer.consume(min(count - len(records), end - self._place), POLL_SEC))
                if not self._fetched:
                    if records:
                        break
                    silent += 1
                    self._reasons.check()
                    if silent * POLL_SEC >= ANSWER_SEC:
                        raise self._reasons.silence(f"sends nothing of {self._partition}")
                    continue
            message: Any = self._fetched.popleft()
            error = message.error()
            if error is None:
                offset = message.offset()
                if offset >= end:
                    self._fetched.appendleft(message)
                    self._place = end
                    break
                value, key = message.value(), message.key()
                try:
                    headers = _read_headers(message) or ()
                except (SystemError, UnicodeDecodeError):
                    headers = None  # the name of one is not UTF-8
                records.append(Record(offset, message.timestamp()[1], value, key, headers))
                size -= len(value or b"") + len(key or b"")
                if headers:
                    size -= sum(len(name) + len(text or b"") for name, text in headers)
                self._place = offset + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                self._place = min(max(self._place, message.offset()), end)
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                raise RecordsGone(f"{self._partition} has no offset {self._place} any more")
            elif error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                continue  # the client looks for the coordinator of its group, which we don't need
            else:
                raise trouble_of(error, self._servers, f"Read on the topic {message.topic()}")
        return records
