"""The HTTP API as users run it, on a server of its own: single messages, batches, and messages by their ids.

The requests come from this process, over connections of loopback that stay open; it shares the cores with the API and with Redis.
"""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from bench.common import (
    ROOT,
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
from bench.http_load import request, send
from bench.server import Server, empty_server

SECONDS, QUICK_SECONDS = 5.0, 0.3
ROUNDS, QUICK_ROUNDS = 5, 1
LINES, QUICK_LINES = 1_000, 100  # a batch
IDS, QUICK_IDS = 5_000, 200  # that are looked for and cancelled
AT_ONCE = 1_000  # ids of a request that cancels many
START_SEC_MAX = 60.0
NDJSON = "application/x-ndjson"
TITLES = {
    "one connection": "one message a request, 1 connection",
    "connections": "one message a request, 32 connections",
    "with ids": "one message with an id a request, 32 connections",
    "batch, 1": "batches of plain lines, 1 connection",
    "batch, 4": "batches of plain lines, 4 connections",
    "batch with ids": "batches with id and topic, 4 connections",
    "get": "GET by id, 1 connection",
    "get, 32": "GET by id, 32 connections",
    "cancel": "DELETE by id, 1 connection",
    "cancel many": f"POST /v1/cancellations of {AT_ONCE:,}, 1 connection",
}


_numbers = itertools.count()


class Api:
    """The job as a process."""

    def __init__(self, server: Server) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        ready, told = os.pipe()
        environ = os.environ | {"REDIS_URL": server.url, "DUETIME_READY_FD": str(told)}
        command = [sys.executable, "-P", "jobs/serve.py", "--port", str(self.port)]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.DEVNULL, pass_fds=(told,))
        os.close(told)
        watchdog = threading.Timer(START_SEC_MAX, self._process.kill)
        watchdog.start()
        with open(ready, "rb") as answer:
            is_up = b"up\n" in answer
        watchdog.cancel()
        if not is_up:
            raise RuntimeError("The API did not start.")
        self._about = psutil.Process(self._process.pid)

    def cpu_s(self) -> float:
        """Return its CPU seconds so far."""
        times = self._about.cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


@contextmanager
def _running() -> Iterator[tuple[Server, Api]]:
    with empty_server(WORK) as server:
        api = Api(server)
        try:
            yield server, api
        finally:
            api.stop()


def run(options: Options) -> Result:
    """Measure everything, a round at a time, each on a server and an API of its own."""
    settings: dict[str, Any] = {
        "seconds": QUICK_SECONDS if options.quick else SECONDS,
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
        "lines": QUICK_LINES if options.quick else LINES,
        "ids": QUICK_IDS if options.quick else IDS,
    }
    result = new_result("api", options, settings)
    result["samples"] = {name: [] for name in TITLES}
    try:
        for number in range(settings["rounds"]):
            say(f"api: round {number + 1}")
            with _running() as (server, api):
                facts = server.facts()
                result["versions"]["server"], result["server_settings"] = facts["server"], facts["settings"]
                send(api.port, itertools.repeat(_single(0)), 4, 0.5)
                for name, take in _parts(settings, server, api).items():
                    if name in (options.only or TITLES):
                        result["samples"][name].append({"round": number, **take()})
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


def _parts(settings: dict[str, Any], server: Server, api: Api) -> dict[str, Callable[[], Sample]]:
    """Return what takes each sample."""
    seconds: float = settings["seconds"]
    lines: int = settings["lines"]
    ids: int = settings["ids"]

    def measured(messages: int, requests: Iterator[bytes], connections: int, seconds: float | None = None) -> Sample:
        """Return a sample of requests with so many messages each."""
        api_s, server_s = api.cpu_s(), server.cpu_s()
        answers = send(api.port, requests, connections, seconds)
        count = len(answers.seconds)
        if answers.statuses.keys() - {200, 201}:
            raise RuntimeError(f"The API refused something: {answers.statuses}.")
        return {
            "wall_s": round(answers.wall_s, 4),
            "messages": count * messages,
            "api_cpu_s": round(api.cpu_s() - api_s, 3),
            "server_cpu_s": round(server.cpu_s() - server_s, 3),
            "p50_ms": round(percentile(answers.seconds, 50) * 1000, 3),
            "p99_ms": round(percentile(answers.seconds, 99) * 1000, 3),
        }

    plain = _batch([_line(number=n) for n in range(lines)])

    def by_id(method: str, connections: int) -> Sample:
        return measured(1, iter([request(method, f"/v1/messages/{name}") for name in _store(api, ids)]), connections)

    def cancel_many() -> Sample:
        names, at_once = _store(api, ids), min(ids, AT_ONCE)
        parts = [names[first : first + at_once] for first in range(0, ids, at_once)]
        return measured(
            at_once,
            iter([request("POST", "/v1/cancellations", json.dumps({"ids": part}).encode()) for part in parts]),
            1,
        )

    return {
        "one connection": lambda: measured(1, map(_single, itertools.count()), 1, seconds),
        "connections": lambda: measured(1, map(_single, itertools.count()), 32, seconds),
        "with ids": lambda: measured(1, (_single(n, f"single-{n}") for n in itertools.count()), 32, seconds),
        "batch, 1": lambda: measured(lines, itertools.repeat(plain), 1, seconds),
        "batch, 4": lambda: measured(lines, itertools.repeat(plain), 4, seconds),
        "batch with ids": lambda: measured(lines, (_batch_with_ids(n, lines) for n in itertools.count()), 4, seconds),
        "get": lambda: by_id("GET", 1),
        "get, 32": lambda: by_id("GET", 32),
        "cancel": lambda: by_id("DELETE", 1),
        "cancel many": cancel_many,
    }


def _store(api: Api, count: int) -> list[str]:
    """Store messages with ids of their own, and return these."""
    names = [f"found-{next(_numbers)}" for _ in range(count)]
    for first in range(0, count, 1_000):
        send(api.port, iter([_batch([_line(name) for name in names[first : first + 1_000]])]), 1)
    return names


def _single(number: int, name: str = "") -> bytes:
    return request("POST", "/v1/messages", json.dumps(_line(name, number)).encode())


def _line(name: str = "", number: int = 0) -> dict[str, Any]:
    fields = {"message": f"reminder {number:09} for a customer", "delay_sec": 51_000 + number % 3_600}
    return fields | ({"id": name} if name else {})


def _batch(lines: Sequence[dict[str, Any]]) -> bytes:
    return request("POST", "/v1/batches", "\n".join(map(json.dumps, lines)).encode(), NDJSON)


def _batch_with_ids(number: int, lines: int) -> bytes:
    return _batch([_line(f"batch-{number}-{n}", n) | {"topic": "mail"} for n in range(lines)])


def tables(result: Result) -> str:
    """Lay the samples out for eyes."""
    rows = []
    for name, samples in result["samples"].items():
        if not samples:
            continue
        rate = spread_of([sample["messages"] / sample["wall_s"] for sample in samples])

        def median(key: str, taken: Sequence[Sample] = samples) -> float:
            return spread_of([sample[key] for sample in taken]).median

        cpu = [
            spread_of([1e6 * s[key] / s["messages"] for s in samples]).median for key in ("api_cpu_s", "server_cpu_s")
        ]
        rows.append(
            (
                TITLES[name],
                *(f"{value:,.0f}" for value in (rate.median, rate.least, rate.most)),
                *(f"{median(key):,.2f}" for key in ("p50_ms", "p99_ms")),
                *(f"{value:,.0f}" for value in cpu),
            )
        )
    head = ("", "messages/s", "min", "max", "p50 ms", "p99 ms", "API us/message", "Redis us/message")
    settings = result["settings"]
    about = (
        f"{settings['rounds']} rounds of {settings['seconds']:g} s each; {settings['lines']:,} lines a batch; "
        f"{settings['ids']:,} ids looked for. p50 and p99 are of requests."
    )
    origin = textwrap.fill(f"{describe_origin(result)} {about}", 100, break_on_hyphens=False)
    return f"{origin}\n\n{format_table(head, rows)}"
