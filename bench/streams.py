"""Streams: moving messages into them, of few and many topics, from due to a consumer, several groups, and takeovers."""

import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench import topics
from bench.common import (
    WORK,
    Options,
    Result,
    Sample,
    describe_origin,
    format_table,
    new_result,
    percentile,
    say,
    spread_of,
)
from bench.filling import KEYS, make_pairs, overdue_pairs, store_pairs
from bench.lateness import count_lateness, expand
from bench.loops import NULL, PIPE, Loop, running, start_ours
from bench.meter import measure
from bench.raw import fill_buffers, send_buffers
from bench.rivals import MOVE_DUE_TO_STREAM, QUEUE, RIVALS, STREAM
from bench.server import Server, empty_server
from pipeline.config import ALL_TOPICS, RedisSettings
from pipeline.core.clock import SystemClock
from pipeline.core.messages import DEFAULT_TOPIC
from pipeline.store.connection import connect
from pipeline.store.entries import BEGINNING
from pipeline.store.groups import GroupStore
from pipeline.store.namespace import change_topic_settings

MESSAGES, QUICK_MESSAGES = 300_000, 5_000
RATE, SECONDS, QUICK_SECONDS = 1_000, 20, 2
ROUNDS, QUICK_ROUNDS = 5, 1
GROUPS, QUICK_GROUPS = (1, 4, 16), (1, 2)
FANNED_MESSAGES, QUICK_FANNED_MESSAGES = 20_000, 1_000
PENDING, QUICK_PENDING = 1_000_000, 10_000
FILLED, RETAINED, FILL_BATCH = 500_000, 100_000, 10_000  # a stream so far over its retention is trimmed for seconds
TRIMMING = {"stream that is trimmed": RETAINED, "stream that keeps all": 0, "stream that is empty at first": None}
TAKEN, TAKES = 100, 100
LEAD_MS, EXTRA_SEC, LOOK_SEC = 4_000, 30.0, 0.005
OURS, TEXT = "ours: 500 a script, one loop", "Alexander: all that is due in one script"


def run(options: Options) -> Result:
    """Measure all parts, or those of ``--only``."""
    parts: dict[str, Callable[[dict[str, Any]], list[Sample]]] = {
        "transfer": _transfers,
        "topics": topics.take_samples,
        "handling": _handlings,
        "groups": _fan_outs,
        "takeover": _takeovers,
    }
    settings = {
        "messages": options.choose(options.rows, MESSAGES, QUICK_MESSAGES),
        "topics": topics.QUICK_TOPICS if options.quick else topics.TOPICS,
        "topic_messages": topics.QUICK_MESSAGES if options.quick else topics.MESSAGES,
        "seconds": QUICK_SECONDS if options.quick else SECONDS,
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
        "groups": QUICK_GROUPS if options.quick else GROUPS,
        "fanned": QUICK_FANNED_MESSAGES if options.quick else FANNED_MESSAGES,
        "pending": QUICK_PENDING if options.quick else PENDING,
    }
    result = new_result("streams", options, settings)
    try:
        with empty_server(WORK) as server:
            facts = server.facts()
        result["versions"]["server"], result["server_settings"] = facts["server"], facts["settings"]
        for name, take_samples in parts.items():
            if name in (options.only or parts):
                say(f"streams: {name}")
                result["samples"][name] = take_samples(settings)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


def _transfers(settings: dict[str, Any]) -> list[Sample]:
    samples = []
    for number in range(1, settings["rounds"] + 1):
        for subject in (OURS, TEXT):
            with empty_server(WORK) as server:
                sample = (_move_ours if subject == OURS else _move_text)(server, settings["messages"])
            samples.append({"subject": subject, "round": number, **sample})
            say(f"round {number}  {settings['messages'] / sample['wall_s']:>9,.0f} messages/s  {subject}")
    return samples


def _move_ours(server: Server, count: int) -> Sample:
    sample = topics.move_pairs(server, overdue_pairs(count))
    _check(server.client.xlen(KEYS.stream(DEFAULT_TOPIC)), count)
    return sample


def _move_text(server: Server, count: int) -> Sample:
    """What the text's first thread does, when it wakes up."""
    send_buffers(server.socket, fill_buffers(RIVALS["stream"].pack(overdue_pairs(count))))
    server.client.rename("staged-queue", QUEUE)
    now = SystemClock().wall_ms() / 1000
    sample = measure(server, lambda: server.client.eval(MOVE_DUE_TO_STREAM, 2, QUEUE, STREAM, now))
    _check(server.client.xlen(STREAM), count)
    return {**sample, "loops_cpu_s": 0.0}


def _handlings(settings: dict[str, Any]) -> list[Sample]:
    samples = []
    for number in range(1, settings["rounds"] + 1):
        for stream, retained in TRIMMING.items():
            with empty_server(WORK) as server:
                sample = _handle(server, RATE * settings["seconds"], retained)
            samples.append({"stream": stream, "round": number, **sample})
            p99 = percentile(expand(sample["lateness_ms"]), 99)
            say(f"round {number}  p99 {p99:.0f} ms from due to handled, {stream}")
    return samples


def _handle(server: Server, count: int, retained: int | None) -> Sample:
    """Handle messages at a steady rate, behind those that fill their stream before, unless ``retained`` is None."""
    clock, filled = SystemClock(), 0 if retained is None else FILLED
    for _ in range(0, filled, FILL_BATCH):
        _fill(server, FILL_BATCH)
    first_ms = clock.wall_ms() + LEAD_MS
    store_pairs(server, make_pairs(first_ms + n * 1000 // RATE for n in range(count)))
    with running([start_ours(server, NULL, "--sink", "stream"), _start_consumer(server, "g", PIPE, "new")]) as loops:
        time.sleep(max(0, first_ms - clock.wall_ms()) / 1000)
        client = connect(RedisSettings(url=server.url))
        change_topic_settings(client, RedisSettings(), ALL_TOPICS, {"retain_messages": retained or 0})
        client.close()
        reader = loops[1].reader
        assert reader is not None
        reader.wait_for_lines(count, (first_ms - clock.wall_ms() + count * 1000 / RATE) / 1000 + EXTRA_SEC)
        for loop in loops:
            loop.stop()
    trimmed = filled + count - server.client.xlen(KEYS.stream(DEFAULT_TOPIC))
    return {"trimmed": trimmed, **count_lateness(reader.portions, count)}


def _start_consumer(server: Server, group: str, output: str, start: str = "beginning") -> Loop:
    words = ("--topic", DEFAULT_TOPIC, "--group", group, "--from", start, "--format", "json")
    return Loop(["./spark-submit.sh", "jobs/consume.py", *words], output, {"REDIS_URL": server.url})


def _fan_outs(settings: dict[str, Any]) -> list[Sample]:
    samples = []
    count = settings["fanned"]
    for number in range(1, settings["rounds"] + 1):
        for groups in settings["groups"]:
            with empty_server(WORK) as server:
                for group in range(groups):
                    for stream in (KEYS.stream(DEFAULT_TOPIC), KEYS.retry(DEFAULT_TOPIC, f"g{group}")):
                        server.client.xgroup_create(stream, f"g{group}", "0", mkstream=True)
                with running([_start_consumer(server, f"g{group}", NULL) for group in range(groups)]) as loops:
                    _fill(server, count)  # in one transaction: they see nothing before its end
                    sample = measure(server, lambda: _wait(server, groups))  # noqa: B023
                    for loop in loops:
                        loop.stop()
            samples.append({"groups": groups, "round": number, **sample})
            say(f"round {number}  {groups} groups: {groups * count / sample['wall_s']:>9,.0f} messages/s in all")
    return samples


def _wait(server: Server, groups: int) -> None:
    while any(group["lag"] or group["pending"] for group in server.client.xinfo_groups(KEYS.stream(DEFAULT_TOPIC))):
        time.sleep(LOOK_SEC * groups)


def _fill(server: Server, count: int) -> None:
    pipeline = server.client.pipeline(transaction=True)
    for n in range(count):
        fields = {"id": n, "message": f"reminder {n:09}", "topic": DEFAULT_TOPIC, "due_ms": 1, "attempt": 1}
        pipeline.xadd(KEYS.stream(DEFAULT_TOPIC), fields)
    pipeline.execute()


def _takeovers(settings: dict[str, Any]) -> list[Sample]:
    """Take 100 of the pending messages over, and look at them in vain."""
    samples: list[Sample] = []
    with empty_server(WORK) as server:
        stream = KEYS.stream(DEFAULT_TOPIC)
        client = connect(RedisSettings(url=server.url))
        store = GroupStore(client, [KEYS], DEFAULT_TOPIC, "g", "taker")
        store.register(BEGINNING)
        for _ in range(0, settings["pending"], FILL_BATCH):
            _fill(server, FILL_BATCH)
            client.xreadgroup("g", "dead", {stream: ">"}, count=FILL_BATCH)
        for what, min_idle_ms in (("none is silent long enough", 86_400_000), ("all are", 0)):
            cursor = BEGINNING
            for _ in range(TAKES):
                started = time.perf_counter_ns()
                page = store.reclaim(stream, cursor, TAKEN, min_idle_ms)
                took_us = (time.perf_counter_ns() - started) / 1000
                cursor = page.cursor
                samples.append({"what": what, "taken": len(page.entries), "round_trip_us": round(took_us)})
    return samples


def tables(result: Result) -> str:
    """Lay the result out for eyes."""
    settings, samples = result["settings"], result["samples"]
    parts = [describe_origin(result)]
    if "transfer" in samples:
        rows = [_transfer_row(name, samples["transfer"], settings["messages"]) for name in (OURS, TEXT)]
        head = ("", "messages/s", "min", "max", "server µs/msg", "loop µs/msg")
        about = f"{settings['messages']:,} messages that are all due, {settings['rounds']} rounds."
        parts.append(f"#### Into a stream\n\n{about}\n\n{format_table(head, rows)}")
    if "topics" in samples:
        parts.append(topics.table(settings, samples["topics"]))
    if "handling" in samples:
        rows = [_handling_row(stream, samples["handling"]) for stream in TRIMMING]
        about = (
            f"One loop, one consumer, {RATE:,} messages/s, {settings['rounds']} times {settings['seconds']} s. Milliseconds to "
            f"when the consumer had printed, and its pipe was read. {FILLED:,} entries are in the stream before, or none."
        )
        columns = ("", "trimmed", "p50", "p99", "p99.9", "max", "read p50", "p99", "p99.9", "max")
        parts.append(f"#### From due to handled\n\n{about}\n\n{format_table(columns, rows)}")
    if "groups" in samples:
        rows = [_group_row(groups, samples["groups"], settings["fanned"]) for groups in settings["groups"]]
        about = (
            f"{settings['fanned']:,} messages in one stream, each group a process of its own, {settings['rounds']} rounds. "
            "From when the last message is there until the last group has acknowledged it."
        )
        parts.append(
            f"#### Groups\n\n{about}\n\n{format_table(('', 'handled/s in all', 'min', 'max', 'server µs each'), rows)}"
        )
    if "takeover" in samples:
        names = list(dict.fromkeys(sample["what"] for sample in samples["takeover"]))
        rows = [_takeover_row(name, samples["takeover"]) for name in names]
        about = (
            f"{settings['pending']:,} messages pending; {TAKES} calls for {TAKEN} of them. Milliseconds, round trip."
        )
        parts.append(f"#### Taking over\n\n{about}\n\n{format_table(('', 'taken', 'p50', 'p99', 'max'), rows)}")
    return "\n\n".join(parts)


def _transfer_row(name: str, samples: Sequence[Sample], count: int) -> list[str]:
    of = [sample for sample in samples if sample["subject"] == name]
    rate = spread_of([count / sample["wall_s"] for sample in of])
    server, loop = (spread_of([s[f] / count * 1e6 for s in of]).median for f in ("server_cpu_s", "loops_cpu_s"))
    numbers = (rate.median, rate.least, rate.most)
    return [
        name,
        *(f"{n:,.0f}" for n in numbers),
        f"{server:.1f}",
        f"{loop:.1f}" if loop else "-",
    ]


def _handling_row(stream: str, samples: Sequence[Sample]) -> list[str]:
    of = [sample for sample in samples if sample["stream"] == stream]
    times = ([value for s in of for value in expand(s[name])] for name in ("lateness_ms", "read_ms"))
    numbers = [f"{percentile(each, percent):.1f}" for each in times for percent in (50, 99, 99.9, 100)]
    return [stream, f"{spread_of([s['trimmed'] for s in of]).median:,.0f}", *numbers]


def _group_row(groups: int, samples: Sequence[Sample], count: int) -> list[str]:
    of = [sample for sample in samples if sample["groups"] == groups]
    rate = spread_of([groups * count / sample["wall_s"] for sample in of])
    server = spread_of([sample["server_cpu_s"] / count / groups * 1e6 for sample in of]).median
    name = "1 group" if groups == 1 else f"{groups} groups"
    return [name, *(f"{n:,.0f}" for n in (rate.median, rate.least, rate.most)), f"{server:.1f}"]


def _takeover_row(what: str, samples: Sequence[Sample]) -> list[str]:
    of = [sample for sample in samples if sample["what"] == what]
    times = [sample["round_trip_us"] / 1000 for sample in of]
    taken = sum(sample["taken"] for sample in of) // len(of)
    return [what, f"{taken}", *(f"{percentile(times, percent):.2f}" for percent in (50, 99, 100))]


def _check(found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(f"The stream holds {found} of {expected} messages.")
