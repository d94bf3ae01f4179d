"""foreachBatch on a real server."""

import errno
import json
import os
import socket
import uuid
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from pipeline.config import RedisSettings
from pipeline.core.clock import SystemClock
from pipeline.core.errors import DiskFull, PipelineError, StoreUnavailable
from pipeline.core.files import mark_folder
from pipeline.core.messages import Reason, Rejection
from pipeline.ingest import rejects as rejects_module
from pipeline.ingest.parsing import FileText, RejectedLine
from pipeline.ingest.query import query_failure, start_query
from pipeline.ingest.readers import read_landing
from pipeline.ingest.rejects import RAW_CHARS_MAX, WORK_NAME, RejectsWriter, reject_record
from pipeline.ingest.shard_writer import ShardWriter, finish_all
from pipeline.ingest.stores import WriterSettings, open_changing_stores, open_stores
from pipeline.ingest.summary import Summary
from pipeline.ingest.transactions import PartQueue
from pipeline.ingest.writer import BatchWriter, PartitionWriter
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.redis_store import RedisStore
from pipeline.store.retry import retry_until_available
from pipeline.store.stats import read_stats
from tests.clock import ManualClock
from tests.ingest.files import TOKEN, file_rows, parsed
from tests.servers import RealServer

CONTENT = b"""{"message":"first","delay_sec":1}
{"message":"no time"}

{"message":"second","delay_sec":2,"id":"order-1"}
{"message":"second again","delay_sec":2,"id":"order-1"}
{"message":"third","due":1700000000005}
"""


@pytest.fixture
def settings(server: RealServer, tmp_path: Path) -> WriterSettings:
    redis = RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}")
    return WriterSettings(redis, "source", str(tmp_path / "rejects"), transaction_messages=2)


def write(spark: SparkSession, settings: WriterSettings, *contents: bytes) -> list[Summary]:
    files = [(f"{TOKEN[:-1]}{number}", 1, "json", content) for number, content in enumerate(contents)]
    reports: list[Summary] = []
    writer = BatchWriter(settings, SystemClock(), lambda batch_id, summary, elapsed_sec: reports.append(summary))
    writer(file_rows(spark, files), 0)
    return reports


def members(settings: WriterSettings) -> list[str]:
    store = open_stores(settings.redis)[0]
    claim = store.claim(f"look:{uuid.uuid4().hex}").claim
    found = [m.member.decode()[22:] for m in claim.messages] if claim else []
    return found + (members(settings) if claim else [])


def test_a_batch_is_stored_its_rejects_written_and_a_replay_stores_nothing(
    spark: SparkSession, settings: WriterSettings
) -> None:
    first = "a.jsonl line 2, missing_due"
    for stored, duplicates in ((3, 1), (0, 4)):
        assert write(spark, settings, CONTENT) == [
            Summary(lines=6, stored=stored, duplicates=duplicates, rejected=1, blank=1, first_reject=first)
        ]
    assert sorted(members(settings)) == ['j{"message":"second","id":"order-1"}', "mfirst", "mthird"]
    [path] = Path(settings.rejects).glob("????-??-??-a.jsonl-*.jsonl")
    [record] = [json.loads(line) for line in path.read_text().splitlines()]
    assert (record["raw"], record["file"], record["line"], record["reason"]) == (
        '{"message":"no time"}',
        "a.jsonl",
        2,
        "missing_due",
    )
    assert record["detail"].endswith(".")
    counters = read_stats(connect(settings.redis), keys_of(settings.redis)).counters
    assert (counters["stored"], counters["duplicates"], counters["rejected"]) == (3, 1, 1)


def test_several_files_in_one_batch_keep_their_own_markers(spark: SparkSession, settings: WriterSettings) -> None:
    write(
        spark,
        settings,
        b'{"message":"a","due":1700000000001}\n' * 5,
        b'{"message":"b","due":1700000000001}\n',
        b"\n\n",
        b"",
    )
    assert sorted(members(settings)) == ["ma"] * 5 + ["mb"]
    assert len(list(open_stores(settings.redis)[0].marked_parts("source"))) == 4


def test_shards_share_the_files_and_know_each_others_ids_and_each_has_its_hash_tag(
    spark: SparkSession, settings: WriterSettings, server: RealServer
) -> None:
    settings = replace(settings, redis=replace(settings.redis, shards=3))
    one = b"".join(
        b'{"message":"%d","due":1700000000005,"id":"order-%d"}\n{"message":"plain","due":1700000000005}\n' % (n, n)
        for n in range(20)
    )
    other = b"".join(b'{"message":"retry","due":1700000000005,"id":"order-%d"}\n' % n for n in range(25))
    assert write(spark, settings, one) == [Summary(lines=40, stored=40)]
    assert write(spark, settings, one, other, *[b'{"message":"m","due":1700000000005}\n{"x":1}'] * 8) == [
        Summary(
            lines=40 + 25 + 16,
            stored=5 + 8,
            duplicates=40 + 20,
            rejected=8,
            first_reject="a.jsonl line 2, unknown_field",
        )
    ]
    each = [read_stats(connect(settings.redis), [keys]) for keys in keys_of(settings.redis)]
    assert all(stats.scheduled for stats in each)
    assert sum(stats.scheduled for stats in each) == 40 + 5 + 8
    assert sum(stats.counters.get("rejected", 0) for stats in each) == 8
    tags = {key.decode()[1:].partition("}")[0] for key in server.client().keys(f"{{{settings.redis.namespace}:*")}
    assert tags == {keys.tag for keys in keys_of(settings.redis)}


@pytest.mark.parametrize("undone", [True, False])
def test_a_batch_that_a_failover_came_between_is_written_again_and_counted_once(
    spark: SparkSession, settings: WriterSettings, server: RealServer, undone: bool
) -> None:
    reports: list[Summary] = []
    asked: list[Summary] = []

    def is_there(done: Summary) -> bool:
        asked.append(done)
        if len(asked) == 1 and undone:
            server.client().delete(*server.client().keys(f"{{{settings.redis.namespace}:*"))
        return len(asked) > 1

    writer = BatchWriter(settings, SystemClock(), lambda batch_id, summary, elapsed_sec: reports.append(summary))
    writer.is_there = is_there
    writer(file_rows(spark, [(TOKEN, 1, "json", CONTENT)]), 0)
    again = 3 if undone else 0
    first = "a.jsonl line 2, missing_due"
    assert reports == [
        Summary(lines=6, stored=3 + again, stored_again=again, duplicates=1, rejected=1, blank=1, first_reject=first)
    ]
    assert len(members(settings)) == 3


@pytest.mark.parametrize("configured", ["ignoreMissingFiles", "ignoreCorruptFiles"])
def test_a_file_that_an_executor_does_not_see_fails_the_batch_with_its_name_and_the_host(
    spark: SparkSession, settings: WriterSettings, tmp_path: Path, configured: str
) -> None:
    landing = tmp_path / "my landing%"
    landing.mkdir()
    names = [f"{TOKEN[:-1]}{number}.1.json.a=20b" for number in range(3)]
    for name in names:
        (landing / name).write_bytes(CONTENT)
    write = BatchWriter(settings, SystemClock(), lambda *_: None)

    def lose_one(batch: DataFrame, batch_id: int) -> None:
        (landing / names[1]).unlink()  # the driver has listed it
        write(batch, batch_id)

    files = read_landing(spark, str(landing), 64_000_000)
    spark.conf.set(f"spark.sql.files.{configured}", "true")
    try:
        query = start_query(files, lose_one, str(tmp_path / "checkpoint"), None)  # type: ignore[arg-type]
        with pytest.raises(StreamingQueryException) as raised:
            query.awaitTermination(120)
    finally:
        spark.conf.unset(f"spark.sql.files.{configured}")
    assert str(query_failure(raised.value)) == (
        f"An executor on {socket.gethostname()} does not see {landing / names[1]}: mount that folder on every executor "
        "and start the job again; nothing of this batch was deleted."
    )
    assert list((tmp_path / "checkpoint" / "commits").glob("[0-9]*")) == []


class UnhurriedDisk(RedisStore):
    """A shard whose disk takes its time."""

    def __init__(self, settings: WriterSettings) -> None:
        super().__init__(connect(settings.redis), keys_of(settings.redis)[0])
        self.waits: list[int] = []

    def wait_for_copies(self, on_disk: bool, replicas: int = 0) -> None:
        self.waits.append(read_stats(self._client, [self._keys]).scheduled)
        if len(self.waits) < 3:
            raise StoreUnavailable("it is not on disk yet.")


@pytest.mark.parametrize(("wait_for_disk", "waits"), [(True, [3, 3, 3]), (False, [])])
def test_a_batch_waits_for_the_disk_where_it_shall(
    settings: WriterSettings, wait_for_disk: bool, waits: list[int]
) -> None:
    shard = UnhurriedDisk(settings)
    writer = ShardWriter(shard, open_changing_stores(settings)[0], replace(settings, wait_for_disk=wait_for_disk))
    writer.add(PartQueue(parsed(b'{"message":"m","due":1700000000005}\n' * 3)))
    assert writer.finish() == Summary(stored=3)
    assert shard.waits == waits


def test_rejects_of_a_file_are_put_in_place_whole(tmp_path: Path) -> None:
    one, two = landed("one 1.json", "T" * 14), landed("two.csv.gz", "U" * 14)
    name = "2023-11-14-one_1.json-TTTTTTTTTTTTTT.jsonl"
    writer = RejectsWriter(tmp_path / "rejects")
    writer.write(one, [{"line": 1}])
    writer.write(one, [{"line": 2}])
    assert [p.name for p in tmp_path.rglob("*.jsonl")] == []
    writer.write(two, [])
    assert [p.name for p in tmp_path.rglob("*.jsonl")] == [name]
    writer.close()
    assert (tmp_path / "rejects" / name).read_text() == '{"line": 1}\n{"line": 2}\n'
    assert files_in(tmp_path / "rejects") == [name]


def test_an_executor_that_does_not_see_the_drivers_folder_writes_no_rejects_on_its_own_disk(tmp_path: Path) -> None:
    file, drivers, own = landed("one.json", "T" * 14), tmp_path / "driver", tmp_path / "own"
    drivers.mkdir()
    mark = mark_folder(drivers)
    assert mark == mark_folder(drivers)
    for its_own in (False, True):
        if its_own:
            own.mkdir()
            assert mark_folder(own) != mark
        with pytest.raises(PipelineError, match=f"does not see the rejects folder {own}: mount it"):
            RejectsWriter(own, mark).write(file, [{"line": 1}])
        assert not list(own.rglob("*.jsonl*"))
    with RejectsWriter(drivers, mark) as writer:
        writer.write(file, [{"line": 1}])
        writer.close()
    assert len(list(drivers.glob("*.jsonl"))) == 1


def test_what_a_dead_task_has_left_of_the_rejects_of_a_file_is_removed_with_the_next_try(tmp_path: Path) -> None:
    folder, file = tmp_path / "rejects", landed("one.json", "T" * 14)
    name = "2023-11-14-one.json-TTTTTTTTTTTTTT.jsonl"
    slow, other = (
        RejectsWriter(folder),
        RejectsWriter(folder),
    )  # of one process, or of containers with the same process id
    slow.write(file, [{"line": 1}])
    (folder / WORK_NAME / "two.4711").write_text("of another file")
    other.write(file, [{"line": 1}])
    assert len(files_in(folder)) == 3
    other.close()
    assert files_in(folder) == [name, "two.4711"]
    slow.close()
    assert files_in(folder) == [name, "two.4711"]
    assert (folder / name).read_text() == '{"line": 1}\n'


def test_a_task_that_fails_leaves_no_file_of_rejects_open(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no more"), RejectsWriter(tmp_path) as writer:
        writer.write(landed("one.json", "T" * 14), [{"line": 1}])
        assert open_files_in(tmp_path)
        raise ValueError("no more")
    assert not open_files_in(tmp_path)
    assert not files_in(tmp_path)


def open_files_in(folder: Path) -> list[str]:
    return [each.path for each in psutil.Process().open_files() if each.path.startswith(str(folder))]


def landed(name: str, token: str) -> FileText:
    return FileText(token, 1, "json", name, 1_700_000_000_123, b"")


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_what_one_server_lost_of_a_shard_while_another_was_stored_is_noticed(settings: WriterSettings) -> None:
    class Losing(ShardWriter):
        def store_waiting(self) -> None:
            if self._waiting:
                keys = keys_of(settings.redis)[0]
                connect(settings.redis).delete(keys.marker(settings.source_id, "A" * 14))
            super().store_waiting()

    [shard], [changing] = open_stores(settings.redis), open_changing_stores(settings)
    writers = [ShardWriter(shard, changing, settings), Losing(shard, changing, settings)]
    for writer, token in zip(writers, "AB", strict=True):
        writer.add(PartQueue(parsed(b'{"message":"m","due":1700000000005}\n', token=token * 14)))
    assert finish_all(writers).lost == 1


class SmallDisk:
    """A disk that takes a number of bytes, and has more room after each failure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, more: int, code: int = errno.ENOSPC) -> None:
        self.room, self.more, self.code, self.failures = room, more, code, 0
        disk = self

        class File(FileIO):
            def write(self, data: Any) -> int:
                if not disk.room:
                    disk.fail()
                written = super().write(bytes(data)[: disk.room])
                disk.room -= written
                return written

        monkeypatch.setattr(rejects_module, "FileIO", File)

    def fail(self) -> None:
        self.failures += 1
        self.room += self.more
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_rejects_wait_for_room_on_a_full_disk_and_are_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    clock, waits, folder = ManualClock(), list[float](), tmp_path / "rejects"
    disk = SmallDisk(monkeypatch, room=70_000, more=1_000, code=code)
    retry = partial(retry_until_available, wait=waits.append, clock=clock, random=lambda: 1.0)
    with RejectsWriter(folder, retry=retry) as writer:  # type: ignore[arg-type]
        for number in range(20):
            writer.write(landed("one.json", "T" * 14), [{"line": number, "raw": "x" * 5_000}])
    [path] = folder.glob("*.jsonl")
    assert [json.loads(line)["line"] for line in path.read_text().splitlines()] == list(range(20))
    assert files_in(folder) == [path.name]
    assert disk.failures == len(waits) > 20
    assert f"waiting for the disk: the disk of {folder} is full: make room" in caplog.text
    assert "the disk can be used again" in caplog.text


def test_rejects_that_never_find_room_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDisk(monkeypatch, room=0, more=0)
    waits: list[float] = []
    retry = partial(
        retry_until_available,
        wait=waits.append,
        clock=ManualClock(),
        random=lambda: 1.0,
        stopping=lambda: len(waits) > 3,
    )
    with pytest.raises(DiskFull, match=str(tmp_path)), RejectsWriter(tmp_path, retry=retry) as writer:  # type: ignore[arg-type]
        writer.write(landed("one.json", "T" * 14), [{"line": 1}])
    assert not files_in(tmp_path)


def test_a_disk_that_is_full_when_rejects_are_synced_is_told_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may say so only then, and what it has taken may be gone."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rejects_module.os, "fsync", fail)
    told = f"the disk of {tmp_path} is full.*Start the job again"
    with pytest.raises(DiskFull, match=told), RejectsWriter(tmp_path) as writer:
        writer.write(landed("one.json", "T" * 14), [{"line": 1}])
    assert not files_in(tmp_path)


def test_good_lines_are_stored_although_the_disk_of_rejects_was_full(
    settings: WriterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch, room=0, more=1_000)
    row = {"value": [CONTENT], "path": [f"{TOKEN}.1.json.a+jsonl"], "arrival_ms": [1_700_000_000_123]}
    done = PartitionWriter(settings).write([pa.RecordBatch.from_pydict(row)])
    assert disk.failures == 1
    assert (done.lines, done.stored, done.duplicates, done.rejected) == (6, 3, 1, 1)
    assert len([*Path(settings.rejects).glob("*.jsonl")]) == 1


def test_what_is_kept_of_a_rejected_line_is_bounded_and_says_so() -> None:
    rejection = Rejection(Reason.NOT_JSON, "It is no JSON.")
    whole, cut = (
        reject_record("a.json", RejectedLine(1, "x" * length, rejection))
        for length in (RAW_CHARS_MAX, RAW_CHARS_MAX + 1)
    )
    assert len(str(whole["raw"])) == RAW_CHARS_MAX and "raw_length" not in whole
    assert len(str(cut["raw"])) == RAW_CHARS_MAX and cut["raw_length"] == RAW_CHARS_MAX + 1
