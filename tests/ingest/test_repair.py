"""What a job does about a failover: the watch says what happened, and what was stored since then is read again."""

import json
import logging
import uuid
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.config import RedisSettings
from pipeline.core.errors import StoreUnavailable
from pipeline.core.ids import encode_token
from pipeline.ingest.landed import LandingFiles
from pipeline.ingest.repair import Repair
from pipeline.ingest.stores import WriterSettings, open_stores
from pipeline.ingest.summary import Summary
from pipeline.ingest.writer import PartitionWriter
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.replication import Failover, FailoverWatch, Position
from pipeline.store.shards import ShardedMarkers
from pipeline.store.stats import read_stats
from tests.clock import ManualClock
from tests.servers import RealServer

NOW_MS = 1_700_000_000_000


class Files:
    """What was stored, as a list of what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.are_stored = True
        self.kept = "3 files"

    def read_again(self, since_ms: int) -> str:
        self.asked.append(since_ms)
        return self.kept

    def forget_archived(self) -> None:
        self.asked.append("forget")

    def newest_are_stored(self) -> bool:
        return self.are_stored


class World:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "archive" / "histories.json"
        self.clock = ManualClock(NOW_MS)
        self.position: Position | None = Position("a", 1_000, "0", -2)
        self.answers = True
        self.told: list[Failover] = []
        self.start()

    def start(self) -> None:
        self.files = Files()
        self.repair = Repair(
            FailoverWatch([self.read], self.clock), self.files, self.path, self.told.append, self.clock
        )
        self.repair.start()

    def read(self) -> Position | None:
        if not self.answers:
            raise StoreUnavailable("Redis does not answer.")
        return self.position

    def step(self) -> list[object]:
        self.clock.advance_ms(1_000)
        self.files.asked.clear()
        self.repair.step()
        return [*self.files.asked]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_failover_that_undid_something_is_told_and_repaired_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert world.step() == ["forget"]
    world.position = Position("b", 600, "a", 400)
    assert world.step() == [0, "forget"]
    assert world.told == [Failover(NOW_MS + 2_000, 0, 600)]
    assert "undid at least the last 600 bytes" in caplog.text and "3 files" in caplog.text
    assert world.step() == ["forget"]
    assert json.loads(world.path.read_text()) == ["b"]


def test_a_failover_that_undid_nothing_is_no_alarm(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.position = Position("b", 1_200, "a", 1_000)
    assert world.step() == ["forget"]
    assert world.told == [] and not [each for each in caplog.records if each.levelno > logging.INFO]


@pytest.mark.parametrize("kept", ["3 files", ""])
def test_a_restart_of_the_server_is_no_alarm_either_and_looked_into(
    world: World, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world.files.kept = kept
    world.position = Position("b", 0, "0", -2)
    assert world.step() == [0, "forget"]
    assert world.told == [] and ("read again" in caplog.text) == bool(kept)


def test_nothing_is_forgotten_while_a_server_is_away(world: World) -> None:
    world.answers = False
    assert world.step() == []


def test_a_start_notices_what_happened_meanwhile(world: World) -> None:
    world.start()
    assert world.files.asked == [], "the same server"
    world.position = Position("b", 1_200, "a", 1_000)
    world.start()
    assert world.files.asked == [0], "what was written last is not known any more"
    world.start()
    assert world.files.asked == []


def test_a_batch_counts_when_the_servers_that_stored_it_are_there(world: World) -> None:
    world.files.asked.clear()
    assert world.repair.is_there(Summary(histories=["a", "a"]))
    assert not world.repair.is_there(Summary(histories=["a", "b"])), "another writer sees the new server already"
    world.position = Position("b", 1_200, "a", 1_000)
    assert not world.repair.is_there(Summary(histories=["a"]))
    assert world.repair.is_there(Summary(histories=["b"]))
    assert world.files.asked == [], "what was stored before the batch is there"


def test_what_was_stored_with_the_last_batch_is_remembered(world: World) -> None:
    """However long ago the last look was, what a batch stored after it counts as seen."""
    world.position = Position("a", 5_000, "0", -2)
    assert world.repair.is_there(Summary(histories=["a"]))
    world.position = Position("b", 5_000, "a", 4_000)
    assert world.step() == [NOW_MS, "forget"]
    assert world.told[0].undone_bytes == 1_000


def test_servers_that_do_not_tell_are_known_by_markers(world: World) -> None:
    world.position = None
    world.start()
    assert world.repair.is_there(Summary(histories=[""]))
    assert world.step() == ["forget"]
    world.files.are_stored = False
    assert world.step() == [0, "forget"]


@pytest.mark.parametrize("kept", ["3 files", ""])
def test_what_is_lost_without_another_history_is_told_and_read_again(
    world: World, caplog: pytest.LogCaptureFixture, kept: str
) -> None:
    """``FLUSHALL`` changes nothing that a server says of itself."""
    world.files.kept, world.files.are_stored = kept, False
    assert world.step() == [0, "forget"]
    [told] = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "Redis has lost messages" in told and (kept or "send it again") in told


@pytest.mark.parametrize("is_flushed", [True, False])
def test_messages_of_archived_files_come_back_once_after_a_flush_of_the_server(
    server: RealServer, tmp_path: Path, is_flushed: bool
) -> None:
    redis = RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}")
    settings = WriterSettings(redis, "source", str(tmp_path / "rejects"), 100)
    clock, landing, keys = ManualClock(NOW_MS), tmp_path / "landing", keys_of(redis)
    client, markers = connect(redis), ShardedMarkers(open_stores(redis))
    markers_of = partial(markers.markers, "source")
    files = LandingFiles(landing, None, markers_of, clock, archive_ms=600_000)
    repair = Repair(FailoverWatch.of(client, keys, clock), files, None, lambda failover: None, clock)
    repair.start()

    def store_what_is_there(batch_id: int) -> int:
        paths = [str(path) for path in landing.iterdir() if not path.name.startswith(".")]
        rows = {"value": [None] * len(paths), "path": paths, "arrival_ms": [NOW_MS] * len(paths)}
        done = PartitionWriter(settings).write([pa.RecordBatch.from_pydict(rows)])
        files.check_batch(batch_id, done.file_tokens)
        files.delete_batch(batch_id)
        return done.stored

    for number in range(3):
        lines = b"".join(b'{"message":"%d","due":1900000000000}\n' % line for line in range(10))
        (landing / f"{encode_token(NOW_MS, number)}.1.json.a+json").write_bytes(lines)
    assert store_what_is_there(0) == 30
    repair.step()
    if is_flushed:
        server.client().flushall()
    repair.step()
    assert store_what_is_there(1) == (30 if is_flushed else 0)
    repair.step()
    assert store_what_is_there(2) == 0, "nothing is read again twice"
    assert read_stats(client, keys).scheduled == 30


class Servers:
    """Two servers of a cluster, of which one may be away, and a job with little patience."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "archive" / "histories.json"
        self.clock = ManualClock(NOW_MS)
        self.positions = [Position("a", 1_000, "0", -2), Position("x", 1_000, "0", -2)]
        self.away: set[int] = set()
        self.asked = [0, 0]
        self.start()

    def start(self) -> None:
        self.files = Files()
        watch = FailoverWatch([lambda: self.read(0), lambda: self.read(1)], self.clock)
        self.repair = Repair(watch, self.files, self.path, lambda failover: None, self.clock, patience_ms=1)
        self.repair.start()

    def read(self, number: int) -> Position:
        self.asked[number] += 1
        if number in self.away:
            raise StoreUnavailable("Redis does not answer.")
        return self.positions[number]


@pytest.fixture
def servers(tmp_path: Path) -> Servers:
    return Servers(tmp_path)


def test_a_batch_does_not_wait_for_a_server_that_it_did_not_need(servers: Servers) -> None:
    servers.away = {1}
    servers.repair.step()
    servers.asked = [0, 0]
    assert servers.repair.is_there(Summary(histories=["a"]))
    assert servers.asked == [1, 0], "one that is known to be away is not even asked"


def test_a_batch_does_not_count_when_a_server_went_away_that_stored_it(servers: Servers) -> None:
    """What it has of the batch is not known: after a failover that may be less than what it has acknowledged."""
    servers.away = {1}
    assert not servers.repair.is_there(Summary(histories=["a", "x"]))
    assert servers.repair.is_there(Summary(histories=["a"])), "written again, without the shard that is away"
    servers.away = set()
    assert servers.repair.is_there(Summary(histories=["a", "x"]))


def test_a_start_waits_for_no_server_and_notices_later_what_happened_to_one_that_was_away(servers: Servers) -> None:
    servers.away = {1}
    servers.start()
    assert servers.files.asked == [], "the other one is the same"
    servers.repair.step()
    assert json.loads(servers.path.read_text()) == ["a", "x"]
    servers.away, servers.positions[1] = set(), Position("y", 900, "z", 100)
    servers.repair.step()
    assert servers.files.asked == [0, "forget"] and json.loads(servers.path.read_text()) == ["a", "y"]
    servers.repair.step()
    assert servers.files.asked == [0, "forget", "forget"]


def test_what_is_known_of_a_server_that_is_away_stays_when_another_one_has_changed(servers: Servers) -> None:
    servers.away, servers.positions[0] = {1}, Position("b", 900, "z", 100)
    servers.start()
    assert servers.files.asked == [0] and json.loads(servers.path.read_text()) == ["b", "x"]
    servers.away = set()
    servers.repair.step()
    assert servers.files.asked == [0, "forget"], "the server that was away is the same"


def test_a_batch_that_a_server_stored_which_was_never_seen_counts_when_that_is_there(servers: Servers) -> None:
    servers.away = {1}
    servers.start()
    servers.away = set()
    assert servers.repair.is_there(Summary(histories=["a", "x"]))
