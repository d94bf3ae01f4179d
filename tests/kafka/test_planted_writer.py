"""The tests of what stores records of Kafka notice what they are there for: each protection, taken out, is missed by one."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import PipelineError, SourceError
from pipeline.ingest.kafka_reader import RangeReader
from pipeline.ingest.kafka_windows import WindowQueue
from pipeline.ingest.kafka_writer import RangeStorer
from pipeline.store.shards import shard_of
from tests.chaos.test_planted import Mutant, plant
from tests.kafka import test_attacks as attacks
from tests.kafka import test_ingest as ingest
from tests.kafka import test_windows as windows
from tests.kafka.broker import Broker
from tests.kafka.intake import Intake, line
from tests.servers import RealServer

pytestmark = [pytest.mark.planted, pytest.mark.xdist_group("kafka")]

STORE, READ, TRY = (RangeStorer, "_store"), (RangeStorer, "_read"), (RangeReader, "_try")
RESUME, MARKER_AT, END_OF = ((WindowQueue, name) for name in ("resume", "marker_at", "end_of"))
OTHER = 1 - shard_of(windows.PARTITION.part_id, 2)  # than the one that counts the rejects
PART = windows.test_a_range_that_ends_within_an_open_window_leaves_what_is_known_of_it
ANEW = ingest.test_what_was_planned_of_a_topic_is_not_read_of_another_under_its_name


def read_behind_a_hole(intake: Intake) -> None:
    intake.make_topic()
    intake.send(*(line(f"{n}") for n in range(10)))
    intake.store(0, 2)
    intake.delete_before(5)
    with pytest.raises(SourceError, match="2 to 4"):
        intake.store(0, 10)


Fault = tuple[tuple[Any, str], Callable[..., None], str, str]

FAULTS: dict[str, Fault] = {
    "who was overtaken counts as stored": (
        STORE,
        windows.test_who_was_overtaken_leaves_what_the_other_has_stored,
        "self._markers[shard] = queue.marker",
        "self._markers[shard] = str(behind)",
    ),
    "what another has stored of the records that were read is stored again": (
        RESUME,
        windows.test_who_was_overtaken_leaves_what_the_other_has_stored,
        "at.next != self._made_at.next or (",
        "False or (",
    ),
    "an open window with another end is gone on with": (
        RESUME,
        partial(windows.test_who_meets_a_window_that_was_opened_meanwhile_goes_on_with_it, end=8),
        "at.is_open and at.end not in (self._end, self._made_at.end)",
        "False",
    ),
    "the place in an open window is forgotten": (
        RESUME,
        windows.test_a_window_is_stored_in_order_of_due_time_and_its_marker_says_how_far,
        "self.place_behind(at.due_ms, at.offset) if at.is_open else 0",
        "0",
    ),
    "what a window has changed is changed again": (
        (WindowQueue, "is_begun"),
        windows.test_what_a_window_has_changed_is_not_changed_again_by_who_goes_on_with_it,
        "return self._marker_of(self.marker).is_open",
        "return False",
    ),
    "who sees a part of an open window closes it": (
        MARKER_AT,
        PART,
        "max(at.end, self._end)",
        "self._end",
    ),
    "who sees a part of an open window opens another": (
        END_OF,
        PART,
        "return len(self) if is_within_another else PartQueue.end_of",
        "return PartQueue.end_of",
    ),
    "an open window is read in part": (
        READ,
        windows.test_a_window_is_stored_in_order_of_due_time_and_its_marker_says_how_far,
        "while behind < end == min(end, reader.end):",
        "while False:",
    ),
    "two shards with windows of their own are taken for one": (
        READ,
        windows.test_two_shards_with_windows_of_their_own_get_small_transactions,
        "if {end} != ends:",
        "if False:",
    ),
    "it is not asked what topic was read": (
        TRY,
        ANEW,
        "self._cluster.check(partition)\n    return found",
        "return found",
    ),
    "a hole is passed over": (
        (RangeReader, "_pass_hole"),
        read_behind_a_hole,
        "if is_known and not self._accept_loss:",
        "if False:",
    ),
    "a shard that is ahead gets all of it": (
        STORE,
        attacks.test_what_one_shard_has_done_is_not_done_again_when_another_catches_up,
        "if place < at < behind:",
        "if False:",
    ),
    "rejects have the name of their partition alone": (
        (RangeStorer, "_write_rejects"),
        attacks.test_a_writer_with_a_smaller_window_replaces_no_rejects,
        'f"{partition.part_id}.{place:014d}-{behind:014d}"',
        "partition.part_id",
    ),
    "a shard without messages has no beginning": (
        (RangeStorer, "store"),
        attacks.test_a_shard_that_has_nothing_yet_knows_where_it_began,
        "if self._markers[shard] == NO_MARKER:",
        "if False:",
    ),
}


# The same, of a shard that is away.
FAULTS |= {
    "a shard that is away holds up the others": (
        (RangeStorer, "_or_without"),
        partial(windows.test_a_shard_that_was_away_gets_all_of_it_later_and_the_other_one_at_once, away=0),
        "self._away.add(shard)",
        "raise",
    ),
    "a partition that is not begun waits for nobody": (
        (RangeStorer, "_ask"),
        windows.test_a_partition_that_is_not_begun_in_a_shard_waits_for_it,
        "if self._is_begun else retrying(call)",
        "",
    ),
    "rejects are written for each shard that catches up": (
        STORE,
        partial(windows.test_a_shard_that_was_away_gets_all_of_it_later_and_the_other_one_at_once, away=OTHER),
        " and self._marker_of(own).next < behind:",
        ":",
    ),
    "rejects are written without the shard that counts them": (
        STORE,
        partial(windows.test_a_shard_that_was_away_gets_all_of_it_later_and_the_other_one_at_once, away=1 - OTHER),
        " and own not in self._away",
        "",
    ),
    "the first marker of a partition is like any other": (
        (RangeStorer, "_begin"),
        windows.test_the_markers_of_any_shards_tell_whether_all_of_them_have_one,
        "first_marker(self._reader.range.begin)",
        "str(self._reader.range.begin)",
    ),
    "who lacks a shard says nothing of it": (
        (RangeStorer, "store"),
        partial(windows.test_a_shard_that_was_away_gets_all_of_it_later_and_the_other_one_at_once, away=0),
        "for shard in sorted(self._away)",
        "for shard in ()",
    ),
}


@pytest.fixture
def intake(broker: Broker, server: RealServer, tmp_path: Path) -> Intake:
    return Intake(broker, server, None, tmp_path)  # type: ignore[arg-type]  # without Spark


def test_without_a_fault_it_passes(intake: Intake) -> None:
    read_behind_a_hole(intake)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str, intake: Intake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target, check, old, new = FAULTS[name]
    plant(Mutant(name, (), {target: ((old, new),)}), monkeypatch)
    with pytest.raises((AssertionError, PipelineError, TypeError, windows.Died, pytest.fail.Exception)):
        run(check, intake, monkeypatch, tmp_path)


def run(check: Callable[..., None], intake: Intake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Call a test with what it asks for."""
    there = {"intake": intake, "monkeypatch": monkeypatch, "tmp_path": tmp_path}
    check(**{name: there[name] for name in inspect.signature(check).parameters if name in there})
