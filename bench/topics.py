"""Moving messages of few and of many topics into streams: a part of the benchmark of streams."""

import time
from typing import Any

from bench.common import WORK, Sample, format_table, say, spread_of
from bench.filling import HIDDEN, KEYS, reveal, store_pairs
from bench.loops import NULL, running, start_ours
from bench.meter import measure
from bench.raw import Pair
from bench.server import Server, empty_server
from bench.workload import ARRIVAL_MS, message_text
from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.clock import SystemClock
from pipeline.core.ids import encode_token, message_id
from pipeline.core.messages import Message

TOPICS, QUICK_TOPICS = (10, 300, 1_000, 10_000), (10, 300)
MESSAGES, QUICK_MESSAGES = 300_000, 1_000
LOOK_SEC = 0.005


def take_samples(settings: dict[str, Any]) -> list[Sample]:
    """Move messages of so many topics, which take turns."""
    samples = []
    for number in range(1, settings["rounds"] + 1):
        for topics in settings["topics"]:
            with empty_server(WORK) as server:
                sample = _move(server, settings["topic_messages"], topics)
            samples.append({"topics": topics, "round": number, **sample})
            rate = settings["topic_messages"] / sample["wall_s"]
            say(f"round {number}  {rate:>9,.0f} messages/s  {topics:,} topics")
    return samples


def _move(server: Server, count: int, topics: int) -> Sample:
    sample = move_pairs(server, _pairs(count, topics))
    found = sum(server.client.xlen(KEYS.stream(f"topic-{number}")) for number in range(topics))
    if found != count:
        raise RuntimeError(f"The streams hold {found} of {count} messages.")
    return sample


def move_pairs(server: Server, pairs: list[Pair]) -> Sample:
    """Let one loop move messages that are all due into the streams of their topics."""
    store_pairs(server, pairs, HIDDEN)
    with running([start_ours(server, NULL, "--sink", "stream")]) as [loop]:
        before_s = loop.cpu_s()

        def move() -> None:
            reveal(server)
            while server.client.exists(KEYS.buckets()):
                time.sleep(LOOK_SEC)

        sample = measure(server, move)
        used_s = loop.cpu_s() - before_s
        loop.stop()
    return {**sample, "loops_cpu_s": round(used_s, 3)}


def _pairs(count: int, topics: int) -> list[Pair]:
    """Return messages that are all due, spread over the last hour."""
    token, width_ms = encode_token(ARRIVAL_MS, 0), 6 * BUCKET_WIDTH_MS
    first_ms = SystemClock().wall_ms() - width_ms
    return [
        (
            first_ms + n * width_ms // count,
            Message(0, message_text(n), f"topic-{n % topics}").to_member(message_id(token, n)),
        )
        for n in range(count)
    ]


def table(settings: dict[str, Any], samples: list[Sample]) -> str:
    """Lay the samples out for reading; ``of the first`` is the rate, divided by that of the fewest topics."""
    count, rows = settings["topic_messages"], []
    first = 0.0
    for topics in settings["topics"]:
        of = [sample for sample in samples if sample["topics"] == topics]
        rate = spread_of([count / sample["wall_s"] for sample in of])
        first = first or rate.median
        server, loop = (
            spread_of([s[name] / count * 1e6 for s in of]).median for name in ("server_cpu_s", "loops_cpu_s")
        )
        numbers = (rate.median, rate.least, rate.most)
        rows.append(
            [
                f"{topics:,} topics",
                *(f"{n:,.0f}" for n in numbers),
                f"{rate.median / first:.2f}",
                f"{server:.1f}",
                f"{loop:.1f}",
            ]
        )
    head = ("", "messages/s", "min", "max", "of the first", "server µs/msg", "loop µs/msg")
    about = f"{count:,} messages that are all due, of topics that take turns, {settings['rounds']} rounds."
    return f"#### Many topics\n\n{about}\n\n{format_table(head, rows)}"
