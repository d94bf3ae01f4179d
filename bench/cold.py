"""Messages that wait in cold files: how fast they are written and come back, and what they take of disk and memory.

One process does each, as a Python worker of Spark and ``jobs/hydrate.py`` do, without Spark around. The messages are due over
thirty days. Files are made one after the other, so ``--rows 100000000`` needs no more memory than a million. What has come into
Redis is taken out again before more comes. The part ``bounded`` is in ``bounded.py``.
"""

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench import bounded
from bench.common import WORK, Options, Result, Sample, describe_origin, format_table, new_result, say, spread_of
from bench.server import Server, empty_server
from pipeline.config import ColdSettings, IngestSettings, RedisSettings
from pipeline.core.clock import SystemClock
from pipeline.core.cold import HOUR_MS
from pipeline.core.ids import encode_token
from pipeline.ingest.cold_folder import ColdFolder, ColdPlace
from pipeline.ingest.cold_opening import open_cold
from pipeline.ingest.hydration import Hydrator
from pipeline.ingest.stores import WriterSettings
from pipeline.ingest.writer import PartitionWriter
from pipeline.store.connection import connect, server_ms
from pipeline.store.keys import keys_of
from pipeline.store.shards import open_shards

ROWS, QUICK_ROWS = 1_000_000, 50_000
ROUNDS, QUICK_ROUNDS = 3, 1
FILE_ROWS = 100_000  # as many as a segment of 8 MB has
DAYS = 30
SUBJECTS = {
    "plain": "33 bytes of text",
    "random": "33 random characters",
    "ids": "33 bytes of text, ids of 17 characters",
}
BOUNDED = "bounded"  # the part of bench/bounded.py
FIGURES = {
    "write": "parsed and written a second",
    "disk": "bytes of disk, each",
    "memory": "bytes of Redis while cold, each",
    "back": "brought back a second, each day at once",
    "hour": "brought back a second, one hour of thirty days",
}


def run(options: Options) -> Result:
    """Measure each kind of messages, and many on a server that may hold little, or those of ``--only``."""
    subjects = [name for name in SUBJECTS if name in (options.only or SUBJECTS)]
    settings: dict[str, Any] = {
        "rows": options.choose(options.rows, ROWS, QUICK_ROWS),
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
        "file_rows": FILE_ROWS,
        "days": DAYS,
    }
    if not options.only or BOUNDED in options.only:
        settings[BOUNDED] = bounded.plan(options)
    result = new_result("cold", options, settings)
    try:
        with empty_server(WORK) as server:
            facts = server.facts()
        result["versions"]["server"], result["server_settings"] = facts["server"], facts["settings"]
        if subjects:
            result["samples"]["cold"] = _take_samples(settings, subjects)
        if BOUNDED in settings:
            result["samples"][BOUNDED] = bounded.take_samples(settings[BOUNDED])
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


def _take_samples(settings: dict[str, Any], subjects: list[str]) -> list[Sample]:
    samples: list[Sample] = []
    for number in range(1, settings["rounds"] + 1):
        for subject in subjects:
            with empty_server(WORK) as server:
                world = _World.of(server, WORK / f"cold-{subject}-{number}", settings["rows"])
                samples.append({"subject": subject, "round": number, **world.measure(subject)})
            said = ", ".join(f"{name} {samples[-1][name]:,.1f}" for name in FIGURES)
            say(f"round {number}  {subject}: {said}")
    return samples


@dataclass(frozen=True, slots=True)
class _World:
    """A namespace with a cold folder."""

    server: Server
    redis: RedisSettings
    place: ColdPlace
    rows: int
    now_ms: int

    @classmethod
    def of(cls, server: Server, path: Path, rows: int) -> "_World":
        redis = RedisSettings(url=server.url)
        client = connect(redis)
        place = open_cold(client, redis, ColdSettings(folder=str(path)))
        assert place is not None
        return cls(server, redis, place, rows, server_ms(client) // HOUR_MS * HOUR_MS)

    @property
    def _writing(self) -> WriterSettings:
        transaction_messages = IngestSettings().transaction_messages
        return WriterSettings(self.redis, "bench", str(WORK / "rejects"), transaction_messages, cold=self.place)

    def measure(self, subject: str) -> Sample:
        """Write all, then bring all back, the first hour apart."""
        before = self.server.data_bytes()
        wrote_s, done = 0.0, 0
        write = PartitionWriter(self._writing)
        for number in range(-(-self.rows // FILE_ROWS)):
            batch = self._file(subject, number, min(FILE_ROWS, self.rows - done))
            started = time.perf_counter()
            done += write.write([batch]).stored
            wrote_s += time.perf_counter() - started
        if done != self.rows:
            raise RuntimeError(f"{done} of {self.rows} messages were stored.")
        memory = self.server.data_bytes() - before
        disk = sum(size for size, _ in self._folder().sizes().values())
        hour, hour_s = self._bring(24)
        back, back_s, lead_hours = 0, 0.0, 24
        while self._folder().names():
            lead_hours += 24
            messages, elapsed_s = self._bring(lead_hours)
            back, back_s = back + messages, back_s + elapsed_s
        if hour + back != self.rows:
            raise RuntimeError(f"{hour + back} of {self.rows} messages came back.")
        return {
            "write": round(self.rows / wrote_s),
            "disk": round(disk / self.rows, 1),
            "memory": round(memory / self.rows, 1),
            "back": round(back / back_s),
            "hour": round(hour / hour_s),
        }

    def _folder(self) -> ColdFolder:
        return ColdFolder(self.place.folder, self.place.folder_id)

    def _bring(self, hours: int) -> tuple[int, float]:
        """Bring in what is due within so many hours, and take it out again; returns messages and seconds."""
        client = connect(self.redis)
        hydrator = Hydrator(
            "bench",
            self._folder(),
            client,
            keys_of(self.redis),
            open_shards(client, self.redis),
            self._writing,
            hours * HOUR_MS,
            0,
            IngestSettings().marker_keep_sec * 1000,
            SystemClock(),
            lambda: False,
            lambda ms: None,
        )
        started = time.perf_counter()
        hydrator.look()
        elapsed_s = time.perf_counter() - started
        for keys in keys_of(self.redis):
            client.unlink(keys.buckets(), *client.scan_iter(f"{{{keys.tag}}}:bucket:*", 1_000))
        client.close()
        return hydrator.totals.messages, elapsed_s

    def _file(self, subject: str, number: int, rows: int) -> pa.RecordBatch:
        """Make a landing file as Spark hands it to a worker: the first hour is that which begins a day from now."""
        chance = random.Random(number)
        lines = []
        for line in range(rows):
            at = number * FILE_ROWS + line
            due_ms = self.now_ms + 24 * HOUR_MS + chance.randrange(DAYS * 24 * HOUR_MS)
            text = f"reminder {at:09d} for a customer"
            if subject == "random":
                text = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=33))
            id_ = f',"id":"order-{at:011d}"' if subject == "ids" else ""
            lines.append(f'{{"message":"{text}","due":{due_ms}{id_}}}\n')
        row = {
            "value": "".join(lines).encode(),
            "path": f"{encode_token(self.now_ms, number)}.1.json.a+jsonl",
            "arrival_ms": self.now_ms - 48 * HOUR_MS,
        }
        return pa.RecordBatch.from_pylist([row])


def tables(result: Result) -> str:
    """Lay the result out for eyes: medians."""
    parts = [describe_origin(result)]
    if "cold" in result["samples"]:
        parts.append(f"#### Cold messages\n\n{_table(result['settings'], result['samples']['cold'])}")
    if BOUNDED in result["samples"]:
        table = bounded.table(result["settings"][BOUNDED], result["samples"][BOUNDED])
        parts.append(f"#### Cold messages, with little memory\n\n{table}")
    return "\n\n".join(parts)


def _table(settings: dict[str, Any], samples: list[Sample]) -> str:
    subjects = [name for name in SUBJECTS if any(sample["subject"] == name for sample in samples)]
    rows = []
    for figure, title in FIGURES.items():
        found = [spread_of([each[figure] for each in samples if each["subject"] == name]).median for name in subjects]
        rows.append([title, *(f"{each:,.1f}" if figure in ("disk", "memory") else f"{each:,.0f}" for each in found)])
    about = (
        f"{settings['rows']:,} messages that are due over {settings['days']} days, in files of {settings['file_rows']:,}, medians "
        f"of {settings['rounds']} rounds; one process, and everything is fsynced."
    )
    return f"{about}\n\n{format_table(('', *(SUBJECTS[name] for name in subjects)), rows)}"
