"""What a program gets: scheduling one by one, at once and in bulk, finding and cancelling; beside it, two peers on the same server.

The peers are BullMQ and docket, if ``bench/run.sh peers --install`` has installed them.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.common import WORK, Options, Result, Sample, describe_origin, format_table, new_result, say, spread_of
from bench.peer_programs import find_peers, measure_verbs
from bench.server import Server, empty_server
from pipeline.client import AsyncDuetime, Duetime, Request

SINGLE, QUICK_SINGLE = 5_000, 200
MANY, QUICK_MANY = 200_000, 5_000
ROUNDS, QUICK_ROUNDS = 5, 1
AT_ONCE = 32
OURS = "ours"
PEERS = ("BullMQ", "docket")
VERBS = {
    "one": "schedule, one at a time",
    "threads": f"schedule, {AT_ONCE} threads",
    "at_once": f"schedule, {AT_ONCE} tasks of asyncio",
    "many": "schedule in bulk, with ids",
    "many_plain": "schedule in bulk, without ids",
    "get": "get, one at a time",
    "get_many": "get in bulk",
    "cancel": "cancel, one at a time",
    "cancel_many": "cancel in bulk",
}


def run(options: Options) -> Result:
    """Measure the client, and the peers that are there."""
    peers = {name: peer for name, peer in find_peers().items() if name in PEERS}
    settings: dict[str, Any] = {
        "single": options.choose(options.rows, SINGLE, QUICK_SINGLE),
        "many": options.choose(options.rows and options.rows * 40, MANY, QUICK_MANY),
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
        "peers": [*peers],
    }
    result = new_result("client", options, settings)
    subjects: dict[str, Callable[[Server], Sample]] = {OURS: lambda server: measure_ours(server, settings)}
    for name, peer in peers.items():
        subjects[name] = lambda server, peer=peer: measure_verbs(peer, server, settings["single"])  # type: ignore[misc]
    samples: list[Sample] = []
    try:
        with empty_server(WORK) as server:
            facts = server.facts()
        result["versions"]["server"], result["server_settings"] = facts["server"], facts["settings"]
        for number in range(1, settings["rounds"] + 1):
            for name, measure in subjects.items():
                with empty_server(WORK) as server:
                    samples.append({"subject": name, "round": number, **measure(server)})
                say(f"round {number}  {name}: {samples[-1]['one']:,.0f} scheduled a second, one at a time")
        result["samples"]["verbs"] = samples
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


def measure_ours(server: Server, settings: dict[str, int]) -> Sample:
    """Return calls, or messages, a second."""
    single, many = settings["single"], settings["many"]
    rates: Sample = {}

    def note(verb: str, count: int, started: float) -> None:
        rates[verb] = round(count / (time.perf_counter() - started), 1)

    def schedule(duetime: Duetime, name: str) -> None:
        if duetime.schedule(f"Hello {name}", delay=3600, id=name).is_duplicate:
            raise RuntimeError(f"{name} was known.")

    with Duetime(server.url) as duetime:
        for verb, call in (
            ("one", lambda n: schedule(duetime, f"one-{n}")),
            ("get", lambda n: duetime.get(f"one-{n}")),
        ):
            started = time.perf_counter()
            for number in range(single):
                call(number)
            note(verb, single, started)
        started = time.perf_counter()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(lambda n: schedule(duetime, f"thread-{n}"), range(single)):
                pass
        note("threads", single, started)
        started = time.perf_counter()
        asyncio.run(schedule_at_once(server.url, single))
        note("at_once", single, started)
        for verb, id_ in (("many", "many-{}"), ("many_plain", "")):
            started = time.perf_counter()
            done = duetime.schedule_many(
                Request(f"Hello {n}", delay=60 + n % 3600, id=id_.format(n)) for n in range(many)
            )
            note(verb, many, started)
            if done.stored != many:
                raise RuntimeError(f"{done.stored} of {many} messages were stored.")
        ids = [f"many-{number}" for number in range(single)]
        for verb, call_many in (("get_many", duetime.get_many), ("cancel_many", duetime.cancel_many)):
            started = time.perf_counter()
            found = call_many(ids)
            note(verb, single, started)
            if not all(each.message for each in found):
                raise RuntimeError(f"{verb} did not find all messages.")
        started = time.perf_counter()
        for number in range(single):
            if not duetime.cancel(f"one-{number}").message:
                raise RuntimeError(f"one-{number} could not be cancelled.")
        note("cancel", single, started)
    return rates


async def schedule_at_once(url: str, count: int) -> None:
    """Schedule messages from many tasks."""
    async with AsyncDuetime(url) as duetime:
        left: Iterator[int] = iter(range(count))

        async def work() -> None:
            for number in left:
                await duetime.schedule(f"Hello {number}", delay=3600, id=f"task-{number}")

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def tables(result: Result) -> str:
    """Lay the result out for eyes: calls or messages a second, medians."""
    samples, settings = result["samples"]["verbs"], result["settings"]
    subjects = [OURS, *settings["peers"]]
    rows = []
    for verb, title in VERBS.items():
        cells = []
        for subject in subjects:
            rates = [sample[verb] for sample in samples if sample["subject"] == subject and verb in sample]
            cells.append(f"{spread_of(rates).median:,.0f}" if rates else "–")
        rows.append([title, *cells])
    about = (
        f"Calls or messages a second, medians of {settings['rounds']} rounds: {settings['single']:,} calls, "
        f"{settings['many']:,} messages of ours in bulk. Everything is fsynced before it is answered."
    )
    return f"{describe_origin(result)}\n\n#### From a program\n\n{about}\n\n{format_table(('', *subjects), rows)}"
