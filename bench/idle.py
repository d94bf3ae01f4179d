"""What a loop costs while nothing is due: commands that it sends, commands that its scripts call, CPU of loop and server.

``MONITOR`` tells the two kinds of commands apart, which the server's counts do not.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.common import WORK, Options, Sample, format_table, say
from bench.filling import make_pairs, store_pairs
from bench.loops import NULL, Loop, running, start_ours
from bench.server import Server, empty_server
from pipeline.core.clock import SystemClock

MESSAGES, QUICK_MESSAGES = 100_000, 10_000
FAR_MS, DAY_MS = 3_600_000, 86_400_000  # the first is due in an hour
SECONDS, QUICK_SECONDS = 20, 2
SETTLE_SEC, LOOK_SEC = 2.0, 0.2
LOOPS, QUICK_LOOPS = (1, 4), (1,)
OURSELVES = ("INFO", "MONITOR", "CLIENT")  # what the bench itself sends


def plan(options: Options) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        "messages": options.choose(options.rows, MESSAGES, QUICK_MESSAGES),
        "seconds": QUICK_SECONDS if options.quick else SECONDS,
        "loops": QUICK_LOOPS if options.quick else LOOPS,
    }


def take_samples(settings: dict[str, Any]) -> list[Sample]:
    """Let loops idle."""
    samples = []
    for count in settings["loops"]:
        samples.append(_measure_idle(count, settings["messages"], settings["seconds"]))
        say(f"{count} idle: {samples[-1]['sent'] / settings['seconds']:.2f} commands/s")
    return samples


def _measure_idle(count_of_loops: int, messages: int, seconds: int) -> Sample:
    with empty_server(WORK) as server:
        first_ms = SystemClock().wall_ms() + FAR_MS
        store_pairs(server, make_pairs(first_ms + n * DAY_MS // messages for n in range(messages)))
        with running([start_ours(server, NULL) for _ in range(count_of_loops)]) as loops:
            time.sleep(SETTLE_SEC)
            before, started = _read_cpu(server, loops), time.monotonic()
            commands = _watch_commands(server, seconds)
            after, wall_s = _read_cpu(server, loops), time.monotonic() - started
            for loop in loops:
                loop.stop()
    used = {name: round(after[name] - before[name], 4) for name in after}
    return {"loops": count_of_loops, "wall_s": round(wall_s, 3), **commands, **used}


def _read_cpu(server: Server, loops: Sequence[Loop]) -> dict[str, float]:
    return {"loops_cpu_s": sum(loop.cpu_s() for loop in loops), "server_cpu_s": server.cpu_s()}


def _watch_commands(server: Server, seconds: int) -> dict[str, int]:
    """Count the commands that clients send, and those that scripts call, for so many seconds."""
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    with server.client.monitor() as monitor:
        while time.monotonic() < deadline:
            if monitor.connection.can_read(LOOK_SEC):
                seen = monitor.next_command()
                if not seen["command"].startswith(OURSELVES):
                    counts["called" if seen["client_type"] == "lua" else "sent"] += 1
    return {name: counts[name] for name in ("sent", "called")}


def table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay the samples out for eyes."""
    rows = [
        (
            f"{s['loops']} loop{'s' if s['loops'] > 1 else ''}",
            *(f"{s[name] / s['wall_s']:.2f}" for name in ("sent", "called")),
            *(f"{s[name] / s['wall_s']:.2%}" for name in ("loops_cpu_s", "server_cpu_s")),
        )
        for s in samples
    ]
    return (
        f"{settings['seconds']} s, {settings['messages']:,} messages scheduled, the first of them in an hour. *sent*: commands a "
        "second of all loops together; *called*: those that their scripts call. CPU of one core, all loops together.\n\n"
        + format_table(("", "sent", "called", "loops CPU", "server CPU"), rows)
    )
