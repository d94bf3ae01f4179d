"""Drain loops as users run them, which write to Kafka: brokers that are away, loops that stand still, and how they end."""

import signal
from collections import Counter
from collections.abc import Iterator
from random import Random
from threading import Event
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

import pipeline.kafka.sender as sender_module
from pipeline.client import Request
from pipeline.kafka.cluster import KafkaAway
from pipeline.kafka.sender import KafkaSender
from pipeline.runtime.process import wait_until
from pipeline.store.outbox import OutboxEntry
from tests.e2e.commands import Checkout, Command
from tests.e2e.conftest import checkout as checkout
from tests.kafka.broker import Broker, real_broker
from tests.kafka.outflow import PAST_MS, Outflow, texts
from tests.servers import RealServer

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("kafka")]


class Loops:
    """Drain loops of one namespace."""

    def __init__(self, checkout: Checkout, outflow: Outflow) -> None:
        self._checkout, self._outflow = checkout, outflow

    def start(self, *options: str, **environ: str) -> Command:
        redis = self._outflow.redis
        settings = {"REDIS_URL": redis.url, "DUETIME_REDIS_NAMESPACE": redis.namespace}
        settings |= {"DUETIME_KAFKA_TAKEOVER_SEC": "1"} | environ
        kafka = ("--sink", "kafka", "--kafka-servers", self._outflow.broker.bootstrap, "--format", "json")
        return self._checkout.run("jobs/drain.py", *kafka, *options, environ=settings)


@pytest.fixture
def outflow(broker: Broker, server: RealServer) -> Iterator[Outflow]:
    made = Outflow(broker, server)
    yield made
    made.close()


def numbers(begin: int, end: int, topic: str) -> list[Request]:
    return [Request(str(n), due=PAST_MS + n, topic=topic) for n in range(begin, end)]


def expect_once(outflow: Outflow, topic: str, count: int) -> None:
    found = Counter(texts(outflow.broker.read_all(topic)))
    assert found == Counter(map(str, range(count))), found - Counter(map(str, range(count)))


@pytest.mark.slow
def test_a_loop_whose_broker_is_away_waits_and_holds_up_nothing_else(checkout: Checkout, server: RealServer) -> None:
    """On a broker that makes topics when they are asked for, ours make none."""
    with real_broker(transactions=True, auto_create_topics_enable="true") as broker:
        outflow = Outflow(broker, server)
        topic = outflow.topic(partitions=3)
        outflow.set("seen", sink="screen")
        broker.kill()
        loop = Loops(checkout, outflow).start()
        outflow.duetime.schedule_many(numbers(0, 200, topic))
        loop.wait_for_line("messages for Kafka wait")
        outflow.duetime.schedule("while it is away", delay=1, topic="seen")
        loop.wait_for(lambda c: len(c.out) == 1, "a message on the screen")
        broker.start()
        assert wait_until(lambda: outflow.left() == 0, 60), loop.screen()
        loop.wait_for_line("messages for Kafka go on")
        outflow.duetime.schedule_many(numbers(200, 5_000, topic))
        assert wait_until(lambda: 0 < outflow.left() < 4_800, 20), loop.screen()
        broker.kill()
        outflow.duetime.schedule("while it is away again", delay=1, topic="seen")
        loop.wait_for(lambda c: len(c.out) == 2, "a message on the screen")
        broker.start()
        outflow.duetime.schedule("x", delay=0, topic="absent")
        assert wait_until(lambda: outflow.left() == 0 and bool(outflow.dead("absent")), 60), loop.screen()
        assert loop.stop() == 0
        expect_once(outflow, topic, 5_000)
        assert all(0 <= each["delivered_ms"] - each["due_ms"] < 2_000 for each in loop.records())
        said = [line for _, line in loop.err if "messages for Kafka wait" in line]
        assert 1 <= len(said) <= 2, "once for each time that it was away"
        assert "Traceback" not in loop.screen()
        assert "absent" not in broker.admin.list_topics(timeout=60).topics
        outflow.close()


def test_a_loop_ends_only_when_all_that_is_due_is_in_kafka(checkout: Checkout, outflow: Outflow) -> None:
    topic = outflow.topic(partitions=2)
    outflow.duetime.schedule_many(numbers(0, 3_000, topic))
    loops = Loops(checkout, outflow)
    once = loops.start("--once", DUETIME_KAFKA_BATCH_MESSAGES="100")
    assert once.end() == 0, once.screen()
    assert outflow.left() == 0
    expect_once(outflow, topic, 3_000)
    assert "3,000 written to Kafka, 0 refused" in once.screen()
    outflow.duetime.schedule_many(Request(str(n), delay=2, topic=topic) for n in range(3_000, 3_100))
    empty = loops.start("--until-empty")
    assert empty.end() == 0, empty.screen()
    assert outflow.left() == 0
    expect_once(outflow, topic, 3_100)


def test_a_sender_that_slept_in_its_transaction_commits_nothing_more(outflow: Outflow) -> None:
    topic, name = outflow.topic(), "duetime-" + outflow.redis.namespace
    entries = [OutboxEntry(f"1-{n + 1}", topic, f"i{n}", PAST_MS, b"%d" % n, {}) for n in range(10)]
    properties = {"bootstrap.servers": outflow.broker.bootstrap}

    def sender() -> KafkaSender:
        return KafkaSender(properties, name, str, True, 10_000, "duetime-positions")

    zombie = sender()
    assert zombie.send(entries[:2]) == {}
    others: list[KafkaSender] = []

    def while_it_sleeps() -> None:
        others.append(sender())
        assert others[0].position == "1-2"
        assert others[0].send(entries[2:]) == {}

    with pytest.raises(KafkaAway):
        zombie.send(entries[2:6], while_it_sleeps)
    zombie.close()
    expect_once(outflow, topic, 10)
    anew = sender()
    assert anew.position == "1-10"
    with pytest.raises(KafkaAway):
        others[0].send(entries[:1])
    for each in (anew, *others):
        each.close()


def test_a_coordinator_that_is_not_ready_is_asked_again(outflow: Outflow, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that makes its topic of offsets, or has just taken it over, says so for a moment."""
    said = [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS]

    class NotReady(Consumer):
        def committed(self, *args: Any) -> list[TopicPartition]:
            if said:
                raise KafkaException(KafkaError(said.pop()))
            return super().committed(*args)

    monkeypatch.setattr(sender_module, "Consumer", NotReady)
    name, properties = "duetime-" + outflow.redis.namespace, {"bootstrap.servers": outflow.broker.bootstrap}
    opened = KafkaSender(properties, name, str, True, 10_000, "duetime-positions")
    assert not said
    assert opened.position == ""
    opened.close()
    said[:] = [KafkaError.GROUP_AUTHORIZATION_FAILED]
    with pytest.raises(KafkaAway, match="GROUP_AUTHORIZATION_FAILED"):
        KafkaSender(properties, name, str, True, 10_000, "duetime-positions")


def test_loops_that_are_frozen_beyond_their_lease_write_nothing_twice(checkout: Checkout, outflow: Outflow) -> None:
    random, topic, count = Random(1), outflow.topic(partitions=4), 0
    loops = [
        Loops(checkout, outflow).start(DUETIME_KAFKA_BATCH_MESSAGES="40", DUETIME_DRAIN_LEASE_SEC="3") for _ in range(2)
    ]
    assert wait_until(lambda: outflow.client.zcard(outflow.shards[0].drains()) == len(loops), 30)
    for _ in range(5):
        outflow.duetime.schedule_many(numbers(count, count + 1_500, topic))
        count += 1_500
        Event().wait(random.uniform(0.05, 0.6))
        leader = outflow.client.get(outflow.shards[0].forwarder()) or b""
        frozen = next((loop for loop in loops if b":%d:" % loop.process.pid in leader), loops[0])
        frozen.process.send_signal(signal.SIGSTOP)
        outflow.wait_until_empty(30)
        frozen.process.send_signal(signal.SIGCONT)
    assert wait_until(lambda: len(outflow.broker.read_all(topic)) >= count, 30)
    assert all(loop.process.poll() is None for loop in loops)
    assert [loop.stop() for loop in loops] == [0, 0]
    expect_once(outflow, topic, count)
    assert not any("Traceback" in loop.screen() for loop in loops)
