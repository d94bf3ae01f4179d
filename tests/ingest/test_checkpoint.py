"""What committed batches have read, and beginning anew, over checkpoints that Spark wrote."""

import json
import os
import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from pipeline.config import RedisSettings
from pipeline.core.clock import Clock, SystemClock
from pipeline.core.errors import PipelineError
from pipeline.core.ids import encode_token
from pipeline.ingest import checkpoint as module
from pipeline.ingest.checkpoint import (
    GAP_MS,
    LOOK_MS,
    MARK_NAME,
    CheckpointRoller,
    begin_anew,
    committed_log_id,
    finish_beginning_anew,
    names_read,
)
from pipeline.ingest.landed import LandingFiles
from pipeline.ingest.query import BINDING_NAME, bind_checkpoint, open_session
from pipeline.ingest.readers import read_landing
from pipeline.ingest.stores import WriterSettings, open_stores
from pipeline.ingest.writer import BatchWriter
from tests.clock import ManualClock
from tests.servers import RealServer

LANDED_MS = 1_700_000_000_000
LINES = 3  # a file


class CutOffError(Exception):
    """Stands in for a kill."""


class Input:
    """A landing folder and a checkpoint, in a folder with a name that a URI has to escape."""

    def __init__(self, folder: Path) -> None:
        self.landing = folder / "my inbox%" / ".landing"
        self.checkpoint = folder / "checkpoint"
        self.landing.mkdir(parents=True)
        self.landed = 0
        bind_checkpoint(str(self.checkpoint), "source", "/in")

    def land(self, files: int) -> list[str]:
        """Put in the next files, and return their names in order."""
        names = []
        for number in range(self.landed, self.landed + files):
            names.append(f"{encode_token(LANDED_MS + number, 7)}.1.json.a=20{number}+json")
            work = self.landing / f".work-{number}"
            work.write_text(
                "".join(json.dumps({"message": f"{number}/{n}", "delay_sec": 0}) + "\n" for n in range(LINES))
            )
            work.rename(self.landing / names[-1])
        self.landed += files
        return names

    def here(self) -> set[str]:
        return {path.name for path in self.landing.iterdir()}

    def roller(self, files_max: int, clock: Clock | None = None) -> CheckpointRoller:
        """A roller to which all files are stored that committed batches have read."""

        def delete(names: Iterable[str]) -> list[str]:
            for name in names:
                (self.landing / name).unlink(missing_ok=True)
            return []

        return CheckpointRoller(self.checkpoint, delete, files_max, clock or SystemClock())

    def run(self, spark: SparkSession, write, max_bytes: int = 1 << 20) -> None:  # type: ignore[no-untyped-def]
        """Take in what is there, as a job that ends, or is cut off by an exception, does."""
        files = read_landing(spark, str(self.landing), max_bytes)
        writer = files.writeStream.foreachBatch(write).option("checkpointLocation", str(self.checkpoint))
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(120), "the query did not finish within two minutes"
        finally:
            query.stop()

    def run_and_cut_off(self, spark: SparkSession) -> None:
        with pytest.raises(Exception, match="CutOffError"):
            self.run(spark, cut_off)


def keep_nothing(batch: DataFrame, batch_id: int) -> None:
    """Read all rows, and store none."""
    batch.collect()


def cut_off(batch: DataFrame, batch_id: int) -> None:
    """End as a kill in the middle of a batch does, as far as the checkpoint goes."""
    raise CutOffError


@pytest.fixture
def given(tmp_path: Path) -> Input:
    return Input(tmp_path)


def test_what_committed_batches_have_read_is_known_and_what_one_that_was_cut_off_has_read_is_not(
    spark: SparkSession, given: Input
) -> None:
    assert (committed_log_id(given.checkpoint), names_read(given.checkpoint, -1, 99)) == (-1, set())
    first = given.land(2)
    given.run(spark, keep_nothing)
    second = given.land(2)
    given.run_and_cut_off(spark)
    assert committed_log_id(given.checkpoint) == 0
    assert names_read(given.checkpoint, -1, 0) == set(first)
    assert names_read(given.checkpoint, 0, 1) == set(second)


@pytest.mark.slow
def test_it_is_known_across_compacted_logs(spark: SparkSession, given: Input) -> None:
    names = given.land(23)
    given.run(spark, keep_nothing, max_bytes=1)  # a batch a file
    assert (given.checkpoint / "sources" / "0" / "19.compact").exists()
    assert committed_log_id(given.checkpoint) == 22
    assert names_read(given.checkpoint, -1, 22) == set(names)
    assert len(names_read(given.checkpoint, 17, 22)) == 5
    assert len(names_read(given.checkpoint, -1, 9)) == 10
    assert len(names_read(given.checkpoint, 20, 20)) == 0


def test_files_that_a_crash_left_between_the_log_of_files_and_the_offsets_are_read_with_the_next_batch(
    spark: SparkSession, given: Input
) -> None:
    first = given.land(1)
    given.run(spark, keep_nothing)
    second = given.land(1)
    given.run_and_cut_off(spark)
    for name in ("1", ".1.crc"):  # Spark's own session writes checksums, and ours none
        (given.checkpoint / "offsets" / name).unlink(missing_ok=True)
    given.roller(1).prepare()
    assert given.here() == set(second)
    third = given.land(1)
    given.run(spark, keep_nothing)
    assert names_read(given.checkpoint, -1, committed_log_id(given.checkpoint)) == {*first, *second, *third}
    given.roller(10).prepare()
    assert given.here() == set()


@pytest.mark.parametrize("name", ["offsets/.0.5fbc.tmp", "commits/.0.5fbc.tmp"])
def test_what_a_kill_has_left_of_the_first_entry_of_a_log_is_no_obstacle(
    spark: SparkSession, given: Input, name: str
) -> None:
    open_session()
    names = given.land(1)
    (given.checkpoint / name).parent.mkdir()
    (given.checkpoint / name).write_text("v")
    given.run(spark, keep_nothing)
    assert names_read(given.checkpoint, -1, 0) == set(names)


def test_a_batch_starts_no_process_for_checksums(spark: SparkSession, given: Input) -> None:
    open_session()
    given.land(1)
    given.run(spark, keep_nothing)
    assert (given.checkpoint / "commits" / "0").exists()
    assert [*given.checkpoint.rglob("*.crc")] == []


@pytest.mark.parametrize("name", ["offsets/0", "sources/0/0"])
def test_a_damaged_checkpoint_is_said_and_nothing_is_deleted(spark: SparkSession, given: Input, name: str) -> None:
    names = given.land(2)
    given.run(spark, keep_nothing)
    (given.checkpoint / name).write_text("")
    for left in names:
        (given.landing / left).write_text("")
    with pytest.raises(PipelineError, match="delete the folder"):
        given.roller(1).prepare()
    assert given.here() == set(names)


def test_only_what_is_sparks_is_thrown_away(spark: SparkSession, given: Input) -> None:
    given.land(1)
    given.run(spark, keep_nothing)
    (given.checkpoint / "notes.txt").write_text("mine")
    begin_anew(given.checkpoint)
    assert sorted(os.listdir(given.checkpoint)) == [BINDING_NAME, "notes.txt"]


class KilledError(BaseException):
    """Stands in for kill -9: nothing of ours handles it."""


def prepare_and_die_at(roller: CheckpointRoller, step: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Prepare, and die before the ``step``-th change of a file system; False if it was over before."""
    left = step

    def dying(change):  # type: ignore[no-untyped-def]
        def instead(*arguments, **options):  # type: ignore[no-untyped-def]
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return change(*arguments, **options)

        return instead

    with monkeypatch.context() as patched:
        for name in ("unlink", "rmdir", "touch"):
            patched.setattr(Path, name, dying(getattr(Path, name)))
        for name in ("unlink", "rmdir"):
            patched.setattr(os, name, dying(getattr(os, name)))
        try:
            roller.prepare()
        except KilledError:
            return True
    return False


@pytest.mark.slow
def test_a_kill_at_any_step_of_beginning_anew_loses_nothing_and_stores_nothing_twice(
    spark: SparkSession, given: Input, server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}")
    settings = WriterSettings(redis, "source", str(given.landing.parent / "rejects"), 2)
    write = BatchWriter(settings, SystemClock(), lambda *_: None)
    markers_of = partial(open_stores(redis)[0].markers, "source")
    landing = LandingFiles(given.landing, given.checkpoint, markers_of, SystemClock())
    roller = CheckpointRoller(given.checkpoint, landing.delete_marked, 0, SystemClock())

    # Every kind of file is there each time: read and left behind, read by a batch that was cut off, not read.
    steps = 0
    for step in (0, 1, 2, 3, 9, 25, 10_000):
        stored = given.land(2)
        given.run(spark, write)
        given.land(1)
        given.run_and_cut_off(spark)
        unread = given.land(1)
        for name in stored:
            (given.landing / name).touch()
        died = prepare_and_die_at(roller, step, monkeypatch)
        steps += died
        assert set(unread) <= given.here()
        roller.prepare()
        assert os.listdir(given.checkpoint) == [BINDING_NAME], "half a checkpoint is left"
        assert not given.here().intersection(stored)
        given.run(spark, write)
    assert steps == 6, "the last run must have got through, and all others not"

    store = open_stores(redis)[0]
    members = []
    while (claim := store.claim(uuid.uuid4().hex).claim) is not None:
        members += [m.member.decode()[23:] for m in claim.messages]
    assert sorted(members) == sorted(f"{file}/{n}" for file in range(given.landed) for n in range(LINES))


def test_half_a_checkpoint_is_never_started_from(spark: SparkSession, given: Input) -> None:
    given.land(1)
    given.run(spark, keep_nothing)
    (given.checkpoint / MARK_NAME).touch()
    finish_beginning_anew(given.checkpoint)
    assert os.listdir(given.checkpoint) == [BINDING_NAME]
    finish_beginning_anew(given.checkpoint)


def test_a_long_log_asks_for_a_stop_in_a_gap_between_batches(spark: SparkSession, given: Input) -> None:
    clock = ManualClock(LANDED_MS)
    given.land(3)
    given.run(spark, keep_nothing)
    assert not given.roller(3, clock).wants_stop(lambda: True)
    roller = given.roller(2, clock)
    assert not roller.wants_stop(lambda: False)
    assert roller.wants_stop(lambda: True)
    assert not roller.wants_stop(lambda: True), "it looks only once in a while"
    assert roller.prepare() == 3
    clock.now_ms += LOOK_MS
    assert not roller.wants_stop(lambda: True)


def test_without_a_gap_a_batch_is_cut_off_but_only_for_files_that_are_committed(
    spark: SparkSession, given: Input
) -> None:
    clock = ManualClock(LANDED_MS)
    roller = given.roller(2, clock)
    given.land(3)
    given.run_and_cut_off(spark)
    assert not roller.wants_stop(lambda: True)
    given.run(spark, keep_nothing)
    clock.now_ms += LOOK_MS
    assert not roller.wants_stop(lambda: False)
    clock.now_ms += GAP_MS
    assert roller.wants_stop(lambda: False)


def test_a_log_that_changes_under_our_eyes_is_looked_at_later(given: Input, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(checkpoint: Path) -> int:
        raise FileNotFoundError(checkpoint)

    monkeypatch.setattr(module, "committed_log_id", gone)
    assert not given.roller(1, ManualClock(LANDED_MS)).wants_stop(lambda: True)
