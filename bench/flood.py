"""A million messages due in one millisecond: how long is the server blocked, what do others feel, what does the loop hold?

Messages are due one a millisecond for a second before, and again behind the flood; the order of all by due time is checked.
A client of its own pings the server a thousand times a second from before the flood to its end. The same with a script that
moves all that is due at once, as one of the texts has it, shows what it is like without bounds, and that the pings would tell.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from bench.common import WORK, Options, Sample, TooLateError, format_table, patiently, percentile, say
from bench.filling import make_pairs, store_pairs
from bench.lateness import expand
from bench.loops import NULL, PIPE, Loop, running, split_lines, start_ours, start_pinger, start_rival
from bench.raw import fill_buffers, send_buffers
from bench.rivals import QUEUE, RIVALS, STAGED
from bench.server import Server, empty_server
from pipeline.core.clock import SystemClock

MESSAGES, QUICK_MESSAGES = 1_000_000, 20_000
ROUNDS, QUICK_ROUNDS = 3, 1
EDGE = 1_000  # messages before and behind the flood, one a millisecond
LEAD_MS, LEAD_MS_PER_MESSAGE = 5_000, 0.015  # to fill the server, and for pings before anything is due
BEFORE_MS = 1_000  # of pings, before the first is due
SLOW_US = 100  # scripts that take longer are recorded
SLOW_ENTRIES = 100_000
DRAIN_SEC_MAX, LOOK_SEC = 300.0, 0.01
OURS, UNBOUNDED = "ours", "stream"
UNBOUNDED_PART = (
    5  # it gets a fifth as many: after five seconds of one script a server answers everybody else with errors
)
TITLES = {OURS: "ours", UNBOUNDED: "Alexander: a script without a limit"}


def plan(options: Options) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        "messages": options.choose(options.rows, MESSAGES, QUICK_MESSAGES),
        "edge": EDGE,
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
    }


def take_samples(settings: dict[str, Any]) -> list[Sample]:
    """Flood our loop, and in the first round the one without bounds."""
    samples = []
    for number in range(1, settings["rounds"] + 1):
        for subject in (OURS, UNBOUNDED) if number == 1 else (OURS,):
            count = settings["messages"] // (1 if subject == OURS else UNBOUNDED_PART)
            sample = patiently(partial(_measure_flood, subject, count))
            samples.append({"subject": subject, "round": number, **sample})
            say(f"round {number}  {subject:<8} longest script {sample['longest_script_us'] / 1000:.1f} ms")
    return samples


def _measure_flood(subject: str, count: int, patience: int) -> Sample:
    total = count + 2 * EDGE
    clock = SystemClock()
    with empty_server(WORK) as server:
        flood_ms = clock.wall_ms() + patience * LEAD_MS + int(count * LEAD_MS_PER_MESSAGE)
        loop = _start(server, subject, flood_ms, count)
        with running([loop, start_pinger(server)]) as [_, pinger]:
            if clock.wall_ms() >= flood_ms - EDGE - BEFORE_MS:
                raise TooLateError
            rss_bytes = loop.rss_bytes()
            _wait_until_moved(server, subject, loop, total, (flood_ms - clock.wall_ms()) / 1000 + DRAIN_SEC_MAX)
            ended_ms = clock.wall_ms()
            held = {"rss_bytes": rss_bytes, "peak_rss_bytes": loop.peak_rss_bytes()}
            loop.stop()
            pings = _collect_pings(pinger)
            scripts = [entry["duration"] for entry in server.client.slowlog_get(SLOW_ENTRIES) if _is_script(entry)]
    return {
        "messages": count,
        "wall_s": round((ended_ms - flood_ms) / 1000, 3),
        "longest_script_us": max(scripts, default=SLOW_US),
        "scripts_over_1_ms": sum(us > 1_000 for us in scripts),
        "ping_ms_before": _count(us for at_ms, us in pings if at_ms < flood_ms - EDGE),
        "ping_ms": _count(us for at_ms, us in pings if flood_ms <= at_ms <= ended_ms),
        **held,
        **(check_order(loop, total) if subject == OURS else {}),
    }


def _start(server: Server, subject: str, flood_ms: int, count: int) -> Loop:
    """Schedule the messages and start a loop."""
    edge = range(1, EDGE + 1)
    due = [*(flood_ms - EDGE - 1 + n for n in edge), *[flood_ms] * count, *(flood_ms + n for n in edge)]
    pairs = make_pairs(due)
    if subject == OURS:
        store_pairs(server, pairs)
    else:
        send_buffers(server.socket, fill_buffers(RIVALS[subject].pack(pairs)))
        server.client.rename(STAGED, QUEUE)
    server.client.config_set("slowlog-max-len", SLOW_ENTRIES)
    server.client.config_set("slowlog-log-slower-than", SLOW_US)
    if subject == OURS:
        return start_ours(server, PIPE, "--format", "json")
    loop = start_rival(server, subject, NULL)
    loop.go()
    return loop


def _wait_until_moved(server: Server, subject: str, loop: Loop, total: int, sec_max: float) -> None:
    """Wait until our loop has written everything; of the other, until its script has run."""
    if loop.reader:
        loop.reader.wait_for_lines(total, sec_max)
        return
    deadline = time.monotonic() + sec_max
    while server.client.exists(QUEUE):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{subject} did not move {total} messages.")
        time.sleep(LOOK_SEC)


def _collect_pings(pinger: Loop) -> list[tuple[float, float]]:
    pinger.finish()
    assert pinger.reader is not None
    pings: list[tuple[float, float]] = json.loads(b"".join(portion for _, portion in pinger.reader.portions))
    return pings


def _is_script(entry: dict[str, Any]) -> bool:
    return bytes(entry["command"]).startswith(b"EVAL")


def _count(samples_us: Iterable[float]) -> dict[str, int]:
    """Count by ms, to a hundredth."""
    counts = Counter(round(us / 1000, 2) for us in samples_us)
    return {str(ms): n for ms, n in sorted(counts.items())}


def check_order(loop: Loop, total: int) -> Sample:
    """See that every message came once, in order of due time, and messages of one time in the order in which they were stored.

    Raises:
        RuntimeError: they did not.
    """
    assert loop.reader is not None
    records = [json.loads(line) for _, line in split_lines(loop.reader.portions)]
    came = [(record["due_ms"], record["id"]) for record in records]
    if len(came) != total or len(set(came)) != total:
        raise RuntimeError(f"{len(came)} lines came of {total} messages, of {len(set(came))} different ones.")
    wrong = sum(later < earlier for earlier, later in pairwise(came))
    if wrong:
        raise RuntimeError(f"{wrong} messages came out of order.")
    return {"lateness_ms_max": max(record["lateness_ms"] for record in records)}


def table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay the samples out for eyes."""
    rows = []
    for subject, title in TITLES.items():
        of_subject = [sample for sample in samples if sample["subject"] == subject]
        before, during = ([ms for s in of_subject for ms in expand(s[name])] for name in ("ping_ms_before", "ping_ms"))
        wall_s = sum(s["wall_s"] for s in of_subject)
        rows.append(
            (
                title,
                f"{sum(s['messages'] for s in of_subject) / wall_s:,.0f}",
                f"{max(s['longest_script_us'] for s in of_subject) / 1000:.1f}",
                *(f"{percentile(before, percent):.1f}" for percent in (99, 100)),
                *(f"{percentile(during, percent):.1f}" for percent in (50, 99, 100)),
                f"{max(s['rss_bytes'] for s in of_subject) / 2**20:.0f}",
                f"{max(s['peak_rss_bytes'] for s in of_subject) / 2**20:.0f}",
            )
        )
    head = ("", "messages/s", "longest script", "PING before p99", "max", "PING p50", "p99", "max", "RSS MiB", "peak")
    return (
        f"{settings['messages']:,} messages due in one millisecond, {settings['rounds']} rounds, as JSON through a pipe; the "
        f"one without a limit gets 1/{UNBOUNDED_PART} of them and only moves them on. Milliseconds.\n\n"
        + format_table(head, rows)
    )
