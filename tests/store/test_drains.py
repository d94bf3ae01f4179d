"""What drain loops tell about themselves comes back as it was told, and does not stay."""

import json

from pipeline.core.lateness import Lateness
from pipeline.store import drains
from pipeline.store.drains import DrainProgress, add_up_drains, read_drains, write_drain
from tests.store.conftest import START_MS, Bench


def progress(loop_id: str, seen_ms: int = START_MS, topic: str = "default") -> DrainProgress:
    late = Lateness()
    late.add(4, 2)
    late.add(7)
    return DrainProgress(
        loop_id=loop_id,
        started_ms=seen_ms - 1_000,
        seen_ms=seen_ms,
        claimed=5,
        delivered=3,
        stale=1,
        repeated=2,
        reclaimed=4,
        errors={"TimeoutError": 2},
        topics={topic: late},
    )


def test_loops_are_read_as_they_were_written_the_latest_first(bench: Bench) -> None:
    told = [progress("host:1:a"), progress("host:2:b", START_MS + 5, 'ä"{}'), progress("host:3:c", START_MS + 3)]
    for each in told:
        write_drain(bench.client, bench.keys, each)
    assert read_drains(bench.client, bench.keys) == [told[1], told[2], told[0]]


def test_a_loop_replaces_what_it_said_before(bench: Bench) -> None:
    write_drain(bench.client, bench.keys, progress("host:1:a"))
    write_drain(bench.client, bench.keys, again := progress("host:1:a", START_MS + 9, "other"))
    assert read_drains(bench.client, bench.keys) == [again]


def test_loops_that_are_silent_for_an_hour_are_forgotten(bench: Bench) -> None:
    write_drain(bench.client, bench.keys, progress("host:1:a"))
    assert 0 < bench.client.ttl(bench.keys.drain("host:1:a")) <= drains.KEEP_SEC
    bench.client.unlink(bench.keys.drain("host:1:a"))  # as if it had expired
    assert read_drains(bench.client, bench.keys) == []
    write_drain(bench.client, bench.keys, progress("host:2:b", START_MS + drains.KEEP_SEC * 1_000))
    assert bench.client.zrange(bench.keys.drains(), 0, -1) == [b"host:2:b"]


def test_what_another_version_told_is_left_out(bench: Bench) -> None:
    for loop_id in "abc":
        write_drain(bench.client, bench.keys, progress(loop_id))
    bench.client.hdel(bench.keys.drain("a"), "stale")
    other_bounds = {"default": {"counts": [1, 2], "sum_ms": 3, "max_ms": 3}}
    bench.client.hset(bench.keys.drain("b"), "topics", json.dumps(other_bounds))
    assert [each.loop_id for each in read_drains(bench.client, bench.keys)] == ["c"]


def test_nobody_told_anything(bench: Bench) -> None:
    assert read_drains(bench.client, bench.keys) == []
    assert add_up_drains([]) == DrainProgress(
        loop_id="", started_ms=0, seen_ms=0, claimed=0, delivered=0, stale=0, repeated=0, reclaimed=0
    )


def test_loops_add_up_topic_by_topic() -> None:
    whole = add_up_drains([progress("a"), progress("b", START_MS + 50, "x"), progress("c", START_MS + 20, "x")])
    assert (whole.started_ms, whole.seen_ms) == (START_MS - 1_000, START_MS + 50)
    assert (whole.claimed, whole.delivered, whole.stale, whole.repeated, whole.reclaimed) == (15, 9, 3, 6, 12)
    assert whole.errors == {"TimeoutError": 6}
    assert {topic: (late.total(), late.sum_ms, late.max_ms) for topic, late in whole.topics.items()} == {
        "default": (3, 15, 7),
        "x": (6, 30, 7),
    }
