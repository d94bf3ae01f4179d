"""Cold messages come into Redis before they are due, each once, whatever happens to those who bring them."""

import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config import ColdSettings
from pipeline.core.cold import cold_place
from pipeline.core.errors import ColdUnavailable, ConfigError, PipelineError, StoreProtocolError
from pipeline.ingest import hydration
from pipeline.ingest.cold_folder import DONE_NAME, IDENTITY_NAME, SOURCE_ID, ColdName
from pipeline.ingest.cold_opening import open_cold
from pipeline.ingest.cold_writer import ColdWriter
from pipeline.ingest.hydration import Hydrator
from pipeline.ingest.summary import Summary
from pipeline.ingest.transactions import PartQueue
from pipeline.store.base import NO_MARKER, NO_ROWS, MarkerMove, MessageRows, Scheduled, State, Transaction
from pipeline.store.shards import open_shards
from tests.chaos.proxy import Cut, Exchange, Proxy, after, before, naming, reply_with, running
from tests.ingest.cold_world import HOUR_MS, ColdWorld
from tests.servers import RealServer


@pytest.fixture
def world(server: RealServer, tmp_path: Path) -> ColdWorld:
    return ColdWorld(server, tmp_path)


@pytest.fixture
def proxy(server: RealServer, tmp_path: Path) -> Iterator[Proxy]:
    with closing(Proxy(server.folder / "s", server.folder / f"p-{uuid.uuid4().hex[:8]}")) as proxy:
        yield proxy


def test_what_is_due_long_after_its_file_came_in_is_counted_and_in_a_file(world: ColdWorld) -> None:
    lines = [world.line("soon", 0.9), world.line("cold", 1), world.line("keyed", 5.5, "k"), world.line("colder", 5.7)]
    assert world.write(lines, [world.line("later", 30)]) == Summary(lines=5, stored=5)
    assert world.waiting() == {"soon": 0.9 * HOUR_MS}
    assert world.cold_hours() == {1: 1, 5: 2, 30: 1}
    assert world.places() == {"k": cold_place(f"{world.token(1)}00000003", world.now_ms + round(5.5 * HOUR_MS))}
    assert world.counters() == {"stored": 5}
    due = [world.now_ms + hours for hours in (HOUR_MS, round(5.7 * HOUR_MS), 30 * HOUR_MS)]
    assert world.names() == [ColdName(world.token(1), 0, *due[:2]), ColdName(world.token(2), 0, due[2], due[2])]


def test_messages_come_in_the_hour_that_begins_within_the_lead_and_no_sooner(world: ColdWorld) -> None:
    world.write([world.line(str(n), 1.5 + n) for n in range(6)])
    hydrator = world.hydrator(2)
    assert hydrator.look()
    came = (hydrator.until_ms - world.now_ms) // HOUR_MS - 1
    assert came in (2, 3), "up to the end of the hour after the next, if the test did not begin in the hour before"
    assert world.waiting() == {str(n): (1.5 + n) * HOUR_MS for n in range(came)}
    assert world.cold_hours() == {1 + n: 1 for n in range(came, 6)}
    [name] = world.names()
    assert world.client.get(world.shards[0].marker(SOURCE_ID, name.marker_id)) not in (None, b"all")
    hydrator.leave()
    assert world.hydrate() == 6 - came
    assert world.waiting() == {str(n): (1.5 + n) * HOUR_MS for n in range(6)}
    assert world.cold_hours() == {}
    assert (world.names(), world.client.get(world.shards[0].marker(SOURCE_ID, name.marker_id))) == ([], b"all")
    assert world.counters() == {"stored": 6}, "they are not stored a second time"


def test_a_look_goes_through_the_names_as_often_with_many_begun_files_as_with_one(
    world: ColdWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are begun are not merged, so they add up."""

    class Names(list[ColdName]):
        walks = 0

        def __iter__(self) -> Iterator[ColdName]:
            Names.walks += 1
            return super().__iter__()

    monkeypatch.setattr(world.folder.__class__, "names", lambda self: Names(names))
    walks = []
    for begun in (1, 20):
        names = [
            ColdName(world.token(n), 0, world.now_ms + 90 * HOUR_MS, world.now_ms + 90 * HOUR_MS) for n in range(begun)
        ]
        hydrator = world.hydrator(2)
        hydrator._next_due_ms = dict.fromkeys(names, world.now_ms + 95 * HOUR_MS)
        Names.walks = 0
        assert hydrator.look() and len(hydrator._next_due_ms) == begun
        walks.append(Names.walks)
        hydrator.leave()
    assert walks[0] == walks[1]


def test_a_file_of_which_nothing_is_due_is_not_opened(world: ColdWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.write([world.line("a", 1.5), world.line("b", 50)], [world.line("c", 60)])
    hydrator = world.hydrator(2)
    assert hydrator.look()
    monkeypatch.setattr(hydration, "ColdFile", None)
    assert hydrator.look()
    assert list(world.waiting()) == ["a"]
    hydrator.leave()


def test_so_many_messages_are_in_memory_and_no_more(world: ColdWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.write(*[[world.line(f"{file}-{n}", 3) for n in range(2)] for file in range(7)])
    sizes: list[int] = []
    store = ColdWriter.store

    def counted(self: ColdWriter, queues: list[PartQueue]) -> None:
        sizes.append(sum(map(len, queues)))
        store(self, queues)

    monkeypatch.setattr(ColdWriter, "store", counted)
    monkeypatch.setattr(hydration, "ROWS_AT_ONCE", 3)
    assert world.hydrate() == len(world.waiting()) == 14
    assert sizes == [4, 4, 4, 2]
    assert world.names() == []


def test_what_was_due_long_ago_comes_as_well(world: ColdWorld) -> None:
    world.now_ms -= 1000 * HOUR_MS
    world.write([world.line("late", 2), world.line("later", 3)])
    assert world.hydrate(0.1) == 2
    assert world.names() == []


def test_a_key_is_stored_once_hot_or_cold(world: ColdWorld) -> None:
    world.write([world.line("first", 9, "k"), world.line("second", 3, "l")])
    again = [world.line("third", 2, "k"), world.line("fourth", 0.1, "k"), world.line("fifth", 4, "l")]
    assert world.write(again) == Summary(lines=3, duplicates=3)
    assert world.cold_hours() == {9: 1, 3: 1}
    assert world.hydrate() == 2
    assert world.waiting() == {"first": 9 * HOUR_MS, "second": 3 * HOUR_MS}
    assert world.places() == {
        key: f"{world.token(1)}0000000{line}{world.now_ms + hours * HOUR_MS}".encode()
        for key, line, hours in (("k", 1, 9), ("l", 2, 3))
    }
    assert world.write([world.line("sixth", 9, "k")]) == Summary(lines=1, duplicates=1)
    assert world.hydrate() == 0 and world.names() == []


def test_of_one_key_twice_in_a_file_the_first_to_be_due_counts(world: ColdWorld) -> None:
    lines = [world.line("cold", 3, "k"), world.line("hot", 0.5, "k"), world.line("a", 4, "l"), world.line("b", 3, "l")]
    assert world.write(lines) == Summary(lines=4, stored=2, duplicates=2)
    assert world.hydrate() == 1
    assert world.waiting() == {"hot": HOUR_MS // 2, "b": 3 * HOUR_MS}
    assert world.cold_hours() == {}


def test_lines_of_files_cancel_and_replace_what_is_cold(world: ColdWorld) -> None:
    world.write([world.line(f"old {key}", 3, key) for key in "abc"])
    changes = [{"cancel": "a"}, world.line("new b", 8, "b", replace=True), {"cancel": "other"}]
    assert world.write(changes) == Summary(lines=3, cancelled=2, replaced=1)
    assert world.waiting() == {"new b": 8 * HOUR_MS}, "a replacement stays in Redis"
    assert world.cold_hours() == {3: 1}
    assert world.write([world.line("a again", 3, "a")]) == Summary(lines=1, duplicates=1)
    assert world.hydrate() == 1
    assert world.waiting() == {"new b": 8 * HOUR_MS, "old c": 3 * HOUR_MS}
    assert world.names() == [] and world.cold_hours() == {}
    assert world.counters() == {"stored": 3, "cancelled": 1, "duplicates": 1}


def test_of_thousands_of_keys_those_that_lead_elsewhere_do_not_come(world: ColdWorld) -> None:
    world.settings = replace(world.settings, transaction_messages=5_000)
    world.write([world.line(f"m{n}", 3, f"k{n}") for n in range(2_500)])
    gone = (0, 999, 1_000, 1_001, 2_000, 2_499)
    for n in gone:
        assert world.by_id().cancel(f"k{n}").state is State.CANCELLED
    assert world.hydrate() == 2_500 - len(gone)
    assert world.waiting().keys() == {f"m{n}" for n in range(2_500) if n not in gone}
    assert world.cold_hours() == {} and world.names() == []


def test_what_is_cancelled_while_it_is_on_its_way_does_not_come(world: ColdWorld, proxy: Proxy) -> None:
    world.write([world.line(f"m{n}", 3, f"k{n}") for n in range(4)])
    keys = iter("213")
    trap = proxy.trap(running("hydrate"), before(lambda: world.by_id().cancel(f"k{next(keys)}")), 1, 3)
    hydrator = world.hydrator(url=proxy.url)
    assert hydrator.look() and trap.was_sprung
    assert world.waiting() == {"m0": 3 * HOUR_MS} and world.places().keys() == {"k0"}
    assert world.cold_hours() == {} and world.names() == []
    hydrator.leave()


def test_of_one_key_several_times_in_a_transaction_what_its_place_says_comes_once(world: ColdWorld) -> None:
    world.write([world.line("right", 3, "k"), world.line("other", 3, "l")])
    due_ms = world.now_ms + 3 * HOUR_MS
    ids = [f"{world.token(1)}{line:08x}" for line in (9, 1, 1, 2)]
    keys, due = pa.array([b"k", b"k", b"k", b"l"]), np.full(4, due_ms)
    members = [f"{each}m{text}".encode() for each, text in zip(ids, ("wrong", "right", "right", "other"), strict=True)]
    places = MessageRows(due, pa.array([cold_place(each, due_ms) for each in ids]), keys)
    rows = MessageRows(due, pa.array(members), keys)
    move = MarkerMove("part", NO_MARKER, "all")
    store = open_shards(world.client, world.redis)[0]
    assert store.hydrate(SOURCE_ID, Transaction([move], NO_ROWS, rows, 0, cold_identified=places)) == Scheduled(2)
    assert world.waiting() == {"right": 3 * HOUR_MS, "other": 3 * HOUR_MS}
    assert world.cold_hours() == {}


@pytest.mark.parametrize("horizon_hours", [0.5, 2, 100])
def test_a_replay_splits_as_before_whatever_the_horizon_is_now(
    world: ColdWorld, monkeypatch: pytest.MonkeyPatch, horizon_hours: float
) -> None:
    lines = [world.line(str(n), 0.2 + 0.2 * n, f"k{n}" if n % 3 == 0 else "") for n in range(20)]
    other = replace(world.settings, cold=replace(world.place, horizon_ms=round(horizon_hours * HOUR_MS)))
    other = replace(other, transaction_messages=3)
    for transactions in range(1, 6):
        token = world.token(1000 + transactions)
        texts = [{**each, "message": f"{token} {each['message']}"} for each in lines]
        if "id" in texts[0]:
            texts = [{**each, **({"id": each["id"] + token} if "id" in each else {})} for each in texts]
        with suppress(StoreProtocolError), monkeypatch.context() as patch:
            fail_after(patch, transactions)
            world.write(texts, token=token)
        done = world.write(texts, token=token, settings=other)
        assert done.stored + done.duplicates == 20
        assert len([name for name in world.names() if name.token == token]) == 1
    waited = sum(world.cold_hours().values())
    assert world.hydrate() == waited
    assert len(world.waiting()) == 100 and world.cold_hours() == {} and world.names() == []
    assert world.counters() == {"stored": 100}


def fail_after(patch: pytest.MonkeyPatch, transactions: int) -> None:
    """Let the writer die after so many transactions."""
    from pipeline.store.redis_store import RedisStore

    schedule, left = RedisStore.schedule, [transactions]

    def counted(self: RedisStore, *arguments: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise StoreProtocolError("the task dies here")
        return schedule(self, *arguments)  # type: ignore[arg-type]

    patch.setattr(RedisStore, "schedule", counted)


def test_what_is_due_before_its_file_is_stored_whole_comes_when_it_is(
    world: ColdWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer dies, and goes on when messages of it are due: those that are not stored yet are not taken for cancelled ones."""
    lines = [world.line(str(n), 2 + n / 10, f"k{n}" if n % 2 else "") for n in range(20)]
    with pytest.raises(StoreProtocolError), monkeypatch.context() as patch:
        fail_after(patch, 2)
        world.write(lines, token=world.token(7))
    stored = sum(world.cold_hours().values())
    assert 0 < stored < 20
    hydrator = world.hydrator()
    for _ in range(2):
        assert hydrator.look()
        assert sorted(world.waiting(), key=int) == [str(n) for n in range(stored)]
        assert world.cold_hours() == {} and len(world.names()) == 1
    deliver_all(world)
    assert world.write(lines, token=world.token(7)) == Summary(lines=20, stored=20 - stored, duplicates=stored)
    assert hydrator.look()
    assert sorted(world.waiting(), key=int) == [str(n) for n in range(stored, 20)]
    assert world.cold_hours() == {} and world.names() == []


def test_a_young_file_whose_marker_a_failover_undid_waits_until_it_is_read_again(world: ColdWorld) -> None:
    world.write([world.line("a", 3), world.line("b", 3, "k")], token=world.token(7))
    world.client.delete(
        world.shards[0].marker("source", world.token(7)), world.shards[0].cold(), world.shards[0].places()
    )
    hydrator = world.hydrator()
    hydrator._marker_keep_ms = 3_600_000
    assert hydrator.look() and world.waiting() == {}
    world.write([world.line("a", 3), world.line("b", 3, "k")], token=world.token(7))
    assert hydrator.look()
    assert sorted(world.waiting()) == ["a", "b"] and world.cold_hours() == {} and world.names() == []


def test_a_file_that_is_written_again_after_it_was_brought_in_brings_nothing(world: ColdWorld) -> None:
    world.write([world.line("a", 3), world.line("b", 4, "k")])
    [name] = world.names()
    content = Path(world.folder.path(name)).read_bytes()
    assert world.hydrate() == 2
    deliver_all(world)
    Path(world.folder.path(name)).write_bytes(content)
    assert world.hydrate() == 0
    assert world.waiting() == {} and world.names() == []


def deliver_all(world: ColdWorld) -> None:
    for keys in world.shards:
        for start in world.client.zrange(keys.buckets(), 0, -1):
            world.client.unlink(keys.bucket(int(start)))
        world.client.unlink(keys.buckets(), keys.places())


def test_messages_begun_under_a_folder_that_is_not_set_any_more_are_not_lost(
    world: ColdWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [world.line("a", 3, "k"), world.line("b", 4)]
    with pytest.raises(StoreProtocolError), monkeypatch.context() as patch:
        fail_after(patch, 1)
        world.write(lines, token=world.token(7))
    with pytest.raises(PipelineError, match=r"^Messages of a file were on their way into the cold folder"):
        world.write(lines, token=world.token(7), settings=replace(world.settings, cold=None))
    assert world.write(lines, token=world.token(7)) == Summary(lines=2, stored=2)


class TestFolder:
    def test_a_folder_that_is_away_is_waited_for(self, world: ColdWorld) -> None:
        world.write([world.line("a", 3)])
        away = world.path.rename(world.path.with_name("away"))
        done: list[Summary] = []
        writing = threading.Thread(target=lambda: done.append(world.write([world.line("b", 3)])), daemon=True)
        writing.start()
        with pytest.raises(ColdUnavailable, match=IDENTITY_NAME):
            world.hydrator().look()
        assert not done
        away.rename(world.path)
        writing.join(60)
        assert done == [Summary(lines=1, stored=1)]
        assert world.hydrate() == 2

    def test_folder_and_namespace_know_each_other(self, world: ColdWorld, server: RealServer, tmp_path: Path) -> None:
        settings = ColdSettings(folder=str(world.path))
        assert open_cold(world.client, world.redis, settings) == replace(world.place, horizon_ms=24 * HOUR_MS)
        other = ColdSettings(folder=str(tmp_path / "new"))
        with pytest.raises(ColdUnavailable, match=f"^The cold folder .*new has no {IDENTITY_NAME}"):
            open_cold(world.client, world.redis, other)
        elsewhere = replace(world.redis, namespace="elsewhere")
        with pytest.raises(ColdUnavailable, match=r"belongs to the namespace test-.*, not to elsewhere"):
            open_cold(world.client, elsewhere, settings)
        assert open_cold(world.client, elsewhere, other)
        with pytest.raises(ConfigError, match=r"cold\.lead_hours \(24\) must be less than cold\.horizon_hours \(24\)"):
            open_cold(world.client, world.redis, replace(settings, lead_hours=24.0))

    def test_a_folder_that_redis_has_forgotten_is_taken_only_if_it_is_empty(self, world: ColdWorld) -> None:
        settings = ColdSettings(folder=str(world.path))
        meta = world.shards[0].meta()
        world.client.hdel(meta, "cold_folder_id")
        assert open_cold(world.client, world.redis, settings) == replace(world.place, horizon_ms=24 * HOUR_MS)
        world.write([world.line("a", 3)])
        world.client.hdel(meta, "cold_folder_id")
        with pytest.raises(ColdUnavailable, match="has messages of which Redis knows nothing"):
            open_cold(world.client, world.redis, settings)

    def test_without_a_folder_nothing_may_wait_in_one(self, world: ColdWorld) -> None:
        assert open_cold(world.client, world.redis, ColdSettings()) is None
        world.write([world.line("a", 3)])
        with pytest.raises(
            ColdUnavailable, match=r"^Messages of the namespace .* wait in a cold folder, and cold\.folder"
        ):
            open_cold(world.client, world.redis, ColdSettings())
        world.hydrate()
        assert open_cold(world.client, world.redis, ColdSettings()) is None

    def test_a_damaged_file_keeps_no_other_from_coming(self, world: ColdWorld) -> None:
        world.write([world.line("a", 3)], [world.line("b", 3)])
        first = world.names()[0]
        content = Path(world.folder.path(first)).read_bytes()
        Path(world.folder.path(first)).write_bytes(content[:-20])
        hydrator = world.hydrator()
        with pytest.raises(PipelineError, match=f"{re.escape(str(first))} is damaged"):
            hydrator.look()
        assert world.waiting() == {"b": 3 * HOUR_MS} and world.names() == [first]
        assert "is damaged" in hydrator.progress("", 0).problem and not hydrator.progress("", 0).is_done
        Path(world.folder.path(first)).write_bytes(content)
        assert hydrator.look() and hydrator.progress("", 0).problem == ""
        assert sorted(world.waiting()) == ["a", "b"]


class TestSeveral:
    def test_one_at_a_time_has_a_shard(self, world: ColdWorld) -> None:
        world.write([world.line("a", 3)])
        first, second = world.hydrator(), world.hydrator()
        assert first.look() and not second.look()
        assert second.totals.messages == 0
        first.leave()
        assert second.look()
        assert not first.look()
        second.leave()

    def test_two_without_a_lease_bring_each_message_once(
        self, server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pipeline.ingest.hydration.HydratorLease.hold", lambda self: True)
        monkeypatch.setattr(hydration, "FILES_AT_ONCE", 2)
        world = ColdWorld(server, tmp_path, shards=3)
        files = [
            [world.line(f"{n}-{m}", 1 + m % 7, f"k{n}-{m}" if m % 4 == 0 else "") for m in range(40)] for n in range(12)
        ]
        world.write(*files)
        each = [world.hydrator() for _ in range(3)]
        threads = [threading.Thread(target=one.look, daemon=True) for one in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum(one.totals.messages for one in each) == 480 == len(world.waiting())
        assert world.cold_hours() == {} and world.names() == []


class TestFaults:
    """A hydrator behind a proxy; its transactions have at most five messages."""

    @pytest.fixture
    def lines(self, world: ColdWorld) -> int:
        world.write(
            [world.line(f"a{n}", 1 + n % 5, f"k{n}" if n % 3 == 0 else "") for n in range(30)],
            [world.line(f"b{n}", 2) for n in range(8)],
        )
        return 38

    def behind(self, world: ColdWorld, proxy: Proxy) -> Hydrator:
        return world.hydrator(url=proxy.url)

    def expect_each_once(self, world: ColdWorld, lines: int) -> None:
        assert world.hydrate() >= 0
        assert len(world.waiting()) == lines
        assert world.cold_hours() == {} and world.names() == []
        assert world.counters() == {"stored": lines}

    @pytest.mark.parametrize("stored", [False, True])
    def test_it_dies_at_each_transaction(self, world: ColdWorld, proxy: Proxy, lines: int, stored: bool) -> None:
        died = 0
        die = reply_with(b"-ERR it dies here\r\n")

        def die_when_stored(exchange: Exchange) -> None:
            exchange.forward()
            die(exchange)

        while world.names():
            trap = proxy.trap(running("hydrate"), die_when_stored if stored else die, first=1 if stored else 2)
            hydrator = self.behind(world, proxy)
            try:
                hydrator.look()
            except StoreProtocolError:
                died += 1
            hydrator.leave()
            proxy.remove(trap)
        assert died >= 6
        self.expect_each_once(world, lines)

    def test_replies_are_lost(self, world: ColdWorld, proxy: Proxy, lines: int) -> None:
        def lose(exchange: Exchange) -> None:
            exchange.forward()
            raise Cut

        traps = [proxy.trap(running("hydrate"), lose, first=number) for number in (1, 3, 6)]
        hydrator = self.behind(world, proxy)
        assert hydrator.look()
        assert all(trap.was_sprung for trap in traps)
        hydrator.leave()
        self.expect_each_once(world, lines)

    @pytest.mark.parametrize("at", ["WATCH", "hydrate", "behind"])
    def test_another_one_overtakes_it(self, world: ColdWorld, proxy: Proxy, lines: int, at: str) -> None:
        def overtake() -> None:
            world.client.delete(world.shards[0].hydrator())
            other = world.hydrator()
            other.look()
            other.leave()
            for text in world.waiting():
                seen.add(text)
            deliver_all(world)

        seen: set[str] = set()
        matches = naming("WATCH") if at == "WATCH" else running("hydrate")
        trap = proxy.trap(matches, (after if at == "behind" else before)(overtake), first=2)
        hydrator = self.behind(world, proxy)
        hydrator.look()
        assert trap.was_sprung
        world.hydrate()
        assert len(seen) + len(world.waiting()) == lines and not seen & world.waiting().keys()
        assert world.cold_hours() == {} and world.names() == []

    def test_what_a_failover_undid_comes_again_from_the_files_that_are_done(self, world: ColdWorld, lines: int) -> None:
        client, pattern = world.server.client(), f"{{{world.redis.namespace}:*"
        then = {key: client.dump(key) for key in client.keys(pattern)}
        hydrator = world.hydrator(archive_ms=600_000)
        assert hydrator.look()
        assert world.names() == [] and len(world.waiting()) == lines
        client.delete(*client.keys(pattern))
        for key, value in then.items():
            client.restore(key, 0, value)
        hydrator.leave()
        assert hydrator.look() and world.waiting() == {}
        assert hydrator.bring_back(0) == 2
        assert hydrator.look()
        assert len(world.waiting()) == lines and world.cold_hours() == {}
        assert len(world.folder.done_minutes()) in (1, 2)
        assert hydrator.bring_back(0) == 2 and hydrator.look()
        assert len(world.waiting()) == lines
        hydrator.forget_done()
        assert len(world.folder.done_minutes()) in (1, 2)
        hydrator._archive_ms = -120_000
        hydrator.forget_done()
        assert world.folder.done_minutes() == []
        assert not any(Path(world.folder.path(DONE_NAME)).iterdir())

    def test_a_file_stays_while_its_marker_does_not_say_that_all_is_there(
        self, world: ColdWorld, proxy: Proxy, lines: int
    ) -> None:
        """A server with weak settings comes back without its last writes, just before the file is to be deleted."""
        marker_of = [world.shards[0].marker(SOURCE_ID, name.marker_id) for name in world.names()]

        def lose() -> None:
            if world.client.mget(marker_of) == [b"all", b"all"]:
                world.client.delete(*marker_of)

        proxy.trap(naming("MGET"), before(lose), last=float("inf"))
        hydrator = self.behind(world, proxy)
        hydrator.look()
        assert len(world.names()) == 2 and len(world.waiting()) == lines

    def test_a_key_in_the_way_moves_no_marker(self, world: ColdWorld, lines: int) -> None:
        start = (world.now_ms + HOUR_MS) // 600_000 * 600_000
        world.client.set(world.shards[0].bucket(start), "not ours")
        with pytest.raises(StoreProtocolError, match="not ours"):
            world.hydrate()
        world.client.delete(world.shards[0].bucket(start))
        world.client.delete(world.shards[0].hydrator())
        self.expect_each_once(world, lines)


def test_shards_have_files_of_their_own(server: RealServer, tmp_path: Path) -> None:
    world = ColdWorld(server, tmp_path, shards=3)
    world.write([world.line(f"a{n}", 2, f"k{n}") for n in range(30)], [world.line(f"b{n}", 3) for n in range(5)])
    assert {name.shard for name in world.names() if name.token == world.token(1)} == {0, 1, 2}
    assert len([name for name in world.names() if name.token == world.token(2)]) == 1
    assert world.hydrate() == 35 and len(world.waiting()) == 35
    assert world.cold_hours() == {}
