"""A hundred million cold messages on a server that may hold 500 MB: written, and an hour of them brought in and delivered.

``schedule`` writes them from tables of Spark, a part each, as users' programs do. They are due over thirty days from three hours
on, but for one in 720, an hour's share, which is due within half a minute after its part. ``jobs/hydrate.py`` brings these in, and
``jobs/drain.py`` delivers them; both are processes of their own. Which messages came is compared with what Spark says was due.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bench.common import WORK, Options, Sample, format_table, say
from bench.loops import NULL, PIPE, Loop, running, start_job
from bench.server import Server, empty_server
from bench.session import KEEP_SEC, spark_session
from pipeline.config import ColdSettings, RedisSettings, Settings
from pipeline.core.clock import SystemClock
from pipeline.core.cold import HOUR_MS
from pipeline.ingest.cold_folder import ColdFolder
from pipeline.ingest.tables import schedule_table
from pipeline.store.cold import read_cold_hours
from pipeline.store.connection import connect, server_ms
from pipeline.store.keys import keys_of
from pipeline.store.layout import cold_folder_id
from pipeline.store.namespace import open_namespace

MESSAGES, QUICK_MESSAGES = 100_000_000, 100_000
PART_MESSAGES = 10_000_000  # scheduled by one call
HOURS = 720
MAXMEMORY = 500_000_000
HORIZON_HOURS, NEAR_MS, NEAR_SPAN_MS = 0.002, 15_000, 10_000  # the share of an hour is cold, and due soon
GAP_HOURS = 3  # before the others, so that they stay where they are however long this takes
WAIT_SEC_MAX = 1_800
TEN = 10  # the estimate is for so many times as many


def plan(options: Options) -> dict[str, Any]:
    """Return the settings."""
    messages = options.choose(options.messages, MESSAGES, QUICK_MESSAGES)
    return {"messages": messages, "master": options.master, "hours": HOURS, "maxmemory": MAXMEMORY}


def take_samples(settings: dict[str, Any]) -> list[Sample]:
    """Measure once."""
    with empty_server(WORK) as server, ExitStack() as stack:
        server.client.config_set("maxmemory", settings["maxmemory"])
        run = _Run(server, WORK / "cold-bounded", settings["messages"], settings["master"])
        sample = run.write() | run.hydrate(stack) | run.deliver(stack)
        sample["peak_used_memory"] = server.info("memory")["used_memory_peak"]
        sample["peak_rss"]["server"] = _peak_rss(server.info("server")["process_id"])
    return [sample]


class _Run:
    """One namespace, its folder, and what is expected."""

    def __init__(self, server: Server, folder: Path, messages: int, master: str) -> None:
        self._server = server
        self._messages = messages
        self._master = master
        self._folder = folder
        cold = ColdSettings(folder=str(folder), horizon_hours=HORIZON_HOURS, lead_hours=HORIZON_HOURS / 2)
        self._settings = replace(Settings(), redis=RedisSettings(url=server.url), cold=cold)
        self._client = connect(self._settings.redis)
        open_namespace(self._client, self._settings.redis, may_create=True)
        self._later_ms = server_ms(self._client) // HOUR_MS * HOUR_MS + GAP_HOURS * HOUR_MS
        self._last_ms = 0
        self._expected: set[int] = set()
        self._peak_rss: dict[str, int] = {}

    def write(self) -> Sample:
        """Schedule all messages."""
        wrote_s = 0.0
        before = self._server.data_bytes()
        with spark_session(self._master) as spark:
            for first in range(0, self._messages, PART_MESSAGES):
                end = min(first + PART_MESSAGES, self._messages)
                table = self._part(spark, first, end)
                started_ms = SystemClock().monotonic_ms()
                done = schedule_table(
                    table, f"part-{first}", {}, str(WORK / "staging"), KEEP_SEC, self._client, self._settings
                )
                wrote_s += (SystemClock().monotonic_ms() - started_ms) / 1000
                if done.stored != end - first:
                    raise RuntimeError(f"{done.stored} of {end - first} messages were stored.")
                self._expected |= {row.number for row in _near(_numbers(spark, first, end)).select("number").collect()}
                say(f"bounded: {end:,} written, {end / wrote_s:,.0f} a second")
            self._note_peaks()
        sizes = self._cold_folder().sizes()
        return {
            "write_s": round(wrote_s, 3),
            "files": len(sizes),
            "disk_bytes": sum(size for size, _ in sizes.values()),
            "cold": self._cold_messages(),
            "used_memory_cold": self._server.data_bytes(),
            "grown_cold": self._server.data_bytes() - before,
            "peak_rss": self._peak_rss,
        }

    def _part(self, spark: SparkSession, first: int, end: int) -> DataFrame:
        """Return a part of the messages: those of the near hour are due soon from now on."""
        near_ms = server_ms(self._client) + NEAR_MS
        self._last_ms = near_ms + NEAR_SPAN_MS
        spread = F.pmod(F.xxhash64("number", F.lit(1)), F.lit(HOUR_MS))
        later_ms = F.lit(self._later_ms) + (F.col("hour") - 1) * HOUR_MS + spread
        due_ms = F.when(F.col("hour") == 0, near_ms + spread % NEAR_SPAN_MS).otherwise(later_ms)
        text = F.concat(F.lit("reminder "), F.lpad(F.col("number").cast("string"), 9, "0"), F.lit(" for a customer"))
        return _numbers(spark, first, end).select(text.alias("message"), due_ms.alias("due"))

    def hydrate(self, stack: ExitStack) -> Sample:
        """Bring in what is due within an hour, by a process."""
        environ = {"DUETIME_COLD_FOLDER": str(self._folder), "DUETIME_COLD_LEAD_HOURS": "1"}
        loop = start_job(self._server, NULL, "jobs/hydrate.py", **environ)
        stack.enter_context(running([loop]))
        started_ms = SystemClock().monotonic_ms()
        before = self._server.data_bytes()
        self._wait(loop, lambda: self._cold_messages() == self._messages - len(self._expected))
        elapsed_s = (SystemClock().monotonic_ms() - started_ms) / 1000
        self._end(loop, "hydrator")
        if (waiting := self._server.messages()) != len(self._expected):
            raise RuntimeError(f"{waiting} messages came into Redis, not {len(self._expected)}.")
        return {
            "hour": len(self._expected),
            "hydrate_s": round(elapsed_s, 3),
            "grown_hour": self._server.data_bytes() - before,
            "used_memory_hour": self._server.data_bytes(),
        }

    def deliver(self, stack: ExitStack) -> Sample:
        """Deliver them, by a process that has them all due when it starts."""
        while (left_ms := self._last_ms - server_ms(self._client)) > 0:
            self._server.client.blpop(["nothing"], timeout=left_ms / 1000)
        loop = start_job(self._server, PIPE, "jobs/drain.py")
        stack.enter_context(running([loop]))
        assert loop.reader is not None
        loop.reader.wait_for_lines(len(self._expected), WAIT_SEC_MAX)
        self._end(loop, "drain loop")
        first_ns, last_ns = (loop.reader.portions[place][0] for place in (0, -1))
        lines = b"".join(portion for _, portion in loop.reader.portions).splitlines()
        delivered = [int(line.rpartition(b"reminder ")[2].partition(b" ")[0]) for line in lines]
        if len(delivered) != len(self._expected) or {*delivered} != self._expected:
            raise RuntimeError(
                f"{len(delivered)} messages were delivered, not just the {len(self._expected)} of the hour."
            )
        if (left := self._cold_messages()) != self._messages - len(self._expected) or self._server.messages():
            raise RuntimeError(f"{left} messages are cold, and {self._server.messages()} wait in Redis.")
        return {"drain_s": round((last_ns - first_ns) / 1e9, 4), "delivered": len(delivered)}

    def _cold_folder(self) -> ColdFolder:
        return ColdFolder(str(self._folder), cold_folder_id(self._client, self._settings.redis))

    def _cold_messages(self) -> int:
        return read_cold_hours(self._client, keys_of(self._settings.redis)).total()

    def _wait(self, loop: Loop, is_done: Callable[[], bool]) -> None:
        clock = SystemClock()
        deadline_ms = clock.monotonic_ms() + WAIT_SEC_MAX * 1000
        while not is_done():
            if not loop.is_alive() or clock.monotonic_ms() > deadline_ms:
                raise RuntimeError("The hydrator ended, or does not come to an end.")
            self._server.client.blpop(["nothing"], timeout=0.02)

    def _end(self, loop: Loop, name: str) -> None:
        self._peak_rss[name] = loop.peak_rss_bytes()
        loop.stop()

    def _note_peaks(self) -> None:
        """Note the most memory of this process, of Spark's JVM below it, and of its largest Python worker."""
        self._peak_rss["driver"] = _peak_rss(os.getpid())
        for process in psutil.Process().children(recursive=True):
            name = {"java": "jvm", "valkey-server": ""}.get(process.name(), "python worker")
            if name:
                self._peak_rss[name] = max(self._peak_rss.get(name, 0), _peak_rss(process.pid))


def _numbers(spark: SparkSession, first: int, end: int) -> DataFrame:
    """Return messages as numbers, each with the hour that it is due in, from 0."""
    numbers = spark.range(first, end).withColumnRenamed("id", "number")
    return numbers.withColumn("hour", F.pmod(F.xxhash64("number"), F.lit(HOURS)))


def _near(numbers: DataFrame) -> DataFrame:
    return numbers.where("hour = 0")


def _peak_rss(pid: int) -> int:
    """Return the most memory that a process ever held, 0 if it is gone or the kernel doesn't tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def table(settings: dict[str, Any], samples: list[Sample]) -> str:
    """Lay the result out for eyes, with what it comes to for ten times as many."""
    [sample] = samples
    messages, hour = settings["messages"], sample["hour"]
    rows = [
        ("scheduled a second, by `schedule` from tables", f"{messages / sample['write_s']:,.0f}"),
        ("cold files", f"{sample['files']:,}"),
        ("bytes of disk, each", f"{sample['disk_bytes'] / messages:.1f}"),
        ("messages of the hour", f"{hour:,}"),
        ("brought in a second", f"{hour / sample['hydrate_s']:,.0f}"),
        ("delivered, each once and no other", f"{sample['delivered']:,}"),
        ("delivered a second, from the first on", f"{sample['delivered'] / max(sample['drain_s'], 0.001):,.0f}"),
        ("Redis, MB: all are cold", f"{sample['used_memory_cold'] / 1e6:,.1f}"),
        ("Redis, MB: the hour is in", f"{sample['used_memory_hour'] / 1e6:,.1f}"),
        ("Redis, MB: the most at any moment", f"{sample['peak_used_memory'] / 1e6:,.1f}"),
        *((f"most memory of the {name}, MB", f"{peak / 1e6:,.0f}") for name, peak in sample["peak_rss"].items()),
    ]
    disk_gb = TEN * sample["disk_bytes"] / 1e9
    redis_mb = (sample["used_memory_cold"] + TEN * sample["grown_hour"]) / 1e6
    estimate = (
        f"Ten times as many, {TEN * messages:,}, worked out from these and not run: {disk_gb:,.2f} GB of disk in "
        f"{TEN * sample['files']:,} files, {TEN * sample['write_s'] / 60:,.0f} minutes to write them, an hour of "
        f"{TEN * hour:,} messages that is in Redis after {TEN * sample['hydrate_s']:,.1f} s and takes {redis_mb:,.0f} MB there."
    )
    about = (
        f"{messages:,} messages of 33 bytes over {settings['hours'] / 24:g} days, on a server that may hold "
        f"{settings['maxmemory'] / 1e6:,.0f} MB (`maxmemory`), {settings['master']}."
    )
    return f"{about}\n\n{format_table(('', 'measured'), rows)}\n\n{estimate}"
