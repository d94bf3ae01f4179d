"""The tests of failovers notice what they are there for: each protection, taken out, is missed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.ingest import landed
from pipeline.ingest.landed import LandingFiles
from pipeline.ingest.repair import Repair
from pipeline.store import redis_store
from pipeline.store.replication import FailoverWatch
from tests.chaos.test_planted import Mutant, plant
from tests.ingest import test_landed as landing
from tests.ingest import test_repair as repair
from tests.store import test_replication as watching

pytestmark = pytest.mark.planted

Check = Callable[[Path, pytest.LogCaptureFixture], None]


def of_files(test: Callable[[landing.World], None]) -> Check:
    return lambda folder, caplog: test(landing.archiving_world(folder))


def of_servers(test: Callable[..., None]) -> Check:
    return lambda folder, caplog: test(repair.World(folder))


def of_several(test: Callable[[repair.Servers], None]) -> Check:
    return lambda folder, caplog: test(repair.Servers(folder))


def told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    repair.test_a_failover_that_undid_something_is_told_and_repaired_once(repair.World(folder), caplog)


def lost(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    repair.test_what_is_lost_without_another_history_is_told_and_read_again(repair.World(folder), caplog, "3 files")


def watched(test: Callable[[], None]) -> Check:
    return lambda folder, caplog: test()


ARCHIVED = of_files(landing.test_stored_files_are_archived_for_a_time_and_read_again_if_they_must_be)
IS_THERE = of_servers(repair.test_a_batch_counts_when_the_servers_that_stored_it_are_there)
COMPARE, READ_AGAIN = (FailoverWatch, "_compare"), (LandingFiles, "read_again")

# By name: the function, old and new text, and what notices it.
FAULTS: dict[str, tuple[Any, str, str, Check]] = {
    "files are read again under the name that Spark has read": (
        (landed, "repeated_name"),
        "=.{int(times[1]) + 1 if times else 1}",
        "",
        ARCHIVED,
    ),
    "files are archived no longer than nothing": (
        (LandingFiles, "forget_archived"),
        "self._clock.wall_ms() - self._archive_ms",
        "MINUTE_MS + self._clock.wall_ms()",
        ARCHIVED,
    ),
    "the minute of the failover is not read again": (
        READ_AGAIN,
        "minute >= since_ms",
        "minute > since_ms",
        of_files(landing.test_only_what_was_stored_since_is_read_again),
    ),
    "files of a batch that is not committed are not read again": (
        READ_AGAIN,
        "self._again.update(self._stored)",
        "pass",
        of_files(landing.test_files_of_a_batch_that_is_not_committed_yet_are_read_again_when_it_is),
    ),
    "the newest files are not looked at": (
        (LandingFiles, "newest_are_stored"),
        "[name for name, stored_ms in self._newest if stored_ms > before_ms]",
        "[]",
        of_files(landing.test_markers_tell_whether_what_was_archived_last_is_still_stored),
    ),
    "a batch counts whatever server has stored it": (
        (Repair, "is_there"),
        "if {*batch.histories} <= self._watch.present():",
        "if True:",
        IS_THERE,
    ),
    "nobody looks before a batch counts": (
        (Repair, "is_there"),
        "self._watch.look(lambda read: patience.retrying(next(servers), read), batch.histories)",
        "None",
        IS_THERE,
    ),
    "a failover is noticed and nothing read again": (
        (Repair, "_handle"),
        "self._what.read_again(failover.since_ms)",
        '""',
        told,
    ),
    "files are forgotten while a server is away": (
        (Repair, "step"),
        "if self._watch.saw_all:",
        "if True:",
        of_servers(repair.test_nothing_is_forgotten_while_a_server_is_away),
    ),
    "a start believes that nothing has happened": (
        (Repair, "_compare_with_last_run"),
        "not is_unseen and a != b",
        "False",
        of_servers(repair.test_a_start_notices_what_happened_meanwhile),
    ),
    "a server that went away counts as there": (
        (Repair, "is_there"),
        "self._watch.present()",
        "{*self._watch.histories()}",
        of_several(repair.test_a_batch_does_not_count_when_a_server_went_away_that_stored_it),
    ),
    "a server that was away at the start is never looked into": (
        (Repair, "_compare_with_last_run"),
        "self._is_unsure = any(unseen)",
        "pass",
        of_several(repair.test_a_start_waits_for_no_server_and_notices_later_what_happened_to_one_that_was_away),
    ),
    "what is known of a server that is away is forgotten": (
        (Repair, "_handle"),
        "[a or b for a, b in zip(now, before, strict=True)]",
        "now",
        of_several(repair.test_what_is_known_of_a_server_that_is_away_stays_when_another_one_has_changed),
    ),
    "a batch asks servers that are away": (
        (FailoverWatch, "look"),
        "if not is_wanted and not self._answers[index]:",
        "if False:",
        of_several(repair.test_a_batch_does_not_wait_for_a_server_that_it_did_not_need),
    ),
    "markers are not asked of a server that does not tell": (
        (Repair, "step"),
        "elif not self._what.newest_are_stored():",
        "elif all(self._watch.histories()) and not self._what.newest_are_stored():",
        of_servers(repair.test_servers_that_do_not_tell_are_known_by_markers),
    ),
    "markers are asked only of a server that does not tell": (
        (Repair, "step"),
        "elif not self._what.newest_are_stored():",
        "elif not all(self._watch.histories()) and not self._what.newest_are_stored():",
        lost,
    ),
    "a history that goes back is the same": (
        COMPARE,
        "now.history == last.history and now.offset >= last.offset",
        "now.history == last.history",
        watched(watching.test_shards_are_looked_at_apart),
    ),
    "a history that was never followed is taken for a failover": (
        COMPARE,
        "now.before != last.history or now.history == last.history",
        "False",
        watched(watching.test_a_server_that_is_restarted_or_restored_can_not_tell),
    ),
    "all is in doubt since the last look": (
        COMPARE,
        "if position.offset <= now.before_ended",
        "",
        watched(watching.test_what_a_failover_undid_is_told_to_the_byte_and_since_when),
    ),
    "a replica is asked like a primary": (
        (watching, "read_position"),
        'found["role"] != "master"',
        "False",
        watched(watching.test_a_replica_is_no_answer_and_a_user_who_may_not_ask_is_told_nothing),
    ),
    "replicas are not waited for": (
        (redis_store, "wait_for_copies"),
        "if replicas and (received := connection.read_response()) < replicas:",
        "if replicas and (received := connection.read_response()) < 0:",
        watched(watching.test_a_batch_waits_for_replicas),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, old, new, check = FAULTS[name]
    plant(Mutant(name, (), {target: ((old, new),)}), monkeypatch)
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        check(tmp_path, caplog)
