"""Ingest with a backlog: does storing get slower when millions of messages already wait?

One server, one JVM. At each level the backlog is filled up by plain ZADDs, as our writer would have stored it: in portions that
are sorted by due time and spread over the same day. Then rounds are measured; what a round has stored is taken out again.
Last the server is emptied and the first level measured again: a JVM gets faster with time, and that shows here.
"""

import shutil
import statistics
from collections.abc import Iterator

import numpy as np
from pyspark.sql import SparkSession

from bench.common import WORK, Options, Result, Sample, describe_origin, format_table, new_result, say, spread_of
from bench.meter import measure
from bench.raw import Pair, fill_buffers, pack_zadds, pack_zrems, send_buffers
from bench.server import Server, empty_server
from bench.session import SOURCE_ID, collect_garbage, java_version, spark_session, store_ours
from bench.workload import ARRIVAL_MS, DAY_SEC, SEED, message_text, write_workload
from pipeline.config import IngestSettings, RedisSettings
from pipeline.core.ids import encode_token, message_id
from pipeline.core.messages import Message
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore

LEVELS = (0, 1_000_000, 10_000_000)
QUICK_LEVELS = (0, 100_000, 300_000)
ROWS, ROUNDS = 200_000, 5
QUICK_ROWS, QUICK_ROUNDS = 50_000, 3
WARM_UP_ROWS, QUICK_WARM_UP_ROWS = 1_000_000, 100_000
FILL_ROWS = 100_000  # a sorted portion
KEYS = Keys(RedisSettings().namespace)


def run(options: Options) -> Result:
    """Measure each level up to ``--max``."""
    rows = options.choose(options.rows, ROWS, QUICK_ROWS)
    rounds = options.choose(options.rounds, ROUNDS, QUICK_ROUNDS)
    warm_up_rows = options.choose(None, WARM_UP_ROWS, QUICK_WARM_UP_ROWS)
    levels = [n for n in (QUICK_LEVELS if options.quick else LEVELS) if n <= options.backlog_max]
    settings = {
        "rows": rows,
        "rounds": rounds,
        "master": options.master,
        "transaction_messages": IngestSettings().transaction_messages,
    }
    result = new_result("backlog", options, settings | {"levels": levels})
    try:
        with spark_session(options.master) as spark, empty_server(WORK) as server:
            facts = server.facts()
            result["versions"] |= {"java": java_version(spark), "server": facts["server"]}
            result["server_settings"] = facts["settings"]
            for _ in range(-(-warm_up_rows // rows)):
                _measure_round(spark, server, rows, 0)
            filled = 0
            for level in levels:
                _fill(server, filled, level)
                filled = level
                samples = [_measure_round(spark, server, rows, number) for number in range(1, rounds + 1)]
                result["samples"][f"{level:,}"] = samples
            server.client.flushall()
            again = [_measure_round(spark, server, rows, number) for number in range(1, rounds + 1)]
            result["samples"]["0, again at the end"] = again
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


def _measure_round(spark: SparkSession, server: Server, rows: int, number: int) -> Sample:
    """Store a workload on top of the backlog, then take it out again. Round 0 warms up."""
    workload = write_workload(WORK / "landing", rows, generation=number)
    waiting = server.messages()
    collect_garbage(spark)
    sample = measure(server, lambda: store_ours(spark, workload.folder, server.url, WORK / "rejects"))
    if server.messages() != waiting + rows:
        raise RuntimeError(f"{server.messages() - waiting} messages were stored, not {rows}.")
    store = RedisStore(connect(RedisSettings(url=server.url)), KEYS)
    store.forget_markers(SOURCE_ID, [part_id for part_id, _ in store.marked_parts(SOURCE_ID)])
    send_buffers(server.socket, fill_buffers(pack_zrems(sorted(workload.members()), KEYS)))
    say(
        f"backlog {waiting:>10,}  {rows / sample['wall_s']:>10,.0f} rows/s, others used {sample['others_cores']:.2f} cores"
    )
    return {"round": number, "backlog": waiting, **sample}


def _fill(server: Server, first: int, end: int) -> None:
    """Raise the backlog from ``first`` messages to ``end``."""
    send_buffers(server.socket, fill_buffers(_fill_commands(first, end)))
    if server.messages() != end:
        raise RuntimeError(f"The backlog is {server.messages()}, not {end}.")
    server.wait_for_rewrite()


def _fill_commands(first: int, end: int) -> Iterator[bytes]:
    rng = np.random.default_rng((SEED, first))
    for start in range(first, end, FILL_ROWS):
        count = min(FILL_ROWS, end - start)
        token = encode_token(ARRIVAL_MS - DAY_SEC * 1000 + start // FILL_ROWS, start)
        due = np.sort(rng.integers(0, DAY_SEC * 1000, count)) + ARRIVAL_MS
        pairs: list[Pair] = [
            (due_ms, Message(due_ms, message_text(start + line)).to_member(message_id(token, line)))
            for line, due_ms in enumerate(due.tolist())
        ]
        yield from pack_zadds(pairs, KEYS)


def tables(result: Result) -> str:
    """Lay the result out for eyes."""
    about = result["settings"]
    rows = []
    for level, samples in result["samples"].items():
        rate = spread_of([about["rows"] / s["wall_s"] for s in samples])
        server_us = [s["server_cpu_s"] / about["rows"] * 1e6 for s in samples]
        rates = (f"{value:,.0f}" for value in (rate.median, rate.least, rate.most))
        rows.append((level, *rates, f"{statistics.median(server_us):.2f}"))
    others = max(s["others_cores"] for samples in result["samples"].values() for s in samples)
    return (
        f"{describe_origin(result)}\n"
        f"{about['rows']:,} lines a round, {about['rounds']} rounds, {about['master']}; other processes used at most "
        f"{others:.2f} cores during one.\n\n"
        f"{format_table(('messages waiting', 'rows/s', 'min', 'max', 'server µs/msg'), rows)}"
    )
