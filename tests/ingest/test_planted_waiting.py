"""The tests of shards that are away notice what they are there for: each protection, taken out, is missed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.ingest import loop
from pipeline.ingest.landed import LandingFiles
from pipeline.ingest.loop import MarkerSweeper
from pipeline.ingest.shard_writer import ShardWriter
from pipeline.ingest.stores import Patience
from pipeline.ingest.waiting import ShardsAway, WaitingFiles
from pipeline.ingest.writer import PartitionWriter
from tests.chaos.test_planted import Mutant, plant
from tests.ingest import test_waiting as waiting
from tests.ingest.test_landed import World
from tests.servers import RealServer
from tests.store import test_layout as layout

pytestmark = pytest.mark.planted

Check = Callable[[Path, RealServer, pytest.MonkeyPatch, pytest.LogCaptureFixture], None]


def of_files(test: Callable[[World], None]) -> Check:
    return lambda folder, server, patch, caplog: test(World(folder))


def of_writers(answers: int) -> Check:
    test = waiting.test_a_writer_leaves_a_shard_that_goes_away_at_any_point_and_the_next_one_stores_the_rest
    return lambda folder, server, patch, caplog: test(answers)


def set_aside(folder: Path, server: RealServer, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    waiting.test_a_file_that_a_shard_lacks_is_set_aside_before_its_batch_is_committed_and_no_other(World(folder), patch)


def portions(folder: Path, server: RealServer, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    waiting.test_what_waited_comes_back_in_portions_so_that_new_files_are_not_behind_all_of_it(World(folder), patch)


def replayed(folder: Path, server: RealServer, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    waiting.test_a_replay_misses_no_file_that_waits_or_was_given_back(World(folder), caplog)


def looked_at(folder: Path, server: RealServer, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    waiting.test_a_shard_that_a_batch_found_away_is_looked_at_each_second_and_then_back(waiting.Driver(), caplog)


def tried_again(folder: Path, server: RealServer, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    waiting.test_a_shard_that_answers_and_stores_nothing_is_tried_less_and_less_often(waiting.Driver())


def rejects(folder: Path, server: RealServer, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    waiting.test_the_rejects_of_a_file_that_is_read_again_are_not_written_again_nor_are_its_lines_counted(
        server, folder
    )


def given_up(folder: Path, server: RealServer, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    waiting.test_a_shard_that_was_given_up_is_not_asked_again_in_this_batch()


def patient(folder: Path, server: RealServer, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    waiting.test_the_patience_is_one_for_all_shards_of_a_batch_and_calls_that_are_answered_take_nothing_of_it()


def of_namespaces(test: Callable[[layout.World], None]) -> Check:
    return lambda folder, server, patch, caplog: test(layout.World(server))


READ_AGAIN = of_files(
    waiting.test_a_file_that_waits_is_read_again_as_soon_as_one_of_its_shards_is_back_and_then_deleted
)
GIVE_BACK, CHECK_BATCH, FINISH = (WaitingFiles, "give_back"), (LandingFiles, "check_batch"), (ShardWriter, "finish")

# By name: the function, old and new text, and what notices it.
FAULTS: dict[str, tuple[Any, str, str, Check]] = {
    "a file is deleted although a shard lacks it": (
        CHECK_BATCH,
        "frozenset(tokens) - shards.keys()",
        "frozenset(tokens)",
        of_files(waiting.test_a_file_that_is_given_back_before_the_commit_of_its_batch_is_told_stays),
    ),
    "files stay in the landing folder until the commit": (CHECK_BATCH, "if shards:", "if False:", set_aside),
    "a power cut undoes that they are set aside": ((WaitingFiles, "put"), "_sync(folder)", "pass", set_aside),
    "files that were not read are not noticed beside others that wait": (
        CHECK_BATCH,
        "self._refuse_unread(batch_id, frozenset(tokens))",
        "pass",
        of_files(waiting.test_files_that_were_not_read_are_noticed_beside_files_that_wait),
    ),
    "a file is not moved back": (GIVE_BACK, "if shards is None or shards - {*away}", "if False", READ_AGAIN),
    "a file waits until all its shards are back": (GIVE_BACK, "shards - {*away}", "not shards & {*away}", READ_AGAIN),
    "a file is moved back under the name that Spark has read": (
        GIVE_BACK,
        "repeated_name(name, has_waited=True)",
        "name",
        READ_AGAIN,
    ),
    "all files come back at once": (GIVE_BACK, "if moved and not all_at_once and (", "if False and (", portions),
    "the next portion comes before the last is read": (
        GIVE_BACK,
        "if self._given and not all_at_once:",
        "if False:",
        portions,
    ),
    "a start does not look what waits": (
        (WaitingFiles, "__init__"),
        "dict.fromkeys(landing_names(self._folder))",
        "{}",
        of_files(waiting.test_a_start_finds_what_another_run_has_left_and_has_it_read_again),
    ),
    "a replay misses files that wait": (
        (LandingFiles, "_refuse_unread"),
        "*self.waiting.tokens(), ",
        "",
        replayed,
    ),
    "markers of files that wait are swept": (
        (loop, "tokens_below"),
        "os.walk(landing, onerror=_fail)",
        "[(landing, [], os.listdir(landing))]",
        of_files(waiting.test_the_markers_of_files_that_wait_or_are_kept_stay),
    ),
    "markers of a file are swept one by one": (
        (MarkerSweeper, "sweep"),
        "max(at_ms, moved_ms.get(token, at_ms))",
        "min(at_ms, moved_ms.get(token, at_ms))",
        of_files(waiting.test_the_markers_of_a_file_stay_as_long_as_that_which_moved_last),
    ),
    "the breaker never closes": (
        (ShardsAway, "step"),
        "each.back_ms = self._clock.monotonic_ms()",
        "pass",
        looked_at,
    ),
    "the breaker never opens": (
        (ShardsAway, "note"),
        "self._known[shard] = _Away(wait_ms, now_ms + wait_ms)",
        "pass",
        looked_at,
    ),
    "a shard that stores nothing is tried every second": (
        (ShardsAway, "note"),
        "min(2 * before.wait_ms, LOOK_MS_MAX)",
        "LOOK_MS",
        tried_again,
    ),
    "a shard that was given up is asked again": (
        (Patience, "retrying"),
        "if shard in self.away:",
        "if False:",
        given_up,
    ),
    "each shard is waited for anew": ((Patience, "retrying"), " - self._waited_ms", "", patient),
    "work takes of the patience": ((Patience, "retrying"), "if waits or shard in self.away:", "if True:", patient),
    "what was not looked at again counts as stored": (FINISH, "self._lacks = True", "pass", of_writers(6)),
    "lines that wait count as done": (
        (ShardWriter, "store_waiting"),
        "self.summary.lines -=",
        "self.summary.lines -= 0 *",
        of_writers(2),
    ),
    "rejects are written each time": ((PartitionWriter, "write"), "if not file.is_repeated:", "if True:", rejects),
    "what an older copy says of topics is written to all": (
        (layout, "adopt_topic_settings"),
        "if shard == 0 and not",
        "if not",
        of_namespaces(layout.test_what_another_shard_says_of_topics_is_written_to_no_third_one),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(
    name: str,
    tmp_path: Path,
    server: RealServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, old, new, check = FAULTS[name]
    plant(Mutant(name, (), {target: ((old, new),)}), monkeypatch)
    with pytest.raises((AssertionError, OSError, ValueError, pytest.fail.Exception)):
        check(tmp_path, server, monkeypatch, caplog)


@pytest.mark.parametrize("check", [*dict.fromkeys(fault[3] for fault in FAULTS.values())])
def test_without_a_fault_it_passes(
    check: Check,
    tmp_path: Path,
    server: RealServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(tmp_path, server, monkeypatch, caplog)
