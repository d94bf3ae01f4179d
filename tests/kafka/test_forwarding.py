"""Messages that came due, on their way through the outbox into a real Kafka."""

import base64
import logging
import uuid
from collections import Counter
from collections.abc import Iterator

import pytest

from pipeline.client import Request
from pipeline.core.records import Headers, Record, headers_of
from pipeline.kafka import forwarding
from pipeline.kafka.cluster import Cluster
from pipeline.kafka.properties import client_properties
from pipeline.runtime.process import wait_until
from tests.kafka.broker import Broker
from tests.kafka.outflow import PAST_MS, Outflow, texts
from tests.servers import RealServer

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("kafka")]

both_modes = pytest.mark.parametrize("exactly_once", [True, False], ids=["exactly once", "at least once"])


@pytest.fixture
def outflow(broker: Broker, server: RealServer) -> Iterator[Outflow]:
    made = Outflow(broker, server)
    yield made
    made.close()


def as_it_came(topic: str, n: int, value: bytes, key: bytes | None = None, headers: Headers = ()) -> Request:
    """Return what the ingest job stores of a raw record."""
    try:
        text, said = value.decode(), {}
    except UnicodeDecodeError:
        text, said = base64.b64encode(value).decode(), {"duetime-encoding": "base64"}
    kept = headers_of(Record(0, 0, value, key, headers), "raw", said)
    return Request(text, due=PAST_MS + n, id=f"id-{n}", topic=topic, headers=kept)


@both_modes
def test_records_leave_as_they_came_byte_for_byte(outflow: Outflow, exactly_once: bool) -> None:
    topic = outflow.topic()
    sent: list[tuple[bytes, bytes | None, Headers]] = [
        (b"plain", None, []),
        (b"\x00\xff", b"\x00\xff", [("b", b"\x00\xff"), ("a", None), ("b", b""), ("b", b"\x00\xff"), ("a", b"1")]),
        ("Grüße".encode(), "Schlüssel".encode(), [("a", b"1"), ("b", b"2")]),
        (b"empty", b"", [("", b""), ("z", b""), ("a", None)]),
        (b"\xf0\x9f\x9a\x80 ok", b"\xf0\x9f\x9a\x80", [("CALLER_SERVICE", b"shop")]),
        (bytes(range(256)) * 100, bytes(range(256)), [("all", bytes(range(256)))]),
    ]
    outflow.come_due(as_it_came(topic, n, *record) for n, record in enumerate(sent))
    outflow.forward(exactly_once=exactly_once)
    found = outflow.broker.read_all(topic)
    own = [[("duetime-id", b"id-%d" % n), ("duetime-due-ms", b"%d" % (PAST_MS + n))] for n in range(len(sent))]
    assert [(each.value, each.key, each.headers) for each in found] == [
        (value, key, [*headers, *more]) for (value, key, headers), more in zip(sent, own, strict=True)
    ]


def test_a_message_without_key_or_id_has_its_message_id(outflow: Outflow) -> None:
    topic = outflow.topic()
    outflow.come_due([Request("m", due=PAST_MS, topic=topic)])
    outflow.forward()
    [record] = outflow.broker.read_all(topic)
    headers = dict(record.headers)
    assert (record.key, headers["duetime-due-ms"]) == (None, b"%d" % PAST_MS)
    assert len(headers["duetime-id"] or b"") == 22


def murmur2(data: bytes) -> int:
    """Return what org.apache.kafka.common.utils.Utils.murmur2 does, written anew from its definition."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    whole = len(data) - len(data) % 4
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        h = (h * m & mask) ^ ((k ^ k >> 24) * m & mask)
    if data[whole:]:
        h = (h ^ int.from_bytes(data[whole:], "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def test_records_are_where_the_java_client_would_put_them_in_order_of_due_time_and_arrival(outflow: Outflow) -> None:
    assert murmur2(b"21") - (1 << 32) == -973932308, "what Kafka's own tests say"
    topic = outflow.topic(partitions=7)
    keys = [b"", b"k", b"order-1", b"\xff\x00\x01", *(b"key-%d" % n for n in range(30))]
    # Three times each: the last that arrives is due first, and the other two are due at once.
    for late, name in ((5_000, "second"), (5_000, "third"), (0, "first")):
        outflow.duetime.schedule_many(
            Request(
                f"{n} {name}",
                due=PAST_MS + late,
                topic=topic,
                headers=headers_of(Record(0, 0, b"", key), "raw", {}),
            )
            for n, key in enumerate(keys)
        )
    outflow.claim()
    outflow.forward(batch_messages=25)
    found = outflow.broker.read_all(topic)
    by_key = {key: texts(each for each in found if each.key == key) for key in keys}
    assert by_key == {key: [f"{n} {name}" for name in ("first", "second", "third")] for n, key in enumerate(keys)}
    assert {each.key: each.partition for each in found} == {key: (murmur2(key) & 0x7FFFFFFF) % 7 for key in keys}


@both_modes
def test_only_what_kafka_refuses_becomes_a_dead_letter(outflow: Outflow, exactly_once: bool) -> None:
    narrow, wide = outflow.topic(partitions=2, max_message_bytes=2_000), outflow.topic()
    small = [f"{n:03}" + "x" * 300 for n in range(60)]  # each is fine, a request of all of them is too large
    messages = [(narrow, text) for text in small] + [(wide, text) for text in small]
    messages += [(narrow, "y" * 5_000), (wide, "y" * 5_000), ("absent", "a"), (".", "b"), (narrow, "z" * 5_000)]
    messages.sort(key=lambda pair: pair[1][2:])  # large ones and others are mixed
    outflow.come_due(Request(text, due=PAST_MS + n, topic=topic) for n, (topic, text) in enumerate(messages))
    totals = outflow.forward(exactly_once=exactly_once)
    assert sorted(texts(outflow.broker.read_all(narrow))) == small
    assert sorted(texts(outflow.broker.read_all(wide))) == [*small, "y" * 5_000]
    refused = {topic: [(letter.body[0], letter.reason) for letter in outflow.dead(topic)] for topic, _ in messages}
    assert {topic: sorted(letters) for topic, letters in refused.items()} == {
        narrow: [("y", "too_large"), ("z", "too_large")],
        wide: [],
        "absent": [("a", "unknown_topic")],
        ".": [("b", "unknown_topic")],
    }
    assert (totals.forwarded, totals.refused) == (121, 4)
    assert outflow.left() == 0


@both_modes
def test_a_record_larger_than_the_client_takes_is_refused_alone(outflow: Outflow, exactly_once: bool) -> None:
    topic, key = outflow.topic(), base64.b64encode(b"\xff" * 8_000).decode()
    large = {f"h{n}": "h" * 8_000 for n in range(3)}
    outflow.come_due(
        Request(str(n), due=PAST_MS + n, topic=topic, headers=large | {"kafka-key-base64": key} if n == 5 else {})
        for n in range(10)
    )
    properties = outflow.client_file({"message.max.bytes": "10000"})
    totals = outflow.forward(exactly_once=exactly_once, client_config=properties)
    assert sorted(texts(outflow.broker.read_all(topic))) == [str(n) for n in range(10) if n != 5]
    assert [(letter.body, letter.reason) for letter in outflow.dead(topic)] == [("5", "too_large")]
    assert (totals.forwarded, totals.refused) == (9, 1)


def test_a_dead_letter_that_is_driven_again_arrives_when_its_topic_is_there(outflow: Outflow) -> None:
    topic = f"t-{uuid.uuid4().hex}"
    outflow.come_due([Request("late", due=PAST_MS, id="a", topic=topic, headers={"kafka-key": "k", "h": "1"})])
    with outflow.forwarding():
        outflow.wait_until_empty()
        [letter] = outflow.dead(topic)
        assert letter.reason == "unknown_topic" and topic in letter.detail
        outflow.broker.make_topic(topic)
        assert outflow.letters.redrive(letter, PAST_MS + 1)
        outflow.claim()
        outflow.wait_until_empty()
    [record] = outflow.broker.read_all(topic)
    assert (record.value, record.key) == (b"late", b"k")
    # It is due anew.
    assert record.headers == [("h", b"1"), ("duetime-id", b"a"), ("duetime-due-ms", b"%d" % (PAST_MS + 1))]
    assert outflow.dead(topic) == []


@both_modes
def test_a_topic_that_is_deleted_under_way_holds_up_no_other(outflow: Outflow, exactly_once: bool) -> None:
    doomed, other = outflow.topic(), outflow.topic()
    with outflow.forwarding(exactly_once=exactly_once, transaction_timeout_ms=3_000) as totals:
        outflow.come_due(Request("before", due=PAST_MS, topic=topic) for topic in (doomed, other))
        outflow.wait_until_empty()
        outflow.broker.delete_topic(doomed)
        outflow.come_due(Request("after", due=PAST_MS, topic=topic) for topic in (doomed, other))
        outflow.wait_until_empty()
    assert [letter.reason for letter in outflow.dead(doomed)] == ["unknown_topic"]
    found = Counter(texts(outflow.broker.read_all(other)))
    assert found["before"] == 1 and (found["after"] == 1 if exactly_once else found["after"] >= 1)
    assert totals.refused == 1


def test_a_topic_goes_to_the_kafka_topic_that_its_settings_name(
    outflow: Outflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = outflow.topic(), outflow.topic()
    outflow.set("mail", kafka_topic=first)
    with outflow.forwarding():
        outflow.come_due([Request("1", due=PAST_MS, topic="mail"), Request("2", due=PAST_MS, topic=first)])
        outflow.wait_until_empty()
        outflow.set("mail", kafka_topic=second)
        monkeypatch.setattr("pipeline.kafka.forwarding.TOPICS_MS", 0)  # else it would be taken for known a while
        outflow.come_due([Request("3", due=PAST_MS, topic="mail")])
        outflow.wait_until_empty()
    assert (texts(outflow.broker.read_all(first)), texts(outflow.broker.read_all(second))) == (["1", "2"], ["3"])
    # A dead letter is one of the topic that the user knows.
    outflow.set("mail", kafka_topic="absent")
    outflow.come_due([Request("4", due=PAST_MS, topic="mail")])
    outflow.forward()
    [letter] = outflow.dead("mail")
    assert "absent" in letter.detail and outflow.dead("absent") == []


def test_the_position_is_in_the_name_of_a_topic_that_is_made_and_stays_empty(outflow: Outflow) -> None:
    topic, position = outflow.topic(), f"p-{uuid.uuid4().hex}"
    outflow.come_due(Request(str(n), due=PAST_MS + n, topic=topic) for n in range(25))
    outflow.forward(position_topic=position, batch_messages=10)
    [partition] = Cluster(client_properties(outflow.broker.bootstrap, "")).partitions_of(position)
    assert partition.number == 0
    assert outflow.broker.read_all(position, "read_uncommitted") == []
    assert texts(outflow.broker.read_all(topic)) == [str(n) for n in range(25)]


def test_several_shards_have_an_outbox_each(broker: Broker, server: RealServer) -> None:
    outflow = Outflow(broker, server, shards=3)
    topic = outflow.topic(partitions=2)
    outflow.come_due(Request(str(n), due=PAST_MS, id=f"i{n}", topic=topic) for n in range(300))
    assert all(outflow.client.xlen(keys.outbox()) for keys in outflow.shards)
    outflow.forward(batch_messages=50)
    assert Counter(texts(broker.read_all(topic))) == Counter(map(str, range(300)))
    outflow.close()


def test_a_transaction_of_somebody_else_that_hangs_is_told(
    outflow: Outflow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forwarding, "LOOK_MS", 100)
    monkeypatch.setattr(forwarding, "STUCK_MS", 500)
    topic = outflow.topic(partitions=3)
    foreign = outflow.broker.transactional(f"foreign-{uuid.uuid4().hex}", {"transaction.timeout.ms": 60_000})
    foreign.begin_transaction()
    foreign.produce(topic, b"open", partition=1)
    foreign.flush(10)
    with outflow.forwarding() as totals, caplog.at_level(logging.ERROR):
        outflow.come_due(Request(str(n), due=PAST_MS, topic=topic) for n in range(30))
        outflow.wait_until_empty()
        assert wait_until(lambda: totals.stuck_partitions == [f"{topic}/1"], 20), totals.stuck_partitions
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 1 and f"a transaction in {topic}/1 at offset 0 is open" in told[0], told
        foreign.abort_transaction(10)
        assert wait_until(lambda: totals.stuck_partitions == [], 20)
    assert len(outflow.broker.read_all(topic)) == 30


def test_offsets_of_the_position_are_those_of_the_namespace_alone(outflow: Outflow, server: RealServer) -> None:
    """Two namespaces of the same broker, and one of the same name on another server, do not meet."""
    topic, other = outflow.topic(), Outflow(outflow.broker, server)
    for n, each in enumerate((outflow, other)):
        each.come_due([Request(str(n), due=PAST_MS, topic=topic)])
    outflow.forward()
    other.forward()
    server.client().flushall()
    anew = Outflow(outflow.broker, server, namespace=outflow.redis.namespace)
    anew.come_due([Request("2", due=PAST_MS, topic=topic)])
    anew.forward()
    assert texts(outflow.broker.read_all(topic)) == ["0", "1", "2"]
    other.close()
    anew.close()
