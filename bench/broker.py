"""A Kafka broker of its own for a benchmark: on the disk of the private server, with the JVM settings that Kafka ships."""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from confluent_kafka import Producer

from pipeline.core.errors import PipelineError
from pipeline.kafka.sender import KafkaSender
from pipeline.store.outbox import OutboxEntry
from tests.kafka import jars
from tests.kafka.broker import Broker

# What kafka-server-start.sh gives to Java.
JAVA_OPTIONS = (
    *("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35"),
    *("-XX:+ExplicitGCInvokesConcurrent", "-Dlog4j2.level=WARN"),
)
# Kafka's own defaults, where the broker of tests has less.
SETTINGS = {"num_network_threads": 3, "num_io_threads": 8, "log_cleaner_dedupe_buffer_size": 134_217_728}
WARM_UP_BATCHES, QUICK_WARM_UP_BATCHES, WARM_UP_RECORDS = 200, 5, 500
# Of one record and a position each, a batch: with fewer the p99 of a thousand messages a second still halved from sample to sample.
WARM_UP_SMALL = 30
ANSWER_SEC = 30.0


class BenchBroker(Broker):
    """A broker whose topics are all new."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None, None, JAVA_OPTIONS, **SETTINGS)
        self._numbers = itertools.count()

    def new_topic(self, partitions: int = 1, **config: object) -> str:
        """Make a topic that keeps everything, and return its name."""
        name = f"bench-{next(self._numbers)}"
        self.make_topic(name, partitions, retention_ms=-1, **config)
        return name

    def cpu_s(self) -> float:
        """Return the CPU seconds that it has used so far."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def warm_up(self, batches: int) -> None:
        """Let it work until its compiler has seen what comes: with transactions, without, and a reader."""
        topic = self.new_topic(3)
        value = b"x" * 50
        plain = Producer(self.client_settings({"enable.idempotence": True}))
        inside = self.transactional("warm-up")
        ours = KafkaSender(self.client_settings(), "warm-up-small", str, True, int(ANSWER_SEC) * 1_000, topic)
        for _ in range(batches):
            inside.begin_transaction()
            for producer in (inside, plain):
                for _ in range(WARM_UP_RECORDS):
                    producer.produce(topic, value)
                producer.flush(ANSWER_SEC)
            inside.commit_transaction(ANSWER_SEC)
            for number in range(WARM_UP_SMALL):
                ours.send([OutboxEntry(f"1-{number}", topic, "", 0, value, {})])
        ours.close()
        found, sent = len(self.read_all(topic)), batches * (2 * WARM_UP_RECORDS + WARM_UP_SMALL)
        if found != sent:
            raise RuntimeError(f"{found} of {sent} records came while warming up.")


def kafka_version() -> str:
    """Return the version of the broker."""
    return jars.installed().name


@contextmanager
def bench_broker(work: Path, quick: bool) -> Iterator[BenchBroker]:
    """Run a warm broker on a folder below ``work`` while the block lasts.

    Raises:
        PipelineError: there is no Kafka.
    """
    if why := jars.why_unavailable():
        raise PipelineError(f"There is no Kafka: {why}.")
    folder = work / "broker"
    folder.mkdir(parents=True)
    broker = BenchBroker(folder)
    try:
        broker.start()
        broker.warm_up(QUICK_WARM_UP_BATCHES if quick else WARM_UP_BATCHES)
        yield broker
    finally:
        broker.kill()
        shutil.rmtree(folder, ignore_errors=True)
