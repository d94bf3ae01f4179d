"""The same lateness beside other ways to get a message into a topic later: loops of a text, and a consumer that pauses."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.broker import ANSWER_SEC, BenchBroker
from bench.common import WORK, Options, Sample
from bench.kafka_lateness import (
    QUICK_ROUNDS,
    QUICK_SECONDS,
    ROUNDS,
    SECONDS,
    Measure,
    lateness_table,
    measure_ours,
    meter_until,
    pairs_to_come,
    take_turns,
)
from bench.kafka_out import PARTITIONS
from bench.kafka_out import TITLES as OURS
from bench.kafka_reader import count_lateness, start_reader
from bench.kafka_rivals import DELAY_MS, GROUP, RIVALS, start_rival
from bench.loops import Loop, running
from bench.raw import Pair, fill_buffers, send_buffers
from bench.rivals import QUEUE, STAGED, pack_ids
from bench.server import Server, empty_server
from bench.workload import message_text
from pipeline.core.clock import SystemClock

RATES, QUICK_RATES = (200, 1_000), (200,)
PATIENCE_SEC, QUICK_PATIENCE_SEC = 5.0, 1.0  # after the last message is due; what has not come by then does not count
PAUSING = "pausing"
LACKS = (
    f"*{RIVALS['ten']}*: a crash repeats up to ten messages, two loops take the same ones, there is neither key nor header, "
    f"and one message that can't be produced holds up all others. *{RIVALS[PAUSING]}*: exactly once, but a topic and a consumer "
    "for each delay, no absolute time, and nothing can be cancelled or moved."
)


def plan(options: Options) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        "rates": QUICK_RATES if options.quick else RATES,
        "seconds": QUICK_SECONDS if options.quick else SECONDS,
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
        "patience_sec": QUICK_PATIENCE_SEC if options.quick else PATIENCE_SEC,
        "delay_ms": DELAY_MS,
    }


def take_samples(settings: dict[str, Any], broker: BenchBroker) -> list[Sample]:
    """Measure each subject at each rate once a round."""
    ours: dict[str, Measure] = {name: partial(measure_ours, name) for name in OURS}
    others = {name: partial(_measure_rival, name, settings["patience_sec"]) for name in RIVALS}
    return take_turns(settings, broker, ours | others)


def _measure_rival(name: str, patience_sec: float, broker: BenchBroker, rate: int, seconds: int) -> Sample:
    """Let a rival deliver messages that come due. It may be too slow: what has come counts."""
    topic, source = broker.new_topic(PARTITIONS), broker.new_topic()
    with empty_server(WORK) as server, ExitStack() as stack:
        started = [
            start_rival(name, server.url, broker.bootstrap, topic, source),
            start_reader(broker.bootstrap, topic),
        ]
        loop, consumer = stack.enter_context(running(started))
        loop.go()
        first_ms, pairs = pairs_to_come(rate, rate * seconds)
        if name == PAUSING:
            _send_delayed(broker, source, pairs)
        else:
            _stage(server, pairs)
        if SystemClock().wall_ms() >= first_ms:
            raise RuntimeError("The messages were stored too late; is this machine that busy?")
        used = meter_until(server, broker, loop, _waiter(consumer, first_ms, rate * seconds, seconds + patience_sec))
        loop.stop()
        consumer.stop()
    assert consumer.reader is not None
    sample = count_lateness(consumer.reader.portions, first_ms)
    if name == PAUSING and sample["came"] == rate * seconds:
        _check_position(broker, source, rate * seconds)
    return {**used, **sample}


def _waiter(consumer: Loop, first_ms: int, count: int, sec_max: float) -> Callable[[], None]:
    def wait() -> None:
        assert consumer.reader is not None
        left_sec = (first_ms - SystemClock().wall_ms()) / 1000 + sec_max
        try:
            consumer.reader.wait_for_lines(count, left_sec)
        except RuntimeError:
            return  # it is too slow

    return wait


def _stage(server: Server, pairs: list[Pair]) -> None:
    send_buffers(server.socket, fill_buffers(pack_ids(pairs)))
    server.client.rename(STAGED, QUEUE)


def _send_delayed(broker: BenchBroker, topic: str, pairs: list[Pair]) -> None:
    """Produce records of which each is the delay older than its message is due."""
    producer = Producer(broker.client_settings({"enable.idempotence": True}))
    for number, (due_ms, _) in enumerate(pairs):
        producer.produce(topic, message_text(number), timestamp=due_ms - DELAY_MS)
    if producer.flush(ANSWER_SEC):
        raise RuntimeError("The broker did not take all records.")


def _check_position(broker: BenchBroker, topic: str, count: int) -> None:
    """See that the consumer that pauses has committed all that it has read."""
    consumer = Consumer(broker.client_settings({"group.id": f"{GROUP}-{topic}"}))
    [found] = consumer.committed([TopicPartition(topic, 0)], ANSWER_SEC)
    consumer.close()
    if found.offset != count:
        raise RuntimeError(f"The group's offset is {found.offset}, not {count}.")


def table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay the samples out for eyes."""
    return (
        f"{settings['rounds']} times {settings['seconds']} s of each rate, as above. *came*: until "
        f"{settings['patience_sec']:.0f} s after the last was due; the milliseconds are of those. {LACKS}\n\n"
        + lateness_table(settings, samples, OURS | RIVALS)
    )
