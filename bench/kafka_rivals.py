"""Other ways to get a message into a topic later, each a program: ``python -m bench.kafka_rivals NAME URL SERVERS TOPIC SOURCE``.

Each record gets the header that says when it was due, so that its lateness can be told; that is ours and costs little.
"""

import json
import signal
import sys
import time
from collections import deque
from typing import Any

import redis
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from bench.common import ROOT
from bench.kafka_reader import DUE
from bench.loops import NULL, Loop
from bench.rivals import PAUSE_SEC, QUEUE
from pipeline.cli import announce_ready

RIVALS = {
    "ten": "agrim: 10 a second, GET each",
    "ten_eager": "agrim: no pause",
    "pausing": "consumer that pauses, one delay",
}
GROUP = "pausing"
DELAY_MS = 60_000
POLL_RECORDS = 500  # that a consumer of Kafka's own hands out at a time, as default
ANSWER_SEC, WAIT_SEC = 30.0, 0.1


def start_rival(name: str, url: str, servers: str, topic: str, source: str) -> Loop:
    """Start one as a process."""
    command = [sys.executable, "-P", "-m", "bench.kafka_rivals", name, url, servers, topic, source]
    return Loop(command, NULL, {"PYTHONPATH": str(ROOT)})


def take_ten(client: Any, servers: str, topic: str, pause_sec: float) -> None:
    """agrim, "Implementing delayed message support with Apache Kafka": ten a second, a key for each body.

    They are removed when Kafka has them: the other way round, a crash would lose them.
    """
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    producer.list_topics(topic, ANSWER_SEC)
    announce_ready()
    sys.stdin.readline()
    while True:
        found = client.zrange(QUEUE, 0, time.time(), byscore=True, offset=0, num=10, withscores=True)
        for message_id, due_sec in found:
            body = json.loads(client.get(message_id))["message"]
            producer.produce(topic, body, headers={DUE: b"%d" % round(due_sec * 1000)})
        if found:
            producer.flush()
            client.zrem(QUEUE, *(message_id for message_id, _ in found))
        time.sleep(pause_sec if found else PAUSE_SEC)


def pause_and_forward(servers: str, topic: str, source: str) -> None:
    """A topic for one delay: read, wait until a record is old enough, write it on; exactly once, by transactions.

    What is due is taken together; then the wait is exactly until the next one is.
    """
    group = f"{GROUP}-{source}"
    common = {"bootstrap.servers": servers}
    consumer = Consumer({**common, "group.id": group, "enable.auto.commit": False, "auto.offset.reset": "earliest"})
    # The second setting as ours has it: how long one transaction waits for the end of the one before.
    producer = Producer({**common, "transactional.id": group, "retry.backoff.ms": 2, "linger.ms": 50})
    producer.init_transactions(ANSWER_SEC)
    consumer.assign([TopicPartition(source, 0, 0)])
    consumer.poll(0)
    announce_ready()
    sys.stdin.readline()
    waiting: deque[Any] = deque()
    while True:
        _fetch(consumer, waiting)
        now_ms = time.time_ns() // 1_000_000
        due: list[Any] = []
        while waiting and len(due) < POLL_RECORDS and waiting[0].timestamp()[1] + DELAY_MS <= now_ms:
            due.append(waiting.popleft())
        if due:
            producer.begin_transaction()
            for message in due:
                producer.produce(topic, message.value(), headers={DUE: b"%d" % (message.timestamp()[1] + DELAY_MS)})
            position = TopicPartition(source, 0, due[-1].offset() + 1)
            producer.send_offsets_to_transaction([position], consumer.consumer_group_metadata(), ANSWER_SEC)
            producer.flush()
            producer.commit_transaction(ANSWER_SEC)
        elif waiting:
            time.sleep(max(0, waiting[0].timestamp()[1] + DELAY_MS - time.time_ns() / 1_000_000) / 1000)


def _fetch(consumer: Consumer, waiting: deque[Any]) -> None:
    """Have some records to wait for; waits itself only where there is none."""
    while len(waiting) < POLL_RECORDS:
        message = consumer.poll(0 if waiting else WAIT_SEC)
        if message is None:
            return
        if message.error():
            raise KafkaException(message.error())
        waiting.append(message)


def main(name: str, url: str, servers: str, topic: str, source: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if name == "pausing":
        pause_and_forward(servers, topic, source)
    client = redis.Redis.from_url(url, decode_responses=True)
    client.ping()
    take_ten(client, servers, topic, PAUSE_SEC if name == "ten" else 0.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
