"""The broker of the tests does what Kafka promises, as tests of ours will rely on it."""

import contextlib
import select
import socket
import socketserver
import threading
import uuid
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from tests.kafka import jars
from tests.kafka.broker import Broker, real_broker
from tests.kafka.clients import Clients

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("kafka")]


@pytest.fixture
def topic(broker: Broker) -> str:
    """An empty topic with one partition."""
    name = uuid.uuid4().hex
    broker.make_topic(name)
    return name


def values(broker: Broker, topic: str, isolation: str) -> list[bytes | None]:
    """Return the values that a consumer sees now."""
    return [record.value for record in broker.read_all(topic, isolation)]


def write(producer: Producer, topic: str, value: str) -> None:
    """Have the broker store a record of an open transaction."""
    producer.begin_transaction()
    producer.produce(topic, value)
    assert producer.flush(30) == 0


def test_a_record_comes_back_as_it_was_produced(broker: Broker, topic: str) -> None:
    headers = [("trace", b"1"), ("other", b""), ("trace", None), ("trace", b"\xff")]
    first = broker.produce(topic, b"\x00value", b"key", headers, timestamp_ms=1_700_000_000_123, partition=0)
    tombstone = broker.produce(topic, None, "ключ")
    assert broker.read_all(topic) == [first, tombstone]
    assert (first.partition, first.offset, first.key, first.value) == (0, 0, b"key", b"\x00value")
    assert (first.headers, first.timestamp_ms) == (headers, 1_700_000_000_123)
    assert (tombstone.offset, tombstone.key, tombstone.value) == (1, "ключ".encode(), None)


def test_topics_come_grow_and_go(broker: Broker) -> None:
    name = uuid.uuid4().hex
    for texts in (["a", "b"], ["c"]):
        broker.make_topic(name, 2, cleanup_policy="compact", retention_ms=60_000)
        broker.add_partitions(name, 3)
        sent = broker.produce_all(name, texts, "key", partition=2)
        assert [(record.partition, record.offset) for record in sent] == [(2, offset) for offset in range(len(texts))]
        assert broker.read_all(name, count=len(texts)) == sent
        broker.delete_topic(name)
        assert name not in broker.admin.list_topics(timeout=60).topics


def test_what_was_aborted_is_shown_only_to_who_reads_uncommitted(broker: Broker, topic: str) -> None:
    producer = broker.transactional(topic)
    write(producer, topic, "aborted")
    producer.abort_transaction(30)
    write(producer, topic, "committed")
    producer.commit_transaction(30)
    write(producer, topic, "open")
    assert values(broker, topic, "read_committed") == [b"committed"]
    assert values(broker, topic, "read_uncommitted") == [b"aborted", b"committed", b"open"]
    producer.abort_transaction(30)


def test_a_second_producer_fences_the_first(broker: Broker, topic: str) -> None:
    first = broker.transactional(topic)
    write(first, topic, "first")
    second = broker.transactional(topic)
    with pytest.raises(KafkaException) as refused:
        first.commit_transaction(30)
    assert refused.value.args[0].code() == KafkaError._FENCED
    write(second, topic, "second")
    second.commit_transaction(30)
    assert values(broker, topic, "read_committed") == [b"second"]


class Relay(socketserver.ThreadingTCPServer):
    """The least of a proxy: what comes to its port goes on to a broker, and back."""

    connections = 0
    upstream = ("", 0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Relayed(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        relay: Relay = self.server  # type: ignore[assignment]
        relay.connections += 1
        with contextlib.suppress(OSError), socket.create_connection(relay.upstream) as broker:
            other = {self.request: broker, broker: self.request}
            while True:
                for source in select.select(list(other), [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    other[source].sendall(data)


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    with Relay(("127.0.0.1", 0), Relayed) as relay:
        thread = threading.Thread(target=relay.serve_forever, args=(0.05,))
        thread.start()
        yield relay
        relay.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def relayed(relay: Relay) -> Iterator[Broker]:
    """A broker that may be killed, with a relay before its second listener."""
    with real_broker(proxied_port=relay.server_address[1]) as broker:
        relay.upstream = broker.upstream
        yield broker
        broker.stop()  # once by SIGTERM, as the shared one is killed


def test_a_killed_broker_comes_back_with_what_it_acknowledged_and_where_it_was(relayed: Broker) -> None:
    relayed.make_topic("kept")
    sent = relayed.produce_all("kept", map(str, range(1000)))
    before, bootstrap = relayed.admin.describe_cluster().result(), relayed.bootstrap
    relayed.restart()
    assert relayed.read_all("kept") == sent
    sent.append(relayed.produce("kept", "after"))
    assert relayed.read_all("kept") == sent
    after = relayed.admin.describe_cluster().result()
    assert (after.cluster_id, relayed.bootstrap) == (before.cluster_id, bootstrap)


def test_who_comes_by_a_proxy_is_not_told_of_another_way(relayed: Broker, relay: Relay) -> None:
    relayed.make_topic("relayed")
    sent = relayed.produce("relayed", "directly")
    assert (relayed.read_all("relayed"), relay.connections) == ([sent], 0)
    client = Clients(relay.address)
    [told] = client.admin.list_topics(timeout=60).brokers.values()
    assert f"{told.host}:{told.port}" == relay.address
    assert client.read_all("relayed") == [sent]
    assert relay.connections > 0


class FakeIvy:
    """Stands in for Java: what it is asked for it writes into the folder."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.fetches = 0

    def __call__(self, arguments: list[str], failure: str) -> None:
        if arguments[-2] == "-retrieve":
            self.fetches += 1
            target = Path(arguments[-1].replace("[organisation]", "org.apache.kafka"))
            target.parent.mkdir(parents=True)
            (target.parent / "kafka-clients-1.0.jar").write_bytes(self.content)
        else:
            data = Path(arguments[-1]).parent / "data"
            data.mkdir()
            (data / jars.CHECKPOINT).touch()


LISTED = {"org.apache.kafka/kafka-clients-1.0.jar": sha256(b"good").hexdigest()}


def test_jars_are_fetched_once_and_again_when_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ivy = FakeIvy(b"good")
    monkeypatch.setattr(jars, "_run", ivy)
    folder = jars.install(tmp_path, LISTED)
    assert jars.install(tmp_path, LISTED) == folder == tmp_path / "1.0"
    assert ivy.fetches == 1
    next(folder.glob("*/*.jar")).write_bytes(b"spoilt")
    assert jars.install(tmp_path, LISTED) == folder
    assert (ivy.fetches, next(folder.glob("*/*.jar")).read_bytes()) == (2, b"good")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.0", "lock"]


def test_a_jar_that_is_not_the_listed_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "_run", FakeIvy(b"other"))
    with pytest.raises(AssertionError, match=r"kafka-clients-1\.0\.jar has the checksum \w+, not \w+"):
        jars.install(tmp_path, LISTED)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("ci, outcome", [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_no_broker_skips_tests_but_fails_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(jars, "why_unavailable", lambda: "no network")
    with pytest.raises(outcome, match="There is no Kafka: no network"), real_broker():
        pass
