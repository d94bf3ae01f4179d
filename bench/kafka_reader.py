"""A consumer that reads committed records and says when it had each: ``python -m bench.kafka_reader SERVERS TOPIC``.

A line each: the microsecond at which the consumer returned it, when it was due by its header, and its value.
"""

import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition

from bench.common import ROOT, Sample
from bench.loops import PIPE, Loop, Portion, split_lines
from pipeline.cli import announce_ready

ANSWER_SEC, WAIT_SEC = 30.0, 0.1
LINES = 500  # that are written at a time, if so many come at once
DUE = "duetime-due-ms"


def start_reader(servers: str, topic: str) -> Loop:
    """Start it as a process."""
    command = [sys.executable, "-P", "-m", "bench.kafka_reader", servers, topic]
    return Loop(command, PIPE, {"PYTHONPATH": str(ROOT)})


def count_lateness(portions: Sequence[Portion], first_ms: int) -> Sample:
    """Count messages by their lateness in ms, to a tenth, those that were due before ``first_ms`` left out.

    Raises:
        RuntimeError: a message came early or twice.
    """
    seen: Counter[float] = Counter()
    values = set()
    for _, line in split_lines(portions):
        read_us, due_ms, value = line.split(b" ", 2)
        if int(due_ms) >= first_ms:
            seen[round(int(read_us) / 1000 - int(due_ms), 1)] += 1
            values.add(value)
    if len(values) != seen.total():
        raise RuntimeError(f"{seen.total()} records came of {len(values)} different messages.")
    if seen and min(seen) < 0:
        raise RuntimeError(f"A message came {-min(seen)} ms before it was due.")
    return {"came": seen.total(), "lateness_ms": {str(ms): n for ms, n in sorted(seen.items())}}


def main(servers: str, topic: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "bench-reader", "enable.auto.commit": False})
    partitions = consumer.list_topics(topic, ANSWER_SEC).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
    consumer.poll(0)
    announce_ready()
    lines: list[bytes] = []
    while True:
        message = consumer.poll(0 if lines else WAIT_SEC)
        if message is not None:
            if message.error():
                raise KafkaException(message.error())
            read_us = time.time_ns() // 1000
            due, value = dict(message.headers() or ())[DUE], message.value()
            assert isinstance(due, bytes) and isinstance(value, bytes)
            lines.append(b"%d %b %b\n" % (read_us, due, value))
        if lines and (message is None or len(lines) >= LINES):
            sys.stdout.buffer.write(b"".join(lines))
            sys.stdout.buffer.flush()
            lines = []


if __name__ == "__main__":
    main(*sys.argv[1:])
