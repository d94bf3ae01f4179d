"""What a job does about a failover: the watch says what happened, and what was stored since then is read again."""

import json
import logging
from pathlib import Path

import pytest

from pipeline.core.errors import StoreUnavailable
from pipeline.ingest.repair import Repair
from pipeline.ingest.shard_writer import Summary
from pipeline.store.replication import Failover, FailoverWatch, Position
from tests.clock import ManualClock

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
