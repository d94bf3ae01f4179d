"""From produced to stored: how long after a record is handed to a producer its message is in Redis, durably.

The ingest job runs as users run it, with default settings. Each message is due before all that came earlier, so storing it rings
the wake channel after the server's fsync: see ``bench.latency``.
"""

import json
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import Producer

from bench.broker import ANSWER_SEC, BenchBroker
from bench.common import WORK, Options, Sample, format_table, percentile, say
from bench.latency import DELAY_SEC_MAX, DELAY_STEP_SEC, INTERVAL_MS, JITTER_MS, STORE_SEC_MAX, WARM_UP_FILES, Watcher
from bench.loops import NULL, running, start_job
from bench.server import empty_server
from bench.workload import SEED, message_text
from pipeline.config import IngestSettings
from pipeline.runtime.process import wait_until

RECORDS, QUICK_RECORDS = 60, 3
PARTITIONS = 4


def plan(options: Options) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        "records": QUICK_RECORDS if options.quick else RECORDS,
        "warm_up": WARM_UP_FILES,
        "interval_ms": INTERVAL_MS,
        "jitter_ms": JITTER_MS,
        "master": options.master,
        "trigger": IngestSettings().trigger,
    }


def take_samples(settings: dict[str, Any], broker: BenchBroker) -> list[Sample]:
    """Produce a record each second, and note when its message is stored."""
    count = settings["warm_up"] + settings["records"]
    topic = broker.new_topic(PARTITIONS)
    words = ("--master", settings["master"], "jobs/ingest.py", "--source", "kafka")
    kafka = ("--kafka-servers", broker.bootstrap, "--kafka-topics", topic)
    folders = ("--checkpoint", str(WORK / "checkpoint"), "--rejects", str(WORK / "rejects"))
    with empty_server(WORK) as server, running([start_job(server, NULL, *words, *kafka, *folders)]) as [job]:
        watcher = Watcher(server, count, 1)
        sent = _send_records(broker, topic, range(settings["warm_up"]))
        if not wait_until(lambda: len(watcher.stored_at) >= settings["warm_up"], STORE_SEC_MAX):
            raise RuntimeError("The job does not store the first records.")
        sent += _send_records(broker, topic, range(settings["warm_up"], count))
        stored_at = watcher.join()
        job.stop()
        if server.messages() != count:
            raise RuntimeError(f"{server.messages()} messages are stored, not {count}.")
    say(
        f"{count} records stored, the first {settings['warm_up']} of them to warm up, "
        f"the very first after {(stored_at[0] - sent[0][0]) * 1000:,.0f} ms"
    )
    samples = [
        {
            "record": number,
            "acknowledged_ms": round((acknowledged - handed) * 1000, 2),
            "stored_ms": round((stored - handed) * 1000, 2),
        }
        for number, ((handed, acknowledged), stored) in enumerate(zip(sent, stored_at, strict=True))
    ]
    return samples[settings["warm_up"] :]


def _send_records(broker: BenchBroker, topic: str, numbers: range) -> list[tuple[float, float]]:
    """Produce records on time, into one partition after the other; returns when each was handed over and acknowledged."""
    rng = random.Random(SEED + numbers.start)
    producer = Producer(broker.client_settings({"linger.ms": 0}))
    producer.list_topics(topic, ANSWER_SEC)  # it is connected
    sent = []
    pause, start = threading.Event(), time.monotonic()
    for place, number in enumerate(numbers):
        request = {"message": message_text(number), "delay_sec": DELAY_SEC_MAX - number * DELAY_STEP_SEC}
        value = json.dumps(request).encode()
        send_at = start + (place * INTERVAL_MS + rng.random() * JITTER_MS) / 1000
        pause.wait(max(send_at - time.monotonic(), 0))
        handed = time.monotonic()
        producer.produce(topic, value, partition=number % PARTITIONS)
        if producer.flush(ANSWER_SEC):
            raise RuntimeError("The broker did not take a record.")
        sent.append((handed, time.monotonic()))
    return sent


def table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay the samples out for eyes."""
    rows = []
    for title, name in (("produced to acknowledged", "acknowledged_ms"), ("produced to stored", "stored_ms")):
        values = [sample[name] for sample in samples]
        rows.append((title, *(f"{percentile(values, percent):,.0f}" for percent in (50, 90, 99, 100))))
    return (
        f"{settings['records']} records, one a second, {settings['master']}, trigger {settings['trigger']}. Milliseconds.\n\n"
        + format_table(("", "p50", "p90", "p99", "max"), rows)
    )
