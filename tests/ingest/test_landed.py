"""Which landing files are stored: what a batch has to bring, and what may be deleted."""

import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError, PipelineError, StoreUnavailable
from pipeline.core.ids import encode_token
from pipeline.ingest import landed as module
from pipeline.ingest.checkpoint import CheckpointRoller
from pipeline.ingest.landed import LandingFiles
from tests.clock import ManualClock

NOW_MS = 1_700_000_060_000


class World:
    """A landing folder, Spark's log of the files of each batch, and the markers in Redis."""

    def __init__(self, folder: Path) -> None:
        self.landing, self.checkpoint = folder / "landing", folder / "checkpoint"
        self.landing.mkdir()
        self.markers: dict[str, str] = {}
        self.answers = True
        self.clock = ManualClock(NOW_MS)
        self.files = LandingFiles(self.landing, self.checkpoint, self.markers_of, self.clock)

    def markers_of(self, tokens: Sequence[str]) -> list[str]:
        if not self.answers:
            raise StoreUnavailable("Redis does not answer.")
        return [self.markers.get(token, "") for token in tokens]

    def land(self, *ages_ms: int, content: str = "{}\n") -> list[str]:
        names = [f"{encode_token(NOW_MS - age_ms, 7)}.1.json.a+json" for age_ms in ages_ms]
        for name in names:
            (self.landing / name).write_text(content)
        return names

    def plan(self, batch_id: int, names: Sequence[str], is_committed: bool = False) -> None:
        """Write what Spark writes before a batch runs, and when it is over."""
        entries = [json.dumps({"path": f"file:///in/{name}", "timestamp": 1, "batchId": batch_id}) for name in names]
        logs = {f"sources/0/{batch_id}": entries, f"offsets/{batch_id}": ["{}", json.dumps({"logOffset": batch_id})]}
        if is_committed:
            logs[f"commits/{batch_id}"] = ["{}"]
        for path, lines in logs.items():
            (self.checkpoint / path).parent.mkdir(parents=True, exist_ok=True)
            (self.checkpoint / path).write_text("\n".join(["v1", *lines]))

    def here(self) -> list[str]:
        return sorted(path.name for path in self.landing.iterdir())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def tokens(names: Sequence[str]) -> list[str]:
    return [name[:14] for name in names]


def test_files_are_deleted_when_the_batch_that_stored_them_is_committed(world: World) -> None:
    first, second, waiting = world.land(3, 2), world.land(1), world.land(0)
    world.plan(0, first)
    world.plan(1, second)
    world.files.check_batch(0, tokens(first))
    world.files.check_batch(1, tokens(second))
    assert world.here() == sorted([*first, *second, *waiting])
    world.files.delete_batch(0)
    assert world.here() == sorted([*second, *waiting])
    world.files.delete_batch(1)
    world.files.delete_batch(2)
    assert world.here() == waiting


def test_a_batch_with_a_file_that_nobody_has_read_fails_and_deletes_nothing(world: World) -> None:
    read, unread = world.land(2), world.land(1, 0)
    world.plan(0, [*read, *unread])
    with pytest.raises(
        PipelineError, match=rf"left 2 files of batch 0 unread.*{re.escape(min(unread))}.*nothing was deleted"
    ):
        world.files.check_batch(0, tokens(read))
    assert world.here() == sorted([*read, *unread])
    world.files.check_batch(0, tokens([*read, *unread]))


def test_an_empty_file_is_no_row_and_missed_by_nobody(world: World) -> None:
    names = world.land(1, content="")
    world.plan(0, names)
    world.files.check_batch(0, [])


def test_a_replay_does_without_files_that_are_stored_and_gone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    gone, read = world.land(2), world.land(1)
    world.plan(0, [*gone, *read])
    (world.landing / gone[0]).unlink()
    world.markers = {gone[0][:14]: "all"}
    world.files.check_batch(0, tokens(read))
    assert caplog.records == []
    world.answers = False
    world.files.check_batch(0, tokens(read))
    assert caplog.records == []


def test_a_replay_of_files_whose_markers_are_forgotten_too_does_not_fail_for_ever(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    gone = world.land(2, 1)
    world.plan(0, gone)
    shutil.rmtree(world.landing)
    world.files.check_batch(0, [])
    [record] = caplog.records
    assert record.getMessage().startswith(f"2 files of batch 0, such as {min(gone)}, are gone")


def test_a_batch_is_compared_with_its_own_files_only(world: World) -> None:
    first, second = world.land(3), world.land(2)
    world.plan(0, first)
    world.plan(1, second)
    world.files.check_batch(1, tokens(second))


def test_a_checkpoint_that_can_not_be_read_fails_the_batch(world: World) -> None:
    with pytest.raises(PipelineError, match="can't be read"):
        world.files.check_batch(0, [])


def test_a_file_of_somebody_else_in_the_landing_folder_fails_no_batch(world: World) -> None:
    names = world.land(1)
    (world.landing / "abcdefghijkl!!.x.json.foo").write_text("{}")
    world.plan(0, [*names, "abcdefghijkl!!.x.json.foo"])
    world.files.check_batch(0, tokens(names))
    world.files.delete_batch(0)
    assert world.here() == ["abcdefghijkl!!.x.json.foo"]


def test_a_file_that_can_not_be_deleted_keeps_no_other_and_does_not_wait(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored = world.land(4_000, 3_000, 2_000, 1_000)
    refused = stored[::2]
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name in refused:
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    world.plan(0, stored)
    world.files.check_batch(0, tokens(stored))
    world.files.delete_batch(0)
    assert world.here() == refused
    assert world.files.oldest_waiting_ms() == 0, "they are stored"
    [record] = caplog.records
    assert re.match(
        r"Landing files that are stored, 2 in all, can't be deleted \(.*Operation not permitted.*\); the next start deletes them\.",
        record.getMessage(),
    )
    world.markers = dict.fromkeys(tokens(stored), "all")
    restarted = LandingFiles(world.landing, world.checkpoint, world.markers_of, ManualClock(NOW_MS))
    assert restarted.delete_marked(stored) == []
    assert restarted.oldest_waiting_ms() == 0


def test_without_a_local_checkpoint_the_workers_are_believed(world: World) -> None:
    files = LandingFiles(world.landing, None, world.markers_of, ManualClock())
    names = world.land(2, 1)
    files.check_batch(7, tokens(names[:1]))
    files.delete_batch(7)
    assert world.here() == names[1:]


def test_what_a_crash_has_left_is_deleted_if_its_marker_says_that_it_is_stored_whole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 10)
    whole, half, unmarked, unread = world.land(9, 8, 7, 6)
    [long] = world.land(5, content="x" * 11)
    [empty] = world.land(4, content="")
    world.markers = {whole[:14]: "all", half[:14]: "5 00000001", long[:14]: "all", unread[:14]: "all"}
    named = [whole, half, unmarked, long, empty, "gone"]
    world.answers = False
    assert world.files.delete_marked(named) == []
    assert len(world.here()) == 6
    world.answers = True
    assert world.files.delete_marked(named) == [half, unmarked, long]
    assert world.here() == [half, unmarked, unread, long]


def test_a_checkpoint_that_names_an_unstored_file_as_read_is_thrown_away_so_that_it_is_read(world: World) -> None:
    stored, unstored = world.land(2, 1)
    world.plan(0, [stored, unstored], is_committed=True)
    world.markers = {stored[:14]: "all", unstored[:14]: "all"}
    roller = CheckpointRoller(world.checkpoint, world.files.delete_marked, 10, ManualClock())
    del world.markers[unstored[:14]]
    assert roller.prepare() == 2
    assert (world.here(), list(world.checkpoint.iterdir())) == ([unstored], [])


def test_the_oldest_file_that_is_not_stored_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.files.oldest_waiting_ms() == 0
    stored = world.land(9_000)
    world.plan(0, stored)
    (world.landing / ".work-of-the-gatekeeper").touch()
    assert world.files.oldest_waiting_ms() == 9_000
    world.files.check_batch(0, tokens(stored))
    assert world.files.oldest_waiting_ms() == 0, "it is there until the commit, and doesn't count"
    world.land(4_000, 3_000)
    assert world.files.oldest_waiting_ms() == 4_000
    world.files.delete_batch(0)
    monkeypatch.setattr(module, "LISTED_MAX", 4)
    assert world.files.oldest_waiting_ms() == 4_000
    shutil.rmtree(world.landing)
    assert world.files.oldest_waiting_ms() is None


KEPT_MS = 600_000


def archiving_world(folder: Path) -> World:
    world = World(folder)
    world.files = LandingFiles(world.landing, world.checkpoint, world.markers_of, world.clock, KEPT_MS)
    return world


@pytest.fixture
def archiving(tmp_path: Path) -> World:
    return archiving_world(tmp_path)


def store(world: World, batch_id: int, names: Sequence[str]) -> None:
    world.plan(batch_id, names, is_committed=True)
    world.files.check_batch(batch_id, tokens(names))
    world.files.delete_batch(batch_id)
    world.markers.update(dict.fromkeys(tokens(names), "all"))


def archived(world: World) -> list[str]:
    return sorted(path.name for path in (world.landing / ".stored").glob("*/*"))


def waiting(world: World) -> list[str]:
    return [name for name in world.here() if not name.startswith(".")]


def test_stored_files_are_archived_for_a_time_and_read_again_if_they_must_be(archiving: World) -> None:
    first, second, third = archiving.land(3, 2), archiving.land(1), archiving.land(0)
    store(archiving, 0, first)
    archiving.clock.advance_ms(KEPT_MS)
    store(archiving, 1, second)
    archiving.files.forget_archived()
    assert archived(archiving) == sorted([*first, *second]), "to the minute"
    archiving.clock.advance_ms(60_000)
    archiving.files.forget_archived()
    assert (archived(archiving), waiting(archiving)) == (second, third)
    assert archiving.files.read_again(NOW_MS) == "1 file"
    assert (archived(archiving), waiting(archiving)) == ([], sorted([f"{second[0]}=.1", *third]))
    assert archiving.files.oldest_waiting_ms() == KEPT_MS + 60_000 + 1
    again = [name for name in waiting(archiving) if name not in third]
    store(archiving, 2, again)
    assert archiving.files.read_again(0) == "1 file"
    assert waiting(archiving) == sorted([f"{second[0]}=.2", *third])
    assert archiving.files.read_again(0) == ""


def test_only_what_was_stored_since_is_read_again(archiving: World) -> None:
    first, second = archiving.land(3), archiving.land(2)
    store(archiving, 0, first)
    archiving.clock.advance_ms(120_000)
    since_ms = archiving.clock.wall_ms()
    store(archiving, 1, second)
    assert archiving.files.read_again(since_ms) == "1 file"
    assert (archived(archiving), waiting(archiving)) == (first, [f"{second[0]}=.1"])


def test_files_of_a_batch_that_is_not_committed_yet_are_read_again_when_it_is(archiving: World) -> None:
    names = archiving.land(3, 2)
    archiving.plan(0, names)
    archiving.files.check_batch(0, tokens(names))
    assert archiving.files.read_again(0) == "" and waiting(archiving) == sorted(names)
    archiving.files.delete_batch(0)
    assert waiting(archiving) == sorted(f"{name}=.1" for name in names)
    store(archiving, 1, waiting(archiving))
    assert (len(archived(archiving)), waiting(archiving)) == (2, [])


def test_markers_tell_whether_what_was_archived_last_is_still_stored(archiving: World) -> None:
    assert archiving.files.newest_are_stored()
    names = archiving.land(3, 2)
    store(archiving, 0, names)
    restarted = LandingFiles(archiving.landing, None, archiving.markers_of, archiving.clock, KEPT_MS)
    for files in (archiving.files, restarted):
        assert files.newest_are_stored()
        archiving.markers[tokens(names)[1]] = ""
        assert not files.newest_are_stored()
        archiving.answers = False
        assert files.newest_are_stored(), "nothing is known"
        archiving.answers, archiving.markers[tokens(names)[1]] = True, "all"
    archiving.files.read_again(0)
    archiving.markers.clear()
    assert archiving.files.newest_are_stored(), "it is looked after"


def test_a_marker_that_may_be_forgotten_by_now_and_an_empty_file_tell_nothing(archiving: World) -> None:
    [name], [empty] = archiving.land(3), archiving.land(2, content="")
    files = LandingFiles(archiving.landing, None, archiving.markers_of, archiving.clock, KEPT_MS, marked_ms=1_000)
    archiving.markers[tokens([name])[0]] = "all"
    assert files.delete_marked([name, empty]) == []
    restarted = LandingFiles(archiving.landing, None, archiving.markers_of, archiving.clock, KEPT_MS)
    assert files.newest_are_stored() and restarted.newest_are_stored(), "nothing of the empty file was ever stored"
    archiving.markers.clear()
    assert not files.newest_are_stored() and not restarted.newest_are_stored()
    archiving.clock.advance_ms(1_000)
    assert files.newest_are_stored()


def test_what_a_crash_has_left_is_archived_too(archiving: World) -> None:
    names = archiving.land(3, 2)
    archiving.markers[tokens(names)[0]] = "all"
    assert archiving.files.delete_marked(names) == [names[1]]
    assert (archived(archiving), waiting(archiving)) == ([names[0]], [names[1]])


def test_files_that_can_not_be_archived_keep_no_batch_and_are_said_once(
    archiving: World, caplog: pytest.LogCaptureFixture
) -> None:
    names = archiving.land(0, 1)
    archiving.plan(0, names)
    archiving.files.check_batch(0, [name.partition(".")[0] for name in names])
    minute = archiving.landing / module.ARCHIVE_NAME / str(NOW_MS // module.MINUTE_MS)
    minute.touch()  # no folder can be made here
    archiving.files.delete_batch(0)
    assert waiting(archiving) == sorted(names)
    assert [record.message for record in caplog.records if "can't be deleted" in record.message]
    assert archiving.files.oldest_waiting_ms() == 0


def test_an_archive_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / module.ARCHIVE_NAME).symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="is a link"):
        LandingFiles(tmp_path, None, lambda tokens: [], ManualClock(NOW_MS), archive_ms=1)


def test_files_that_are_not_kept_are_deleted(world: World) -> None:
    store(world, 0, world.land(3))
    assert world.here() == [] and world.files.histories is None
    assert world.files.read_again(0) == ""
