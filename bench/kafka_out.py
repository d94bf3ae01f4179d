"""How fast one drain loop writes messages that are all due into a topic, with transactions and without.

The loop has written a few before: the first ones wait until it has looked for the outbox and opened its producer. Then all
messages appear in one moment, and a sample ends when the outbox is empty, which is after Kafka has acknowledged the last one.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.broker import BenchBroker
from bench.common import WORK, Options, Sample, format_table, say, spread_of
from bench.filling import HIDDEN, KEYS, make_pairs, overdue_pairs, reveal, store_pairs
from bench.loops import NULL, Loop, running, start_job
from bench.meter import measure
from bench.server import Server, empty_server
from pipeline.config import KafkaSettings
from pipeline.core.clock import SystemClock

MESSAGES, QUICK_MESSAGES = 200_000, 2_000
ROUNDS, QUICK_ROUNDS = 5, 1
PARTITIONS = 3
FIRST = 100  # messages that a loop has written before it is measured
LOOK_SEC, FIRST_SEC_MAX, SAMPLE_SEC_MAX = 0.005, 30.0, 300.0
WITH, WITHOUT = "with transactions", "without"
TITLES = {WITH: "ours: exactly once, by transactions", WITHOUT: "ours: at least once"}


def plan(options: Options) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        "messages": options.choose(options.rows, MESSAGES, QUICK_MESSAGES),
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
        "partitions": PARTITIONS,
        "batch_messages": KafkaSettings().batch_messages,
    }


def take_samples(settings: dict[str, Any], broker: BenchBroker) -> list[Sample]:
    """Measure both ways once a round, in turn the one and the other first."""
    samples = []
    names, count = list(TITLES), settings["messages"]
    for number in range(1, settings["rounds"] + 1):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            sample = _measure(broker, name, count)
            samples.append({"subject": name, "round": number, "place": place, **sample})
            say(f"round {number}  {count / sample['wall_s']:>9,.0f} messages/s  {TITLES[name]}")
    return samples


def start_ours(server: Server, broker: BenchBroker, topic: str, name: str) -> Loop:
    """Start the drain job that writes all messages to one topic of Kafka."""
    return start_job(
        *(server, NULL, "jobs/drain.py", "--sink", "kafka", "--kafka-servers", broker.bootstrap),
        DUETIME_TOPICS_KAFKA_TOPIC=topic,
        DUETIME_KAFKA_EXACTLY_ONCE="true" if name == WITH else "false",
    )


def write_first(server: Server) -> float:
    """Have the loop write its first messages; returns how many seconds that took.

    Raises:
        RuntimeError: they are not written.
    """
    started = time.monotonic()
    store_pairs(server, make_pairs([SystemClock().wall_ms()] * FIRST, generation=1))
    server.client.publish(KEYS.wake(), 0)
    _wait_until_written(server, FIRST_SEC_MAX)
    return time.monotonic() - started


def _measure(broker: BenchBroker, name: str, count: int) -> Sample:
    topic = broker.new_topic(PARTITIONS)
    with empty_server(WORK) as server:
        store_pairs(server, overdue_pairs(count), HIDDEN)
        with running([start_ours(server, broker, topic, name)]) as [loop]:
            first_s = write_first(server)
            before = loop.cpu_s(), broker.cpu_s()

            def write() -> None:
                reveal(server)
                _wait_until_written(server, SAMPLE_SEC_MAX)

            sample = measure(server, write)
            loop_s, broker_s = loop.cpu_s() - before[0], broker.cpu_s() - before[1]
            loop.stop()
    check_written(broker, topic, count + FIRST)
    used = {"loop_cpu_s": round(loop_s, 3), "broker_cpu_s": round(broker_s, 3)}
    return {**sample, **used, "first_s": round(first_s, 3)}


def _wait_until_written(server: Server, sec_max: float) -> None:
    """Wait until nothing is scheduled, in flight or in the outbox: a message is in one of them until Kafka has it."""
    deadline = time.monotonic() + sec_max
    pipeline = server.client.pipeline(transaction=True)
    while True:
        pipeline.exists(KEYS.buckets(), KEYS.claims()).xlen(KEYS.outbox())
        if not any(pipeline.execute()):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"The loop did not write all messages within {sec_max:.0f} s.")
        time.sleep(LOOK_SEC)


def check_written(broker: BenchBroker, topic: str, count: int) -> None:
    """See that each of so many messages is in a topic once.

    Raises:
        RuntimeError: it is not.
    """
    ids = Counter(dict(record.headers)["duetime-id"] for record in broker.read_all(topic))
    if len(ids) != count or ids.total() != count:
        raise RuntimeError(f"{ids.total()} records are in {topic} of {count} messages, of {len(ids)} different ones.")


def table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay the samples out for eyes."""
    count = settings["messages"]
    rows = []
    for name, title in TITLES.items():
        of = [sample for sample in samples if sample["subject"] == name]
        rate = spread_of([count / sample["wall_s"] for sample in of])
        costs = (spread_of([s[cpu] / count * 1e6 for s in of]).median for cpu in _COSTS)
        rows.append(
            (
                title,
                *(f"{value:,.0f}" for value in (rate.median, rate.least, rate.most)),
                *(f"{cost:.1f}" for cost in costs),
            )
        )
    return (
        f"{count:,} messages that are all due, one loop, a topic of {settings['partitions']} partitions, "
        f"{settings['batch_messages']:,} messages a batch, {settings['rounds']} rounds.\n\n"
        + format_table(("", "messages/s", "min", "max", "loop µs/msg", "server µs/msg", "broker µs/msg"), rows)
    )


_COSTS = ("loop_cpu_s", "server_cpu_s", "broker_cpu_s")
