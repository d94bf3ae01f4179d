"""Ours beside its peers, all on a server with the same settings, in turn: scheduling, memory, draining, and how late jobs come.

A *backlog* is so many jobs that come due within a second. They are scheduled before, which gives jobs a second and bytes a job;
when all are due, one worker starts, and what counts is the time from the first that it handles to the last. *Lateness* is measured
of jobs that are due at a steady rate, scheduled before, with a worker that has handled some already.
"""

import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

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
from bench.lateness import expand
from bench.loops import Reader
from bench.meter import measure
from bench.peer_programs import PEERS, Handled, find_peers, install_peers, schedule_jobs
from bench.peer_subjects import OURS, OURS_BATCHES, OURS_HANDLER, OURS_PIPE, Subject, make_subjects
from bench.server import Server, empty_server
from pipeline.core.clock import SystemClock

JOBS, QUICK_JOBS = 1_000, 100
# How many times as many the faster ones get, so that all take seconds.
TIMES_JOBS = {OURS_PIPE: 200, OURS_BATCHES: 40, OURS_HANDLER: 5, "BullMQ": 30, "asynq": 5, "docket": 4, "huey": 10}
TIMES_JOBS |= {"dramatiq": 2, "Celery": 2, "arq": 2}
FIRST_JOBS, MEMORY_JOBS, QUICK_MEMORY_JOBS = 500, 10_000, 500
ROUNDS, QUICK_ROUNDS = 3, 1
RATES, QUICK_RATES = (200, 1_000), (200,)
LATENESS_ROUNDS, SECONDS, QUICK_SECONDS = 2, 7, 1
WARM_UP_JOBS = 50
START_MS, QUICK_START_MS, TRIES_MAX = 2_500, 1_500, 3
DRAIN_SEC_MAX, EXTRA_SEC = 120.0, 10.0
COSTS = ("client_cpu_s", "server_cpu_s", "others_cores")


class Late(Exception):
    """Jobs came due before all was ready for them."""


def run(options: Options) -> Result:
    """Measure ours, and the peers that are installed."""
    if options.install:
        install_peers()
    peers = {name: peer for name, peer in find_peers().items() if not options.only or name in options.only}
    jobs = options.choose(options.rows, JOBS, QUICK_JOBS)
    settings: dict[str, Any] = {
        "jobs": {name: jobs * TIMES_JOBS.get(name, 1) for name in (*OURS, *peers)},
        "memory_jobs": QUICK_MEMORY_JOBS if options.quick else MEMORY_JOBS,
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
        "rates": QUICK_RATES if options.quick else RATES,
        "lateness_rounds": min(options.choose(options.rounds, LATENESS_ROUNDS, QUICK_ROUNDS), LATENESS_ROUNDS),
        "seconds": QUICK_SECONDS if options.quick else SECONDS,
        "start_ms": QUICK_START_MS if options.quick else START_MS,  # that a program may take to start
        "absent": [name for name in PEERS if name not in peers],
        "failed": {},
    }
    result = new_result("peers", options, settings)
    try:
        with empty_server(WORK) as server:
            facts = server.facts()
        result["versions"] |= {"server": facts["server"], **{name: peer.version() for name, peer in peers.items()}}
        result["server_settings"] = facts["settings"]
        result["samples"] = _Measurement(settings, make_subjects(peers)).take_samples()
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


class _Measurement:
    """A run. A peer that fails is left out from then on, with what it has failed with."""

    def __init__(self, settings: dict[str, Any], subjects: Sequence[Subject]) -> None:
        self._settings = settings
        self._subjects = list(subjects)
        self._clock = SystemClock()
        self._rates: dict[str, float] = {}  # jobs that were scheduled a second, the last time
        self._patience: dict[str, int] = {}  # how many times the usual time one is given to get ready

    def take_samples(self) -> dict[str, list[Sample]]:
        """Measure all, in turn; each round begins with another one."""
        samples: dict[str, list[Sample]] = {"memory": [], "backlog": [], "lateness": []}
        for subject in self._subjects:
            for sample in self._guarded(subject, partial(self._memory, subject)):
                samples["memory"].append({"subject": subject.name, **sample})
        for number in range(1, self._settings["rounds"] + 1):
            for subject in self._in_turn(number):
                for sample in self._guarded(subject, partial(self._backlog, subject)):
                    samples["backlog"].append({"subject": subject.name, "round": number, **sample})
        for number in range(1, self._settings["lateness_rounds"] + 1):
            for rate in self._settings["rates"]:
                for subject in self._in_turn(number):
                    for sample in self._guarded(subject, partial(self._lateness, subject, rate)):
                        samples["lateness"].append({"subject": subject.name, "round": number, **sample})
        failed = self._settings["failed"]
        return {
            part: [sample for sample in taken if sample["subject"] not in failed] for part, taken in samples.items()
        }

    def _in_turn(self, number: int) -> list[Subject]:
        first = number % len(self._subjects)
        return self._subjects[first:] + self._subjects[:first]

    def _guarded(self, subject: Subject, take: Callable[[], Sample]) -> list[Sample]:
        """Return the one sample, or none if a peer failed."""
        if subject.name in self._settings["failed"]:
            return []
        problem: Exception = Late()
        for _ in range(TRIES_MAX):
            try:
                return [take()]
            except Late as late:
                problem = late
                say(f"{subject.name}: {late} Again, with more time.")
                self._patience[subject.name] = 2 * self._patience.get(subject.name, 1)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                problem = error
                break
        if subject.name not in PEERS:
            raise RuntimeError(f"{subject.name}: {problem}") from problem
        say(f"{subject.name} failed, and is left out: {problem}")
        self._settings["failed"][subject.name] = str(problem).splitlines()[0]
        return []

    def _memory(self, subject: Subject) -> Sample:
        """Schedule some, so that scripts are loaded and keys are there, and then those that count."""
        count = self._settings["memory_jobs"]
        with empty_server(WORK) as server:
            far_ms = self._clock.wall_ms() + 3_600_000
            schedule_jobs(subject.command, server, [far_ms + n for n in range(FIRST_JOBS)])
            before = server.data_bytes()
            took_s = schedule_jobs(subject.command, server, [far_ms + n for n in range(count)])
            grown = server.data_bytes() - before
        self._rates[subject.name] = count / took_s
        return {"jobs": count, "data_bytes": grown}

    def _ready_ms(self, subject: Subject, count: int, programs: int) -> int:
        """Return in how many ms so many programs have started, and scheduled so many jobs, with some time to spare."""
        usual_ms = int(programs * self._settings["start_ms"] + 1_500 * count / self._rates[subject.name])
        return usual_ms * self._patience.get(subject.name, 1)

    def _backlog(self, subject: Subject) -> Sample:
        count = self._settings["jobs"][subject.name]
        with empty_server(WORK) as server:
            first_ms = self._clock.wall_ms() + self._ready_ms(subject, count, programs=1)
            took_s = schedule_jobs(subject.command, server, [first_ms + n * 1_000 // count for n in range(count)])
            if self._clock.wall_ms() >= first_ms:
                raise Late("Not all was scheduled before the first was due.")
            self._rates[subject.name] = count / took_s
            time.sleep((first_ms + 1_100 - self._clock.wall_ms()) / 1000)
            handled: Handled = []
            costs = measure(server, lambda: handled.extend(_handle(subject, server, count)))
        times = [at_ms for _, at_ms in handled]
        drained_s = (max(times) - min(times)) / 1000
        sample = {"jobs": count, "schedule_s": round(took_s, 4), "drain_s": round(drained_s, 4)}
        rate = len(handled) / drained_s
        say(f"{subject.name}: {count / took_s:,.0f} scheduled, {rate:,.0f} handled a second")
        return {**sample, **count_wrong(handled, count), **{name: costs[name] for name in COSTS}}

    def _lateness(self, subject: Subject, rate: int) -> Sample:
        seconds = self._settings["seconds"]
        count = rate * seconds
        with empty_server(WORK) as server:
            now_ms = self._clock.wall_ms()
            first_ms = now_ms + self._ready_ms(subject, count, programs=2)
            due_ms = [now_ms] * WARM_UP_JOBS + [first_ms + n * 1_000 // rate for n in range(count)]
            schedule_jobs(subject.command, server, due_ms)
            with subject.start(server) as working:
                try:
                    working.reader.wait_for_lines(WARM_UP_JOBS, max(0, first_ms - self._clock.wall_ms()) / 1000)
                except RuntimeError as error:
                    raise Late(f"It was not at work before the first job was due: {error}") from None
                sec_max = (first_ms - self._clock.wall_ms()) / 1000 + seconds + EXTRA_SEC
                costs = measure(server, lambda: _wait(working.reader, len(due_ms), sec_max))
                handled = working.finish()
        late = count_lateness(handled, due_ms, first=WARM_UP_JOBS)
        ms = expand(late["lateness_ms"])
        say(f"{subject.name}: {rate:,}/s, p50 {percentile(ms, 50):,.0f} ms late, p99 {percentile(ms, 99):,.0f}")
        used = {name: costs[name] for name in COSTS}
        return {"rate": rate, "seconds": seconds, **late, **count_wrong(handled, len(due_ms)), **used}


def _handle(subject: Subject, server: Server, count: int) -> Handled:
    with subject.start(server) as working:
        _wait(working.reader, count, DRAIN_SEC_MAX)
        handled = working.finish()
    if not handled:
        raise RuntimeError(f"{subject.name} handled nothing within {DRAIN_SEC_MAX:.0f} s.")
    return handled


def _wait(reader: Reader, count: int, sec_max: float) -> None:
    """Wait for so many lines; what does not come is counted later."""
    try:
        reader.wait_for_lines(count, sec_max)
    except RuntimeError as error:
        say(str(error))


def count_wrong(handled: Handled, count: int) -> Sample:
    """Count the jobs that came more than once, and those that did not come.

    Raises:
        RuntimeError: there is one that was never scheduled.
    """
    times = Counter(number for number, _ in handled)
    if max(times, default=0) >= count:
        raise RuntimeError(f"Job {max(times)} was handled, of {count}.")
    return {"twice": times.total() - len(times), "lost": count - len(times)}


def count_lateness(handled: Handled, due_ms: Sequence[int], first: int) -> Sample:
    """Count jobs by their lateness in ms, below zero if they came early, but for the ones before ``first``."""
    late = Counter(_rounded(at_ms - due_ms[number]) for number, at_ms in handled if number >= first)
    return {"lateness_ms": {f"{ms:g}": count for ms, count in sorted(late.items())}}


def _rounded(ms: float) -> float:
    """Round to two digits or more, and never what is early to what is in time."""
    if ms < 0:
        return -_rounded(-ms) or -0.1
    return round(ms, 1 if ms < 10 else 0 if ms < 1_000 else -1)


def tables(result: Result) -> str:
    """Lay the result out for eyes."""
    settings, samples = result["settings"], result["samples"]
    head = ["", "jobs", "schedule/s", "bytes/job", "drain/s", "min", "max"]
    for rate in settings["rates"]:
        head += [f"{rate:,}/s: p50 ms", "p99"]
    names = [name for name in settings["jobs"] if name not in settings["failed"]]
    rows = [_row(name, settings, samples) for name in names]
    about = (
        f"Jobs of 33 bytes, medians of {settings['rounds']} rounds; *p50* and *p99* of {settings['lateness_rounds']} times "
        f"{settings['seconds']} s of each rate, milliseconds from due to handled; *of 50%*: of those that were handled until "
        f"{EXTRA_SEC:.0f} s after the last was due. *early*: handled before it was due. *twice*, and *lost*: not handled within "
        f"{DRAIN_SEC_MAX:.0f} s, of the drained ones. Bytes are of {settings['memory_jobs']:,} jobs. "
        "Everything is fsynced before it is answered. *others*: cores that other processes used meanwhile, medians of draining "
        "and of lateness: lines where these differ were not measured under the same conditions."
    )
    table = format_table([*head, "early", "twice", "lost", "others: drain", "late"], rows)
    absent = [f"{name} is not installed, and so not measured." for name in settings["absent"]]
    failed = [f"{name} failed, and is left out: {why}" for name, why in settings["failed"].items()]
    return "\n\n".join(
        [describe_origin(result), about, table, *(["\n".join(absent + failed)] if absent + failed else [])]
    )


def _row(name: str, settings: dict[str, Any], samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    memory, backlog, late = (
        [s for s in samples[part] if s["subject"] == name] for part in ("memory", "backlog", "lateness")
    )
    schedule = spread_of([s["jobs"] / s["schedule_s"] for s in backlog]).median
    drain = spread_of([(s["jobs"] - s["lost"]) / s["drain_s"] for s in backlog])
    each = sum(s["data_bytes"] for s in memory) / sum(s["jobs"] for s in memory)
    cells = [name, f"{settings['jobs'][name]:,}", f"{schedule:,.0f}", f"{each:,.0f}"]
    cells += [f"{rate:,.0f}" for rate in (drain.median, drain.least, drain.most)]
    came: list[float] = []
    for rate in settings["rates"]:
        of_rate = [s for s in late if s["rate"] == rate]
        ms = [value for s in of_rate for value in expand(s["lateness_ms"])]
        missing = sum(s["lost"] for s in of_rate)
        share = f" of {int(100 * len(ms) / (len(ms) + missing))}%" if missing else ""
        cells += [f"{percentile(ms, 50):,.1f}", f"{percentile(ms, 99):,.1f}{share}"] if ms else ["-", "none came"]
        came += ms
    cells.append(f"{sum(ms < 0 for ms in came) / len(came):.0%}")
    cells += [f"{sum(s['twice'] for s in (*backlog, *late)):,}", f"{sum(s['lost'] for s in backlog):,}"]
    return cells + [f"{spread_of([s['others_cores'] for s in part]).median:.2f}" for part in (backlog, late)]
