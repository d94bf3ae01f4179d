"""The tests of cold messages notice what they are there for: each protection, taken out, is missed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import PipelineError
from pipeline.ingest.cold_files import ColdFile
from pipeline.ingest.cold_folder import ColdFolder
from pipeline.ingest.cold_merging import Merger
from pipeline.ingest.hydration import Hydrator
from pipeline.ingest.transactions import PartQueue, Step
from pipeline.store import hydration, schedule
from tests.chaos.test_planted import Mutant, plant
from tests.ingest import test_cold_files as files
from tests.ingest import test_cold_merging as merging
from tests.ingest import test_hydration as hydrating
from tests.ingest.cold_world import ColdWorld
from tests.servers import RealServer

pytestmark = [
    pytest.mark.planted,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

Check = Callable[[RealServer, Path, pytest.MonkeyPatch], None]


def of_world(test: Callable[..., None], *arguments: Any) -> Check:
    return lambda server, path, patch: test(ColdWorld(server, path), *arguments)


def patching(test: Callable[..., None], *arguments: Any) -> Check:
    return lambda server, path, patch: test(ColdWorld(server, path), patch, *arguments)


def of_small_files(test: Callable[..., None], *arguments: Any) -> Check:
    return lambda server, path, patch: test(merging.world_of_small_files(server, path), *arguments)


def patching_small_files(test: Callable[..., None]) -> Check:
    return lambda server, path, patch: test(merging.world_of_small_files(server, path), patch)


def alone(test: Callable[[], None]) -> Check:
    return lambda server, path, patch: test()


REPLAY = patching(hydrating.test_a_replay_splits_as_before_whatever_the_horizon_is_now, 0.5)
ONCE = of_world(hydrating.test_a_key_is_stored_once_hot_or_cold)
CHANGED = of_world(hydrating.test_lines_of_files_cancel_and_replace_what_is_cold)
BETWEEN = patching_small_files(merging.test_a_file_that_is_begun_while_others_merge_it_is_not_merged)
IN_PART = of_world(hydrating.test_messages_come_in_the_hour_that_begins_within_the_lead_and_no_sooner)
PAGES = of_world(hydrating.test_of_thousands_of_keys_those_that_lead_elsewhere_do_not_come)
LATE_PART = patching(hydrating.test_what_is_due_before_its_file_is_stored_whole_comes_when_it_is)

# By name: the function or script, old and new text, and what notices it.
FAULTS: dict[str, tuple[Any, str, str, Check]] = {
    "the marker does not say where cold messages begin": (
        (PartQueue, "marker_at"),
        'return last if self.cold_from_ms is None else f"{last} {self.cold_from_ms}"',
        "return last",
        REPLAY,
    ),
    "cold messages count before their beginning is agreed on": (
        (PartQueue, "end_of"),
        "return self.place if self.marker == NO_MARKER else self._end_of_cold(messages)",
        "return self._end_of_cold(messages)",
        alone(files.test_where_cold_messages_begin_is_agreed_on_before_any_is_counted),
    ),
    "messages count that are in no file": (
        (Step, "opens_cold"),
        "queue.place == queue.cold_begin",
        "queue.place > queue.cold_begin",
        of_world(hydrating.test_what_is_due_long_after_its_file_came_in_is_counted_and_in_a_file),
    ),
    "the keys of cold messages are not remembered": (
        (schedule, "_store"),
        "frame_cold_places(cold_identified, keys.places())",
        'frame_command("PING")',
        ONCE,
    ),
    "cold messages are not counted": (
        "schedule",
        "redis.call('HINCRBY', cold, ARGV[index], ARGV[index + 1])",
        "redis.call('DBSIZE')",
        ONCE,
    ),
    "hours are counted wrong": (
        (schedule, "count_hours"),
        "HOUR_MS)",
        "2 * HOUR_MS)",
        ONCE,
    ),
    "what comes is not counted off": (
        "hydrate",
        "count_cold(cold, ARGV[index], -tonumber(ARGV[index + 1]))",
        "text(1)",
        IN_PART,
    ),
    "a message comes whatever its key leads to": (
        "check_cold",
        "if found[cursor - first + 1] ~= place then",
        "if false then",
        CHANGED,
    ),
    "what leads elsewhere comes all the same": (
        "check_cold",
        "if is_right and #changed == 0 then",
        "if is_right then",
        CHANGED,
    ),
    "only the first page of keys is looked at": (
        "check_cold",
        "for first = FIRST_NAME, #ARGV, PAGE do",
        "for first = FIRST_NAME, FIRST_NAME, PAGE do",
        PAGES,
    ),
    "places are compared with those of the page before": (
        "check_cold",
        "local number = cursor - FIRST_NAME",
        "local number = cursor - first",
        PAGES,
    ),
    "what was checked is not known at the end": (
        "check_cold",
        "  let_be(KEYS, FIRST_WRITTEN, written)\n",
        "",
        of_world(hydrating.test_a_key_is_stored_once_hot_or_cold),
    ),
    "a transaction that was refused moves its markers": (
        "hydrate",
        "written) then\n  return {}\nend",
        "written) then\nend",
        CHANGED,
    ),
    "what is in two files counts twice": (
        (hydration, "_doubles"),
        "return [number for",
        "return [] and [number for",
        of_world(hydrating.test_of_one_key_several_times_in_a_transaction_what_its_place_says_comes_once),
    ),
    "a cancelled message stays counted": ("by_id", "count_cold(cold, cold_hour, -1)", "text(1)", CHANGED),
    "a replaced message stays counted": ("replace", "count_cold(cold, cold_hour, -1)", "text(1)", CHANGED),
    "there is a cursor": (
        (Hydrator, "_look"),
        "self._due_ms(name) < self.until_ms",
        "self.until_ms - HOUR_MS <= self._due_ms(name) < self.until_ms",
        of_world(hydrating.test_what_was_due_long_ago_comes_as_well),
    ),
    "all of a file comes at once": (
        (ColdFile, "rows"),
        '(due_ms, until_due_ms, side="left")',
        "(due_ms, 1 << 60)",
        IN_PART,
    ),
    "a part of a file is taken for all of it": (
        (Hydrator, "_bring"),
        "ColdQueue(rows, marker)",
        "ColdQueue(replace(rows, is_end=True), marker)",
        IN_PART,
    ),
    "what is not stored yet comes": (
        (Hydrator, "_stored"),
        "return int(due_ms), int(line, 16)",
        "return None",
        LATE_PART,
    ),
    "a file whose marker is undone comes before it is read again": (
        (Hydrator, "_is_young"),
        "written_ms is not None and",
        "False and",
        of_world(hydrating.test_a_young_file_whose_marker_a_failover_undid_waits_until_it_is_read_again),
    ),
    "a file goes before its marker says that all is there": (
        (Hydrator, "_retire"),
        "if marker not in GONE:",
        "if False:",
        IN_PART,
    ),
    "any folder will do": (
        (ColdFolder, "check"),
        'if identity is None or identity.get("id") != self.folder_id:',
        "if False:",
        lambda server, path, patch: files.test_a_folder_that_is_away_is_no_empty_one(
            files.open_folder(path / "cold"), path
        ),
    ),
    "a file that is begun is merged": (
        (Merger, "_merge"),
        "if marker == NO_MARKER]",
        "]",
        of_small_files(merging.test_a_file_that_is_begun_is_not_merged),
    ),
    "files are merged whether begun or not": (
        (Merger, "_merge"),
        "for each in tables]",
        "for each in ()]",
        BETWEEN,
    ),
    "a merged file counts before it is valid": (
        (Hydrator, "_bring"),
        "or (name.is_merged and marker == NO_MARKER)",
        "",
        BETWEEN,
    ),
    "a merged file is dropped that may become valid": (
        (Merger, "_drop_invalid"),
        "and self._store.schedule(SOURCE_ID, Transaction([move], NO_ROWS, NO_ROWS, 0))",
        "and move",
        patching_small_files(merging.test_what_is_dropped_can_not_become_valid),
    ),
    "a part is merged that is not stored whole": (
        (Merger, "_read"),
        "if marker not in (ALL_STORED, NO_MARKER):",
        "if False:",
        of_small_files(merging.test_a_part_that_is_not_stored_whole_is_not_merged),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(
    name: str, server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, old, new, check = FAULTS[name]
    plant(Mutant(name, (), {target: ((old, new),)}), monkeypatch)
    with pytest.raises((AssertionError, PipelineError, KeyError, ValueError, pytest.fail.Exception)):
        check(server, tmp_path, monkeypatch)
    server.client().flushall()
