"""A topic, a namespace, and what is between them: for tests."""

import json
import uuid
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from confluent_kafka import TopicPartition
from pyspark.sql import SparkSession

from pipeline.config import KafkaSettings, RedisSettings
from pipeline.core.clock import SystemClock
from pipeline.core.messages import Message
from pipeline.ingest.kafka_again import RecordsAgain
from pipeline.ingest.kafka_reader import ReadSettings, RecordReader
from pipeline.ingest.kafka_source import KafkaSource, name_of, read_kafka
from pipeline.ingest.kafka_writer import RangeWriter
from pipeline.ingest.query import query_failure, start_query
from pipeline.ingest.stores import WriterSettings
from pipeline.ingest.summary import Summary
from pipeline.ingest.writer import BatchWriter
from pipeline.kafka.cluster import Cluster, Partition
from pipeline.kafka.properties import client_properties
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.listing import list_scheduled
from tests.kafka.broker import Broker
from tests.servers import RealServer

HOUR = 3_600
SENT_MS = 1_700_000_000_000


def line(message: str, **fields: object) -> bytes:
    return json.dumps({"message": message, "delay_sec": HOUR, **fields}).encode()


class Intake:
    """A topic and a namespace, and the query between them."""

    def __init__(self, broker: Broker, server: RealServer, spark: SparkSession, folder: Path, shards: int = 1) -> None:
        self.broker = broker
        self.topic = f"t-{uuid.uuid4().hex}"
        self.redis = RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}", shards=shards)
        self.rejects = folder / "rejects"
        self._spark = spark
        self._source: KafkaSource | None = None
        self._folder = folder

    def make_topic(self, partitions: int = 1, **config: object) -> None:
        # What tests send is older than what a topic keeps.
        self.broker.make_topic(self.topic, partitions=partitions, **{"retention_ms": -1, **config})

    def send(self, *values: bytes | None, partition: int = 0, **more: object) -> None:
        self.broker.produce_all(self.topic, values, partition=partition, **more)  # type: ignore[arg-type]

    def settings(self, transaction_messages: int) -> tuple[WriterSettings, KafkaSource]:
        if self._source is None:
            self._source = KafkaSource(KafkaSettings(servers=self.broker.bootstrap, topics=self.topic), lambda _: None)
            self._source.close()
        source_id = self._source.marker_source_id
        return WriterSettings(self.redis, source_id, str(self.rejects), transaction_messages), self._source

    def take_in(self, checkpoint: str = "one", transaction_messages: int = 7, **kafka: object) -> Summary:
        """Read what is there; returns what became of it."""
        writer_settings, source = self.settings(transaction_messages)
        read = KafkaSettings(servers=self.broker.bootstrap, topics=self.topic, **kafka)  # type: ignore[arg-type]
        total = Summary()
        write = RangeWriter(writer_settings, ReadSettings(source.properties, read.format, read.accept_loss))
        writer = BatchWriter(writer_settings, SystemClock(), lambda _, summary, __: total.add(summary), write)
        partitions = Cluster(source.properties).partitions_of(self.topic)
        found = [
            connect(self.redis).get(keys_of(self.redis)[0].marker(source.marker_source_id, p.part_id))
            for p in partitions
        ]
        stored = {name_of(at): int(marker) for at, marker in zip(partitions, found, strict=True) if marker}
        rows = read_kafka(self._spark, read, source.properties, stored)
        query = start_query(rows, writer, str(self._folder / checkpoint), None)
        running: Any = SimpleNamespace(
            streams=SimpleNamespace(active=[query]), createDataFrame=self._spark.createDataFrame
        )
        self.again = RecordsAgain(running, read, writer.write)
        try:
            assert query.awaitTermination(120), "the query did not end within two minutes"
        except Exception as exc:
            raise query_failure(exc) from exc
        finally:
            query.stop()
        return total

    def first_partition(self) -> Partition:
        return Cluster(client_properties(self.broker.bootstrap, "")).partitions_of(self.topic)[0]

    def store(
        self,
        begin: int,
        end: int,
        transaction_messages: int = 7,
        accept_loss: bool = False,
        at: Partition | None = None,
    ) -> Summary:
        """Store a range, of the first partition, in this process with clients of its own."""
        settings, source = self.settings(transaction_messages)
        write = RangeWriter(
            settings,
            ReadSettings(source.properties, "json", accept_loss),
            lambda properties: (Cluster(properties), RecordReader(properties)),
        )
        at = at or self.first_partition()
        row = {"topic": at.topic, "topic_id": at.topic_id, "partition": at.number, "begin": begin, "end": end}
        return write.write([pa.RecordBatch.from_pylist([row])])

    def delete_before(self, offset: int) -> None:
        [answer] = self.broker.admin.delete_records([TopicPartition(self.topic, 0, offset)]).values()
        answer.result(60)

    def stored(self) -> list[Message]:
        client = connect(self.redis)
        return [each.message for each in list_scheduled(client, keys_of(self.redis), 0, 1 << 50)]

    def bodies(self) -> Counter[str]:
        return Counter(message.body for message in self.stored())
