"""What jobs publish about themselves is read as it was written, and expires."""

import json

from pipeline.core.lateness import Lateness
from pipeline.store.heartbeats import (
    FRESH_MS,
    LOOP_COUNTERS,
    LOOP_KEEP_SEC,
    IngestHeartbeat,
    LoopProgress,
    LoopStats,
    TopicStats,
    add_up_loops,
    count_running_ingests,
    read_loops,
    write_loop,
)
from tests.store.conftest import START_MS, Bench


def progress(loop_id: str, seen_ms: int = START_MS, topic: str = "default") -> LoopProgress:
    late = Lateness()
    late.add(4, 2)
    late.add(7)
    return LoopProgress(
        loop_id=loop_id,
        started_ms=seen_ms - 1_000,
        seen_ms=seen_ms,
        has_ended=False,
        stats=LoopStats(
            **dict(zip(LOOP_COUNTERS, range(1, 99), strict=False)),
            errors={"TimeoutError": 2},
            topics={topic: TopicStats(4, late)},
        ),
    )


def test_loops_are_read_as_they_were_written_the_latest_first(bench: Bench) -> None:
    written = [progress("host:1:a"), progress("host:2:b", START_MS + 5, 'ä"{}'), progress("host:3:c", START_MS + 3)]
    for one in written:
        write_loop(bench.client, bench.keys, one)
    assert read_loops(bench.client, bench.keys) == [written[1], written[2], written[0]]


def test_a_loop_replaces_its_last_heartbeat(bench: Bench) -> None:
    write_loop(bench.client, bench.keys, progress("host:1:a"))
    write_loop(bench.client, bench.keys, again := progress("host:1:a", START_MS + 9, "other"))
    assert read_loops(bench.client, bench.keys) == [again]


def test_loops_that_are_silent_for_an_hour_are_forgotten(bench: Bench) -> None:
    write_loop(bench.client, bench.keys, progress("host:1:a"))
    assert 0 < bench.client.ttl(bench.keys.drain("host:1:a")) <= LOOP_KEEP_SEC
    bench.client.unlink(bench.keys.drain("host:1:a"))  # as if it had expired
    assert read_loops(bench.client, bench.keys) == []
    write_loop(bench.client, bench.keys, progress("host:2:b", START_MS + LOOP_KEEP_SEC * 1_000))
    assert bench.client.zrange(bench.keys.drains(), 0, -1) == [b"host:2:b"]


def test_what_another_version_wrote_is_left_out(bench: Bench) -> None:
    for loop_id in "abc":
        write_loop(bench.client, bench.keys, progress(loop_id))
    bench.client.hdel(bench.keys.drain("a"), "late_acks")
    other_bounds = {"default": {"delivered": 3, "lateness": {"counts": [1, 2], "sum_ms": 3, "max_ms": 3}}}
    bench.client.hset(bench.keys.drain("b"), "topics", json.dumps(other_bounds))
    assert [each.loop_id for each in read_loops(bench.client, bench.keys)] == ["c"]


def test_nothing_is_known_of_jobs_that_never_ran(bench: Bench) -> None:
    assert read_loops(bench.client, bench.keys) == []
    assert add_up_loops([]) == LoopStats()


def test_loops_add_up_topic_by_topic() -> None:
    whole = add_up_loops(progress("a", topic=topic).stats for topic in ("default", "x", "x"))
    assert [getattr(whole, name) for name in LOOP_COUNTERS] == [
        3 * number for number in range(1, len(LOOP_COUNTERS) + 1)
    ]
    assert whole.errors == {"TimeoutError": 6}
    assert {
        topic: (each.delivered, each.lateness.total(), each.lateness.sum_ms, each.lateness.max_ms)
        for topic, each in whole.topics.items()
    } == {
        "default": (4, 3, 15, 7),
        "x": (8, 6, 30, 7),
    }


class StoppedClock:
    def wall_ms(self) -> int:
        return START_MS

    def monotonic_ms(self) -> float:
        return 0.0


def test_an_ingest_job_counts_as_running_until_it_ends_or_is_silent(bench: Bench) -> None:
    heartbeats = [IngestHeartbeat(bench.client, bench.keys, source, StoppedClock()) for source in "ab"]
    assert count_running_ingests(bench.client, bench.keys, START_MS) == 0
    for heartbeat in heartbeats:
        heartbeat.step()
    assert count_running_ingests(bench.client, bench.keys, START_MS + FRESH_MS) == 2
    assert count_running_ingests(bench.client, bench.keys, START_MS + FRESH_MS + 1) == 0
    heartbeats[0].publish(has_ended=True)
    assert count_running_ingests(bench.client, bench.keys, START_MS) == 1
