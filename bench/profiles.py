"""Where the time of ingest goes: in the JVM, in the Python workers, in the server. For whoever makes it faster; no benchmark.

The same warm-up and workload as ``ingest``, then three runs: one sampled by Java's flight recorder, one under Spark's profiler of
Python functions (cProfile in the worker; calls look dearer than they are), one plain, for the server's own counts.
"""

import json
import pstats
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from bench.common import WORK, Options, format_table, say
from bench.server import Server, empty_server
from bench.session import spark_session, store_ours
from bench.workload import Workload, write_workload

ROWS, QUICK_ROWS = 1_000_000, 100_000
WARM_UP_ROUNDS, JVM_ROUNDS = 2, 3
SAMPLE_MS = 10
TOP = 25
OUTSIDE_FRAMES = 6
PARTS = ("jvm", "python", "server")
_SPARK_PROFILER = "spark.sql.pyspark.udf.profiler"


def run(options: Options) -> str:
    """Return the tables of all parts, or those of ``--only``."""
    workload = write_workload(WORK / "landing", options.choose(options.rows, ROWS, QUICK_ROWS))
    parts = options.only or PARTS
    makers: dict[str, Callable[[SparkSession, Workload], str]] = {
        "jvm": profile_jvm,
        "python": profile_python,
        "server": profile_server,
    }
    try:
        with spark_session(options.master) as spark:
            for _ in range(WARM_UP_ROUNDS):
                _store(spark, workload)
            say("warm")
            return "\n\n".join(makers[part](spark, workload) for part in PARTS if part in parts)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)


def _store(spark: SparkSession, workload: Workload, then: Callable[[Server], None] | None = None) -> None:
    with empty_server(WORK) as server:
        store_ours(spark, workload.folder, server.url, WORK / "rejects")
        if then:
            then(server)


def profile_jvm(spark: SparkSession, workload: Workload) -> str:
    """Sample the task threads; needs a JDK, as a bare Java runtime lacks the recorder or its reader."""
    jvm: Any = spark._jvm
    reader = Path(jvm.System.getProperty("java.home"), "bin", "jfr")
    if not reader.exists():
        return f"JVM: no profile, as {reader} is missing; set JAVA_HOME to a full JDK."
    recording = jvm.jdk.jfr.Recording()
    recording.enable("jdk.ExecutionSample").withPeriod(jvm.java.time.Duration.ofMillis(SAMPLE_MS))
    recording.start()
    for _ in range(JVM_ROUNDS):
        _store(spark, workload)
    recording.stop()
    file = WORK / "recording.jfr"
    recording.dump(jvm.java.io.File(str(file)).toPath())
    recording.close()
    command = [str(reader), "print", "--json", "--events", "jdk.ExecutionSample", "--stack-depth", "40", str(file)]
    stacks = read_stacks(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    own = Counter(stack[0] for stack in stacks)
    within = Counter(frame for stack in stacks for frame in {frame.method for frame in _without_plumbing(stack)})
    methods = Counter(frame.method for frame in own.elements())
    interpreted = Counter(frame.method for frame in own.elements() if frame.is_interpreted)
    rows = [
        (method, f"{count / len(stacks):.1%}", f"{interpreted[method] / len(stacks):.1%}")
        for method, count in methods.most_common(TOP)
    ]
    callers = [(method, f"{count / len(stacks):.1%}") for method, count in within.most_common(TOP)]
    return (
        f"JVM, {len(stacks)} samples of task threads that ran Java code, {SAMPLE_MS} ms apart, "
        f"{interpreted.total() / max(len(stacks), 1):.0%} of them in code that was not compiled\n\n"
        f"{format_table(('itself', 'share', 'not compiled'), rows)}\n\n"
        f"{format_table(('in generated code: it and what it calls', 'share'), callers)}"
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """A method on a stack; ``is_interpreted`` unless one of the compilers has been at it."""

    method: str
    is_interpreted: bool


def read_stacks(text: str) -> list[list[Frame]]:
    """Read the stacks of task threads, innermost method first, from what ``jfr print --json`` writes."""
    stacks = []
    for event in json.loads(text)["recording"]["events"]:
        values = event["values"]
        thread, trace = values["sampledThread"] or {}, values["stackTrace"] or {}
        frames = [
            Frame(
                f"{_class_name(frame['method']['type']['name'])}.{frame['method']['name']}",
                frame["type"] == "Interpreted",
            )
            for frame in trace.get("frames", [])
        ]
        if frames and str(thread.get("javaName")).startswith("Executor task"):
            stacks.append(frames)
    return stacks


def _class_name(name: str) -> str:
    """Shorten java/lang/String to String, and a lambda to the class that it stands in."""
    return name.partition("$$Lambda")[0].replace("/", ".").rpartition(".")[2]


def _without_plumbing(stack: Sequence[Frame]) -> Sequence[Frame]:
    """Keep what runs within Spark's generated code; around it every stack has the same thirty frames."""
    generated = [place for place, frame in enumerate(stack) if "GeneratedIterator" in frame.method]
    return stack[: generated[-1] + 1] if generated else stack[:OUTSIDE_FRAMES]


def profile_python(spark: SparkSession, workload: Workload) -> str:
    """Run under Spark's own profiler, in the real workers; waiting for the JVM's rows and for the server counts as time."""
    folder = WORK / "python"
    spark.profile.clear()
    spark.conf.set(_SPARK_PROFILER, "perf")
    try:
        _store(spark, workload)
    finally:
        spark.conf.unset(_SPARK_PROFILER)
    spark.profile.dump(str(folder), type="perf")
    files = sorted(str(path) for path in folder.glob("*.pstats"))
    if not files:
        return "Python: Spark's profiler has recorded nothing."
    calls = pstats.Stats(*files).stats  # type: ignore[attr-defined]
    total_s = sum(call[2] for call in calls.values())
    ranked = sorted(calls.items(), key=lambda item: -item[1][2])[:TOP]
    rows = [
        (_function_name(*function), f"{call[1]:,}", f"{call[2]:.3f}", f"{call[3]:.3f}", f"{call[2] / total_s:.1%}")
        for function, call in ranked
    ]
    table = format_table(("function", "calls", "itself s", "with callees s", "share"), rows)
    return f"Python workers, {total_s:.2f} s together under cProfile\n\n{table}"


def profile_server(spark: SparkSession, workload: Workload) -> str:
    """Read the server's own counts after one run on an empty server."""
    tables: list[str] = []

    def read(server: Server) -> None:
        stats, cpu = server.info("commandstats"), server.info("cpu")
        rows = [
            (name.removeprefix("cmdstat_"), f"{s['calls']:,}", f"{s['usec_per_call']:,.1f}", f"{s['usec'] / 1000:,.1f}")
            for name, s in sorted(stats.items(), key=lambda item: -item[1]["usec"])
        ]
        used_s = cpu["used_cpu_user"] + cpu["used_cpu_sys"]
        slow = server.client.slowlog_get(5)
        slowest = max((entry["duration"] for entry in slow), default=0)
        tables.append(
            f"Server, {workload.rows:,} messages, {used_s:.2f} s of CPU in all; a script's time holds that of what it calls; "
            f"{server.client.slowlog_len()} calls took over 10 ms, the longest of the last five {slowest / 1000:.1f} ms\n\n"
            + format_table(("command", "calls", "µs a call", "ms in all"), rows)
        )

    _store(spark, workload, read)
    return tables[0]


def _function_name(file: str, line: int, name: str) -> str:
    return name if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"
