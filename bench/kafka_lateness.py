"""How late messages are at a steady rate: from due to when a consumer that reads committed has them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.broker import BenchBroker
from bench.common import WORK, Options, Sample, format_table, percentile, say
from bench.filling import make_pairs, store_pairs
from bench.kafka_out import FIRST, PARTITIONS, TITLES, check_written, start_ours, write_first
from bench.kafka_reader import count_lateness, start_reader
from bench.lateness import expand
from bench.loops import Loop, running
from bench.raw import Pair
from bench.server import Server, empty_server
from pipeline.config import DrainSettings
from pipeline.core.clock import SystemClock

RATES, QUICK_RATES = (200, 1_000, 10_000), (200,)  # messages a second
SECONDS, QUICK_SECONDS = 15, 2
ROUNDS, QUICK_ROUNDS = 3, 1
LEAD_MS, LEAD_MS_PER_MESSAGE = 2_500, 0.03  # to store the messages and to wake up for them, before the first is due
EXTRA_SEC = 30.0

Measure = Callable[[BenchBroker, int, int], Sample]  # of a rate, for so many seconds


def plan(options: Options) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        "rates": QUICK_RATES if options.quick else RATES,
        "seconds": QUICK_SECONDS if options.quick else SECONDS,
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
    }


def take_samples(settings: dict[str, Any], broker: BenchBroker) -> list[Sample]:
    """Measure both ways at each rate once a round."""
    return take_turns(settings, broker, {name: partial(measure_ours, name) for name in TITLES})


def take_turns(settings: dict[str, Any], broker: BenchBroker, subjects: dict[str, Measure]) -> list[Sample]:
    """Measure subjects at each rate once a round; a round starts one subject further than the round before."""
    samples, names = [], list(subjects)
    for number in range(1, settings["rounds"] + 1):
        for rate in settings["rates"]:
            for place in range(len(names)):
                name = names[(number + place) % len(names)]
                sample = subjects[name](broker, rate, settings["seconds"])
                about = {"subject": name, "rate": rate, "seconds": settings["seconds"], "round": number, "place": place}
                samples.append({**about, **sample})
                late = f"p99 {percentile(expand(sample['lateness_ms']), 99):,.0f} ms late" if sample["came"] else "none"
                say(f"round {number}  {rate:>6,} messages/s, {sample['came']:,} came: {late}, {name}")
    return samples


def measure_ours(name: str, broker: BenchBroker, rate: int, seconds: int) -> Sample:
    """Let the drain job write messages that come due; each must come once."""
    topic = broker.new_topic(PARTITIONS)
    count, clock = rate * seconds, SystemClock()
    with empty_server(WORK) as server, ExitStack() as stack:
        started = [start_ours(server, broker, topic, name), start_reader(broker.bootstrap, topic)]
        loop, consumer = stack.enter_context(running(started))
        first_s = write_first(server)
        first_ms, pairs = pairs_to_come(rate, count)
        store_pairs(server, pairs)
        if clock.wall_ms() + DrainSettings().wait_ms_max >= first_ms:
            raise RuntimeError("The messages were stored too late; is this machine that busy?")
        used = meter_until(server, broker, loop, partial(_wait_for, consumer, FIRST + count, first_ms, seconds))
        loop.stop()
        consumer.stop()
    check_written(broker, topic, FIRST + count)
    assert consumer.reader is not None
    sample = count_lateness(consumer.reader.portions, first_ms)
    if sample["came"] != count:
        raise RuntimeError(f"{sample['came']} of {count} messages came.")
    return {**used, "first_s": round(first_s, 3), **sample}


def pairs_to_come(rate: int, count: int) -> tuple[int, list[Pair]]:
    """Return when the first message is due, and messages from then on at a steady rate."""
    first_ms = SystemClock().wall_ms() + LEAD_MS + int(count * LEAD_MS_PER_MESSAGE)
    return first_ms, make_pairs(first_ms + n * 1000 // rate for n in range(count))


def _wait_for(consumer: Loop, count: int, first_ms: int, seconds: int) -> None:
    assert consumer.reader is not None
    lead_sec = (first_ms - SystemClock().wall_ms()) / 1000
    consumer.reader.wait_for_lines(count, lead_sec + seconds + EXTRA_SEC)


def meter_until(server: Server, broker: BenchBroker, loop: Loop, wait: Callable[[], None]) -> Sample:
    """Return what loop, server and broker use while ``wait`` waits."""
    before = loop.cpu_s(), server.cpu_s(), broker.cpu_s(), SystemClock().monotonic_ms()
    wait()
    after = loop.cpu_s(), server.cpu_s(), broker.cpu_s(), SystemClock().monotonic_ms()
    *cpu_s, took_ms = (now - then for now, then in zip(after, before, strict=True))
    names = ("loop_cpu_s", "server_cpu_s", "broker_cpu_s")
    return {
        **{name: round(used, 3) for name, used in zip(names, cpu_s, strict=True)},
        "wall_s": round(took_ms / 1000, 3),
    }


def table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay the samples out for eyes."""
    return (
        f"One loop, one consumer, {settings['rounds']} times {settings['seconds']} s of each rate, due times spread evenly. "
        "Milliseconds to when the consumer returned the record. *CPU* is of one core.\n\n"
        + lateness_table(settings, samples, TITLES)
    )


def lateness_table(settings: dict[str, Any], samples: Sequence[Sample], titles: dict[str, str]) -> str:
    """Lay out a row for each rate and subject."""
    rows = []
    for rate in settings["rates"]:
        for name, title in titles.items():
            of = [sample for sample in samples if (sample["rate"], sample["subject"]) == (rate, name)]
            late = [value for sample in of for value in expand(sample["lateness_ms"])]
            wall_s = sum(sample["wall_s"] for sample in of)
            share = sum(s["came"] for s in of) / sum(s["rate"] * s["seconds"] for s in of)
            rows.append(
                (
                    f"{rate:,}/s, {title}",
                    f"{share:.0%}",
                    *(f"{percentile(late, percent):,.1f}" if late else "-" for percent in (50, 99, 99.9, 100)),
                    *(f"{sum(s[f'{what}_cpu_s'] for s in of) / wall_s:.1%}" for what in ("loop", "server", "broker")),
                )
            )
    head = ("", "came", "p50", "p99", "p99.9", "max", "loop CPU", "server CPU", "broker CPU")
    return format_table(head, rows)
