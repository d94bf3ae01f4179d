"""What a user sees of the query: the line of a batch, the counters, the bar."""

import io
import logging
import uuid
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipeline.config import RedisSettings
from pipeline.core.errors import StoreUnavailable
from pipeline.core.ids import encode_token
from pipeline.ingest.bar import StoredBytes, intake_bar
from pipeline.ingest.landed import LandingFiles
from pipeline.ingest.progress import BatchReporter, batch_line
from pipeline.ingest.readers import read_landing
from pipeline.ingest.stores import WriterSettings
from pipeline.ingest.summary import Summary
from pipeline.ingest.writer import BatchWriter
from pipeline.store import heartbeats
from pipeline.store.connection import connect
from pipeline.store.heartbeats import INGEST_KEEP_SEC, IngestProgress, read_ingests, write_ingest
from pipeline.store.keys import Keys
from tests.clock import ManualClock
from tests.servers import RealServer
from tests.waiting import DEADLINE_SEC

NOW_MS = 1_700_000_060_000


@pytest.fixture
def redis(server: RealServer) -> RedisSettings:
    return RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}")


def progress(source_id: str, last_batch_ms: int, **changed: object) -> IngestProgress:
    values = {
        "source_id": source_id,
        "reads": "/in/größe",
        "started_ms": NOW_MS,
        **dict.fromkeys(("batches", "files", "lines", "stored", "duplicates", "rejected", "blank"), 3),
        "last_batch_ms": last_batch_ms,
        **dict.fromkeys(("last_lines", "last_lines_per_sec", "last_took_ms"), 4),
        "last_oldest_waiting_ms": None,
        "last_phases_ms": {"addBatch": 210},
    }
    return IngestProgress(**{**values, **changed})  # type: ignore[arg-type]


def test_a_batch_is_one_line_of_a_screen_also_with_a_million_lines() -> None:
    line = batch_line(12, Summary(lines=1_000_000, stored=1_000_000), 4.05, 12_345)
    assert line == "batch 12: 1,000,000 in, 1,000,000 stored, 0 duplicates, 0 rejected, 247k/s, backlog 12.3 s"
    assert len("2026-11-21 04:00:06Z ingest: ") + len(line) < 120
    few = Summary(lines=9, stored=6, duplicates=2, rejected=1)
    assert batch_line(0, few, 0.0, None) == "batch 0: 9 in, 6 stored, 2 duplicates, 1 rejected, 9,000/s"


def land(landing: Path, age_ms: int, content: str = '{"message":"m","delay_sec":0}\n{"message":"x"}\n') -> str:
    name = f"{encode_token(NOW_MS - age_ms, 7)}.1.json.a+json"
    landing.mkdir(exist_ok=True)
    (landing / f".work-{name}").write_text(content)
    (landing / f".work-{name}").rename(landing / name)
    return name


def take_in(
    spark: SparkSession, folder: Path, redis: RedisSettings, reporter: BatchReporter, is_told: Event | None = None
) -> None:
    """Run a query that a reporter listens to, as the job does; ``is_told`` is set by what is waited for, else the end is."""
    spark.streams.addListener(reporter)
    try:
        writer = BatchWriter(
            WriterSettings(redis, "s", str(folder / "rejects"), 100), ManualClock(NOW_MS), reporter.report
        )
        files = read_landing(spark, str(folder / "landing"), 1 << 20)
        query = files.writeStream.foreachBatch(writer).option("checkpointLocation", str(folder / "checkpoint"))
        running = query.trigger(availableNow=True).start()
        assert running.awaitTermination(120), "the query did not finish within two minutes"
        assert (is_told or reporter._has_ended).wait(120), "Spark did not tell how the query ended"
        reporter.wait_for_the_end()
    finally:
        spark.streams.removeListener(reporter)


def test_each_batch_that_had_lines_is_told_to_a_log_and_to_the_store(
    spark: SparkSession, tmp_path: Path, redis: RedisSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pipeline.ingest.progress")
    client, keys = connect(redis), Keys(redis.namespace)
    files = LandingFiles(tmp_path / "landing", tmp_path / "checkpoint", lambda tokens: [], ManualClock(NOW_MS))
    reporter = BatchReporter("s", "/in", files, lambda told: write_ingest(client, keys, told), ManualClock(NOW_MS))
    land(tmp_path / "landing", 7_000)
    land(tmp_path / "landing", 6_000)
    take_in(spark, tmp_path, redis, reporter)
    land(tmp_path / "landing", 5_000)
    take_in(spark, tmp_path, redis, reporter)
    take_in(spark, tmp_path, redis, reporter)  # nothing new
    assert list((tmp_path / "landing").iterdir()) == [], "what a committed batch has stored is deleted"

    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[2].rpartition(" rejected")[0] for line in lines[::2]] == [
        " 4 in, 2 stored, 0 duplicates, 2",
        " 2 in, 1 stored, 0 duplicates, 1",
    ]
    assert all(line.endswith("/s, backlog 0.0 s") for line in lines[::2])
    assert lines[1::2] == [f"{count} rejected, see rejects (first: a.json line 2, missing_due)" for count in (2, 1)]
    [told] = read_ingests(client, keys)
    assert (told.reads, told.batches, told.files, told.lines, told.stored, told.rejected) == ("/in", 2, 3, 6, 3, 3)
    assert (told.last_lines, told.last_batch_ms, told.last_oldest_waiting_ms) == (2, NOW_MS, 0)
    assert {"addBatch", "queryPlanning", "latestOffset", "walCommit"} <= told.last_phases_ms.keys()
    assert told.last_took_ms >= told.last_phases_ms["addBatch"] > 0
    assert reporter.total_text() == "2 batches: 6 lines, 3 stored, 0 duplicates, 3 rejected"


def test_a_store_that_does_not_answer_disturbs_no_query_and_is_told_the_sums_later(
    spark: SparkSession, tmp_path: Path, redis: RedisSettings
) -> None:
    told: list[IngestProgress] = []

    def refuse_the_first(sums: IngestProgress) -> None:
        told.append(sums)
        if len(told) == 1:
            raise StoreUnavailable("Redis does not answer.")

    reporter = BatchReporter("s", "/in", None, refuse_the_first, ManualClock(NOW_MS))
    for _ in range(2):
        land(tmp_path / "landing", len(told) + 1)
        take_in(spark, tmp_path, redis, reporter)
    assert [(sums.batches, sums.lines) for sums in told] == [(1, 2), (2, 4)]
    assert told[0].last_oldest_waiting_ms is None


def test_a_last_batch_whose_files_take_long_to_delete_is_counted_and_waited_for(
    spark: SparkSession, tmp_path: Path, redis: RedisSettings
) -> None:
    texts: list[str] = []
    is_deleting, has_waited = Event(), Event()

    class SlowFiles(LandingFiles):
        def delete_batch(self, batch_id: int) -> None:
            is_deleting.set()
            texts.append(reporter.total_text())
            assert has_waited.wait(DEADLINE_SEC)
            super().delete_batch(batch_id)

    class SlowEnd(Event):
        """Does not come in time, three times."""

        waits = 0

        def wait(self, timeout: float | None = None) -> bool:
            self.waits += 1
            if self.waits <= 3:
                return False
            has_waited.set()
            return super().wait(timeout)

    files = SlowFiles(tmp_path / "landing", tmp_path / "checkpoint", lambda tokens: [], ManualClock(NOW_MS))
    reporter = BatchReporter("s", "/in", files, lambda told: None, ManualClock(NOW_MS))
    reporter._has_ended = SlowEnd()
    land(tmp_path / "landing", 1)
    take_in(spark, tmp_path, redis, reporter, is_deleting)
    assert list((tmp_path / "landing").iterdir()) == []
    assert texts == ["1 batch: 2 lines, 1 stored, 0 duplicates, 1 rejected"]


class Deleted(LandingFiles):
    """Files of which only is noted which batches were to be deleted."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None, lambda tokens: [], ManualClock(NOW_MS))
        self.deleted: list[int] = []

    def delete_batch(self, batch_id: int) -> None:
        self.deleted.append(batch_id)


def event_of(run_id: str, batch_id: int = 0) -> Any:
    told = SimpleNamespace(runId=run_id, batchId=batch_id, numInputRows=1, durationMs={}, sources=[])
    return SimpleNamespace(runId=run_id, progress=told)


def test_totals_are_what_was_stored_whether_or_not_spark_has_told_of_it(tmp_path: Path) -> None:
    files = Deleted(tmp_path)
    reporter = BatchReporter("s", "/in", files, lambda told: None, ManualClock(NOW_MS))
    reporter.onQueryStarted(event_of("one"))
    for batch_id in range(2):
        reporter.report(batch_id, Summary(lines=2, stored=2), 1)
    reporter.onQueryProgress(event_of("one"))
    assert reporter.total_text() == "2 batches: 4 lines, 4 stored, 0 duplicates, 0 rejected"
    reporter.onQueryProgress(event_of("one", 1))
    assert reporter.total_text() == "2 batches: 4 lines, 4 stored, 0 duplicates, 0 rejected", "once"
    assert files.deleted == [0, 1]


def test_a_late_event_of_the_query_before_is_not_taken_for_the_batch_of_that_number(tmp_path: Path) -> None:
    """A query on a new checkpoint numbers its batches from 0."""
    files, told = Deleted(tmp_path), list[IngestProgress]()
    reporter = BatchReporter("s", "/in", files, told.append, ManualClock(NOW_MS))
    reporter.onQueryStarted(event_of("one"))
    reporter.report(0, Summary(lines=1, stored=1), 1)
    reporter.onQueryStarted(event_of("two"))
    reporter.report(0, Summary(lines=5, stored=5), 1)
    reporter.onQueryProgress(event_of("one"))
    reporter.onQueryTerminated(event_of("one"))
    assert files.deleted == [] and told == [] and not reporter._has_ended.is_set()
    reporter.onQueryProgress(event_of("two"))
    assert files.deleted == [0] and [each.last_lines for each in told] == [5]
    assert reporter.total_text() == "2 batches: 6 lines, 6 stored, 0 duplicates, 0 rejected"


def test_what_jobs_tell_of_themselves_is_bounded_in_time_by_the_clock_of_the_server(
    redis: RedisSettings, server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, keys = connect(redis), Keys(redis.namespace)
    written = (("old", NOW_MS - INGEST_KEEP_SEC * 1000 - 1), ("one", NOW_MS - 1), ("two", NOW_MS))
    for source_id, server_clock_ms in written:
        monkeypatch.setattr(heartbeats, "server_ms", lambda client, now_ms=server_clock_ms: now_ms)
        write_ingest(client, keys, progress(source_id, NOW_MS))
    assert read_ingests(client, keys) == [progress("two", NOW_MS), progress("one", NOW_MS)]
    assert server.client().ttl(keys.ingest("two")) == INGEST_KEEP_SEC
    client.delete(keys.ingest("two"))
    client.hset(keys.ingest("one"), "reads", '"/elsewhere"')
    client.hdel(keys.ingest("one"), "blank")
    assert read_ingests(client, keys) == []


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def test_bytes_taken_in_follow_the_markers_and_the_files_that_are_gone(tmp_path: Path) -> None:
    marked, gone, waiting = (land(tmp_path, age_ms, "x" * size) for age_ms, size in ((9, 100), (8, 10), (7, 1)))
    markers = {marked[:14]: "5 00000001"}
    stored = StoredBytes(tmp_path, lambda tokens: [markers.get(token, "") for token in tokens])
    assert (stored.total_bytes, stored.count()) == (111, 0)
    markers[marked[:14]] = "all"
    assert stored.count() == 100
    (tmp_path / gone).unlink()
    assert stored.count() == 110
    (tmp_path / marked).unlink()
    (tmp_path / waiting).unlink()
    assert stored.count() == 111


def test_a_terminal_gets_a_bar_with_log_lines_above_it(tmp_path: Path) -> None:
    name, clock, terminal = land(tmp_path, 9_000), ManualClock(NOW_MS), Terminal()
    with intake_bar(tmp_path, lambda tokens: ["" for _ in tokens], terminal, clock) as move:
        move()
        (tmp_path / name).unlink()
        clock.now_ms += 1_000
        move()
    assert "taking in:   0%" in terminal.getvalue()
    assert "taking in: 100%" in terminal.getvalue()


def test_a_store_that_does_not_answer_leaves_the_bar_where_it_is(tmp_path: Path) -> None:
    def refuse(tokens: object) -> list[str]:
        raise StoreUnavailable("Redis does not answer.")

    land(tmp_path, 9_000)
    terminal = Terminal()
    with intake_bar(tmp_path, refuse, terminal, ManualClock(NOW_MS)) as move:
        move()
    assert "100%" not in terminal.getvalue()


def test_what_is_no_terminal_gets_no_bar(tmp_path: Path) -> None:
    land(tmp_path, 9_000)
    stream = io.StringIO()
    with intake_bar(tmp_path, lambda tokens: ["" for _ in tokens], stream, ManualClock(NOW_MS)) as move:
        move()
    assert stream.getvalue() == ""
