"""What surrounds the query: its checkpoint, its failures, the marks of files that are gone."""

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.sql import SparkSession

from pipeline.core.errors import ConfigError, PipelineError, StoreUnavailable
from pipeline.core.ids import encode_token, token_epoch_ms
from pipeline.ingest.loop import MarkerSweeper, Restarts, run_to_the_end, wait_for_first_look
from pipeline.ingest.query import SUITABLE, TRIES_MAX, Tries, bind_checkpoint, java_watched, query_failure, start_query
from pipeline.ingest.writer import BatchWriter
from pipeline.runtime.submit import ROOT, spark_environ
from tests.clock import ManualClock

HOUR_MS = 3_600_000
LANDED_MS = 1_700_000_000_000


def test_a_checkpoint_belongs_to_the_input_that_used_it_first(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    bind_checkpoint(checkpoint, "one", "/in/one")
    bind_checkpoint(checkpoint, "one", "/in/moved")
    with pytest.raises(ConfigError, match="belongs to another input \\(/in/one\\), not to /in/two"):
        bind_checkpoint(checkpoint, "two", "/in/two")


def test_a_checkpoint_that_can_not_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--checkpoint"):
        bind_checkpoint(str(tmp_path / "file" / "checkpoint"), "one", "/in")


def test_a_checkpoint_elsewhere_is_left_to_its_owner() -> None:
    bind_checkpoint("hdfs://host/checkpoint", "one", "/in")


SESSION = """
from pipeline.ingest.query import SUITABLE, open_session
spark = open_session()
print({name: spark.sparkContext.getConf().get(name) for name in SUITABLE})
spark.stop()
"""


@pytest.mark.process
def test_the_job_sets_what_suits_it_and_leaves_what_somebody_has_configured() -> None:
    given = {"spark.sql.shuffle.partitions": "7", "spark.sql.adaptive.enabled": "true"}
    options = [word for name, value in given.items() for word in ("--conf", f"{name}={value}")]
    environ = {**os.environ, **spark_environ(os.environ), "SPARK_LOCAL_IP": "127.0.0.1"}
    environ["PYSPARK_SUBMIT_ARGS"] = shlex.join([*options, "pyspark-shell"])
    command = [sys.executable, "-c", SESSION]
    said = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert ast.literal_eval(said.stdout.splitlines()[-1]) == SUITABLE | given


def test_programs_of_users_get_none_of_the_settings_that_suit_the_job() -> None:
    lines = (ROOT / "conf" / "spark-defaults.conf").read_text().splitlines()
    names = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert names == ["spark.sql.session.timeZone", "spark.ui.showConsoleProgress"]
    assert " off" not in (ROOT / "conf" / "log4j2.properties").read_text()


def test_a_checkpoint_elsewhere_that_spark_can_not_use_is_one_sentence(spark: SparkSession) -> None:
    with pytest.raises(
        ConfigError, match=r"can't use the checkpoint s3a://b/c, as it lacks \S+\.S3AFileSystem: add jars"
    ):
        start_query(spark.readStream.format("rate").load(), BatchWriter.__new__(BatchWriter), "s3a://b/c", None)


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        (
            "[FOREACH] failed\nTraceback\npipeline.core.errors.ConfigError: Redis refuses the user.\n\tat java",
            ConfigError,
            "Redis refuses the user.",
        ),
        (
            "[FOREACH] failed\n  File x\njava.lang.Exception: outer\nCaused by: java.io.IOException: not a gzip file\n",
            PipelineError,
            "The streaming query ended: java.io.IOException: not a gzip file",
        ),
        (
            "[FOREACH] failed\norg.apache.spark.SparkException: Python worker exited unexpectedly (crashed).\n\tat x",
            PipelineError,
            (
                "A Python worker of Spark has ended in the middle of a batch: it was killed, or ran out of memory. "
                "Start the job again; it goes on where it was."
            ),
        ),
        ("Something else", PipelineError, "The streaming query ended: Something else"),
    ],
)
def test_why_a_query_ended_is_one_sentence(text: str, kind: type[Exception], sentence: str) -> None:
    failure = query_failure(Exception(text))
    assert (type(failure), str(failure)) == (kind, sentence)


def meet(error: Exception, stopping: bool) -> None:
    with java_watched(lambda: stopping):
        raise error


@pytest.mark.parametrize(
    "error",
    [Py4JNetworkError("Answer from Java side is empty"), Py4JError("o97.isActive"), ConnectionRefusedError(111)],
)
def test_that_java_has_ended_is_one_sentence_unless_it_was_to_end(error: Exception) -> None:
    with pytest.raises(PipelineError, match=r"^The Java process .* has ended.*[Ss]tart the job again"):
        meet(error, stopping=False)
    meet(error, stopping=True)


def test_what_else_goes_wrong_is_not_taken_for_the_end_of_java() -> None:
    with pytest.raises(ValueError, match="ours"):
        meet(ValueError("ours"), stopping=True)


class Markers:
    """A store that only knows markers, and may not answer."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = set(tokens)
        self.moved: list[tuple[str, int]] = []  # later than when the file was claimed, also on several shards
        self.answers = True

    def marked_parts(self, source_id: str) -> list[tuple[str, int]]:
        if not self.answers:
            raise StoreUnavailable("Redis does not answer.")
        claimed = [(token, token_epoch_ms(token.partition(".")[0])) for token in self.tokens]
        return [*claimed, *((token, moved_ms) for token, moved_ms in self.moved if token in self.tokens)]

    def forget_markers(self, source_id: str, file_tokens: Sequence[str]) -> None:
        self.tokens -= set(file_tokens)


def token_of(minutes: int) -> str:
    return encode_token(LANDED_MS + minutes * 60_000, 1)


def test_a_marker_outlives_its_file_by_the_configured_time(tmp_path: Path) -> None:
    clock, gone, here = ManualClock(LANDED_MS), token_of(0), token_of(1)
    markers = Markers(gone, here)
    (tmp_path / f"{here}.1.json.a+json").write_text("")
    sweeper = MarkerSweeper(markers, "source", tmp_path, HOUR_MS, clock)
    for minutes in (0, 30, 60):
        clock.now_ms = minutes * 60_000
        sweeper.sweep()
        assert markers.tokens == {gone, here}
    clock.now_ms = 71 * 60_000
    sweeper.sweep()
    assert markers.tokens == {here}


def test_a_file_that_was_gone_before_the_start_is_forgotten_at_the_start(tmp_path: Path) -> None:
    clock, old, young = ManualClock(LANDED_MS), token_of(-61), token_of(-59)
    markers = Markers(old, young)
    MarkerSweeper(markers, "source", tmp_path, HOUR_MS, clock).sweep()
    assert markers.tokens == {young}


def test_a_file_that_was_just_deleted_keeps_its_marker_until_the_next_look(tmp_path: Path) -> None:
    clock, old = ManualClock(LANDED_MS), token_of(-120)
    markers = Markers(old)
    landed = tmp_path / f"{old}.1.json.a+json"
    landed.write_text("")
    sweeper = MarkerSweeper(markers, "source", tmp_path, HOUR_MS, clock)
    sweeper.sweep()
    landed.unlink()
    clock.now_ms = 10 * 60_000
    sweeper.sweep()
    assert markers.tokens == {old}
    clock.now_ms = 20 * 60_000
    sweeper.sweep()
    assert markers.tokens == set()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_marker_is_kept_from_its_last_move_however_long_the_file_waited_before(tmp_path: Path, shards: int) -> None:
    clock, waited, part = ManualClock(LANDED_MS), token_of(-120), f"{token_of(-120)}.5"
    markers = Markers(waited, part)
    markers.moved = [(waited, LANDED_MS), (part, LANDED_MS)][::-1]
    if shards == 2:  # the other one moved it earlier
        markers.moved += [(waited, LANDED_MS - 2 * HOUR_MS), (part, LANDED_MS - 2 * HOUR_MS)]
    sweeper = MarkerSweeper(markers, "source", tmp_path, HOUR_MS, clock)
    for minutes in (0, 30, 60):
        clock.now_ms = minutes * 60_000
        sweeper.sweep()
        assert markers.tokens == {waited, part}
    clock.now_ms = 71 * 60_000
    sweeper.sweep()
    assert markers.tokens == set()


def test_a_server_that_does_not_answer_stops_no_sweep_for_good(tmp_path: Path) -> None:
    clock, markers = ManualClock(LANDED_MS), Markers(token_of(-61))
    sweeper = MarkerSweeper(markers, "source", tmp_path, HOUR_MS, clock)
    markers.answers = False
    sweeper.sweep()
    markers.answers = True
    clock.now_ms = HOUR_MS
    sweeper.sweep()
    assert markers.tokens == set()


LATE = "[STREAM_FAILED] Query [id = 1] terminated with exception: Python worker failed to connect back."
TIMED_OUT = "org.apache.spark.SparkException: Timed out while waiting for the Python worker to connect back"


class Query:
    """A query that has ended."""

    isActive = False  # noqa: N815 (Spark's name)

    def __init__(self, failure: str = "", rows: int = 0) -> None:
        self._failure = Exception(failure) if failure else None
        self.recentProgress = [SimpleNamespace(numInputRows=rows)]

    def exception(self) -> Exception | None:
        return self._failure


class Started:
    """What starts queries, each of which has ended as is said, and the waits between them."""

    def __init__(self, *queries: Query) -> None:
        self.queries = [*queries]
        self.waits: list[float] = []
        self.restarts = Restarts(self.start, "/var/checkpoint", Tries(self.waits.append))  # type: ignore[arg-type]

    def start(self) -> Query:
        return self.queries.pop(0)

    def run(self) -> None:
        run_to_the_end(self.start(), self.restarts, lambda: False, ManualClock(LANDED_MS), None)  # type: ignore[arg-type]


def test_a_query_that_takes_in_what_is_there_may_end_and_may_fail() -> None:
    Started(Query()).run()
    started = Started(Query("x\nCaused by: java.io.IOException: disk"), Query())
    with pytest.raises(PipelineError, match=r"java\.io\.IOException: disk"):
        started.run()
    assert started.waits == []


def test_a_query_that_should_run_for_ever_and_does_not_is_a_failure() -> None:
    with pytest.raises(PipelineError, match="stopped from outside"):
        Started().restarts.after(Query())  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [LATE, TIMED_OUT])
def test_a_query_whose_worker_came_too_late_is_started_again(text: str, caplog: pytest.LogCaptureFixture) -> None:
    started = Started(Query(text), Query(text), Query(text), Query())
    started.run()
    assert started.queries == [] and len(started.waits) == 3
    assert started.waits[0] < started.waits[2] and "as on a busy machine" in caplog.text


def test_that_workers_come_too_late_again_and_again_ends_the_job_unless_something_was_stored_in_between() -> None:
    started = Started(*(Query(LATE) for _ in range(TRIES_MAX + 1)))
    with pytest.raises(PipelineError, match="failed to connect back"):
        started.run()
    assert len(started.queries) == 1
    started = Started(*(Query(LATE, rows=number % 5 == 0) for number in range(3 * TRIES_MAX)), Query())
    started.run()
    assert started.queries == []


def test_a_call_is_tried_again_until_its_worker_comes_in_time_or_a_stop() -> None:
    waits: list[float] = []
    failures = [Exception(LATE), Exception(LATE)]

    def call() -> None:
        if failures:
            raise failures.pop()

    Tries(waits.append).call(call, lambda: False)
    assert len(waits) == 2
    failures.append(Exception(LATE))
    with pytest.raises(Exception, match="connect back"):
        Tries(waits.append).call(call, lambda: True)
    assert len(waits) == 2


@pytest.mark.parametrize("said", ["No space left on device", "Disk quota exceeded"])
def test_a_full_disk_of_the_checkpoint_is_told_with_its_folder_and_what_to_do(said: str) -> None:
    with pytest.raises(PipelineError, match=r"/var/checkpoint.* is full: make room and start the job again"):
        Started(Query(f"x\nCaused by: java.io.IOException: {said}")).run()


class LookingQuery:
    """A query that says what it does, one thing an ask; at the end it is over."""

    def __init__(self, *messages: str) -> None:
        self.messages = [*messages]

    @property
    def isActive(self) -> bool:  # noqa: N802 (Spark's name)
        return bool(self.messages)

    @property
    def status(self) -> dict[str, str]:
        return {"message": self.messages.pop(0)}


@pytest.mark.parametrize("then", ["Waiting for data to arrive", "Waiting for next trigger", "Processing new data"])
def test_a_job_is_up_when_its_query_has_looked_for_something_to_read(then: str) -> None:
    """Also when it has found something: a first batch may take minutes, and the source has to be kept going meanwhile."""
    query = LookingQuery("Initializing sources", "Getting offsets from duetime-kafka", then, "more")
    wait_for_first_look(query, lambda: False)
    assert query.messages == ["more"]


def test_a_query_that_ends_or_is_to_stop_is_not_waited_for() -> None:
    query = LookingQuery("Initializing sources")
    wait_for_first_look(query, lambda: False)
    assert not query.messages
    query = LookingQuery("Initializing sources")
    wait_for_first_look(query, lambda: True)
    assert query.messages
