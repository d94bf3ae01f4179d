"""Small cold files become larger ones, and nothing that is begun is touched; what is in any of them is found by its id."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.clock import SystemClock
from pipeline.core.errors import ColdUnavailable, VersionDiffers
from pipeline.ingest import cold_merging
from pipeline.ingest.cold_files import ColdFile
from pipeline.ingest.cold_folder import SOURCE_ID, ColdFolder
from pipeline.ingest.cold_merging import BEGINNING, MERGED, Merger, forget_markers
from pipeline.ingest.cold_reading import ColdFinder
from pipeline.store.base import State
from pipeline.store.by_id import MessagesById
from pipeline.store.shards import open_shards
from tests.clock import ManualClock
from tests.ingest.cold_world import ALL_HOURS, HOUR_MS, RETENTION_MS, ColdWorld
from tests.servers import RealServer

FILES = 30


@pytest.fixture
def world(server: RealServer, tmp_path: Path) -> ColdWorld:
    return world_of_small_files(server, tmp_path)


def world_of_small_files(server: RealServer, path: Path) -> ColdWorld:
    world = ColdWorld(server, path)
    files = [[world.line(f"{n}-{m}", 2 + m, f"k{n}-{m}" if m == 1 else "") for m in range(3)] for n in range(FILES)]
    world.write(*files)
    return world


def merger(world: ColdWorld, settled_ms: float = -60_000) -> Merger:
    return Merger(world.folder, open_shards(world.client, world.redis)[0], 0, settled_ms)


def merge(world: ColdWorld, from_hours: float = 2, settled_ms: float = -60_000) -> int:
    now_ms = SystemClock().wall_ms()
    return merger(world, settled_ms).merge(now_ms, world.now_ms + round(from_hours * HOUR_MS))


def markers(world: ColdWorld) -> dict[bytes, int]:
    """How many files have each marker."""
    found = [world.client.get(world.shards[0].marker(SOURCE_ID, name.marker_id)) for name in world.names()]
    return {marker or b"": found.count(marker) for marker in found}


def expect_all_once(world: ColdWorld) -> None:
    world.hydrate()
    assert len(world.waiting()) == 3 * FILES
    assert world.cold_hours() == {}


def test_small_files_become_one_and_its_messages_come_each_once(world: ColdWorld) -> None:
    assert merge(world) == FILES
    assert markers(world) == {MERGED.encode(): FILES, BEGINNING.encode(): 1}
    assert merge(world) == 0
    [one] = [name for name in world.names() if name.is_merged]
    with ColdFile(world.folder, one) as file:
        assert len(file) == 3 * FILES and len(file.replaces) == FILES
    hydrator = world.hydrator(2.5)
    assert hydrator.look()
    assert FILES <= len(world.waiting()) <= 2 * FILES
    hydrator.leave()
    expect_all_once(world)
    assert world.names() == []
    assert world.counters() == {"stored": 3 * FILES}


def test_merged_files_go_a_while_later(world: ColdWorld) -> None:
    assert merge(world) == FILES
    hydrator = world.hydrator(0.1)
    assert hydrator.look()
    assert len(world.names()) == FILES + 1
    hydrator.keep_house()
    [one] = world.names()
    assert one.is_merged
    hydrator.keep_house()  # not again so soon
    hydrator.leave()
    expect_all_once(world)


def test_a_hydrator_merges_by_itself_what_is_due_later(world: ColdWorld) -> None:
    world.now_ms += 20 * HOUR_MS
    world.write(*[[world.line(f"later {n}", 5)] for n in range(25)])
    hydrator = world.hydrator(0)  # with a lead, the end of an hour would be too near to what waits
    hydrator._marker_keep_ms = -60_000
    assert hydrator.look()
    hydrator.keep_house()
    assert sorted(markers(world).values(), reverse=True)[0] == FILES + 25
    hydrator.leave()


@pytest.mark.parametrize(
    ("from_hours", "settled_ms", "files"), [(2.01, -60_000, FILES), (2, 3_600_000, FILES), (2, -60_000, 19)]
)
def test_what_is_due_soon_or_young_or_few_stays_as_it_is(
    world: ColdWorld, from_hours: float, settled_ms: float, files: int
) -> None:
    for name in world.names()[files:]:
        Path(world.folder.path(name)).unlink()
    assert merge(world, from_hours, settled_ms) == 0
    assert markers(world) == {b"": files}


def test_large_files_stay_as_they_are(world: ColdWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_merging, "SMALL_BYTES", 100)
    assert merge(world) == 0


def test_there_are_several_groups(world: ColdWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_merging, "FILES_MAX", 10)
    monkeypatch.setattr(cold_merging, "FILES_MIN", 2)
    assert merge(world) == FILES
    assert markers(world) == {MERGED.encode(): FILES, BEGINNING.encode(): 3}
    expect_all_once(world)


def test_rows_are_limited(world: ColdWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_merging, "ROWS_MAX", 62)
    assert merge(world) == 20
    expect_all_once(world)


def test_a_part_that_is_not_stored_whole_is_not_merged(world: ColdWorld) -> None:
    first = world.names()[0]
    key = world.shards[0].marker("source", first.part_id)
    world.client.set(key, f"0 00000000 {first.first_due_ms}")
    assert merge(world) == FILES - 1
    assert world.client.get(world.shards[0].marker(SOURCE_ID, first.marker_id)) is None
    world.client.set(key, "all")
    expect_all_once(world)


def test_a_file_that_is_begun_is_not_merged(world: ColdWorld) -> None:
    """The messages that came were delivered meanwhile: they must not come again."""
    begun = world.names()[3]
    hydrator = world.hydrator()
    hydrator._folder = _Only(world.folder, [begun])  # type: ignore[assignment]
    hydrator._until_ms = lambda keys: world.now_ms + round(2.5 * HOUR_MS)  # type: ignore[method-assign]
    assert hydrator.look()
    hydrator.leave()
    [text] = world.waiting()
    deliver(world)
    assert merge(world) == FILES - 1
    world.hydrate()
    assert len(world.waiting()) == 3 * FILES - 1 and text not in world.waiting()


class _Only:
    """A folder of which only some files are seen."""

    def __init__(self, folder: ColdFolder, names: list[Any]) -> None:
        self._folder, self._names = folder, names

    def names(self) -> list[Any]:
        return self._names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)


def deliver(world: ColdWorld) -> None:
    keys = world.shards[0]
    for start in world.client.zrange(keys.buckets(), 0, -1):
        world.client.unlink(keys.bucket(int(start)))
    world.client.unlink(keys.buckets())


def begun_between(world: ColdWorld, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Let a hydrator begin, and messages be delivered, while a merger has read files, and not committed; returns what came."""
    came: set[str] = set()
    write: Callable[..., None] = ColdFolder.write

    def write_late(self: ColdFolder, files: Any) -> None:
        write(self, files)
        hydrator = world.hydrator()
        hydrator._until_ms = lambda keys: world.now_ms + round(2.5 * HOUR_MS)  # type: ignore[method-assign]
        hydrator.look()
        hydrator.leave()
        came.update(world.waiting())
        deliver(world)

    monkeypatch.setattr(ColdFolder, "write", write_late)
    return came


def test_a_file_that_is_begun_while_others_merge_it_is_not_merged(
    world: ColdWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        came = begun_between(world, patch)
        assert merge(world) == 0
    assert len(came) == FILES
    world.hydrate()
    assert len(world.waiting()) == 2 * FILES and not came & world.waiting().keys()
    assert world.cold_hours() == {}
    [invalid] = world.names()
    assert invalid.is_merged
    merge(world)
    assert world.names() == [], "what never became valid goes"


def test_a_file_that_is_merged_while_it_is_brought_in_comes_from_the_merged_one(
    world: ColdWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, left = ColdFile.rows, [FILES]

    def rows_late(self: ColdFile, *arguments: Any) -> Any:
        found = rows(self, *arguments)
        left[0] -= 1
        if not left[0]:
            assert merge(world) == FILES
        return found

    monkeypatch.setattr(ColdFile, "rows", rows_late)
    hydrator = world.hydrator()
    assert hydrator.look()
    assert hydrator.totals.messages == 0 and world.waiting() == {}
    hydrator.leave()
    expect_all_once(world)
    assert world.names() == []


def test_what_is_dropped_can_not_become_valid(world: ColdWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merger sleeps for days between writing and committing."""
    write: Callable[..., None] = ColdFolder.write

    def write_late(self: ColdFolder, files: Any) -> None:
        write(self, files)
        monkeypatch.setattr(ColdFolder, "write", write)
        merger(world)._drop_invalid([name for name in world.names() if name.is_merged])
        assert len(world.names()) == FILES

    monkeypatch.setattr(ColdFolder, "write", write_late)
    assert merge(world) == 0
    expect_all_once(world)


def test_a_failover_that_undid_a_merge_loses_nothing(world: ColdWorld) -> None:
    client, pattern = world.server.client(), f"{{{world.redis.namespace}:*"
    then = {key: client.dump(key) for key in client.keys(pattern)}
    assert merge(world) == FILES
    hydrator = world.hydrator(0.1, archive_ms=600_000)
    assert hydrator.look()
    hydrator.keep_house()
    assert len(world.names()) == 1
    client.delete(*client.keys(pattern))
    for key, value in then.items():
        client.restore(key, 0, value)
    assert hydrator.bring_back(0) == FILES
    expect_all_once(world)


class TestForgetting:
    def test_markers_of_files_that_are_gone_are_forgotten_in_the_end(
        self, world: ColdWorld, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        merge(world)
        world.hydrate()
        store, now_ms = open_shards(world.client, world.redis)[0], SystemClock().wall_ms()
        assert len(dict(store.marked_parts(SOURCE_ID))) == FILES + 1
        forget_markers(store, [], now_ms)
        assert len(dict(store.marked_parts(SOURCE_ID))) == FILES + 1
        forget_markers(store, [], now_ms + cold_merging.KEEP_MERGED_MS + 60_000)
        assert len(dict(store.marked_parts(SOURCE_ID))) == 1
        forget_markers(store, [], now_ms + cold_merging.KEEP_MS + 60_000)
        assert dict(store.marked_parts(SOURCE_ID)) == {}

    def test_those_of_files_that_are_there_stay(self, world: ColdWorld) -> None:
        merge(world)
        store, now_ms = open_shards(world.client, world.redis)[0], SystemClock().wall_ms()
        forget_markers(store, world.names(), now_ms + 2 * cold_merging.KEEP_MS)
        assert len(dict(store.marked_parts(SOURCE_ID))) == FILES + 1


@pytest.mark.parametrize("merged", [False, True])
class TestById:
    @pytest.fixture(autouse=True)
    def merge_or_not(self, world: ColdWorld, merged: bool) -> None:
        assert not merged or merge(world) == FILES

    def test_a_message_is_shown(self, world: ColdWorld) -> None:
        found = world.by_id().get("k4-1")
        assert found.state is State.SCHEDULED and found.message
        assert (found.message.body, found.message.id, found.message.due_ms) == (
            "4-1",
            "k4-1",
            world.now_ms + 3 * HOUR_MS,
        )
        assert found.version == f"{found.message.message_id}-cold"
        assert [each.message and each.message.body for each in world.by_id().get_many(["k1-1", "k9-1", "x"])] == [
            "1-1",
            "9-1",
            None,
        ]

    def test_a_message_is_cancelled_with_and_without_its_file(self, world: ColdWorld) -> None:
        found = world.by_id().cancel("k4-1")
        assert found.state is State.CANCELLED and found.message and found.message.body == "4-1"
        blind = MessagesById(world.client, world.shards, RETENTION_MS)
        other = blind.cancel("k5-1")
        assert other.state is State.CANCELLED and other.message
        assert (other.message.body, other.message.due_ms) == ("", world.now_ms + 3 * HOUR_MS)
        assert [each.state for each in blind.cancel_many(["k6-1", "k7-1"])] == [State.CANCELLED] * 2
        assert world.cold_hours() == {2: FILES, 3: FILES - 4, 4: FILES}
        assert world.counters() == {"stored": 3 * FILES, "cancelled": 4}
        again = blind.cancel("k4-1")
        assert (again.state, again.message) == (State.CANCELLED, None)
        world.hydrate()
        assert len(world.waiting()) == 3 * FILES - 4
        assert world.cold_hours() == {} and not {"4-1", "5-1", "6-1", "7-1"} & world.waiting().keys()

    def test_a_message_is_rescheduled_into_redis(self, world: ColdWorld) -> None:
        by_id = world.by_id()
        version = by_id.get("k4-1").version
        with pytest.raises(VersionDiffers):
            by_id.reschedule("k4-1", world.now_ms + 50 * HOUR_MS, if_versions=["other"])
        found = by_id.reschedule("k4-1", world.now_ms + 50 * HOUR_MS, if_versions=[version])
        assert found.state is State.SCHEDULED and found.message and found.message.body == "4-1"
        assert by_id.get("k4-1") == found
        assert [each.state for each in by_id.reschedule_many(["k5-1", "k6-1"], world.now_ms)] == [State.SCHEDULED] * 2
        assert world.waiting() == {"4-1": 50 * HOUR_MS, "5-1": 0, "6-1": 0}
        assert world.cold_hours() == {2: FILES, 3: FILES - 3, 4: FILES}
        world.hydrate()
        assert world.waiting()["4-1"] == 50 * HOUR_MS and world.waiting()["5-1"] == 0
        assert len(world.waiting()) == 3 * FILES and world.cold_hours() == {}

    def test_without_the_folder_it_can_be_neither_shown_nor_rescheduled(self, world: ColdWorld) -> None:
        blind = MessagesById(world.client, world.shards, RETENTION_MS)
        for call in (lambda: blind.get("k4-1"), lambda: blind.reschedule("k4-1", 5), lambda: blind.get_many(["k4-1"])):
            with pytest.raises(ColdUnavailable, match=r"waits in a cold file: set cold\.folder"):
                call()

    def test_a_message_that_comes_in_meanwhile_is_followed(
        self, world: ColdWorld, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        find = ColdFinder.__call__

        def find_late(self: ColdFinder, message_id: str, shard: int) -> Any:
            found = find(self, message_id, shard)
            world.hydrate(ALL_HOURS)
            return found

        monkeypatch.setattr(ColdFinder, "__call__", find_late)
        found = world.by_id().reschedule("k4-1", world.now_ms + 9 * HOUR_MS)
        assert found.message and found.message.body == "4-1"
        assert world.waiting()["4-1"] == 9 * HOUR_MS and len(world.waiting()) == 3 * FILES

    def test_a_file_that_is_lost_is_said(self, world: ColdWorld) -> None:
        for name in world.names():
            Path(world.folder.path(name)).unlink()
        with pytest.raises(ColdUnavailable, match="can't be read"):
            world.by_id().get("k4-1")
        assert world.by_id().cancel("k4-1").state is State.CANCELLED


def test_a_listing_is_kept_for_a_while(world: ColdWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    finder = ColdFinder(world.folder, clock)
    message_id = f"{world.token(1)}00000002"
    assert finder(message_id, 0)
    listed: list[int] = []
    names = ColdFolder.names
    monkeypatch.setattr(ColdFolder, "names", lambda self, *below: listed.append(1) or names(self, *below))
    assert finder(message_id, 0) and not listed
    assert finder(f"{world.token(99)}00000002", 0) is None and len(listed) == 1
