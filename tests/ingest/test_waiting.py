"""What happens on the way in while a shard is away: its files wait, everything else goes on, and nothing is stored twice."""

import logging
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pytest

from pipeline.config import RedisSettings
from pipeline.core.errors import PipelineError, StoreUnavailable
from pipeline.core.messages import Change
from pipeline.ingest import stores, waiting
from pipeline.ingest.loop import MarkerSweeper
from pipeline.ingest.schemas import FILE_ROW
from pipeline.ingest.shard_writer import ShardWriter
from pipeline.ingest.stores import Patience, WriterSettings, no_slower_than, patience_ms_of, patience_of
from pipeline.ingest.summary import Summary
from pipeline.ingest.transactions import PartQueue
from pipeline.ingest.waiting import CALM_MS, LOOK_MS, LOOK_MS_MAX, ShardsAway, waiting_text
from pipeline.ingest.writer import PartitionWriter
from pipeline.landing.names import parse_landing_name, repeated_name
from pipeline.store.base import Changed, Scheduled, Transaction
from pipeline.store.ingest_heartbeat import Waiting
from tests.clock import ManualClock
from tests.ingest import test_landed as landing
from tests.ingest.files import TOKEN, parsed
from tests.ingest.test_landed import NOW_MS, World, tokens, world  # noqa: F401
from tests.servers import RealServer

T = TypeVar("T")
HOUR_MS = 3_600_000
LINES = b"".join(b'{"message":"m%d","due":%d}\n' % (n, 1_700_000_000_000 + n) for n in range(5))
CHANGE = b'{"cancel":"order-1"}\n'


def lacking(names: Sequence[str], *shards: int) -> list[str]:
    return [f"{token} {shard}" for token in tokens(names) for shard in shards]


def waits(world: World) -> list[str]:  # noqa: F811
    return sorted(path.name for path in (world.landing / ".waiting").glob("*"))


def read(world: World, batch_id: int, names: Sequence[str], *shards: int) -> None:  # noqa: F811
    """Let a batch read files, and find these shards away; then Spark commits it."""
    world.plan(batch_id, names, is_committed=True)
    world.files.check_batch(batch_id, tokens(names), lacking(names, *shards))
    world.files.delete_batch(batch_id)


def test_a_file_that_a_shard_lacks_is_set_aside_before_its_batch_is_committed_and_no_other(
    world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, half = world.land(3), world.land(2, 1)
    synced: list[str] = []
    monkeypatch.setattr(waiting, "_sync", lambda folder: synced.append(folder.name))
    world.plan(0, [*whole, *half])
    world.files.check_batch(0, tokens([*whole, *half]), lacking(half, 1))
    assert synced == [".waiting", "landing"]
    assert (waits(world), landing.waiting(world)) == (sorted(half), whole), "a start takes what is there for stored"
    world.files.delete_batch(0)
    assert (waits(world), landing.waiting(world)) == (sorted(half), [])
    assert world.files.waiting.look() == Waiting(2, [1], NOW_MS - 2)


def test_a_file_that_waits_is_read_again_as_soon_as_one_of_its_shards_is_back_and_then_deleted(world: World) -> None:  # noqa: F811
    of_one, of_two = world.land(2), world.land(1)
    read(world, 0, of_one, 1)
    read(world, 1, of_two, 1, 2)
    files = world.files.waiting
    assert files.give_back({1, 2}) == 0
    assert files.give_back({2}) == 2
    again = sorted(f"{name}=.1w" for name in [*of_one, *of_two])
    assert (waits(world), landing.waiting(world)) == ([], again)
    assert all((landed := parse_landing_name(name)) and landed.has_waited for name in again)
    read(world, 2, [f"{of_one[0]}=.1w"])
    assert files.look() == Waiting(1, [], NOW_MS - 1)
    read(world, 3, [f"{of_two[0]}=.1w"], 2)
    assert waits(world) == [f"{of_two[0]}=.1w"] and files.give_back({2}) == 0
    assert files.give_back(()) == 1
    assert landing.waiting(world) == [f"{of_two[0]}=.2w"]
    read(world, 4, [f"{of_two[0]}=.2w"])
    assert (landing.waiting(world), waits(world), files.look()) == ([], [], None)


def test_a_file_that_is_given_back_before_the_commit_of_its_batch_is_told_stays(world: World) -> None:  # noqa: F811
    names = world.land(1)
    world.plan(0, names)
    world.files.check_batch(0, tokens(names), lacking(names, 1))
    assert world.files.waiting.give_back(()) == 1
    world.files.delete_batch(0)
    assert landing.waiting(world) == [f"{names[0]}=.1w"]


def test_what_waited_is_told_at_its_end_once(world: World, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    names = world.land(2, 1)
    read(world, 0, names, 1)
    world.files.waiting.give_back(())
    assert world.files.waiting.look() is not None and caplog.records == []
    read(world, 1, [f"{name}=.1w" for name in names])
    for _ in range(2):
        assert world.files.waiting.look() is None
    assert [record.getMessage() for record in caplog.records] == ["2 files that waited for shards: all stored now"]


def test_what_waited_comes_back_in_portions_so_that_new_files_are_not_behind_all_of_it(
    world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "PORTION_FILES", 2)
    names = sorted(world.land(5, 4, 3, 2, 1))
    read(world, 0, names, 1)
    files = world.files.waiting
    assert [files.give_back(()), files.give_back(())] == [2, 0], "the first portion is not read yet"
    assert landing.waiting(world) == [f"{name}=.1w" for name in names[:2]], "the oldest first"
    read(world, 1, [f"{name}=.1w" for name in names[:2]])
    monkeypatch.setattr(waiting, "PORTION_BYTES", 1)
    assert files.give_back(()) == 1
    assert files.give_back((), all_at_once=True) == 2


def test_a_start_finds_what_another_run_has_left_and_has_it_read_again(world: World) -> None:  # noqa: F811
    names = world.land(2, 1)
    world.plan(0, names)
    world.files.check_batch(0, tokens(names), lacking(names[:1], 1))
    # Killed here: Spark has not committed the batch, and does it again without the file that it misses.
    started = World.__new__(World)
    started.__dict__ |= world.__dict__
    started.files = type(world.files)(world.landing, world.checkpoint, world.markers_of, world.clock)
    assert started.files.waiting.look() == Waiting(1, [], NOW_MS - 2)
    assert started.files.waiting.give_back({1}) == 1, "what it lacks is not known"
    started.files.check_batch(0, tokens(names[1:]))
    started.files.delete_batch(0)
    assert landing.waiting(started) == [f"{names[0]}=.1w"]


def test_a_replay_misses_no_file_that_waits_or_was_given_back(
    world: World,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = world.land(2, 1)
    read(world, 0, names, 1)
    world.files.check_batch(0, [])
    world.files.waiting.give_back(())
    world.files.check_batch(0, [])
    assert caplog.records == []


def test_files_that_were_not_read_are_noticed_beside_files_that_wait(world: World) -> None:  # noqa: F811
    waits_for, unread = world.land(2), world.land(1)
    world.plan(0, [*waits_for, *unread])
    with pytest.raises(PipelineError, match="left 1 files of batch 0 unread"):
        world.files.check_batch(0, tokens(waits_for), lacking(waits_for, 1))
    assert waits(world) == []


def test_a_batch_whose_files_can_not_be_set_aside_is_not_committed(world: World) -> None:  # noqa: F811
    names = world.land(2)
    (world.landing / ".waiting").touch()
    world.plan(0, names)
    with pytest.raises(PipelineError, match="can't be moved into"):
        world.files.check_batch(0, tokens(names), lacking(names, 1))
    assert landing.waiting(world) == names


def test_the_markers_of_files_that_wait_or_are_kept_stay(world: World) -> None:  # noqa: F811
    """They say what is stored: without them all of it would be stored again."""
    gone, waits_for, back = world.land(3), world.land(2), world.land(1)
    for batch_id, names in enumerate((waits_for, back)):
        read(world, batch_id, names, 1)
    world.files.waiting.give_back({1}, all_at_once=True)
    (world.landing / gone[0]).unlink()
    kept = world.landing / ".stored" / "1"
    kept.mkdir(parents=True)
    [stored] = world.land(4)
    (world.landing / stored).rename(kept / stored)
    forgotten: list[str] = []

    class Markers:
        def marked_parts(self, source_id: str) -> list[tuple[str, int]]:
            return [(token, 0) for token in tokens([*gone, *waits_for, *back, stored])]

        def forget_markers(self, source_id: str, part_ids: Sequence[str]) -> None:
            forgotten.extend(part_ids)

    MarkerSweeper(Markers(), "source", world.landing, HOUR_MS, world.clock).sweep()
    assert forgotten == tokens(gone)


def test_the_markers_of_a_file_stay_as_long_as_that_which_moved_last(world: World) -> None:  # noqa: F811
    """A part that was stored before the shard went away may be read again as long as one that waited for it."""
    forgotten: list[str] = []
    now_ms = world.clock.wall_ms()

    class Markers:
        def marked_parts(self, source_id: str) -> list[tuple[str, int]]:
            return [("A" * 14, 0), (f"{'A' * 14}.9", now_ms - 1), ("B" * 14, 0), (f"{'B' * 14}.9", 1)]

        def forget_markers(self, source_id: str, part_ids: Sequence[str]) -> None:
            forgotten.extend(part_ids)

    MarkerSweeper(Markers(), "source", world.landing, HOUR_MS, world.clock).sweep()
    assert forgotten == ["B" * 14, f"{'B' * 14}.9"]


class Shard:
    """A shard with its markers, and how many calls it does not answer any more."""

    def __init__(self) -> None:
        self.markers_of: dict[str, str] = {}
        self.stored = 0
        self.asked = 0
        self.answers = 1_000
        self.changed: list[Change] = []

    def _ask(self) -> None:
        self.asked += 1
        self.answers -= 1
        if self.answers < 0:
            raise StoreUnavailable("Redis does not answer.")

    def markers(self, source_id: str, part_ids: Sequence[str]) -> list[str]:
        self._ask()
        return [self.markers_of.get(part_id, "") for part_id in part_ids]

    def schedule(self, source_id: str, transaction: Transaction) -> Scheduled | None:
        self._ask()
        if any(self.markers_of.get(move.part_id, "") != move.before for move in transaction.moves):
            return None
        self.markers_of |= {move.part_id: move.after for move in transaction.moves}
        self.stored += len(transaction.rows)
        return Scheduled(len(transaction.rows))

    def apply(self, changes: Sequence[Change]) -> Changed:
        self._ask()
        self.changed += changes
        return Changed(cancelled=len(changes))

    def wait_for_copies(self, on_disk: bool, replicas: int = 0) -> None:
        self._ask()

    def history(self) -> str:
        self._ask()
        return "a"


SETTINGS = WriterSettings(RedisSettings(), "s", "rejects", 2, wait_for_disk=True, tells_history=True, patience_ms=1)


def store(shard: Shard, patience: Patience, content: bytes = LINES, **how: bool) -> Summary:
    writer = ShardWriter(shard, shard, SETTINGS, 4, patience)
    part = parsed(content)
    writer.add(PartQueue(part, **how))
    done = writer.finish()
    done.lines += 0 if how else part.lines
    return done


@pytest.mark.parametrize("answers", range(8))
def test_a_writer_leaves_a_shard_that_goes_away_at_any_point_and_the_next_one_stores_the_rest(answers: int) -> None:
    shard = Shard()
    shard.answers = answers
    content = CHANGE + LINES
    first = store(shard, Patience(1), content)
    [lacks] = first.lacking
    assert lacks.split(" ")[1] == "4" and first.away == {4} and first.histories == []
    assert first.lines + first.waiting == 6 and shard.stored == first.stored
    shard.answers = 1_000
    again = store(shard, Patience(1), content, is_repeated=True, has_waited=True)
    assert again.lacking == [] and again.stored_again == again.waiting == 0
    assert (shard.stored, first.stored + again.stored, len({*shard.changed})) == (5, 5, 1)
    assert again.lines == again.stored + again.cancelled
    assert again.histories == ["a"]


def test_a_shard_that_was_given_up_is_not_asked_again_in_this_batch() -> None:
    shard, patience = Shard(), Patience(1)
    shard.answers = 0
    assert store(shard, patience).lacking
    shard.answers, shard.asked = 1_000, 0
    assert store(shard, patience) == Summary(waiting=5) and shard.asked == 0
    assert store(shard, Patience(1, away={4})).lacking and shard.asked == 0
    assert store(shard, Patience(1, away={3})) == Summary(lines=5, stored=5)


def test_what_a_failover_undid_is_counted_as_stored_again_and_a_file_that_waited_is_not() -> None:
    assert store(Shard(), Patience(), is_repeated=True).stored_again == 5
    assert store(Shard(), Patience(), is_repeated=True, has_waited=True).stored_again == 0


def test_the_patience_is_one_for_all_shards_of_a_batch_and_calls_that_are_answered_take_nothing_of_it() -> None:
    clock = ManualClock()
    patience = Patience(5_000, clock=clock)

    def answer_late() -> int:
        clock.advance_ms(60_000)
        return 7

    def fail() -> None:
        clock.advance_ms(3_000)
        raise StoreUnavailable("no")

    assert [patience.retrying(0, answer_late) for _ in range(2)] == [7, 7]
    tried: list[int] = []
    with pytest.raises(StoreUnavailable):
        patience.retrying(1, lambda: (tried.append(1), fail()))
    assert len(tried) == 2 and patience.away == {1}
    with pytest.raises(StoreUnavailable):
        patience.retrying(2, lambda: (tried.append(2), fail()))
    assert tried == [1, 1, 2]
    assert patience.retrying(0, answer_late) == 7


def test_without_a_limit_a_shard_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "retrying", lambda call: call())
    assert Patience(0).retrying(1, lambda: 7) == 7
    cluster = RedisSettings(url="redis+cluster://a", shards=6)
    assert patience_ms_of(cluster, 5) == 5_000
    assert patience_ms_of(replace(cluster, shards=1), 5) == 0, "nobody goes on then"
    assert patience_ms_of(replace(cluster, url="redis://a"), 5) == 0, "all shards are on one server"
    assert no_slower_than(cluster, 0) == cluster
    assert no_slower_than(cluster, 500).reply_timeout_ms == no_slower_than(cluster, 500).connect_timeout_ms == 500
    assert no_slower_than(cluster, 5_000).connect_timeout_ms == cluster.connect_timeout_ms


def test_the_tasks_of_a_writing_share_their_patience_and_those_of_another_do_not() -> None:
    one = patience_of(SETTINGS, 1, {2})
    one.away.add(3)
    assert patience_of(SETTINGS, 1, {2}).away == {2, 3}
    assert patience_of(SETTINGS, 2, ()).away == set()
    for number in range(3, 20):
        patience_of(SETTINGS, number, ())
    assert len(stores._patience) <= stores.PATIENCE_MAX


class Driver:
    """Six shards, of which some are away, and what is asked of those who wait."""

    def __init__(self) -> None:
        self.clock = ManualClock(NOW_MS)
        self.really_away: set[int] = set()
        self.probed: list[int] = []
        self.given: list[Collection[int]] = []
        self.waiting: Waiting | None = None
        self.told: list[Waiting | None] = []
        self.slices = 0  # that a shard which is back lacks, of an input that has to catch up
        self.caught_up: list[int] = []
        probes = [lambda shard=shard: self.probe(shard) for shard in range(6)]
        self.shards = ShardsAway(probes, self, self.told.append, self.clock)

    def catch_up(self, shard: int) -> bool:
        self.caught_up.append(shard)
        self.slices -= 1
        return self.slices <= 0

    def give_back(self, away: Collection[int]) -> None:
        self.given.append(away)

    def look(self) -> Waiting | None:
        return self.waiting

    def probe(self, shard: int) -> None:
        self.probed.append(shard)
        if shard in self.really_away:
            raise StoreUnavailable("no")

    def seconds(self, count: int) -> None:
        for _ in range(count):
            self.clock.advance_ms(LOOK_MS)
            assert self.shards.step() == LOOK_MS


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_a_shard_that_a_batch_found_away_is_looked_at_each_second_and_then_back(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    driver.seconds(1)
    assert (driver.probed, driver.given) == ([], [frozenset()])
    driver.really_away = {2, 5}
    driver.shards.note({5, 2})
    driver.shards.note({2})
    assert driver.shards.away() == {2, 5}
    driver.seconds(3)
    assert driver.probed == [2, 5] * 3 and driver.given[1:] == [frozenset({2, 5})] * 3
    driver.really_away = {5}
    driver.seconds(1)
    assert driver.shards.away() == {5} and driver.given[-1] == {5}, "what waited for both goes on"
    assert [record.getMessage() for record in caplog.records] == [
        "shards 2, 5 can't be reached: what belongs there waits and is stored when it can; everything else goes on",
        "shard 2 answers again",
    ]


def test_a_shard_that_answers_and_stores_nothing_is_tried_less_and_less_often(driver: Driver) -> None:
    tries = []
    for second in range(300):
        if 1 not in driver.shards.away():
            driver.shards.note({1})
            tries.append(second)
        driver.seconds(1)
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert gaps[-1] * 1_000 == LOOK_MS_MAX
    driver.seconds((LOOK_MS_MAX + CALM_MS) // 1_000 + 1)
    driver.shards.note({1})
    driver.seconds(1)
    assert driver.shards.away() == frozenset()


def test_a_shard_is_not_asked_by_batches_before_it_has_caught_up(driver: Driver) -> None:
    driver.shards.note({1})
    driver.slices = 3
    waits = []
    while 1 in driver.shards.away():
        driver.clock.advance_ms(LOOK_MS)
        waits.append(driver.shards.step())
    assert waits == [0, 0, LOOK_MS] and driver.caught_up == [1, 1, 1]


def test_what_waits_is_told_whenever_it_has_changed(driver: Driver) -> None:
    driver.seconds(2)
    driver.waiting = Waiting(3, [1], NOW_MS)
    driver.seconds(3)
    driver.waiting = None
    driver.seconds(2)
    assert driver.told == [Waiting(3, [1], NOW_MS), None]


def test_what_waits_is_said_in_words() -> None:
    assert waiting_text(Waiting(1, [2], 0)) == "1 file waits for shard 2"
    assert waiting_text(Waiting(3, [2, 5], 0)) == "3 files wait for shards 2, 5"
    assert waiting_text(Waiting(3, [], 0)) == "3 files wait for a shard"


def test_a_name_says_why_a_file_is_read_again() -> None:
    assert repeated_name("T.1.json.a+b") == "T.1.json.a+b=.1"
    assert repeated_name("T.1.json.a+b=.1", has_waited=True) == "T.1.json.a+b=.2w"
    assert repeated_name("T.1.json.a+b=.2w") == "T.1.json.a+b=.3"


def test_a_writing_after_the_first_counts_what_it_adds() -> None:
    total = Summary(lines=3, stored=3, waiting=2, lacking=["T 1"])
    total.write_again(Summary(stored=2))
    assert (total.lines, total.stored, total.stored_again, total.waiting, total.lacking) == (5, 5, 0, 0, [])
    total = Summary(lines=5, stored=5)
    total.write_again(Summary(stored=1, waiting=2, lacking=["T 1"]))
    assert (total.lines, total.stored, total.stored_again, total.lacking) == (5, 6, 1, ["T 1"])


def test_the_rejects_of_a_file_that_is_read_again_are_not_written_again_nor_are_its_lines_counted(
    server: RealServer, tmp_path: Path
) -> None:
    redis = RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}", shards=3)
    settings = WriterSettings(redis, "source", str(tmp_path / "rejects"), 2)

    def write(is_repeated: bool) -> Summary:
        name = f"{TOKEN}.1.json.a+jsonl{'=.1w' if is_repeated else ''}"
        row = dict(zip(FILE_ROW.names, (LINES + b"no json\n", name, 0), strict=True))
        return PartitionWriter(settings).write([pa.RecordBatch.from_pylist([row])])

    assert write(False) == Summary(lines=6, stored=5, rejected=1, first_reject="a.jsonl line 6, not_json")
    [rejects] = (tmp_path / "rejects").glob("*.jsonl")
    rejects.unlink()
    assert write(True) == Summary()
    assert not [*(tmp_path / "rejects").glob("*.jsonl")]
