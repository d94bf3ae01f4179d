"""How late one loop is at a steady rate: from due to delivered, by what its JSON says, and by when a reader had the line."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bench.common import WORK, Options, Sample, TooLateError, format_table, patiently, percentile, say
from bench.filling import make_pairs, store_pairs
from bench.loops import PIPE, Portion, running, split_lines, start_ours
from bench.server import Server, empty_server
from pipeline.core.clock import SystemClock

RATES = (200, 1_000, 10_000)  # messages a second
SECONDS, QUICK_SECONDS = 20, 2
ROUNDS, QUICK_ROUNDS = 3, 1
LEAD_MS, LEAD_MS_PER_MESSAGE = 2_000, 0.01  # to fill the server and to start the loop, before the first is due
EXTRA_SEC = 30.0


def plan(options: Options) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        "rates": RATES,
        "seconds": QUICK_SECONDS if options.quick else SECONDS,
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
    }


def take_samples(settings: dict[str, Any]) -> list[Sample]:
    """Measure each rate once a round."""
    samples = []
    for number in range(1, settings["rounds"] + 1):
        for rate in settings["rates"]:
            samples.append({"round": number, **patiently(partial(_measure_rate, rate, settings["seconds"]))})
            say(f"round {number}  {rate:>6,} messages/s: p99 {_percentile(samples[-1]['lateness_ms'], 99):.0f} ms late")
    return samples


def _measure_rate(rate: int, seconds: int, patience: int) -> Sample:
    count = rate * seconds
    clock = SystemClock()
    with empty_server(WORK) as server:
        first_ms = clock.wall_ms() + patience * LEAD_MS + int(count * LEAD_MS_PER_MESSAGE)
        store_pairs(server, make_pairs(first_ms + n * 1000 // rate for n in range(count)))
        with running([start_ours(server, PIPE, "--format", "json")]) as [loop]:
            if clock.wall_ms() >= first_ms:
                raise TooLateError
            before = loop.cpu_s(), server.cpu_s(), _evaluations(server)
            assert loop.reader is not None
            loop.reader.wait_for_lines(count, (first_ms - clock.wall_ms()) / 1000 + seconds + EXTRA_SEC)
            after = loop.cpu_s(), server.cpu_s(), _evaluations(server)
            loop.stop()
            counts = count_lateness(loop.reader.portions, count)
    loop_s, server_s, calls = (now - then for now, then in zip(after, before, strict=True))
    used = {"loop_cpu_s": round(loop_s, 3), "server_cpu_s": round(server_s, 3), "script_calls": calls}
    return {"rate": rate, "seconds": seconds, **used, **counts}


def _evaluations(server: Server) -> int:
    return int(server.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


def count_lateness(portions: Sequence[Portion], count: int) -> Sample:
    """Count messages by their lateness in ms, as the loop tells it and as the reader saw it, to a tenth.

    Raises:
        RuntimeError: a message came early, twice or not at all.
    """
    told: Counter[int] = Counter()
    seen: Counter[float] = Counter()
    ids = set()
    for read_ns, line in split_lines(portions):
        record = json.loads(line)
        told[record["lateness_ms"]] += 1
        seen[round(read_ns / 1_000_000 - record["due_ms"], 1)] += 1
        ids.add(record["id"])
    if len(ids) != count or told.total() != count:
        raise RuntimeError(f"{told.total()} lines came of {count} messages, of {len(ids)} different ones.")
    if min(told) < 0:
        raise RuntimeError(f"A message came {-min(told)} ms before it was due.")
    return {
        name: {str(ms): n for ms, n in sorted(of.items())} for name, of in (("lateness_ms", told), ("read_ms", seen))
    }


def expand(counts: Mapping[str, int]) -> list[float]:
    """Return the samples that were counted."""
    return [float(value) for value, count in counts.items() for _ in range(count)]


def _percentile(counts: Mapping[str, int], percent: float) -> float:
    return percentile(expand(counts), percent)


def table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay the samples out for eyes."""
    rows = []
    for rate in settings["rates"]:
        of_rate = [sample for sample in samples if sample["rate"] == rate]
        seconds = sum(sample["seconds"] for sample in of_rate)
        told, seen = ([value for s in of_rate for value in expand(s[name])] for name in ("lateness_ms", "read_ms"))
        rows.append(
            (
                f"{rate:,} messages/s",
                *(f"{percentile(told, percent):.0f}" for percent in (50, 99, 99.9, 100)),
                *(f"{percentile(seen, percent):.1f}" for percent in (50, 99, 99.9, 100)),
                *(f"{sum(s[name] for s in of_rate) / seconds:.1%}" for name in ("loop_cpu_s", "server_cpu_s")),
                f"{sum(s['script_calls'] for s in of_rate) / seconds:,.0f}",
            )
        )
    head = ("", "p50", "p99", "p99.9", "max", "read p50", "p99", "p99.9", "max", "loop CPU", "server CPU", "calls/s")
    return (
        f"One loop, {settings['rounds']} times {settings['seconds']} s of each rate, due times spread evenly. Milliseconds "
        "from due to `delivered_ms`, and to when the reader of the pipe had the line. *CPU* is of one core, *calls* of scripts.\n\n"
        + format_table(head, rows)
    )
