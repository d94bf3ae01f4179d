"""What jobs publish about themselves is read as it was written, and expires."""

import json
from dataclasses import replace
from functools import partial

import pytest

from pipeline.core.lateness import Lateness
from pipeline.drain.stats import Heartbeat, Totals
from pipeline.store import heartbeats as module
from pipeline.store import ingest_heartbeat
from pipeline.store.connection import server_ms
from pipeline.store.heartbeats import (
    FRESH_MS,
    LOOP_COUNTERS,
    LOOP_KEEP_SEC,
    LoopProgress,
    LoopStats,
    TopicStats,
    add_up_loops,
    read_loops,
    write_loop,
)
from pipeline.store.ingest_heartbeat import IngestHeartbeat, count_running_ingests
from tests.clock import ManualClock
from tests.store.conftest import START_MS, Bench


class ServerClock:
    """What the server says that time it is."""

    now_ms = START_MS


@pytest.fixture
def server_clock(monkeypatch: pytest.MonkeyPatch) -> ServerClock:
    clock = ServerClock()
    for each in (module, ingest_heartbeat):
        monkeypatch.setattr(each, "server_ms", lambda client: clock.now_ms)
    return clock


def progress(loop_id: str, topic: str = "default") -> LoopProgress:
    late = Lateness()
    late.add(4, 2)
    late.add(7)
    return LoopProgress(
        loop_id=loop_id,
        started_ms=START_MS - 1_000,
        has_ended=False,
        stats=LoopStats(
            **dict(zip(LOOP_COUNTERS, range(1, 99), strict=False)),
            errors={"TimeoutError": 2},
            topics={topic: TopicStats(4, late)},
        ),
    )


def test_loops_are_read_as_they_were_written_the_latest_first(bench: Bench, server_clock: ServerClock) -> None:
    written = [progress("host:1:a"), progress("host:2:b", 'ä"{}'), progress("host:3:c")]
    seen_ms = [START_MS, START_MS + 5, START_MS + 3]
    for one, server_clock.now_ms in zip(written, seen_ms, strict=True):
        write_loop(bench.client, bench.keys, one)
    assert read_loops(bench.client, bench.keys) == [
        replace(written[number], seen_ms=seen_ms[number]) for number in (1, 2, 0)
    ]


def test_a_loop_replaces_its_last_heartbeat(bench: Bench, server_clock: ServerClock) -> None:
    write_loop(bench.client, bench.keys, progress("host:1:a"))
    write_loop(bench.client, bench.keys, again := progress("host:1:a", "other"))
    assert read_loops(bench.client, bench.keys) == [replace(again, seen_ms=START_MS)]


@pytest.mark.parametrize("ahead_ms", [-120_000, LOOP_KEEP_SEC * 1_000 + 1])
def test_what_counts_is_the_clock_of_the_server(bench: Bench, ahead_ms: int) -> None:
    """A loop whose own is behind runs all the same, and one whose own is ahead lets no other be forgotten."""
    before_ms = server_ms(bench.client)
    for loop_id, clock_ms in (("a", before_ms), ("b", before_ms + ahead_ms)):
        write = partial(write_loop, bench.client, bench.keys)
        Heartbeat(write, Totals(), ManualClock(now_ms=clock_ms), loop_id).publish()
    found = read_loops(bench.client, bench.keys)
    assert {each.loop_id for each in found} == {"a", "b"}
    assert all(before_ms <= each.seen_ms <= server_ms(bench.client) for each in found)


def test_loops_that_are_silent_for_an_hour_are_forgotten(bench: Bench, server_clock: ServerClock) -> None:
    write_loop(bench.client, bench.keys, progress("host:1:a"))
    assert 0 < bench.client.ttl(bench.keys.drain("host:1:a")) <= LOOP_KEEP_SEC
    bench.client.unlink(bench.keys.drain("host:1:a"))  # as if it had expired
    assert read_loops(bench.client, bench.keys) == []
    server_clock.now_ms += LOOP_KEEP_SEC * 1_000
    write_loop(bench.client, bench.keys, progress("host:2:b"))
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


def test_an_ingest_job_counts_as_running_until_it_ends_or_is_silent(bench: Bench, server_clock: ServerClock) -> None:
    heartbeats = [IngestHeartbeat(bench.client, bench.keys, source) for source in "ab"]
    assert count_running_ingests(bench.client, bench.keys, START_MS) == 0
    for heartbeat in heartbeats:
        heartbeat.step()
    assert count_running_ingests(bench.client, bench.keys, START_MS + FRESH_MS) == 2
    assert count_running_ingests(bench.client, bench.keys, START_MS + FRESH_MS + 1) == 0
    heartbeats[0].publish(has_ended=True)
    assert count_running_ingests(bench.client, bench.keys, START_MS) == 1
