"""What all benchmarks share: options, facts about the machine and the versions, spreads of samples, tables, result files."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
WORK = ROOT / ".duetime" / f"bench-{os.getpid()}"  # on the disk that the private server of this checkout uses
QUIET_LOAD = 0.3  # a machine with a higher load a minute ago is not quiet

Result = dict[str, Any]
Sample = dict[str, Any]


class TooLateError(RuntimeError):
    """The first message came due before the loop was ready."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for; None leaves a number to the benchmark."""

    quick: bool = False
    rows: int | None = None
    rounds: int | None = None
    master: str = "local[*]"
    only: tuple[str, ...] = ()
    backlog_max: int = 10_000_000
    check: bool = False
    install: bool = False
    messages: int | None = None

    def choose(self, given: int | None, full: int, quick: int) -> int:
        """Return the number that was given, else that of a full or a quick run."""
        return given if given is not None else quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Spread:
    """Where samples lie."""

    median: float
    least: float
    most: float


def spread_of(samples: Sequence[float]) -> Spread:
    """Return median and extremes; of a few rounds nothing finer can be told."""
    return Spread(statistics.median(samples), min(samples), max(samples))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that at least ``percent`` of all are not above (nearest rank)."""
    ranked = sorted(samples)
    rank = -(-len(ranked) * percent // 100)
    return ranked[max(int(rank), 1) - 1]


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table that reads well as plain text too; the first column is left-aligned, numbers are not."""
    widths = [max(len(cells[column]) for cells in (head, *rows)) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *rest])} |"

    rule = "|".join(
        ("-" * (width + 2)) if column == 0 else "-" * (width + 1) + ":" for column, width in enumerate(widths)
    )
    return "\n".join([line(head), f"|{rule}|", *map(line, rows)])


def patiently(measure: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Measure with the usual time before the first message is due; where that is too short, as on a busy machine, with more.

    Args:
        measure: takes how many times the usual time there is.

    Raises:
        TooLateError: even nine times as long was too short.
    """
    for patience in (1, 3):
        try:
            return measure(patience)
        except TooLateError:
            say("the machine is busy: once more, with a longer time before the first message is due")
    return measure(9)


def machine_facts() -> dict[str, Any]:
    """Return what the machine is, and how busy it was a minute ago."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "load_1_minute": os.getloadavg()[0],
    }


def version_facts() -> dict[str, str]:
    """Return the versions of what is measured, apart from the server's and Java's, which only they can tell."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("pyspark", "pyarrow", "redis", "hiredis")},
    }


def new_result(name: str, options: Options, settings: dict[str, Any]) -> Result:
    """Begin a result: everything that is known before the first sample."""
    machine = machine_facts()
    if machine["load_1_minute"] > QUIET_LOAD:
        say(f"This machine is busy (load {machine['load_1_minute']:.1f}): take the numbers as a hint.")
    return {
        "benchmark": name,
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "quick": options.quick,
        "settings": settings,
        "machine": machine,
        "versions": version_facts(),
        "samples": {},
    }


def result_path(name: str, quick: bool) -> Path:
    """Return where a result is kept; quick ones never replace the others."""
    return RESULTS / f"{name}{'-quick' if quick else ''}.json"


def save_result(result: Result) -> Path:
    """Write a result, whole or not at all, and return its path."""
    path = result_path(result["benchmark"], result["quick"])
    path.parent.mkdir(exist_ok=True)
    work = path.with_suffix(".tmp")
    work.write_text(_dump(result), encoding="utf-8")
    work.replace(path)
    return path


def load_result(name: str, quick: bool = False) -> Result | None:
    """Read a result back; None if there is none."""
    path = result_path(name, quick)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def describe_origin(result: Result) -> str:
    """Say in one line when and where a result was taken."""
    machine, versions = result["machine"], result["versions"]
    kind = "quick, " if result["quick"] else ""
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, {machine['kernel']}"
    software = ", ".join(f"{name} {number}" for name, number in versions.items())
    load = machine["load_1_minute"]
    return f"Taken {result['taken_at'][:10]} at {result['commit']}, {kind}on {hardware}, load before {load:.2f}. {software}."


def say(text: str) -> None:
    """Tell the user how far it is, on stderr; stdout is for tables."""
    print(text, file=sys.stderr, flush=True)


def _dump(result: Result) -> str:
    """Write JSON with one sample a line: raw samples are many, and a diff should show which changed."""
    head = json.dumps({**{k: v for k, v in result.items() if k != "samples"}, "samples": None}, indent=2)
    groups = [
        f"    {json.dumps(name)}: [\n" + ",\n".join(f"      {json.dumps(sample)}" for sample in samples) + "\n    ]"
        for name, samples in result["samples"].items()
    ]
    return head.replace('"samples": null', '"samples": {\n' + ",\n".join(groups) + "\n  }") + "\n"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """Return the commit that is measured, with a plus sign if the files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    try:
        return (git("rev-parse", "--short", "HEAD") or "unknown") + (
            "+" if git("status", "--porcelain", "-uno") else ""
        )
    except OSError:  # no git
        return "unknown"
