"""The ingest job on a real broker, as users run it."""

import shutil
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from pipeline.config import RedisSettings
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.listing import list_scheduled
from tests.e2e.commands import Checkout, Command, kill_tree
from tests.e2e.conftest import checkout as checkout
from tests.kafka.broker import Broker, real_broker
from tests.servers import RealServer, real_server

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("kafka")]

RECORDS = 3_000
PARTITIONS = 3


class Pipeline:
    """A broker, a server and the job between them."""

    def __init__(self, checkout: Checkout, broker: Broker, server: RealServer, topic: str) -> None:
        self.checkout, self.broker, self.server, self.topic = checkout, broker, server, topic

    def ingest(self, *options: str, **environ: str) -> Command:
        kafka = ("--source", "kafka", "--kafka-servers", self.broker.bootstrap, "--kafka-topics", self.topic)
        return self.checkout.run("jobs/ingest.py", *kafka, *options, environ={"REDIS_URL": self.server.url, **environ})

    def bodies(self) -> Counter[str]:
        redis = RedisSettings(url=self.server.url)
        return Counter(each.message.body for each in list_scheduled(connect(redis), keys_of(redis), 0, 1 << 50))


def test_a_service_schedules_by_a_topic_as_a_delay_box_promises(checkout: Checkout, broker: Broker) -> None:
    """A record with topic, message, countdown and a header that names its sender comes due, with all of that."""
    with real_server() as server:
        broker.make_topic("requests")
        pipeline = Pipeline(checkout, broker, server, "requests")
        ingest = pipeline.ingest()
        drain = checkout.run("jobs/drain.py", "--format", "json", environ={"REDIS_URL": server.url})
        ingest.wait_for_line("ingest is up")
        request = b'{"topic": "T", "message": "your order", "countdown": 2}'
        sent = broker.produce("requests", request, key=b"order-1", headers=[("CALLER_SERVICE", b"shop")])
        broker.produce("requests", b'{"message": "no countdown"}')
        drain.wait_for(lambda c: bool(c.out), "the message")
        [message] = drain.records()
        assert (message["topic"], message["message"], message["due_ms"]) == (
            "T",
            "your order",
            sent.timestamp_ms + 2_000,
        )
        assert message["headers"] == {"CALLER_SERVICE": "shop", "kafka-key": "order-1"}
        assert message["delivered_ms"] >= message["due_ms"]
        ingest.wait_for_line("requests/0 offset 1, missing_due")
        ingest.wait_for(lambda _: bool(checkout.status("--redis", server.url)["ingest"]), "the progress of the batch")
        [status] = checkout.status("--redis", server.url)["ingest"]
        assert (status["reads"], status["last_lag"]) == (f"requests of Kafka at {broker.bootstrap}", 0)
        assert ingest.stop() == 0 and drain.stop() == 0
        assert "Traceback" not in ingest.screen()


@pytest.mark.slow
@pytest.mark.timeout(600)  # five starts of Spark, each of which may take a minute on a busy machine
def test_whatever_dies_each_record_is_stored_once(checkout: Checkout) -> None:
    """Kill the job, broker and server under load; run it with other portions, and without its checkpoint."""
    with real_broker() as broker, real_server() as server:
        broker.make_topic("requests", partitions=PARTITIONS)
        pipeline = Pipeline(checkout, broker, server, "requests")
        sent = 0

        def send(count: int) -> None:
            nonlocal sent
            for partition in range(PARTITIONS):
                texts = (f"m{sent + n}" for n in range(count // PARTITIONS))
                values = [b'{"message":"%b","delay_sec":36000}' % text.encode() for text in texts]
                broker.produce_all("requests", values, partition=partition)
                sent += len(values)

        send(600)
        for portion, transaction in ((50, 7), (400, 30)):
            job = pipeline.ingest(
                DUETIME_KAFKA_OFFSETS_PER_TRIGGER=str(portion), DUETIME_INGEST_TRANSACTION_MESSAGES=str(transaction)
            )
            before = pipeline.bodies().total()
            job.wait_for(lambda _, before=before: pipeline.bodies().total() > before + 100, "something stored")
            kill_tree(job.process.pid)
            job.process.wait(60)
            send(600)
        job = pipeline.ingest(DUETIME_KAFKA_OFFSETS_PER_TRIGGER="150", DUETIME_INGEST_TRANSACTION_MESSAGES="20")
        job.wait_for(lambda _: pipeline.bodies().total() > 900, "something stored")
        broker.kill()
        job.wait_for_line("waiting for Kafka")
        broker.start()
        job.wait_for_line("Kafka answers again")
        server.kill()
        server.start()
        send(600)
        job.wait_for(lambda _: pipeline.bodies().total() == sent, "all of it")
        assert job.stop() == 0, job.screen()
        shutil.rmtree(checkout.root / ".duetime" / "checkpoints")
        send(600)
        again = pipeline.ingest("--once")
        assert again.end() == 0, again.screen()
        assert pipeline.bodies() == Counter(f"m{n}" for n in range(sent))
        assert sent == RECORDS


def test_a_server_that_restarts_while_spark_starts_is_waited_for(checkout: Checkout, broker: Broker) -> None:
    with real_server() as server:
        broker.make_topic("patient", 1)
        pipeline = Pipeline(checkout, broker, server, "patient")
        job = pipeline.ingest()
        job.wait_for_line("Durability:")
        server.kill()
        job.wait_for_line("waiting for Redis", 60)
        assert job.stop(signal.SIGINT) == 0, job.screen()
        server.start()
        job = pipeline.ingest()
        job.wait_for_line("Durability:")
        server.kill()
        job.wait_for_line("waiting for Redis", 60)
        server.start()
        job.wait_for_line("ingest is up")
        broker.produce("patient", b'{"message":"m","delay_sec":36000}')
        job.wait_for(lambda _: pipeline.bodies() == Counter("m"), "message")
        assert job.stop() == 0
        assert "Traceback" not in job.screen()


@pytest.fixture
def somewhere(checkout: Checkout) -> Iterator[dict[str, str]]:
    with real_server() as server:
        yield {"REDIS_URL": server.url}


def test_what_is_wrong_is_told_in_one_sentence(checkout: Checkout, somewhere: dict[str, str], broker: Broker) -> None:
    file = checkout.root / "client.properties"
    file.write_text("isolation.level=read_uncommitted\n")
    named = ("--kafka-servers", broker.bootstrap)
    for options, code, sentence in (
        ((), 2, "Name the topics to read with --kafka-topics"),
        (("--kafka-topics", "t"), 2, "Name the Kafka cluster with --kafka-servers"),
        (("--kafka-topics", "nothing", *named), 2, "has no topic nothing; create it first"),
        (("--kafka-topics", "t", "--kafka-servers", "127.0.0.1:9"), 1, "Kafka can't be reached"),
        (("--kafka-topics", "t", *named, "--config", str(config(checkout, file))), 2, "isolation.level is not for you"),
    ):
        job = checkout.run("jobs/ingest.py", "--source", "kafka", *options, environ=somewhere)
        assert job.end() == code, job.screen()
        assert sentence in job.err[-1][1] and "Traceback" not in job.screen(), job.screen()


def config(checkout: Checkout, client: object) -> object:
    path = checkout.root / "own.toml"
    path.write_text(f'[kafka]\nclient_config = "{client}"\n')
    return path
