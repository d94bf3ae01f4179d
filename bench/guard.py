"""What single parts cost, each beside a yardstick that does the least for it, so that the ratio says the same on a slow machine.

CI runs it with ``--check``: it fails if a part has become slower by a third, beside its yardstick, than in the result that is kept,
or by half if that was taken on another kind of CPU. What seems so is measured again, twice: noise goes away.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.common import WORK, Options, Result, describe_origin, format_table, load_result, new_result, say
from bench.filling import make_pairs
from bench.server import Server, empty_server
from bench.workload import ARRIVAL_MS, DAY_SEC, FORMS, SEED, bucket_start_ms
from pipeline.config import DrainSettings, RedisSettings, TopicSettings
from pipeline.core.clock import SystemClock
from pipeline.core.messages import Message
from pipeline.core.validation import Kind
from pipeline.drain.stats import Totals
from pipeline.ingest.parsing import FileText, parse_file
from pipeline.ingest.transactions import PartQueue, Step
from pipeline.sinks.screen import ScreenSink
from pipeline.store.base import NO_MARKER, MarkerMove, MessageRows, Transaction
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.resp import frame_names, frame_places, frame_rows

ROWS, QUICK_ROWS = 50_000, 5_000
ROUNDS, QUICK_ROUNDS = 7, 2
FALL_MAX = 1 / 3  # of what it was beside its yardstick
FALL_MAX_ELSEWHERE = 1 / 2  # on another kind of CPU, which may be better at the one or the other
TRIES = 3
PORTION = 5_000  # messages a transaction
CLAIM = DrainSettings().claim_limit
KEYS = Keys(RedisSettings().namespace)

Cost = Callable[[], float]  # microseconds a message


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the pipeline and the yardstick beside it."""

    title: str
    yardstick: str
    cost: Cost
    least: Cost


def run(options: Options) -> Result:
    """Measure all parts, in turn, or with ``--check`` those again that seem slower than they were."""
    rows = options.choose(options.rows, ROWS, QUICK_ROWS)
    rounds = options.choose(options.rounds, ROUNDS, QUICK_ROUNDS)
    result = new_result("guard", options, {"rows": rows, "rounds": rounds})
    with empty_server(WORK) as server:
        result["versions"]["server"] = server.facts()["server"]
        parts = [*_reading(rows), *_storing(server, rows), *_claiming(server, rows), _showing(rows)]
        left = parts
        for _ in range(TRIES if options.check else 1):
            for part in left:
                taken = [{"us": part.cost(), "least_us": part.least()} for _ in range(rounds)]
                result["samples"][part.title] = taken
                say(f"{part.title:<32} {_ratio(taken):6.2f} of {part.yardstick}")
            fallen = fallen_parts(result) if options.check else {}
            left = [part for part in parts if part.title in fallen]
            if not left:
                break
    result["settings"]["yardsticks"] = {part.title: part.yardstick for part in parts}
    return result


def fallen_parts(result: Result) -> dict[str, str]:
    """Return what has fallen too far since the result that is kept, each with a sentence."""
    kept = load_result("guard", result["quick"])
    if kept is None:
        return {}
    is_alike = kept["machine"]["cpu"] == result["machine"]["cpu"]
    left = 1 - (FALL_MAX if is_alike else FALL_MAX_ELSEWHERE)
    fallen = {}
    for title, samples in result["samples"].items():
        before = _ratio(kept["samples"][title]) if title in kept["samples"] else 0.0
        if _ratio(samples) < before * left:
            fallen[title] = f"{title}: {_ratio(samples):.2f} of its yardstick's speed, and it was {before:.2f}."
    return fallen


def tables(result: Result) -> str:
    """Lay the result out for eyes."""
    rows = [
        (
            title,
            f"{statistics.median(s['us'] for s in samples):.2f}",
            f"{statistics.median(s['least_us'] for s in samples):.2f}",
            f"{_ratio(samples):.2f}",
            result["settings"]["yardsticks"][title],
        )
        for title, samples in result["samples"].items()
    ]
    head = ("", "µs a message", "yardstick", "ratio", "which is")
    return f"{describe_origin(result)}\n\n{format_table(head, rows)}"


def _ratio(samples: Sequence[dict[str, float]]) -> float:
    return statistics.median(sample["least_us"] / sample["us"] for sample in samples)


def _reading(rows: int) -> list[Part]:
    """From the bytes of a file to those of its transactions, by the worker's CPU."""
    delays = np.random.default_rng(SEED).integers(0, DAY_SEC, rows).tolist()
    parts = []
    for name, form in FORMS.items():
        lines = [form.line_of(number, delay) for number, delay in enumerate(delays)]
        kind: Kind = "csv" if form.header else "json"
        head = [form.header] if form.header else []
        file = FileText("OZ0aaaabbbbbbb", 1, kind, "guard", ARRIVAL_MS, "\n".join([*head, *lines]).encode())
        simple = lines if kind == "json" else [json.dumps(line.split(",")) for line in lines]
        parts.append(
            Part(
                f"read lines: {name}",
                "json.loads of each line",
                lambda file=file: _cpu_us(lambda: _frame(file), rows),  # type: ignore[misc]
                lambda simple=simple: _cpu_us(lambda: [json.loads(line) for line in simple], rows),  # type: ignore[misc]
            )
        )
    return parts


def _frame(file: FileText) -> None:
    queues = [PartQueue(part) for part in parse_file(file)]
    while step := Step(queues, PORTION, 1 << 30):
        transaction = step.transaction
        for rows in (transaction.rows, transaction.identified):
            frame_rows(rows, KEYS.bucket)
        frame_names(transaction.identified)
        frame_places(transaction.identified, KEYS.places())
        step.advance()


def _cpu_us(call: Callable[[], object], rows: int) -> float:
    began = time.process_time()
    call()
    return (time.process_time() - began) / rows * 1e6


def _storing(server: Server, rows: int) -> list[Part]:
    """Transactions, by what the server says that EXEC took."""
    store = RedisStore(connect(RedisSettings(url=server.url)), KEYS)
    due_ms = sorted(np.random.default_rng(SEED).integers(ARRIVAL_MS, ARRIVAL_MS + DAY_SEC * 1000, rows).tolist())
    members = [member for _, member in make_pairs(due_ms)]

    def stored(has_key: bool) -> float:
        server.client.flushall()
        server.client.config_resetstat()
        for first in range(0, rows, PORTION):
            part = slice(first, first + PORTION)
            keys = [f"order-{number:09d}" for number in range(rows)[part]]
            messages, none = MessageRows(due_ms[part], members[part], keys if has_key else ()), MessageRows([], [])
            move = MarkerMove(f"part-{first}", NO_MARKER, "all")
            both = (none, messages) if has_key else (messages, none)
            store.schedule("guard", Transaction([move], *both, 0))
        return _took_us(server, "exec", rows)

    def added() -> float:
        server.client.flushall()
        server.client.config_resetstat()
        for first in range(0, rows, PORTION):
            pipeline = server.client.pipeline(transaction=True)
            buckets: dict[str, dict[bytes, int]] = {}
            for due, member in zip(due_ms[first : first + PORTION], members[first : first + PORTION], strict=True):
                buckets.setdefault(KEYS.bucket(bucket_start_ms(due)), {})[member] = due
            for key, messages in buckets.items():
                pipeline.zadd(key, messages)
            pipeline.execute()
        return _took_us(server, "exec", rows)

    yardstick = "ZADD within MULTI"
    return [
        Part("store messages", yardstick, lambda: stored(False), added),
        Part("store messages with an id", yardstick, lambda: stored(True), added),
    ]


def _claiming(server: Server, rows: int) -> list[Part]:
    """Claims of messages that are all due, by what the server says that the script took."""
    store = RedisStore(connect(RedisSettings(url=server.url)), KEYS)
    start_ms = bucket_start_ms(ARRIVAL_MS)
    pairs = make_pairs([start_ms + number % 1_000 for number in range(rows)])

    def fill() -> None:
        server.client.flushall()
        for first in range(0, rows, PORTION):
            members = {member: due_ms for due_ms, member in pairs[first : first + PORTION]}
            server.client.zadd(KEYS.bucket(start_ms), members)
        server.client.zadd(KEYS.buckets(), {str(start_ms): start_ms})

    def claimed(sink: str) -> float:
        fill()
        server.client.hset(KEYS.topic_settings(), "*", json.dumps({"sink": sink}))
        store.claim("guard:first")  # by which it knows the bucket and the keys of streams
        left = rows - CLAIM
        server.client.config_resetstat()
        for number in range(left // CLAIM):
            reply = store.claim(f"guard:{number}")
            assert reply.claim or reply.moved
        return _took_us(server, "evalsha", left)

    def popped() -> float:
        fill()
        server.client.config_resetstat()
        while server.client.zpopmin(KEYS.bucket(start_ms), CLAIM):
            pass
        return _took_us(server, "zpopmin", rows)

    return [
        Part("claim messages", "ZPOPMIN", lambda: claimed(TopicSettings().sink), popped),
        Part("claim messages into a stream", "ZPOPMIN", lambda: claimed("stream"), popped),
    ]


def _took_us(server: Server, command: str, rows: int) -> float:
    return float(server.info("commandstats")[f"cmdstat_{command}"]["usec"]) / rows


def _showing(rows: int) -> Part:
    """Messages as lines of JSON, and how late they were."""
    now_ms = SystemClock().wall_ms()
    messages = [Message.read_member(member, due_ms) for due_ms, member in make_pairs(range(now_ms - rows, now_ms))]

    def shown() -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        ScreenSink("json", SystemClock(), nowhere).deliver(messages, lambda: True, lambda: True)
        os.close(nowhere)
        Totals().count_delivered(messages, now_ms)

    return Part(
        "deliver as JSON and count",
        "json.dumps of each",
        lambda: _cpu_us(shown, rows),
        lambda: _cpu_us(lambda: [json.dumps(message.to_record()) for message in messages], rows),
    )
