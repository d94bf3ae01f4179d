"""Ways to lose, double or stop that a review found: topics and logs that change under a range, writers that die between shards."""

import ctypes
import json
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka import TopicCollection

from pipeline.core.errors import ConfigError
from pipeline.core.messages import Message
from pipeline.ingest.kafka_reader import Range, RangeReader, ReadSettings, RecordReader
from pipeline.ingest.kafka_writer import RangeStorer
from pipeline.ingest.rejects import RejectsWriter
from pipeline.ingest.shard_writer import Summary
from pipeline.ingest.stores import open_changing_stores, open_stores
from pipeline.ingest.transactions import PartQueue
from pipeline.kafka.cluster import Cluster, Partition
from pipeline.kafka.properties import client_properties
from pipeline.store.keys import keys_of
from pipeline.store.shards import shard_of
from tests.kafka.broker import Broker
from tests.kafka.intake import Intake, line
from tests.servers import RealServer


@pytest.fixture
def intake(broker: Broker, server: RealServer, tmp_path: Path) -> Intake:
    return Intake(broker, server, None, tmp_path)  # type: ignore[arg-type]  # without Spark


def within(seconds: float, call: Callable[[], Summary]) -> Summary:
    """Run it in a thread; fails if it does not end."""
    found: list[Summary] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it never ends, or raises"
    return found[0]


def storer(intake: Intake, begin: int, end: int, transaction_messages: int) -> RangeStorer:
    settings, source = intake.settings(transaction_messages)
    stores = list(zip(open_stores(settings.redis), open_changing_stores(settings), strict=True))
    clients = Cluster(source.properties), RecordReader(source.properties)
    wanted = Range(intake.first_partition(), begin, end)
    reader = RangeReader(ReadSettings(source.properties, "json", False), *clients, wanted)
    return RangeStorer(stores, settings, reader, RejectsWriter(intake.rejects))


def rejected(intake: Intake) -> list[str]:
    lines = (text for file in intake.rejects.glob("*.jsonl") for text in file.read_text().splitlines())
    return sorted(json.loads(text)["raw"] for text in lines)


@pytest.mark.parametrize("accept_loss", [False, True])
def test_a_range_of_a_topic_that_is_shorter_now_is_left(intake: Intake, accept_loss: bool) -> None:
    intake.make_topic()
    intake.send(*(line(f"{n}") for n in range(10)))
    old = intake.first_partition()
    assert intake.store(0, 5).stored == 5
    intake.broker.delete_topic(intake.topic)
    intake.make_topic()
    assert within(60, lambda: intake.store(5, 10, at=old, accept_loss=accept_loss)).stored == 0


@pytest.mark.parametrize("accept_loss", [False, True])
def test_a_log_that_ends_before_the_marker_is_no_hole(intake: Intake, server: RealServer, accept_loss: bool) -> None:
    intake.make_topic()
    intake.send(*(line(f"{n}") for n in range(5)))
    settings, _ = intake.settings(7)
    server.client().set(keys_of(intake.redis)[0].marker(settings.source_id, intake.first_partition().part_id), 9)
    assert within(60, lambda: intake.store(0, 12, accept_loss=accept_loss)).stored == 0


def test_rejects_of_one_partition_replace_those_of_no_other(intake: Intake) -> None:
    intake.topic = "t" * 180 + uuid.uuid4().hex
    for made in ("old", "new"):
        intake.make_topic(partitions=2)
        for number in range(2):
            intake.send(f"{made} {number}".encode(), partition=number)
        first = intake.first_partition()
        for number in range(2):
            intake.store(0, 1, at=Partition(first.topic, first.topic_id, number))
        intake.broker.delete_topic(intake.topic)
    assert rejected(intake) == ["new 0", "new 1", "old 0", "old 1"]


def test_a_writer_with_a_smaller_window_replaces_no_rejects(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    """It puts its rejects in place between those of the other and its transaction, and then dies."""
    intake.make_topic()
    intake.send(*(f"bad {n}".encode() for n in range(10)))
    one, other = storer(intake, 0, 10, 10), storer(intake, 0, 3, 10)
    store = one._writers[0].store

    def late(queues: list[PartQueue]) -> None:
        monkeypatch.setattr(other._writers[0], "store", lambda _: None)
        other._store(*other._read(0, False))
        store(queues)

    monkeypatch.setattr(one._writers[0], "store", late)
    one.store()
    assert {*rejected(intake)} == {f"bad {n}" for n in range(10)}


def test_what_one_shard_has_done_is_not_done_again_when_another_catches_up(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer dies between shards. Before the next one comes, a program lifts a cancellation; it stays lifted."""
    intake.redis = replace(intake.redis, shards=2)
    intake.make_topic()
    key = next(key for key in (f"k{n}" for n in range(100)) if shard_of(key, 2) == 0)
    intake.send(json.dumps({"cancel": key}).encode(), *(line(f"m{n}") for n in range(5)))
    dying = storer(intake, 0, 3, 5)
    monkeypatch.setattr(dying._writers[1], "store", lambda _: sys.exit())
    with pytest.raises(SystemExit):
        dying.store()
    again = Message(4_000_000_000_000, "again", id=key, message_id="z" * 14 + "0" * 8)
    open_changing_stores(intake.settings(1)[0])[0].replace(again, lifts_cancellation=True)
    intake.store(0, 6, 5)
    assert "again" in intake.bodies()


def test_a_shard_that_has_nothing_yet_knows_where_it_began(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job begins at the end of a topic, dies between shards in its first transaction, and its checkpoint is deleted."""
    intake.redis = replace(intake.redis, shards=2)
    intake.make_topic()
    keys = [f"k{n}" for n in range(10)]
    intake.send(b"before", *(line(key, id=key) for key in keys))
    dying = storer(intake, 1, 11, 100)
    monkeypatch.setattr(dying._writers[1], "store", lambda _: sys.exit())
    with pytest.raises(SystemExit):
        dying.store()
    intake.send(line("later"))
    intake.store(11, 12)
    assert {*intake.bodies()} == {*keys, "later"}


def test_topics_without_ids_are_refused(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them would have one marker, and of the second nothing would be stored."""

    class Id:
        def get_most_significant_bits(self) -> int:
            return 0

        get_least_significant_bits = get_most_significant_bits

    intake.make_topic()
    cluster = Cluster(client_properties(intake.broker.bootstrap, ""))
    described = cluster._ask(cluster._admin.describe_topics(TopicCollection([intake.topic]))[intake.topic])
    described.topic_id = Id()
    monkeypatch.setattr(cluster, "_ask", lambda *_: described)
    with pytest.raises(ConfigError, match=r"no id, as brokers do from version 2\.8 on"):
        cluster.partitions_of(intake.topic)


def test_a_header_name_that_is_no_text_is_rejected_and_ends_nothing(intake: Intake) -> None:
    intake.make_topic()
    produce_with_header(intake.broker.bootstrap, intake.topic, b"\xff\xfe")
    intake.send(line("next"))
    done = intake.store(0, 2)
    assert (done.stored, done.rejected) == (1, 1) and done.first_reject.endswith("offset 0, bad_headers")


def produce_with_header(servers: str, topic: str, name: bytes) -> None:
    """Produce a record as a program in C can: the name of its header is no text."""
    [library] = (Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs").glob("librdkafka*.so*")
    client_of, value, text = ctypes.CDLL(str(library)), line("m"), ctypes.create_string_buffer(512)
    client_of.rd_kafka_conf_new.restype = client_of.rd_kafka_new.restype = ctypes.c_void_p
    size = ctypes.c_size_t(len(text))
    settings = ctypes.c_void_p(client_of.rd_kafka_conf_new())
    client_of.rd_kafka_conf_set(settings, b"bootstrap.servers", servers.encode(), text, size)
    client = ctypes.c_void_p(client_of.rd_kafka_new(0, settings, text, size))
    topic_of, partition_of, flags_of, value_of, header_of = 1, 3, 7, 4, 9  # rd_kafka_vtype_t
    code = client_of.rd_kafka_producev(
        client,
        *(topic_of, ctypes.c_char_p(topic.encode())),
        *(partition_of, ctypes.c_int32(0)),
        *(flags_of, 2),
        *(value_of, ctypes.c_char_p(value), ctypes.c_size_t(len(value))),
        *(header_of, ctypes.c_char_p(name), ctypes.c_char_p(b"1"), ctypes.c_ssize_t(1)),
        0,
    )
    assert code == 0 and client_of.rd_kafka_flush(client, 10_000) == 0


def test_a_client_that_does_not_know_a_new_partition_yet_learns_of_it(intake: Intake) -> None:
    intake.make_topic()
    intake.send(line("first"))
    old = storer(intake, 0, 1, 10)
    old.store()
    intake.broker.add_partitions(intake.topic, 2)
    intake.broker._producer.list_topics(intake.topic, 10)
    intake.send(line("second"), partition=1)
    at = replace(intake.first_partition(), number=1)
    reader = RangeReader(ReadSettings({}, "json", False), old._reader._cluster, old._reader._reader, Range(at, 0, 1))
    settings, _ = intake.settings(10)
    stores = list(zip(open_stores(settings.redis), open_changing_stores(settings), strict=True))
    assert RangeStorer(stores, settings, reader, RejectsWriter(intake.rejects)).store().stored == 1
