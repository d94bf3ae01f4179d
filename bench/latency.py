"""From drop to stored: how long after a file appears in the inbox its messages are in Redis, durably.

The ingest job runs as users run it, with default settings. Each file's messages are due before all that came earlier, so storing
them rings the wake_listener (``PUBLISH`` on the wake channel), and the server sends that only after its fsync: no polling disturbs
what is measured. The job's log gets one more line a batch, Spark's own account of it, by a logging configuration of its own.
"""

import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

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
)
from bench.server import Server, empty_server
from bench.workload import SEED, message_text
from pipeline.config import IngestSettings, RedisSettings
from pipeline.store.keys import Keys

FILES, QUICK_FILES = 60, 15
WARM_UP_FILES = 5
LINES = 10  # a file
INTERVAL_MS, JITTER_MS = 1_000, 100  # the jitter is a whole trigger interval: drops must not keep step with Spark
DELAY_SEC_MAX, DELAY_STEP_SEC = 2_000_000, 60
START_SEC_MAX, STORE_SEC_MAX, LOOK_SEC = 120.0, 30.0, 0.02

# With an appender of its own: that of the job leaves out what is indented.
PROGRESS_LOGGER = """
logger.progress.name = org.apache.spark.sql.execution.streaming.runtime.ProgressReporter
logger.progress.level = info
logger.progress.additivity = false
logger.progress.appenderRef.whole.ref = whole
appender.whole.type = Console
appender.whole.name = whole
appender.whole.target = SYSTEM_ERR
appender.whole.layout.type = PatternLayout
appender.whole.layout.pattern = %d{yyyy-MM-dd HH:mm:ss}{UTC} %p %c{1}: %m%n
"""
PHASES = ("latestOffset", "walCommit", "getBatch", "queryPlanning", "addBatch", "commitOffsets", "triggerExecution")
_PROGRESS = re.compile(r"^\{\n.*?^\}", re.MULTILINE | re.DOTALL)


def run(options: Options) -> Result:
    """Drop small files, one a second, and note when each is stored."""
    files = options.choose(options.rounds, FILES, QUICK_FILES)
    settings = {
        "files": files,
        "lines": LINES,
        "interval_ms": INTERVAL_MS,
        "jitter_ms": JITTER_MS,
        "master": options.master,
        "trigger": IngestSettings().trigger,
    }
    result = new_result("latency", options, settings)
    WORK.mkdir(parents=True)
    try:
        with empty_server(WORK) as server:
            facts = server.facts()
            result["versions"]["server"], result["server_settings"] = facts["server"], facts["settings"]
            job = Job(server, options.master)
            try:
                drops = _drop_files(server, job, WARM_UP_FILES + files)
            finally:
                job.stop()
        result["samples"]["drops"] = join_batches(drops, job.batches())[WARM_UP_FILES:]
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


class Job:
    """The ingest job as a process, its screen in a file."""

    def __init__(self, server: Server, master: str) -> None:
        self.inbox = WORK / "inbox"
        self.inbox.mkdir()
        self._screen = WORK / "screen"
        conf = shutil.copytree(ROOT / "conf", WORK / "conf")
        with open(conf / "log4j2.properties", "a", encoding="utf-8") as out:
            out.write(PROGRESS_LOGGER)
        folders = ["--input", self.inbox, "--checkpoint", WORK / "checkpoint", "--rejects", WORK / "rejects"]
        command = ["./spark-submit.sh", "--master", master, "jobs/ingest.py", *map(str, folders)]
        ready, told = os.pipe()
        environ = os.environ | {
            "REDIS_URL": server.url,
            "SPARK_CONF_DIR": str(conf),
            "DUETIME_READY_FD": str(told),
        }
        with open(self._screen, "wb") as screen, open(ready, "rb") as answer:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=screen, stderr=screen, pass_fds=(told,)
            )
            os.close(told)
            watchdog = threading.Timer(START_SEC_MAX, self._process.kill)
            watchdog.start()
            is_up = b"up\n" in answer
            watchdog.cancel()
        if not is_up:
            self.stop()
            raise RuntimeError(f"The ingest job did not start:\n{self._screen.read_text(errors='replace')}")

    def stop(self) -> None:
        """End it as Ctrl-C does, and wait until it is gone."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(START_SEC_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def batches(self) -> list[dict[str, Any]]:
        """Return Spark's account of each batch that had a file."""
        # The log has a date in front of the first line, and the account over many.
        text = self._screen.read_text(errors="replace").replace("made progress: {", "made progress:\n{")
        accounts = [json.loads(found) for found in _PROGRESS.findall(text)]
        return [account for account in accounts if account["numInputRows"]]


class Watcher:
    """Notes when each file is stored: at the ring, and fifty times a second in case that Spark takes several files at once."""

    def __init__(self, server: Server, files: int, lines: int = LINES) -> None:
        keys = Keys(RedisSettings().namespace)
        self._lines = lines
        self._client, self._counters, self._files = server.client, keys.counters(), files
        self._bell = server.client.pubsub(ignore_subscribe_messages=True)
        self._bell.subscribe(keys.wake())
        self._bell.get_message(timeout=STORE_SEC_MAX)  # the confirmation
        self.stored_at: list[float] = []  # monotonic seconds, by file
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        heard = time.monotonic()
        while len(self.stored_at) < self._files and time.monotonic() - heard < STORE_SEC_MAX:
            self._bell.get_message(timeout=LOOK_SEC)
            now = time.monotonic()
            stored = int(self._client.hget(self._counters, "stored") or 0) // self._lines
            if stored > len(self.stored_at):
                heard = now
                self.stored_at += [now] * (stored - len(self.stored_at))

    def join(self) -> list[float]:
        """Wait for the last file, and return when each was stored.

        Raises:
            RuntimeError: for a long time nothing was.
        """
        self._thread.join()
        self._bell.close()
        if len(self.stored_at) != self._files:
            raise RuntimeError(f"{len(self.stored_at)} of {self._files} files are stored, and nothing more comes.")
        return self.stored_at


def _drop_files(server: Server, job: Job, count: int) -> list[Sample]:
    """Drop files on time, whether or not the ones before are stored.

    Returns, for each, when it was dropped (epoch s) and how long it took to be stored (ms).
    """
    rng = random.Random(SEED)
    watcher = Watcher(server, count)
    dropped: list[tuple[float, float]] = []
    pause, start = threading.Event(), time.monotonic()
    for number in range(count):
        delay_sec = DELAY_SEC_MAX - number * DELAY_STEP_SEC
        work = WORK / "drop"
        work.write_text(
            "".join(
                json.dumps({"message": message_text(number * LINES + line), "delay_sec": delay_sec + line}) + "\n"
                for line in range(LINES)
            )
        )
        drop_at = start + (number * INTERVAL_MS + rng.random() * JITTER_MS) / 1000
        pause.wait(max(drop_at - time.monotonic(), 0))
        dropped.append((time.time(), time.monotonic()))
        work.rename(job.inbox / f"{number}.jsonl")
    stored_at = watcher.join()
    say(f"{count} files stored, the first {WARM_UP_FILES} of them to warm up")
    return [
        {"file": number, "dropped_at": round(epoch, 4), "stored_ms": round((stored - started) * 1000, 2)}
        for number, ((epoch, started), stored) in enumerate(zip(dropped, stored_at, strict=True))
    ]


def join_batches(drops: Sequence[Sample], batches: Sequence[dict[str, Any]]) -> list[Sample]:
    """Add to each drop what Spark tells of its batch; files are taken in the order in which they came."""
    batch_of = [batch for batch in batches for _ in range(batch["numInputRows"])]
    if len(drops) != len(batch_of):
        say(f"Spark tells of {len(batch_of)} files, and {len(drops)} were dropped: no breakdown.")
        return list(drops)
    joined = []
    for drop, batch in zip(drops, batch_of, strict=True):
        trigger_ms = (datetime.fromisoformat(batch["timestamp"]).timestamp() - drop["dropped_at"]) * 1000
        joined.append({**drop, "trigger_ms": round(trigger_ms, 1), "spark_ms": batch["durationMs"]})
    return joined


def tables(result: Result) -> str:
    """Lay the result out for eyes."""
    drops: list[Sample] = result["samples"]["drops"]
    about = result["settings"]
    rows = [("drop to stored", *_quantiles([drop["stored_ms"] for drop in drops]))]
    if "spark_ms" in drops[0]:
        rows.append(("drop to start of the trigger", *_quantiles([drop["trigger_ms"] for drop in drops])))
        rows += [
            (f"Spark: {phase}", *_quantiles([drop["spark_ms"].get(phase, 0) for drop in drops])) for phase in PHASES
        ]
    return (
        f"{describe_origin(result)}\n"
        f"{about['files']} files of {about['lines']} lines, one a second, {about['master']}, trigger {about['trigger']}. "
        "Milliseconds.\n\n" + format_table(("", "p50", "p90", "p99", "max"), rows)
    )


def _quantiles(samples: Sequence[float]) -> tuple[str, ...]:
    values = (statistics.median(samples), percentile(samples, 90), percentile(samples, 99), max(samples))
    return tuple(f"{value:,.0f}" for value in values)
