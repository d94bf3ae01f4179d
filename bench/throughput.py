"""How fast loops deliver what is all due: ours, the texts' and the ceiling, one, two and four at a time.

The loops run and wait; then all messages appear in one moment. A sample ends when the server holds none of them any more.
"""

import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from bench.common import WORK, Options, Sample, format_table, say, spread_of
from bench.filling import HIDDEN, KEYS, overdue_pairs, reveal, store_pairs
from bench.loops import NULL, PIPE, Loop, running, split_lines, start_ours, start_rival
from bench.meter import measure
from bench.raw import fill_buffers, send_buffers
from bench.rivals import QUEUE, RIVALS, STAGED
from bench.server import Server, empty_server

MESSAGES, QUICK_MESSAGES = 300_000, 10_000  # ours and the ceiling
SLOWER, PAUSED_MESSAGES = 30, 60  # the texts' loops get a thirtieth, or six tens, with a pause after each
ROUNDS, QUICK_ROUNDS = 5, 1
LOOPS, QUICK_LOOPS = (1, 2, 4), (1, 2)
LOOK_SEC, SAMPLE_SEC_MAX = 0.005, 300.0
OURS, PAUSED = "ours", ("stream", "ten")
TITLES = {OURS: "ours: leases, acks, order by due time", **{name: rival.title for name, rival in RIVALS.items()}}
_NUMBER = re.compile(rb"reminder (\d{9}) for a customer")


def plan(options: Options) -> dict[str, Any]:
    """Return the settings of a run."""
    messages = options.choose(options.rows, MESSAGES, QUICK_MESSAGES)
    return {
        "messages": {name: _messages(name, messages) for name in TITLES},
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
        "loops": QUICK_LOOPS if options.quick else LOOPS,
        "quick": options.quick,
    }


def _messages(name: str, messages: int) -> int:
    if name in (OURS, "ceiling"):
        return messages
    return PAUSED_MESSAGES if name in PAUSED else max(messages // SLOWER, 1)


def take_samples(settings: dict[str, Any]) -> list[Sample]:
    """Measure every combination once a round; each round begins with another one."""
    combinations = list(_combine(settings))
    samples = []
    for number in range(1, settings["rounds"] + 1):
        first = number * len(TITLES) % len(combinations)
        for name, loops, output in combinations[first:] + combinations[:first]:
            count = settings["messages"][name]
            sample = _measure_loops(name, loops, output, count)
            samples.append({"subject": name, "loops": loops, "output": output, "round": number, **sample})
            say(
                f"round {number}  {name:<12} {loops} to {output:<9} {count / sample['wall_s']:>10,.0f} messages/s, "
                f"others used {sample['others_cores']:.2f} cores"
            )
    return samples


def _combine(settings: dict[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Yield (subject, number of loops, output); a quick run has only one of each of the others."""
    for name in TITLES:
        outputs = (NULL,) if name in PAUSED else (NULL, PIPE)  # a pause is as long into a pipe
        if settings["quick"] and name != OURS:
            yield name, 1, outputs[-1]
        else:
            yield from ((name, loops, output) for loops in settings["loops"] for output in outputs)


def _measure_loops(name: str, count_of_loops: int, output: str, count: int) -> Sample:
    with empty_server(WORK) as server, ExitStack() as stack:
        _stage(server, name, count)
        started = [
            start_ours(server, output) if name == OURS else start_rival(server, name, output)
            for _ in range(count_of_loops)
        ]
        loops = stack.enter_context(running(started))
        before_s = sum(loop.cpu_s() for loop in loops)
        sample = measure(server, lambda: _run_until_empty(server, name, loops, count))
        loops_cpu_s = sum(loop.cpu_s() for loop in loops) - before_s
        for loop in loops:
            loop.stop()
        if name == OURS:
            _check_counters(server, count)
        again = _check_lines(name, loops, count) if output == PIPE else {}
        return {**sample, "messages": count, "loops_cpu_s": round(loops_cpu_s, 3), **again}


def _stage(server: Server, name: str, count: int) -> None:
    pairs = overdue_pairs(count)
    if name == OURS:
        store_pairs(server, pairs, HIDDEN)
    else:
        send_buffers(server.socket, fill_buffers(RIVALS[name].pack(pairs)))


def _run_until_empty(server: Server, name: str, loops: Sequence[Loop], count: int) -> None:
    if name == OURS:
        reveal(server)
    else:
        server.client.rename(STAGED, QUEUE)
        for loop in loops:
            loop.go()
    deadline = time.monotonic() + SAMPLE_SEC_MAX
    while not _is_done(server, name, count):
        if time.monotonic() > deadline or not all(loop.is_alive() for loop in loops):
            raise RuntimeError(f"{name} did not deliver {count} messages.")
        time.sleep(LOOK_SEC)


def _is_done(server: Server, name: str, count: int) -> bool:
    if name == OURS:
        return not server.client.exists(KEYS.buckets(), KEYS.claims())
    return RIVALS[name].is_done(server.client, count)


def _check_counters(server: Server, count: int) -> None:
    """See that the server has every message acknowledged, once."""
    counters = server.client.hgetall(KEYS.counters())
    if counters != {"delivered": str(count)}:
        raise RuntimeError(f"{count} messages were delivered, and the server counts {counters}.")


def _check_lines(name: str, loops: Sequence[Loop], count: int) -> Sample:
    """See that every message came, and ours once; return how many came again."""
    numbers = [
        int(found[1])
        for loop in loops
        if loop.reader
        # A text's loop may still be printing what another one has printed, too, when the queue is empty.
        for _, line in split_lines(loop.reader.portions, ended_early=name != OURS)
        if (found := _NUMBER.search(line))
    ]
    again = len(numbers) - count
    # The one without any safety is ended as soon as its queue is empty, with what it has popped and not written yet.
    if set(numbers) != set(range(count)) and name != "ceiling":
        raise RuntimeError(f"{name} lost {count - len(set(numbers))} of {count} messages.")
    if again and name == OURS:
        raise RuntimeError(f"{again} messages came more than once.")
    return {"again": again}


def table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay the samples out for eyes."""
    parts = []
    for output in (NULL, PIPE):
        of_output = [sample for sample in samples if sample["output"] == output]
        names = [name for name in TITLES if any(sample["subject"] == name for sample in of_output)]
        rows = [_row(name, of_output, settings["loops"]) for name in names]
        head = ["", "1 loop", "min", "max", *(f"{n} loops" for n in settings["loops"][1:])]
        head += ["ours is", "loop µs/msg", "server µs/msg", f"again, {settings['loops'][-1]} loops"]
        parts.append(f"Text to {output}, messages a second.\n\n{format_table(head, rows)}")
    others = max(sample["others_cores"] for sample in samples)
    about = settings["messages"]
    return (
        f"{about[OURS]:,} messages that are all due, {about['one']:,} and {about['ten']:,} for the texts' loops, "
        f"{settings['rounds']} rounds; other processes used at most {others:.2f} cores during one. *ours is*: how many times "
        "as fast as this line, one loop each. *again*: messages that came more than once.\n\n" + "\n\n".join(parts)
    )


def _row(name: str, samples: Sequence[Sample], loops: Sequence[int]) -> list[str]:
    def of(subject: str, count: int) -> list[Sample]:
        return [s for s in samples if s["subject"] == subject and s["loops"] == count]

    def rates(subject: str, count: int) -> list[float]:
        return [s["messages"] / s["wall_s"] for s in of(subject, count)]

    one = spread_of(rates(name, 1))
    ours = statistics.median(rates(OURS, 1)) / one.median
    again = [s["again"] for s in of(name, loops[-1]) if "again" in s]
    return [
        TITLES[name],
        *(f"{value:,.0f}" for value in (one.median, one.least, one.most)),
        *(_median(rates(name, count), 0) for count in loops[1:]),
        "" if name == OURS else f"{ours:,.1f} ×",
        *(
            _median([s[field] / s["messages"] * 1e6 for s in of(name, 1) if name not in PAUSED], 1)
            for field in ("loops_cpu_s", "server_cpu_s")
        ),
        _median(again, 0),
    ]


def _median(samples: Sequence[float], digits: int) -> str:
    return f"{statistics.median(samples):,.{digits}f}" if samples else "-"
