"""Kafka as it is read: topics and their ids, ends, gaps, what was deleted."""

import pickle
import subprocess
import sys
import uuid

import numpy as np
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from pipeline.config import ROOT, KafkaSettings
from pipeline.core.ids import token_epoch_ms
from pipeline.core.records import Records
from pipeline.ingest.kafka_parsing import tokens_of
from pipeline.ingest.kafka_reader import RecordReader
from pipeline.ingest.kafka_source import RangePlanner
from pipeline.kafka.cluster import Cluster, Partition, RecordsGone, TopicGone
from pipeline.kafka.properties import client_properties
from pipeline.runtime.process import wait_until
from tests.kafka.broker import Broker


@pytest.fixture
def topic(broker: Broker) -> str:
    name = f"t-{uuid.uuid4().hex}"
    broker.make_topic(name, partitions=2, retention_ms=-1)  # tests send what is older than a topic keeps
    return name


def cluster_of(broker: Broker) -> Cluster:
    return Cluster(client_properties(broker.bootstrap, ""))


def reader_of(broker: Broker) -> RecordReader:
    return RecordReader(client_properties(broker.bootstrap, ""))


def test_topics_are_found_by_name_and_pattern_and_only_these(broker: Broker, topic: str) -> None:
    cluster = cluster_of(broker)
    found = cluster.partitions_of(f" {topic} ,nothing,{topic}")
    assert [(each.topic, each.number) for each in found] == [(topic, 0), (topic, 1)]
    assert cluster.partitions_of(f"^{topic[:20]}") == found
    assert cluster.partitions_of(f"{topic},^{topic}$,^__") == found, "no internal ones"


GARBAGE = """
import gc
from concurrent.futures import wait
from pipeline.kafka.cluster import Cluster

gc.disable()
cluster = Cluster({"bootstrap.servers": "127.0.0.1:1"})
answer = cluster._admin.describe_cluster(request_timeout=0.5)
answer.add_done_callback(lambda _: gc.collect())
cluster.itself = cluster  # as the traceback of an error does, that holds the frame that holds the error
del cluster
assert wait([answer], 10).done
Cluster({"bootstrap.servers": "127.0.0.1:1"})
print("alive")
"""


def test_a_client_that_is_garbage_when_its_answer_comes_ends_no_process() -> None:
    command = [sys.executable, "-P", "-c", GARBAGE]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "alive\n"), ran.stderr


def test_a_topic_made_anew_is_another_one(broker: Broker, topic: str) -> None:
    cluster = cluster_of(broker)
    [old, _] = cluster.partitions_of(topic)
    cluster.check(old)
    broker.delete_topic(topic)
    with pytest.raises(TopicGone):
        cluster.check(old)
    broker.make_topic(topic)
    [new] = cluster.partitions_of(topic)
    assert new != old and new.part_id != old.part_id
    with pytest.raises(TopicGone):
        cluster.check(old)


def test_records_come_with_all_they_have_over_gaps_of_transactions(broker: Broker, topic: str) -> None:
    broker.produce(
        topic, b"0", key=b"\xff", headers=[("b", b"\x00"), ("a", None), ("b", b"")], timestamp_ms=1234, partition=0
    )
    producer = broker.transactional(f"x-{topic}")
    for ends in (producer.abort_transaction, producer.commit_transaction):
        producer.begin_transaction()
        producer.produce(topic, ends.__name__, partition=0)
        producer.flush()
        ends()
    cluster, reader = cluster_of(broker), reader_of(broker)
    partition, other = cluster.partitions_of(topic)
    assert wait_until(lambda: cluster.end_offsets([partition, other]) == {partition: 5, other: 0}, 10)
    records, place = reader.read(partition, 0, 5, 100, 1 << 20)
    assert (records.offsets, records.values) == ([0, 3], [b"0", b"commit_transaction"])
    assert place == 5 or reader.read(partition, 4, 5, 100, 1 << 20) == (Records(), 5), (
        "behind it is the end of a transaction"
    )
    assert (records.keys[0], records.timestamps_ms[0]) == (b"\xff", 1234)
    assert list(records.headers[0] or ()) == [("b", b"\x00"), ("a", None), ("b", b"")]
    assert reader.read(partition, 1, 3, 100, 1 << 20)[1] == 3
    assert reader.read(partition, 4, 5, 100, 1 << 20) == (Records(), 5)
    assert reader.read(partition, 0, 1, 100, 1 << 20)[0].offsets == [0]
    reader.close()


def test_an_open_transaction_hides_what_is_behind_it(broker: Broker, topic: str) -> None:
    producer = broker.transactional(f"x-{topic}")
    producer.begin_transaction()
    producer.produce(topic, "open", partition=0)
    producer.flush()
    broker.produce(topic, b"behind", partition=0)
    cluster = cluster_of(broker)
    partition, _ = cluster.partitions_of(topic)
    assert cluster.end_offsets([partition]) == {partition: 0}
    producer.commit_transaction()
    assert wait_until(lambda: cluster.end_offsets([partition]) == {partition: 3}, 10)


def test_a_portion_is_bounded_by_count_and_bytes_and_the_next_goes_on(broker: Broker, topic: str) -> None:
    broker.produce_all(topic, [b"x" * 100] * 50, partition=0)
    reader = reader_of(broker)
    partition, _ = cluster_of(broker).partitions_of(topic)
    place, sizes = 0, []
    while place < 50:
        records, behind = reader.read(partition, place, 50, 20, 1_050)
        assert records.offsets == [*range(place, behind)]
        sizes.append(len(records))
        place = behind
    assert max(sizes) == 11 and sum(sizes) == 50
    reader.close()


def test_what_was_deleted_is_gone_and_what_is_left_begins_behind(broker: Broker, topic: str) -> None:
    from confluent_kafka import TopicPartition

    broker.produce_all(topic, [b"x"] * 10, partition=0)
    [answer] = broker.admin.delete_records([TopicPartition(topic, 0, 4)]).values()
    answer.result(60)
    cluster, reader = cluster_of(broker), reader_of(broker)
    partition, _ = cluster.partitions_of(topic)
    with pytest.raises(RecordsGone):
        reader.read(partition, 0, 10, 100, 1 << 20)
    assert cluster.first_offsets([partition]) == {partition: 4}
    assert len(reader.read(partition, 4, 10, 100, 1 << 20)[0]) == 6
    with pytest.raises(RecordsGone):
        reader.read(partition, 3, 10, 100, 1 << 20)
    reader.close()


def test_ids_sort_by_time_and_then_by_offset() -> None:
    partition = Partition("t", "0" * 31 + "7", 3)
    sorted_by = [
        (time_ms, offset) for time_ms in (0, 1, 63, 64, 2**41) for offset in (0, 1, 255, 2**32 - 1, 2**32, 7 * 10**9)
    ]
    times, offsets = (np.array(column, np.int64) for column in zip(*sorted_by, strict=True))
    ids = [
        token.decode() + f"{at & 0xFFFFFFFF:08x}"
        for token, at in zip(tokens_of(partition, offsets, times).to_pylist(), offsets.tolist(), strict=True)
    ]
    assert ids == sorted(ids) and len({*ids}) == len(ids) and {len(each) for each in ids} == {22}
    assert [token_epoch_ms(each[:14]) for each in ids] == times.tolist()


def test_a_batch_is_bounded_and_a_run_that_takes_in_what_is_there_ends_there(broker: Broker, topic: str) -> None:
    settings = KafkaSettings(servers=broker.bootstrap, topics=topic, offsets_per_trigger=6)
    planner = RangePlanner(settings, client_properties(broker.bootstrap, ""), {})
    for partition in (0, 1):
        broker.produce_all(topic, [b"x"] * 10, partition=partition)
    assert planner.initialOffset() == {}
    first = planner.latestOffset({}, planner.getDefaultReadLimit())
    assert sorted(first.values()) == [3, 3]
    assert [(each.begin, each.end) for each in planner.partitions({}, first)] == [(0, 3), (0, 3)]  # type: ignore[attr-defined]
    assert sorted(planner.latestOffset(first, ReadAllAvailable()).values()) == [10, 10]
    assert planner.reportLatestOffset() == planner.latestOffset(first, ReadAllAvailable())
    planner.prepareForTriggerAvailableNow()
    broker.produce_all(topic, [b"x"] * 10, partition=0)
    broker.add_partitions(topic, 3)
    ended = planner.latestOffset(first, ReadMaxRows(100))
    assert sorted(ended.values()) == [10, 10] and planner.latestOffset(ended, ReadMaxRows(100)) == ended
    away = RangePlanner(settings, {"bootstrap.servers": "127.0.0.1:9", "socket.timeout.ms": "300"}, {})
    assert away.latestOffset(first, ReadMaxRows(1)) == first and away.reportLatestOffset() is None
    pickled = pickle.loads(pickle.dumps(planner))
    assert [row[4] for each in planner.partitions(first, ended) for row in pickled.read(each)] == [10, 10]


@pytest.mark.parametrize(
    ("error", "is_told"), [("BrokenPipeError", False), ("ConnectionResetError", False), ("ValueError", True)]
)
def test_a_planner_whose_spark_is_gone_ends_without_a_stack_trace(error: str, is_told: bool) -> None:
    program = f"""
from pipeline.config import ROOT, KafkaSettings
from pipeline.ingest.kafka_source import RangePlanner

RangePlanner(KafkaSettings(), {{}}, {{}}).stop()
raise {error}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, "Traceback" in done.stderr) == (1, is_told), done.stderr
