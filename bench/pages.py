"""The pages of the API with much behind them: how long each takes, and what it costs when five browsers follow what happens."""

import shutil
import socket
import textwrap
import threading
import time
from typing import Any, Final

from bench.api import Api
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
from bench.filling import KEYS, make_pairs, store_pairs
from bench.http_load import request, send
from bench.server import Server, empty_server
from pipeline.core.clock import SystemClock
from pipeline.core.lateness import Lateness
from pipeline.store.heartbeats import LoopProgress, LoopStats, TopicStats, write_loop

MESSAGES, QUICK_MESSAGES = 1_000_000, 2_000
TOPICS, QUICK_TOPICS = 1_000, 20
LETTERS, QUICK_LETTERS = 10_000, 50
ROUNDS, QUICK_ROUNDS = 10, 2
DAYS_MS: Final = 7 * 86_400_000
PAUSE_SEC: Final = 0.6  # so that each page takes a look of its own
VIEWERS: Final = 5
WATCH_SEC, QUICK_WATCH_SEC = 20.0, 2.0
LOOP_TOPICS: Final = 100  # that a heartbeat tells of
PATHS: Final = {
    "/?hours=6": "Overview, 6 h",
    "/?hours=24": "Overview, 24 h",
    "/?hours=168": "Overview, 7 days",
    "/messages": "Messages",
    "/messages?topic=topic-0001": "Messages of a topic that has none",
    "/messages/tea": "a message",
    "/topics": "Topics",
    "/topics/topic-0001": "a topic",
    "/dead": "Dead letters",
    "/loops": "Loops and ingest",
    "/try": "Try it",
    "/change/messages?verb=cancel": "before a change of all messages",
    "/change/dead?verb=redrive": "before a change of all dead letters",
}


def run(options: Options) -> Result:
    """Fill a server, ask for each page by itself, then follow one."""
    settings: dict[str, Any] = {
        "messages": options.choose(options.rows, MESSAGES, QUICK_MESSAGES),
        "topics": QUICK_TOPICS if options.quick else TOPICS,
        "letters": QUICK_LETTERS if options.quick else LETTERS,
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
        "watch_s": QUICK_WATCH_SEC if options.quick else WATCH_SEC,
    }
    result = new_result("pages", options, settings)
    try:
        with empty_server(WORK) as server:
            result["versions"]["server"] = server.facts()["server"]
            say(f"pages: storing {settings['messages']:,} messages")
            _fill(server, settings)
            api = Api(server)
            try:
                send(api.port, iter([request("POST", "/v1/messages", TEA)]), 1)
                for path in PATHS:
                    result["samples"][path] = [_ask(api, path) for _ in range(settings["rounds"])]
                say("pages: watching")
                result["samples"]["watch"] = [
                    _watch(server, api, viewers, settings["watch_s"]) for viewers in (0, VIEWERS)
                ]
            finally:
                api.stop()
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


TEA: Final = b'{"message": "tea is ready", "delay_sec": 86400, "id": "tea"}'


def _fill(server: Server, settings: dict[str, Any]) -> None:
    now_ms, count = SystemClock().wall_ms() + 60_000, settings["messages"]
    store_pairs(server, make_pairs(now_ms + number * DAYS_MS // count for number in range(count)))
    names = [f"topic-{number:04}" for number in range(settings["topics"])]
    pipeline = server.client.pipeline(transaction=False)
    pipeline.sadd(KEYS.topics(), *names)
    for name in names:
        pipeline.xadd(KEYS.stream(name), {"message": "m", "topic": name})
    for number in range(settings["letters"]):
        topic = names[number % len(names)]
        fields = {"message": f"letter {number}", "topic": topic, "reason": "failed", "detail": "x" * 200, "group": "g"}
        pipeline.xadd(KEYS.dead(topic), {**fields, "died_ms": now_ms})
    pipeline.execute()
    for name in names[:20]:
        server.client.xgroup_create(KEYS.stream(name), "g", "0")
    lateness = Lateness()
    for ms in range(1, 2_000):
        lateness.add(ms)
    topics = {name: TopicStats(1_999, lateness) for name in names[:LOOP_TOPICS]}
    for number in range(3):
        stats = LoopStats(delivered=1_999 * len(topics), topics=topics)
        write_loop(
            server.client, KEYS, LoopProgress(loop_id=f"loop-{number}", started_ms=now_ms, has_ended=False, stats=stats)
        )


def _ask(api: Api, path: str) -> Sample:
    time.sleep(PAUSE_SEC)
    answers = send(api.port, iter([request("GET", path)]), 1)
    if answers.statuses.keys() != {200}:
        raise RuntimeError(f"The page {path} was refused: {answers.statuses}.")
    return {"ms": round(1000 * answers.seconds[0], 2)}


def _watch(server: Server, api: Api, viewers: int, seconds: float) -> Sample:
    """Follow the overview with so many browsers, and return what that costs."""
    received = [0] * viewers
    looks = [0] * viewers
    is_over = threading.Event()

    def follow(number: int) -> None:
        with socket.create_connection(("127.0.0.1", api.port), 10) as connection:
            connection.sendall(request("GET", "/live?page=overview&about=24"))
            while not is_over.is_set():
                read = connection.recv(1 << 16)
                received[number] += len(read)
                looks[number] += read.count(b"event: look")

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(viewers)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    api_s, server_s, bytes_before, looks_before = api.cpu_s(), server.cpu_s(), sum(received), sum(looks)
    time.sleep(seconds)
    sample = {
        "viewers": viewers,
        "api_cores": round((api.cpu_s() - api_s) / seconds, 4),
        "server_cores": round((server.cpu_s() - server_s) / seconds, 4),
        "looks_per_s": round((sum(looks) - looks_before) / seconds / max(1, viewers), 2),
        "bytes_per_s": round((sum(received) - bytes_before) / seconds / max(1, viewers)),
    }
    is_over.set()
    for thread in threads:
        thread.join()
    return sample


def tables(result: Result) -> str:
    """Lay the samples out for eyes."""
    settings, samples = result["settings"], result["samples"]
    rows = []
    for path, title in PATHS.items():
        taken = [sample["ms"] for sample in samples[path]]
        rows.append(
            (title, *(f"{value:,.0f}" for value in (spread_of(taken).median, percentile(taken, 90), max(taken))))
        )
    costs = [
        (f"{each['viewers']} viewers", f"{100 * each['api_cores']:.1f} %", f"{100 * each['server_cores']:.1f} %",
         f"{each['looks_per_s']:.2f}", f"{each['bytes_per_s']:,}")
        for each in samples["watch"]
    ]  # fmt: skip
    about = (
        f"{settings['messages']:,} messages in 7 days, {settings['topics']:,} topics, {settings['letters']:,} dead letters, "
        f"3 loops that tell of {LOOP_TOPICS} topics; {settings['rounds']} times each, one after the other."
    )
    origin = textwrap.fill(f"{describe_origin(result)} {about}", 100, break_on_hyphens=False)
    pages = format_table(("page", "median ms", "p90 ms", "max ms"), rows)
    head = ("the overview, followed", "of a core, API", "of a core, Redis", "looks/s", "bytes/s each")
    return f"{origin}\n\n{pages}\n\n{format_table(head, costs)}"
