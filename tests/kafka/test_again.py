"""A shard that was away gets what it lacks of Kafka in slices, and nobody else is asked meanwhile."""

import json
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config import KafkaSettings
from pipeline.core.errors import StoreUnavailable
from pipeline.ingest.kafka_again import SLICE, RecordsAgain
from pipeline.ingest.summary import Summary
from pipeline.kafka.cluster import Partition

TOPIC_ID = "0123456789abcdef0123456789abcdef"
PARTS = [Partition("t", TOPIC_ID, number).part_id for number in range(3)]


class World:
    """Three shards and how far each has three partitions, up to where a query has read them."""

    def __init__(self) -> None:
        self.ends: dict[str, int] | None = {f"t/{TOPIC_ID}/{number}": end for number, end in enumerate((10, 0, 5))}
        self.markers = [dict(zip(PARTS, ("10", "0", "5"), strict=True)) for _ in range(3)]
        self.written: list[tuple[list[tuple[int, int, int]], set[int]]] = []
        self.away: set[int] = set()
        self.is_gone = False
        stores: Any = [SimpleNamespace(markers=lambda source_id, ids, n=n: self.read(n, ids)) for n in range(3)]
        spark: Any = SimpleNamespace(
            streams=SimpleNamespace(active=[self]), createDataFrame=lambda rows, schema: list(rows)
        )
        self.again = RecordsAgain(spark, KafkaSettings(), self.write, stores, "kafka-x")

    @property
    def lastProgress(self) -> Any:  # noqa: N802 (Spark's name)
        return self.ends and SimpleNamespace(sources=[SimpleNamespace(endOffset=json.dumps(self.ends))])

    def read(self, shard: int, part_ids: Sequence[str]) -> list[str]:
        if shard in self.away:
            raise StoreUnavailable("no")
        return [self.markers[shard][part_id] for part_id in part_ids]

    def write(self, rows: list[tuple[str, str, int, int, int]], away: Collection[int]) -> Summary:
        self.written.append(([row[2:] for row in rows], {*away}))
        [shard] = {0, 1, 2} - {*away}
        lacking = [f"{row[0]} {each}" for row in rows for each in away]
        if shard in self.away:
            return Summary(lacking=[*lacking, f"t {shard}"])
        if not self.is_gone:
            self.markers[shard] |= {PARTS[number]: str(end) for _, _, number, _, end in rows}
        return Summary(stored=1, lacking=lacking)


@pytest.fixture
def world() -> World:
    return World()


def test_a_shard_catches_up_from_its_own_markers_and_no_other_is_asked(world: World) -> None:
    world.markers[1] |= {PARTS[0]: "4", PARTS[2]: "0 3 7 1"}
    assert world.again.catch_up(1)
    assert world.written == [([(0, 4, 10), (2, 0, 5)], {0, 2})]
    assert world.again.catch_up(1) and len(world.written) == 1, "there is nothing more"


def test_it_is_done_in_slices_that_leave_the_cores_to_the_batches(world: World) -> None:
    assert world.ends is not None
    world.ends[f"t/{TOPIC_ID}/0"] = 10 + 2 * SLICE + 1
    assert [world.again.catch_up(0) for _ in range(3)] == [False, False, True]
    assert [rows for rows, _ in world.written] == [
        [(0, 10, 10 + SLICE)],
        [(0, 10 + SLICE, 10 + 2 * SLICE)],
        [(0, 10 + 2 * SLICE, 11 + 2 * SLICE)],
    ]


def test_a_topic_that_is_gone_is_not_tried_for_ever(world: World) -> None:
    assert world.ends is not None
    world.ends[f"t/{TOPIC_ID}/0"] = 10 + 3 * SLICE
    world.is_gone = True
    assert world.again.catch_up(0)


def test_a_shard_that_goes_away_again_stays_away(world: World) -> None:
    world.markers[1][PARTS[0]] = "4"
    read = world.read

    def go_away(rows: Any, away: Collection[int]) -> Summary:
        world.away = {1}
        return World.write(world, rows, away)

    world.again.write = go_away
    with pytest.raises(StoreUnavailable, match="away again"):
        world.again.catch_up(1)
    with pytest.raises(StoreUnavailable):
        read(1, PARTS)


def test_nothing_is_known_before_the_query_has_told_how_far_it_is(world: World) -> None:
    world.ends = None
    with pytest.raises(StoreUnavailable, match="not known yet"):
        world.again.catch_up(1)
    world.again.give_back(())
    assert world.written == []


def test_a_partition_without_a_marker_is_left_to_the_batch_that_waits_for_the_shard(world: World) -> None:
    world.markers[1][PARTS[0]] = ""
    assert world.again.catch_up(1) and world.written == []


def test_a_start_looks_once_at_each_shard_whether_it_lacks_something(world: World) -> None:
    """A run before this one may have left it so, and a partition may have no next record."""
    world.markers[2][PARTS[0]] = "9"
    world.markers[1][PARTS[0]] = "8"
    world.away = {1}
    world.again.give_back({1})
    assert world.written == [([(0, 9, 10)], {0, 1})]
    world.away = set()
    world.again.give_back(())
    assert world.written[1:] == [([(0, 8, 10)], {0, 2})]
    world.markers[0][PARTS[0]] = "1"
    world.again.give_back(())
    assert len(world.written) == 2, "then batches look after it"
