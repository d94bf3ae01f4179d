"""Records of a topic into the schedule, by the ingest job's own source and writer, beside the same lines from files.

All subjects run in one JVM, in turn, each on an empty server; the first round only warms up. A round starts one subject further
than the round before.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession

from bench.broker import ANSWER_SEC, BenchBroker
from bench.common import WORK, Options, Sample, format_table, say, spread_of
from bench.filling import KEYS
from bench.meter import measure
from bench.server import Server, empty_server
from bench.session import SOURCE_ID, collect_garbage, spark_session
from bench.workload import ARRIVAL_MS, Workload, bucket_start_ms, write_workload
from pipeline.config import IngestSettings, KafkaSettings, RedisSettings
from pipeline.core.clock import SystemClock
from pipeline.core.ids import MESSAGE_ID_LENGTH
from pipeline.ingest.kafka_reader import ReadSettings
from pipeline.ingest.kafka_source import KafkaSource, read_kafka
from pipeline.ingest.kafka_writer import RangeWriter
from pipeline.ingest.query import start_query
from pipeline.ingest.readers import read_landing
from pipeline.ingest.stores import WriterSettings
from pipeline.ingest.writer import BatchWriter

ROWS, QUICK_ROWS = 1_000_000, 2_000
ROUNDS, QUICK_ROUNDS = 5, 1
PARTITIONS = 4
SMALL_OFFSETS = 100_000  # offsets a batch
QUERY_SEC_MAX = 300
FILES, DEFAULT, SMALL = "files", "default", "small"
TITLES = {
    FILES: "files: default settings",
    DEFAULT: "topic: default settings",
    SMALL: f"topic: batches of {SMALL_OFFSETS:,}",
}

Told = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Subject:
    name: str
    run: Callable[[Server], Told]


def plan(options: Options) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        "rows": options.choose(options.rows, ROWS, QUICK_ROWS),
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
        "master": options.master,
        "partitions": PARTITIONS,
        "offsets_per_trigger": KafkaSettings().offsets_per_trigger,
        "transaction_messages": IngestSettings().transaction_messages,
    }


def take_samples(settings: dict[str, Any], broker: BenchBroker) -> list[Sample]:
    """Measure each subject once a round."""
    workload = write_workload(WORK / "landing", settings["rows"])
    topic = broker.new_topic(PARTITIONS)
    _fill_topic(broker, topic, workload)
    check = _checker(workload)
    samples = []
    with spark_session(settings["master"]) as spark:
        subjects = [
            _Subject(FILES, partial(_store_files, spark, workload)),
            _Subject(DEFAULT, partial(_store_topic, spark, broker, topic, KafkaSettings().offsets_per_trigger)),
            _Subject(SMALL, partial(_store_topic, spark, broker, topic, SMALL_OFFSETS)),
        ]
        for number in range(settings["rounds"] + 1):
            for place in range(len(subjects)):
                subject = subjects[(number + place) % len(subjects)]
                collect_garbage(spark)
                with empty_server(WORK) as server:
                    sample = _measure(server, broker, subject)
                    check(server)
                samples.append({"subject": subject.name, "round": number, "place": place, **sample})
                kind = f"round {number}" if number else "warm-up"
                say(f"{kind:<8} {settings['rows'] / sample['wall_s']:>9,.0f} records/s  {TITLES[subject.name]}")
    return samples


def _measure(server: Server, broker: BenchBroker, subject: _Subject) -> Sample:
    told: Told = []
    before_s = broker.cpu_s()
    sample = measure(server, lambda: told.extend(subject.run(server)))
    broker_s = broker.cpu_s() - before_s
    # The broker is a process below this one.
    client_s = sample["client_cpu_s"] - broker_s
    return {**sample, "client_cpu_s": round(client_s, 3), "broker_cpu_s": round(broker_s, 3), "batches": told}


def _store_files(spark: SparkSession, workload: Workload, server: Server) -> Told:
    """Take landing files in by a query of its own, as ``_store_topic`` does a topic."""
    writer = BatchWriter(_writer_settings(server, SOURCE_ID), SystemClock(), lambda *told: None)
    return _run_query(read_landing(spark, str(workload.folder), IngestSettings().max_bytes_per_trigger), writer)


def _store_topic(spark: SparkSession, broker: BenchBroker, topic: str, offsets: int, server: Server) -> Told:
    """Take a topic in by a query of its own, which ends when all is stored; returns Spark's account of each batch."""
    kafka = KafkaSettings(servers=broker.bootstrap, topics=topic, offsets_per_trigger=offsets)
    source = KafkaSource(kafka, lambda _: None)
    settings = _writer_settings(server, source.marker_source_id)
    write = RangeWriter(settings, ReadSettings(source.properties, kafka.format, kafka.accept_loss))
    try:
        writer = BatchWriter(settings, SystemClock(), lambda *told: None, write)
        return _run_query(read_kafka(spark, kafka, source.properties), writer)
    finally:
        source.close()


def _writer_settings(server: Server, source_id: str) -> WriterSettings:
    return WriterSettings(
        redis=RedisSettings(url=server.url),
        source_id=source_id,
        rejects=str(WORK / "rejects"),
        transaction_messages=IngestSettings().transaction_messages,
    )


def _run_query(rows: DataFrame, writer: BatchWriter) -> Told:
    checkpoint = WORK / "checkpoint"
    try:
        query = start_query(rows, writer, str(checkpoint), None)
        if not query.awaitTermination(QUERY_SEC_MAX):
            query.stop()
            raise RuntimeError(f"The query did not end within {QUERY_SEC_MAX} s.")
        accounts = [json.loads(each.json) for each in query.recentProgress]
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return [account["durationMs"] for account in accounts if account["numInputRows"]]


def _fill_topic(broker: BenchBroker, topic: str, workload: Workload) -> None:
    """Produce the lines of each file into one partition, as of when the files came."""
    producer = Producer(broker.client_settings({"enable.idempotence": True, "queue.buffering.max.messages": 1_000_000}))
    for number, path in enumerate(sorted(workload.folder.iterdir())):
        for line in path.read_bytes().splitlines():
            producer.produce(topic, line, partition=number % PARTITIONS, timestamp=ARRIVAL_MS)
        if producer.flush(ANSWER_SEC):
            raise RuntimeError("The broker did not take all lines.")
    found = len(broker.read_all(topic))
    if found != workload.rows:
        raise RuntimeError(f"The topic has {found} records, not {workload.rows}.")


def _checker(workload: Workload) -> Callable[[Server], None]:
    """Return what raises unless a server holds all messages, and exactly those that it must in one bucket."""
    pairs = sorted(workload.members())
    sample_bucket = bucket_start_ms(pairs[len(pairs) // 2][0])
    expected = [(due_ms, member.decode()) for due_ms, member in pairs if bucket_start_ms(due_ms) == sample_bucket]

    def bodies(members: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
        return sorted((due_ms, member[MESSAGE_ID_LENGTH:]) for due_ms, member in members)  # ids differ by source

    def check(server: Server) -> None:
        if server.messages() != workload.rows:
            raise RuntimeError(f"{server.messages()} messages are stored, not {workload.rows}.")
        found = server.client.zrange(KEYS.bucket(sample_bucket), 0, -1, withscores=True)
        if bodies([(int(due_ms), member) for member, due_ms in found]) != bodies(expected):
            raise RuntimeError(f"The bucket {sample_bucket} does not hold the messages that it must.")

    return check


def _rate_storing(rows: int, of: Sequence[Sample]) -> float:
    """Return the median of records a second while batches are stored; 0 if a batch was too short to be told."""
    stored_ms = [sum(batch["addBatch"] for batch in sample["batches"]) for sample in of]
    return spread_of([rows / ms * 1000 for ms in stored_ms]).median if all(stored_ms) else 0.0


def table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay the samples out for eyes; the warm-up is left out."""
    rows = settings["rows"]
    measured = {name: [s for s in samples if s["subject"] == name and s["round"]] for name in TITLES}
    files = spread_of([rows / s["wall_s"] for s in measured[FILES]]).median
    files_storing = _rate_storing(rows, measured[FILES])
    lines = []
    for name, of in measured.items():
        rate = spread_of([rows / s["wall_s"] for s in of])
        storing = _rate_storing(rows, of)
        lines.append(
            (
                TITLES[name],
                *(f"{value:,.0f}" for value in (rate.median, rate.least, rate.most)),
                f"{rate.median / files:.2f}",
                f"{storing:,.0f}" if storing else "-",
                f"{storing / files_storing:.2f}" if files_storing else "-",
                f"{len(of[0]['batches']) or 1}",
                *(
                    f"{spread_of([s[cpu] / rows * 1e6 for s in of]).median:.2f}"
                    for cpu in ("client_cpu_s", "server_cpu_s", "broker_cpu_s")
                ),
            )
        )
    head = (
        "",
        "records/s",
        "min",
        "max",
        "of files",
        "in batches",
        "of files",
        "batches",
        "client µs",
        "server µs",
        "broker µs",
    )
    others = max(s["others_cores"] for of in measured.values() for s in of)
    return (
        f"{rows:,} request lines in {settings['partitions']} partitions, {settings['master']}, {settings['rounds']} rounds; "
        f"other processes used at most {others:.2f} cores during one. The query starts and ends within what is "
        "measured; *in batches* is the rate while it stores. Microseconds of CPU a record.\n\n"
        + format_table(head, lines)
    )
