"""Topics to Redis through Spark: each record is stored once, whatever happens to query, checkpoint, topic and server."""

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipeline.core.errors import PipelineError, SourceError
from pipeline.core.messages import Message
from pipeline.ingest import kafka_reader
from pipeline.kafka.cluster import Cluster
from pipeline.kafka.properties import client_properties
from pipeline.store.keys import keys_of
from pipeline.store.redis_store import RedisStore
from tests.kafka.broker import Broker
from tests.kafka.intake import SENT_MS, Intake, line
from tests.servers import RealServer


@pytest.fixture
def intake(broker: Broker, server: RealServer, spark: SparkSession, tmp_path: Path) -> Iterator[Intake]:
    made = Intake(broker, server, spark, tmp_path)
    yield made
    if any(
        each.topic == made.topic for each in Cluster(client_properties(broker.bootstrap, "")).partitions_of(made.topic)
    ):
        broker.delete_topic(made.topic)


def test_a_record_is_a_request_that_arrived_at_its_time(intake: Intake) -> None:
    intake.make_topic()
    intake.send(
        b'{"topic": "T", "message": "text 4", "countdown": 120}',
        timestamp_ms=SENT_MS,
        headers=[("CALLER_SERVICE", b"shop")],
    )
    intake.send(line("keyed", id="tea"), key=b"k", timestamp_ms=SENT_MS)
    intake.send(b'{"message": "when?"}', None, b" ", timestamp_ms=SENT_MS)
    total = intake.take_in()
    assert (total.lines, total.stored, total.rejected, total.blank) == (5, 2, 1, 2)
    first, second = intake.stored()
    assert (first.topic, first.body, first.due_ms, dict(first.headers)) == (
        "T",
        "text 4",
        SENT_MS + 120_000,
        {"CALLER_SERVICE": "shop"},
    )
    assert (second.id, dict(second.headers)) == ("tea", {"kafka-key": "k"})
    [rejects] = intake.rejects.glob("*.jsonl")
    record = json.loads(rejects.read_text())
    assert record["headers"] == {} and record["timestamp_ms"] == SENT_MS
    assert (record["topic"], record["partition"], record["offset"], record["reason"]) == (
        intake.topic,
        0,
        2,
        "missing_due",
    )
    assert total.first_reject == f"{intake.topic}/0 offset 2, missing_due"


@pytest.mark.parametrize("shards", [1, 3])
def test_each_record_is_stored_once_whatever_checkpoint_and_portions(
    broker: Broker, server: RealServer, spark: SparkSession, tmp_path: Path, shards: int
) -> None:
    intake, draw = Intake(broker, server, spark, tmp_path, shards), random.Random(shards)
    intake.make_topic(partitions=3)
    sent = 0
    for number, checkpoint in enumerate(("one", "one", "two", "one")):
        for partition in range(3):
            count = draw.randint(0, 60)
            intake.send(
                *(line(f"m{sent + n}", **({"id": f"i{sent + n}"} if n % 3 == 0 else {})) for n in range(count)),
                partition=partition,
            )
            sent += count
        intake.take_in(checkpoint, draw.randint(1, 50), offsets_per_trigger=draw.randint(5, 90))
        assert intake.bodies() == Counter(f"m{n}" for n in range(sent)), number
    again = intake.take_in("three", 5)
    assert (again.lines, again.stored, again.duplicates) == (sent, 0, sent)
    assert len({message.message_id for message in intake.stored()}) == sent


def test_of_one_due_time_they_come_in_order_of_offset(intake: Intake) -> None:
    intake.make_topic()
    for n in range(20):
        intake.send(line(f"{n:02}", delay_sec=60 + n % 2), timestamp_ms=SENT_MS - n)
    intake.send(
        *(line(f"{n}", due=SENT_MS) if False else b'{"message":"%d","due":%d}' % (n, SENT_MS) for n in range(100, 150))
    )
    intake.take_in(transaction_messages=11)
    absolute = [message.body for message in intake.stored() if message.due_ms == SENT_MS]
    assert absolute == [f"{n}" for n in range(100, 150)]


def test_a_topic_made_anew_loses_nothing(intake: Intake) -> None:
    intake.make_topic()
    intake.send(*(line(f"old {n}") for n in range(10)))
    intake.take_in()
    intake.broker.delete_topic(intake.topic)
    intake.make_topic()
    intake.send(*(line(f"new {n}") for n in range(5)))
    assert intake.take_in().stored == 5
    assert intake.take_in("two").stored == 0


def test_what_was_planned_of_a_topic_is_not_read_of_another_under_its_name(intake: Intake) -> None:
    intake.make_topic()
    intake.send(*(line(f"old {n}") for n in range(9)))
    old = intake.first_partition()
    assert intake.store(0, 3).stored == 3
    intake.broker.delete_topic(intake.topic)
    assert intake.store(0, 9, at=old).stored == 0
    intake.make_topic()
    intake.send(*(line(f"new {n}") for n in range(9)))
    assert intake.store(0, 9, at=old).stored == 0
    assert intake.take_in().stored == 9


def test_a_writer_that_died_between_two_shards_is_gone_on_from(
    broker: Broker, server: RealServer, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake = Intake(broker, server, spark, tmp_path, shards=3)
    intake.make_topic()
    intake.send(*(line(f"m{n}", id=f"i{n}") for n in range(60)))
    schedule, calls = RedisStore.schedule, 0

    def fail_now_and_then(store: RedisStore, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise SystemExit
        return schedule(store, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RedisStore, "schedule", fail_now_and_then)
        for transaction_messages in (3, 2, 4, 1, 3):
            with pytest.raises(SystemExit):
                intake.store(0, 60, transaction_messages)
    total = intake.store(0, 60, 9)
    assert 0 < total.stored < 60 and total.lost == 0
    assert intake.bodies() == Counter(f"m{n}" for n in range(60))


def test_a_server_that_loses_its_last_writes_is_noticed_before_the_commit(
    intake: Intake, server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake.make_topic()
    intake.send(*(line(f"m{n}") for n in range(10)))
    schedule = RedisStore.schedule
    marker = keys_of(intake.redis)[0].marker(intake.settings(1)[0].source_id, intake.first_partition().part_id)

    def lose(store: RedisStore, *arguments: Any) -> Any:
        done = schedule(store, *arguments)
        if server.client().get(marker) == b"10":
            server.client().set(marker, 7)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(RedisStore, "schedule", lose)
        assert intake.store(0, 10).lost == 1
    assert intake.store(0, 10).lost == 0


def test_new_partitions_are_read_from_their_beginning(intake: Intake) -> None:
    intake.make_topic()
    intake.send(line("before"))
    assert intake.take_in(start="latest").stored == 0
    intake.broker.add_partitions(intake.topic, 3)
    intake.broker._producer.list_topics(intake.topic, 10)  # looks at it again
    intake.send(line("in a new one"), partition=2)
    intake.send(line("behind"))
    assert intake.take_in(start="latest").stored == 2
    assert intake.bodies() == Counter(["in a new one", "behind"])
    assert intake.take_in("two", start="latest").stored == 0, "the marker knows where to go on"
    intake.send(line("later"))
    assert intake.take_in("three", start="latest").stored == 1, "also without its checkpoint"


def test_a_hole_ends_the_job_with_a_sentence_unless_it_is_accepted(intake: Intake) -> None:
    intake.make_topic()
    intake.send(*(line(f"{n}") for n in range(10)))
    intake.delete_before(3)
    assert intake.store(0, 10).stored == 7, "nobody had read what was before"
    intake.send(*(line(f"{n}") for n in range(10, 20)))
    intake.delete_before(15)
    for begin in (0, 10, 12):
        with pytest.raises(SourceError, match=r"deleted the records 10 to 14 of t-\w+/0 before they were read"):
            intake.store(begin, 20)
    assert intake.store(10, 20, accept_loss=True).stored == 5
    assert sorted(map(int, intake.bodies())) == [*range(3, 10), *range(15, 20)]
    intake.delete_before(20)
    assert intake.store(0, 20).duplicates == 20, "what is stored may go"


def test_a_hole_in_the_middle_of_a_run_says_so_in_one_sentence(intake: Intake) -> None:
    intake.make_topic()
    intake.send(*(line(f"{n}") for n in range(10)))
    intake.store(0, 2)
    intake.delete_before(5)
    with pytest.raises(PipelineError, match=r"^Kafka has deleted the records 2 to 4 of .* to go on behind them\.$"):
        intake.take_in()


def test_a_log_that_was_cut_off_is_read_when_it_has_grown_again(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an election among brokers that are not in step does it."""
    monkeypatch.setattr(kafka_reader, "ANSWER_SEC", 0.5)
    intake.make_topic()
    intake.send(*(line(f"{n}") for n in range(5)))
    assert intake.store(0, 9).stored == 5
    intake.send(*(line(f"{n}") for n in range(5, 9)))
    assert intake.store(9, 9).stored == 4, "from where the marker is"


def test_a_server_that_lost_what_it_had_gets_it_again(intake: Intake, server: RealServer) -> None:
    intake.make_topic()
    intake.send(*(line(f"{n}") for n in range(30)))
    intake.take_in()
    client = server.client()
    for key in client.scan_iter(f"{{{intake.redis.namespace}:*"):
        client.delete(key)
    intake.send(line("30"))
    total = intake.take_in()
    assert total.stored == 1, "nothing is known of it: not even that there was something"
    [partition] = Cluster(client_properties(intake.broker.bootstrap, "")).partitions_of(intake.topic)
    _, source = intake.settings(7)
    client.set(keys_of(intake.redis)[0].marker(source.marker_source_id, partition.part_id), 12)
    intake.send(line("31"))
    assert intake.take_in().stored == 20
    assert {*intake.bodies()} == {f"{n}" for n in range(12, 32)}


def test_what_a_failover_undid_is_stored_again_without_another_record(intake: Intake, server: RealServer) -> None:
    intake.make_topic(partitions=2)
    intake.send(*(line(f"{n}") for n in range(30)))
    intake.send(line("30"), partition=1)
    assert intake.take_in().stored == 31
    assert intake.again.read_again(0) == "2 partitions of Kafka, of which 0 messages were missing"
    client, keys = server.client(), keys_of(intake.redis)[0]
    for bucket in client.zrange(keys.buckets(), 0, -1):
        for member in client.zrange(keys.bucket(int(bucket)), 0, -1):
            if int(Message.from_member(member, 0).body) >= 12:
                client.zrem(keys.bucket(int(bucket)), member)
    _, source = intake.settings(7)
    for partition, marker in zip(source.partitions, (12, None), strict=True):
        name = keys.marker(source.marker_source_id, partition.part_id)
        client.set(name, marker) if marker else client.delete(name)
    assert intake.again.read_again(0) == "2 partitions of Kafka, of which 19 messages were missing"
    assert intake.bodies() == {f"{n}": 1 for n in range(31)}


def test_raw_records_carry_any_bytes_and_all_their_headers(intake: Intake) -> None:
    intake.make_topic()
    asks = [("duetime-delay-sec", b"60.5"), ("duetime-topic", b"T"), ("duetime-id", b"tea")]
    intake.send(
        b"\x00\xff", key=b"\xfe", headers=[*asks, ("b", b"\x01"), ("a", b"x"), ("b", None)], timestamp_ms=SENT_MS
    )
    intake.send(b"text", headers=[("duetime-due", b"2030-01-01T00:00:00Z"), ("a", b"1"), ("b", b"2")])
    intake.send(b"no time", None)
    total = intake.take_in(format="raw")
    assert (total.stored, total.rejected) == (2, 2)
    binary, text = intake.stored()
    assert (binary.body, binary.topic, binary.id, binary.due_ms) == ("AP8=", "T", "tea", SENT_MS + 60_500)
    assert dict(binary.headers) == {
        "duetime-encoding": "base64",
        "kafka-key-base64": "/g==",
        "a": "x",
        "kafka-headers": '[["b","AQ=="],["a","eA=="],["b",null]]',
        "b": "\x01",
    }
    assert (text.body, dict(text.headers)) == ("text", {"a": "1", "b": "2"})


def test_records_cancel_and_replace(intake: Intake) -> None:
    intake.make_topic()
    intake.send(
        line("first", id="tea"),
        line("second", id="tea", replace=True),
        line("coffee", id="coffee"),
        b'{"cancel": "coffee"}',
    )
    total = intake.take_in()
    assert (total.cancelled, total.replaced) == (1, 1)
    assert intake.bodies() == Counter(["second"])
    assert intake.take_in("two").stored == 0
    assert intake.bodies() == Counter(["second"])


def test_writers_at_once_store_each_record_once(intake: Intake) -> None:
    intake.make_topic()
    intake.send(*(line(f"{n}") for n in range(400)))
    totals = [intake.store(0, 1)]  # from here on, the marker says where to go on
    threads = [
        threading.Thread(target=lambda *at: totals.append(intake.store(*at)), args=(begin, 400, count))
        for begin, count in ((0, 3), (0, 7), (0, 50), (250, 10))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(totals) == 5 and sum(total.stored for total in totals) == 400
    assert intake.bodies() == Counter(f"{n}" for n in range(400))
