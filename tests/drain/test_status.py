"""What ``jobs/status.py`` says of a namespace, and whether all is well."""

import json
import subprocess
from dataclasses import replace

import pytest

from jobs.status import as_json, as_text
from pipeline.core.lateness import Lateness
from pipeline.core.text import age_text
from pipeline.status import Status
from pipeline.store.cold import HydratorProgress
from pipeline.store.heartbeats import FRESH_MS, IngestProgress, LoopProgress, LoopStats, TopicStats
from pipeline.store.stats import Stats
from tests.drain.test_command import command, environ, run, schedule
from tests.servers import RealServer

NOW_MS = 1_795_176_001_987  # 2026-11-20 12:00:01.987 UTC
STATS = Stats(
    now_ms=NOW_MS,
    scheduled=7,
    held=0,
    in_flight=0,
    late=0,
    dead=2,
    next_due_ms=NOW_MS + 4_200,
    overdue_ms=0,
    counters={},
)
LOOP = LoopProgress(loop_id="a", started_ms=NOW_MS, seen_ms=NOW_MS - 400, has_ended=False, stats=LoopStats(delivered=3))
INGEST = IngestProgress(
    source_id="s",
    reads="/in",
    started_ms=NOW_MS - 3_600_000,
    batches=1,
    files=2,
    lines=3,
    stored=3,
    duplicates=0,
    rejected=0,
    blank=0,
    last_batch_ms=NOW_MS - 1_699_100,
    last_lines=3,
    last_lines_per_sec=30,
    last_took_ms=100,
    last_oldest_waiting_ms=None,
    last_phases_ms={"walCommit": 10, "addBatch": 51_441},
)
STUCK = replace(LOOP, stats=LoopStats(stuck_partitions=["T/0"]))
GONE = replace(LOOP, seen_ms=NOW_MS - 250_000)


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (Status(STATS, [LOOP, LOOP], [INGEST], 1), "OK: 1 ingest job and 2 drain loops running, nothing late"),
        (Status(STATS, [LOOP, GONE], [], 0), "OK: no ingest job and 1 drain loop running, nothing late"),
        (
            Status(replace(STATS, scheduled=0), [], [], 0),
            "OK: no ingest job and no drain loop running, nothing late",
        ),
        (
            Status(replace(STATS, held=7), [GONE], [], 2),
            "OK: 2 ingest jobs and no drain loop running, nothing late",
        ),
        (
            Status(replace(STATS, late=312, overdue_ms=252_000), [GONE], [INGEST], 1),
            "PROBLEM: no drain loop has been seen for 4 min, 312 messages are late, the oldest by 4 min 12 s",
        ),
        (Status(STATS, [], [INGEST], 1), "PROBLEM: no drain loop has been seen in the last hour"),
        (
            Status(STATS, [replace(LOOP, has_ended=True)], [], 0),
            "PROBLEM: no drain loop is running, the last one ended 0.4 s ago",
        ),
        (
            Status(replace(STATS, late=1, overdue_ms=10_001), [LOOP], [], 0),
            "PROBLEM: 1 message is late, the oldest by 10.0 s",
        ),
        (
            Status(replace(STATS, outbox=2, outbox_ms=10_001), [LOOP], [], 0),
            "PROBLEM: 2 messages wait to be written to Kafka, the oldest for 10.0 s",
        ),
        (
            Status(replace(STATS, outbox=2, outbox_ms=10_000), [LOOP], [], 0),
            "OK: no ingest job and 1 drain loop running, nothing late",
        ),
        (
            Status(STATS, [STUCK, STUCK], [], 0),
            "PROBLEM: a transaction hangs in T/0 of Kafka",
        ),
    ],
)
def test_the_verdict_comes_first(status: Status, verdict: str) -> None:
    assert as_text(status).splitlines()[0] == verdict
    assert json.loads(as_json(status))["verdict"] == verdict


def test_a_loop_runs_until_its_heartbeat_is_old_or_it_has_ended() -> None:
    loops = [replace(LOOP, seen_ms=NOW_MS - FRESH_MS + 1), replace(LOOP, seen_ms=NOW_MS - FRESH_MS)]
    assert Status(STATS, loops, [], 0).running_loops() == loops[:1]
    assert Status(STATS, [replace(LOOP, has_ended=True)], [], 0).running_loops() == []


def test_times_have_their_zone_and_ages_a_unit() -> None:
    text = as_text(Status(STATS, [LOOP], [INGEST], 1))
    assert "next due        in 4.2 s  (2026-11-20 12:00:06Z)\n" in text
    assert "oldest late            -\n" in text
    assert "\ningest of /in, since 2026-11-20 11:00:01Z\n" in text
    assert (
        "\n  last batch 28 min ago: 3 lines, 30/s, 100 ms in all\n  phases (ms): addBatch 51,441, walCommit 10" in text
    )
    assert "\n  1 batch, 2 files, 3 lines: 3 stored, " in text
    assert "\ndrain: 1 loop in the last hour, 1 running, seen 0.4 s ago\n" in text


def test_a_counter_of_what_should_not_be_is_shown_if_it_is_not_zero() -> None:
    assert "misfiled" not in as_text(Status(STATS, [LOOP], [], 0))
    assert "\nmisfiled               3\n" in as_text(Status(replace(STATS, counters={"misfiled": 3}), [LOOP], [], 0))
    assert json.loads(as_json(Status(STATS, [LOOP], [], 0)))["misfiled"] == 0


def test_the_way_out_into_kafka_is_shown_if_it_is_used() -> None:
    text = as_text(Status(STATS, [LOOP], [], 0))
    assert not any(word in text for word in ("outbox", "forwarded", "refused", "Kafka"))
    stats = LoopStats(delivered=3, forwarded=2)
    stats.outbox.add(7, 2)
    status = Status(replace(STATS, outbox=1), [replace(LOOP, stats=stats)], [], 0)
    text = as_text(status)
    assert "\noutbox                 1\n" in text
    assert ", 2 forwarded\n  to Kafka after p50 7 ms, p99 7 ms, max 7 ms" in text
    assert json.loads(as_json(status))["drain"]["outbox"] == {"delivered": 2, "p50_ms": 7, "p99_ms": 7, "max_ms": 7}


def test_topics_show_what_was_delivered_and_how_late() -> None:
    lateness = Lateness()
    lateness.add(4, 2)
    loop = replace(
        LOOP, stats=LoopStats(delivered=3, topics={"ma\nil": TopicStats(3, lateness)}, errors={"TimeoutError": 1})
    )
    text = as_text(Status(STATS, [loop], [], 0))
    assert r"topic ma\nil: 3 delivered, p50 4 ms, p99 4 ms, max 4 ms" in text
    assert "failed calls: 1 TimeoutError" in text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "0.0 s"),
        (59_999, "59.9 s"),
        (60_000, "1 min"),
        (1_699_100, "28 min"),
        (7_200_000, "2 h"),
        (172_800_000, "2 d"),
    ],
)
def test_an_age_has_one_unit(ms: float, text: str) -> None:
    assert age_text(ms) == text


def test_a_probe_fails_when_nobody_delivers(server: RealServer) -> None:
    assert run(server, "status", "--check").returncode == 1, "a mistyped namespace looks like this one"
    assert run(server, "drain", "--once").returncode == 0
    assert run(server, "status", "--check").returncode == 0
    schedule(server, NOW_MS + 10**9)
    assert run(server, "status").returncode == 0
    ended = run(server, "status", "--check")
    assert ended.returncode == 1
    assert ended.stdout.startswith("PROBLEM: no drain loop is running, the last one ended ")


def test_it_can_be_watched_until_it_is_stopped(server: RealServer) -> None:
    with subprocess.Popen(
        command("status", "--watch", "0.1", "--format", "json"),
        env=environ(server),
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["scheduled"] == 0
        schedule(server, NOW_MS + 10**9)
        for line in watching.stdout:
            if json.loads(line)["scheduled"] == 1:
                break
        watching.send_signal(2)
        assert watching.wait(30) == 0


@pytest.mark.parametrize("seconds", ["0", "x", "1e9"])
def test_a_time_to_watch_by_has_limits(server: RealServer, seconds: str) -> None:
    assert run(server, "status", "--watch", seconds).returncode == 2


HYDRATOR = HydratorProgress(
    hydrator_id="h",
    started_ms=NOW_MS,
    seen_ms=NOW_MS - 3_000,
    messages=1_234,
    files=5,
    until_ms=NOW_MS + 7_200_000,
    lead_ms=7_200_000,
    is_done=True,
    problem="",
)
COLD = replace(STATS, cold=5, cold_due_ms=NOW_MS + 7_200_000)
FINE = "OK: no ingest job and 1 drain loop running, nothing late"


@pytest.mark.parametrize(
    ("stats", "hydrators", "verdict"),
    [
        (COLD, [HYDRATOR], FINE),
        (STATS, [], FINE),
        (replace(COLD, cold_due_ms=NOW_MS + 3_600_000), [HYDRATOR], FINE),
        (COLD, [], "PROBLEM: 5 messages wait in cold files and no hydrator is running"),
        (
            COLD,
            [replace(HYDRATOR, has_ended=True)],
            "PROBLEM: 5 messages wait in cold files and no hydrator is running",
        ),
        (
            replace(COLD, cold=1),
            [replace(HYDRATOR, seen_ms=NOW_MS - FRESH_MS)],
            "PROBLEM: 1 message waits in cold files and no hydrator is running",
        ),
        (
            replace(COLD, cold_due_ms=NOW_MS + 3_599_999),
            [HYDRATOR],
            "PROBLEM: cold messages that are due in 59 min 59 s are not in Redis yet",
        ),
        (
            replace(COLD, cold_due_ms=NOW_MS + 3_599_999),
            [replace(HYDRATOR, lead_ms=3_600_000)],
            FINE,
        ),
        (
            replace(COLD, cold_due_ms=NOW_MS - 1),
            [HYDRATOR],
            "PROBLEM: cold messages that may be late are not in Redis yet",
        ),
        (
            COLD,
            [replace(HYDRATOR, problem="The folder is away."), replace(HYDRATOR, problem="The folder is away.")],
            "PROBLEM: a hydrator can't go on (The folder is away)",
        ),
        (replace(COLD, away=[0, 1]), [], "PROBLEM: shards 0, 1 can't be reached and what is there is not counted"),
    ],
)
def test_messages_in_cold_files_are_no_problem_while_somebody_brings_them_in_time(
    stats: Stats, hydrators: list[HydratorProgress], verdict: str
) -> None:
    assert Status(stats, [LOOP], [], 0, hydrators=hydrators).verdict() == verdict


def test_what_waits_in_cold_files_is_shown() -> None:
    status = Status(
        COLD, [LOOP], [], 0, hydrators=[HYDRATOR, replace(HYDRATOR, has_ended=True, messages=1, is_done=False)]
    )
    text = as_text(status)
    assert "\ncold                   5\n" in text
    assert (
        "\nhydrate: 1 running, seen 3.0 s ago\n  1,235 messages brought into Redis; all is in that is due before 2026-11-20"
        in text
    )
    assert "hydrate" not in as_text(Status(STATS, [LOOP], [], 0)) and "cold" not in as_text(
        Status(STATS, [LOOP], [], 0)
    )
    record = json.loads(as_json(status))
    assert (record["cold"], record["cold_due_ms"], record["hydrated_until_ms"], record["running_hydrators"]) == (
        5,
        NOW_MS + 7_200_000,
        NOW_MS + 7_200_000,
        1,
    )
