"""Throughput of ingest: from landing files to stored messages, beside the usual way, bare parsing and the server's ceiling.

All subjects run in one JVM, in turn, each on an empty server; the first round only warms up. A round starts one subject further
than the round before, so that none always follows the same one.
"""

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from pyspark.sql import DataFrame, SparkSession

from bench.common import (
    WORK,
    Options,
    Result,
    Sample,
    Spread,
    describe_origin,
    format_table,
    new_result,
    say,
    spread_of,
)
from bench.meter import measure
from bench.raw import Buffer, fill_buffers, pack_buckets, pack_zadds, send_buffers
from bench.server import Server, empty_server
from bench.session import collect_garbage, java_version, parse_ours, schedule_ours, spark_session, store_ours
from bench.usual import read_requests, store_grouped, store_row_by_row
from bench.workload import ARRIVAL_MS, FORMS, Workload, bucket_start_ms, write_workload
from pipeline.config import IngestSettings, RedisSettings
from pipeline.store.keys import Keys

ROWS, ROUNDS = 1_000_000, 5
QUICK_ROWS, QUICK_ROUNDS = 100_000, 3
KEYS = Keys(RedisSettings().namespace)
CEILINGS = {"ceiling": "plain", "ceiling_id": "id", "ceiling_everything": "everything"}

TITLES = {
    "ours": "ours: exactly once, whole path",
    "topic": "ours, each with a topic",
    "due": "ours, each with an ISO due time",
    "id": "ours, each with an id",
    "everything": "ours, each with everything",
    "csv": "ours, from CSV",
    "table": "ours, from a table in Parquet: schedule",
    "usual": "usual: a ZADD a row, pipeline of 1,000",
    "usual_topic": "usual, each with a topic",
    "usual_due": "usual, each with an ISO due time",
    "usual_id": "usual, each with an id",
    "usual_everything": "usual, each with everything",
    "usual_csv": "usual, from CSV",
    "grouped": "usual, a ZADD a bucket of 5,000 rows",
    "parse_usual": "parsing alone: text and from_json",
    "parse_ours": "parsing alone: ours, in Python workers",
    "alone": "server alone: sorted, packed before, ZADDs of 500",
    "ceiling": "server's ceiling: the same, a ZADD a bucket",
    "ceiling_id": "server's ceiling, each with an id: and an HSET",
    "ceiling_everything": "server's ceiling, each with everything",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """One way to measure; ``check`` raises unless the server holds what it must afterwards."""

    name: str
    run: Callable[[Server], object]
    check: Callable[[Server], None]


def run(options: Options) -> Result:
    """Measure all subjects, or those of ``--only``."""
    rows = options.choose(options.rows, ROWS, QUICK_ROWS)
    rounds = options.choose(options.rounds, ROUNDS, QUICK_ROUNDS)
    settings = {
        "rows": rows,
        "rounds": rounds,
        "master": options.master,
        "transaction_messages": IngestSettings().transaction_messages,
    }
    result = new_result("ingest", options, settings)
    forms = {form: write_workload(WORK / "landing" / form, rows, form=form) for form in FORMS}
    settings["files"] = len(forms["plain"].files)
    try:
        with spark_session(options.master) as spark:
            result["versions"]["java"] = java_version(spark)
            with empty_server(WORK) as server:
                facts = server.facts()
            result["versions"]["server"], result["server_settings"] = facts["server"], facts["settings"]
            subjects = [s for s in make_subjects(spark, forms) if s.name in (options.only or TITLES)]
            result["samples"] = _measure_rounds(spark, subjects, rounds)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)
    return result


def make_subjects(spark: SparkSession, forms: Mapping[str, Workload]) -> list[Subject]:
    """Prepare every subject; what one needs beforehand is made here, outside of what is measured."""
    rows = forms["plain"].rows
    folders = {form: str(workload.folder) for form, workload in forms.items()}
    buffers: list[Buffer] = list(fill_buffers(pack_zadds(sorted(forms["plain"].members()), KEYS)))
    whole = {form: list(fill_buffers(pack_buckets(sorted(forms[form].messages()), KEYS))) for form in CEILINGS.values()}
    sample_bucket = bucket_start_ms(ARRIVAL_MS + int(np.median(forms["plain"].delays)) * 1000)
    samples = {form: _members_in(workload, sample_bucket) for form, workload in forms.items()}

    def holds_exactly(form: str, server: Server) -> None:
        holds_all(server)
        if server.client.zrange(KEYS.bucket(sample_bucket), 0, -1, withscores=True) != samples[form]:
            raise RuntimeError(f"The bucket {sample_bucket} does not hold the messages that it must.")

    def holds_all(server: Server) -> None:
        if server.messages() != rows:
            raise RuntimeError(f"{server.messages()} messages are stored, not {rows}.")

    def holds_none(server: Server) -> None:
        if server.messages():
            raise RuntimeError("Parsing alone has stored something.")

    def to_nowhere(frame: DataFrame) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def ours(name: str, form: str) -> Subject:
        folder = forms[form].folder
        return Subject(name, lambda s: store_ours(spark, folder, s.url, WORK / "rejects"), partial(holds_exactly, form))

    def ceiling(name: str, form: str) -> Subject:
        return Subject(name, lambda s: send_buffers(s.socket, whole[form]), partial(holds_exactly, form))

    def usual(name: str, form: str) -> Subject:
        folder = folders[form]
        return Subject(name, lambda s: store_row_by_row(read_requests(spark, folder, form), s.url), holds_all)

    plain, table = folders["plain"], str(WORK / "table")
    read_requests(spark, plain, "plain").withColumnRenamed("due_ms", "due").write.parquet(table)
    others = [form for form in FORMS if form != "plain"]
    return [
        ours("ours", "plain"),
        *(ours(form, form) for form in others),
        Subject("table", lambda s: schedule_ours(spark.read.parquet(table), s.url), holds_all),
        usual("usual", "plain"),
        *(usual(f"usual_{form}", form) for form in others),
        Subject("grouped", lambda s: store_grouped(read_requests(spark, plain, "plain"), s.url), holds_all),
        Subject("parse_usual", lambda _: to_nowhere(read_requests(spark, plain, "plain")), holds_none),
        Subject("parse_ours", lambda _: parse_ours(spark, forms["plain"].folder), holds_none),
        Subject("alone", lambda s: send_buffers(s.socket, buffers), partial(holds_exactly, "plain")),
        *(ceiling(name, form) for name, form in CEILINGS.items()),
    ]


def _members_in(workload: Workload, bucket_ms: int) -> list[tuple[str, int]]:
    """Return the members that a bucket must hold of a workload, and when each is due."""
    members = sorted((due_ms, member) for due_ms, member in workload.members() if bucket_start_ms(due_ms) == bucket_ms)
    return [(member.decode(), due_ms) for due_ms, member in members]


def _measure_rounds(spark: SparkSession, subjects: Sequence[Subject], rounds: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {subject.name: [] for subject in subjects}
    for number in range(rounds + 1):
        for place in range(len(subjects)):
            subject = subjects[(number + place) % len(subjects)]
            collect_garbage(spark)
            with empty_server(WORK) as server:
                sample = measure(server, lambda run=subject.run, at=server: run(at))  # type: ignore[misc]
                subject.check(server)
            kind = f"round {number}" if number else "warm-up"
            say(
                f"{kind:<8} {subject.name:<12} {sample['wall_s']:8.2f} s, others used {sample['others_cores']:.2f} cores"
            )
            samples[subject.name].append({"round": number, "place": place, **sample})
    return samples


def tables(result: Result) -> str:
    """Lay the result out for eyes."""
    rows = result["settings"]["rows"]
    measured = {name: [s for s in samples if s["round"]] for name, samples in result["samples"].items()}
    lines = []
    for name, samples in measured.items():
        rate = _rate(samples, rows)
        usual = measured.get(f"usual_{name}") or measured.get("usual")
        stores = samples[0]["data_bytes"] > rows
        lines.append(
            (
                TITLES[name],
                *(f"{value:,.0f}" for value in (rate.median, rate.least, rate.most)),
                f"{rate.median / _rate(usual, rows).median:.2f}" if usual else "-",
                f"{_median(samples, 'client_cpu_s') / rows * 1e6:.2f}",
                f"{_median(samples, 'server_cpu_s') / rows * 1e6:.2f}" if stores else "-",
                f"{_median(samples, 'data_bytes') / rows:.0f}" if stores else "-",
            )
        )
    others = max(s["others_cores"] for samples in measured.values() for s in samples)
    head = ("", "rows/s", "min", "max", "of usual", "client µs/row", "server µs/msg", "bytes/msg")
    about = result["settings"]
    return (
        f"{describe_origin(result)}\n"
        f"{rows:,} lines in {about['files']} files, {about['master']}, {about['rounds']} rounds; other processes used at most "
        f"{others:.2f} cores during one; server settings "
        f"{', '.join(f'{k} {v}' if v else f'no {k}' for k, v in result['server_settings'].items())}.\n\n"
        f"{format_table(head, lines)}"
    )


def _rate(samples: Sequence[Sample], rows: int) -> Spread:
    return spread_of([rows / s["wall_s"] for s in samples])


def _median(samples: Sequence[Sample], name: str) -> float:
    return float(statistics.median(s[name] for s in samples))
