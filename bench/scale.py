"""What shards, servers and loops bring and cost: lateness with many shards on one server, throughput over several masters."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import redis

from bench.common import (
    WORK,
    Options,
    Result,
    Sample,
    TooLateError,
    describe_origin,
    format_table,
    new_result,
    patiently,
    percentile,
    say,
    spread_of,
)
from bench.filling import make_pairs, overdue_pairs
from bench.lateness import count_lateness, expand
from bench.loops import NULL, PIPE, Loop, running
from bench.server import empty_server
from pipeline.config import RedisSettings
from pipeline.core.buckets import bucket_start_ms
from pipeline.core.clock import SystemClock
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.namespace import open_namespace
from pipeline.store.topology import client_of
from tests.cluster import real_cluster

SHARDS, QUICK_SHARDS = (1, 6, 64), (1, 6)
RATE, SECONDS, QUICK_SECONDS = 1_000, 20, 2
PLACES, QUICK_PLACES = ((1, 1), (1, 6), (2, 6), (3, 6), (1, 64)), ((3, 6),)  # masters and shards
LOOPS, QUICK_LOOPS = (1, 2, 4), (1,)
MESSAGES, QUICK_MESSAGES = 200_000, 5_000
ROUNDS, QUICK_ROUNDS = 3, 1
PARTS = ("lateness", "throughput")
LEAD_MS, LOOK_SEC, SAMPLE_SEC_MAX, ZADD = 4_000, 0.005, 120.0, 500


def run(options: Options) -> Result:
    """Measure both parts, or those of ``--only``."""
    settings: dict[str, Any] = {
        "shards": QUICK_SHARDS if options.quick else SHARDS,
        "seconds": QUICK_SECONDS if options.quick else SECONDS,
        "places": QUICK_PLACES if options.quick else PLACES,
        "loops": QUICK_LOOPS if options.quick else LOOPS,
        "messages": options.choose(options.rows, MESSAGES, QUICK_MESSAGES),
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
    }
    result = new_result("scale", options, settings)
    try:
        with empty_server(WORK) as server:
            facts = server.facts()
        result["versions"]["server"], result["server_settings"] = facts["server"], facts["settings"]
        for part in [part for part in PARTS if part in (options.only or PARTS)]:
            take = take_lateness if part == "lateness" else take_throughput
            result["samples"][part] = take(settings)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


def take_lateness(settings: dict[str, Any]) -> list[Sample]:
    """Measure a steady rate with each number of shards on one server, once a round."""
    samples = []
    for number in range(1, settings["rounds"] + 1):
        for shards in settings["shards"]:
            samples.append({"round": number, **patiently(partial(_measure_lateness, shards, settings["seconds"]))})
            p99 = percentile(expand(samples[-1]["lateness_ms"]), 99)
            say(f"round {number}  {shards:>2} shards, {RATE:,} messages/s: p99 {p99:.0f} ms late")
    return samples


def _measure_lateness(shards: int, seconds: int, patience: int) -> Sample:
    count = RATE * seconds
    with empty_server(WORK) as server:
        redis_settings = RedisSettings(url=server.url, shards=shards)
        client, clock = connect(redis_settings), SystemClock()
        open_namespace(client, redis_settings, may_create=True)
        first_ms = clock.wall_ms() + patience * LEAD_MS
        _fill(client, redis_settings, make_pairs(first_ms + n * 1000 // RATE for n in range(count)))
        with running([_start(redis_settings, PIPE, "--format", "json")]) as [loop]:
            if clock.wall_ms() >= first_ms:
                raise TooLateError
            before = loop.cpu_s(), server.cpu_s()
            assert loop.reader is not None
            loop.reader.wait_for_lines(count, (first_ms - clock.wall_ms()) / 1000 + seconds + 30)
            used = loop.cpu_s() - before[0], server.cpu_s() - before[1]
            loop.stop()
            counts = count_lateness(loop.reader.portions, count)
        client.close()
    return {
        "shards": shards,
        "seconds": seconds,
        "loop_cpu_s": round(used[0], 3),
        "server_cpu_s": round(used[1], 3),
        **counts,
    }


def take_throughput(settings: dict[str, Any]) -> list[Sample]:
    """Measure how fast loops deliver what is all due, in each place, once a round."""
    samples = []
    combinations = [(place, loops) for place in settings["places"] for loops in settings["loops"]]
    for number in range(1, settings["rounds"] + 1):
        first = number % len(combinations)
        for (masters, shards), loops in combinations[first:] + combinations[:first]:
            sample = _measure_throughput(masters, shards, loops, settings["messages"])
            samples.append({"masters": masters, "shards": shards, "loops": loops, "round": number, **sample})
            rate = sample["messages"] / sample["wall_s"]
            say(f"round {number}  {masters} masters, {shards:>2} shards, {loops} loops: {rate:>9,.0f} messages/s")
    return samples


def _measure_throughput(masters: int, shards: int, count_of_loops: int, count: int) -> Sample:
    with _servers(masters) as (url, servers), ExitStack() as stack:
        settings = RedisSettings(url=url, shards=shards)
        client = connect(settings)
        stack.callback(client.close)
        open_namespace(client, settings, may_create=True)
        _fill(client, settings, overdue_pairs(count), ":hidden")
        loops = stack.enter_context(running([_start(settings, NULL) for _ in range(count_of_loops)]))
        before = sum(loop.cpu_s() for loop in loops), _cpu_s(servers)
        began = time.monotonic()
        _reveal(client, settings)
        while _delivered(client, settings) < count:
            if time.monotonic() - began > SAMPLE_SEC_MAX or not all(loop.is_alive() for loop in loops):
                raise RuntimeError(f"{_delivered(client, settings)} of {count} messages were delivered.")
            time.sleep(LOOK_SEC)
        wall_s = time.monotonic() - began
        used = sum(loop.cpu_s() for loop in loops) - before[0], _cpu_s(servers) - before[1]
        for loop in loops:
            loop.stop()
        if (delivered := _delivered(client, settings)) != count:
            raise RuntimeError(f"{count} messages were delivered {delivered} times.")
    return {"messages": count, "wall_s": wall_s, "loops_cpu_s": round(used[0], 3), "servers_cpu_s": round(used[1], 3)}


@contextmanager
def _servers(masters: int) -> Iterator[tuple[str, list[Any]]]:
    """Run a cluster of masters, or one server by itself; gives its URL and a client of each."""
    if masters == 1:
        with empty_server(WORK) as server:
            yield server.url, [server.client]
        return
    with real_cluster(masters) as cluster:
        clients = [redis.Redis(port=node.port) for node in cluster.masters]
        yield cluster.url, clients
        for client in clients:
            client.close()


def _start(settings: RedisSettings, output: str, *options: str) -> Loop:
    environ = {"REDIS_URL": settings.url, "DUETIME_REDIS_SHARDS": str(settings.shards)}
    return Loop(["./spark-submit.sh", "jobs/drain.py", *options], output, environ)


def _fill(client: Any, settings: RedisSettings, pairs: Sequence[tuple[int, bytes]], suffix: str = "") -> None:
    """Store messages in turn in all shards, in order of due time."""
    for keys in keys_of(settings):
        pipeline = client_of(client, keys).pipeline(transaction=False)
        of_buckets: dict[int, dict[bytes, int]] = {}
        for due_ms, member in pairs[keys.shard :: settings.shards]:
            of_buckets.setdefault(bucket_start_ms(due_ms), {})[member] = due_ms
        for start_ms, members in of_buckets.items():
            items = [*members.items()]
            for first in range(0, len(items), ZADD):
                pipeline.zadd(keys.bucket(start_ms) + suffix, dict(items[first : first + ZADD]))
            pipeline.zadd(keys.buckets() + suffix, {str(start_ms): start_ms})
        pipeline.execute()


def _reveal(client: Any, settings: RedisSettings) -> None:
    """Give what is hidden to the loops, of each shard in one moment, and wake them."""
    for keys in keys_of(settings):
        of_shard = client_of(client, keys)
        hidden = keys.buckets() + ":hidden"
        starts = [int(start) for start in of_shard.zrange(hidden, 0, -1)]
        pipeline = of_shard.pipeline(transaction=True)
        for start_ms in starts:
            pipeline.rename(keys.bucket(start_ms) + ":hidden", keys.bucket(start_ms))
        pipeline.rename(hidden, keys.buckets())
        pipeline.publish(keys.wake(), starts[0])
        pipeline.execute()


def _delivered(client: Any, settings: RedisSettings) -> int:
    return sum(int(client.hget(keys.counters(), "delivered") or 0) for keys in keys_of(settings))


def _cpu_s(servers: Sequence[Any]) -> float:
    found = [server.info("cpu") for server in servers]
    return float(sum(each["used_cpu_user"] + each["used_cpu_sys"] for each in found))


def tables(result: Result) -> str:
    """Lay the result out for eyes."""
    settings, samples = result["settings"], result["samples"]
    parts = [describe_origin(result)]
    if "lateness" in samples:
        parts.append(f"#### Lateness with many shards\n\n{lateness_table(settings, samples['lateness'])}")
    if "throughput" in samples:
        parts.append(f"#### Throughput over masters\n\n{throughput_table(settings, samples['throughput'])}")
    return "\n\n".join(parts)


def lateness_table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay out how late messages were."""
    rows = []
    first = 0.0
    for shards in settings["shards"]:
        of_shards = [sample for sample in samples if sample["shards"] == shards]
        told, seen = ([value for s in of_shards for value in expand(s[name])] for name in ("lateness_ms", "read_ms"))
        seconds = sum(sample["seconds"] for sample in of_shards)
        p99 = percentile(seen, 99)
        first = first or p99
        cpu = [f"{sum(s[name] for s in of_shards) / seconds:.1%}" for name in ("loop_cpu_s", "server_cpu_s")]
        figures = [f"{percentile(told, percent):.0f}" for percent in (50, 99, 99.9, 100)]
        rows.append((str(shards), *figures, f"{p99:.1f}", f"{p99 / first:.2f}", *cpu))
    head = ("shards on one server", "p50", "p99", "p99.9", "max", "read p99", "of the first", "loop CPU", "server CPU")
    about = (
        f"One loop, {RATE:,} messages/s, {settings['rounds']} times {settings['seconds']} s of each, due times spread evenly "
        "over the shards. Milliseconds from due to `delivered_ms`, and to when the reader of the pipe had the line."
    )
    return f"{about}\n\n{format_table(head, rows)}"


def throughput_table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay out how fast they were."""
    rows = []
    for masters, shards in settings["places"]:
        for loops in settings["loops"]:
            chosen = [s for s in samples if (s["masters"], s["shards"], s["loops"]) == (masters, shards, loops)]
            rate = spread_of([s["messages"] / s["wall_s"] for s in chosen])
            micros = [
                f"{spread_of([s[name] / s['messages'] * 1e6 for s in chosen]).median:.1f}"
                for name in ("loops_cpu_s", "servers_cpu_s")
            ]
            rows.append(
                (
                    f"{masters} × {shards}, {loops} loop{'s' if loops > 1 else ''}",
                    *(f"{value:,.0f}" for value in (rate.median, rate.least, rate.most)),
                    *micros,
                )
            )
    head = ("servers × shards, loops", "messages/s", "min", "max", "loop µs/msg", "server µs/msg")
    about = (
        f"{settings['messages']:,} messages that are all due, {settings['rounds']} rounds, text to /dev/null. One server is "
        "reached by a unix socket, the masters of a Redis Cluster over loopback."
    )
    return f"{about}\n\n{format_table(head, rows)}"
