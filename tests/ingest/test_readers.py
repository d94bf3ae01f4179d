"""Real streaming queries over real files."""

import gzip
import os
import re
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from pipeline.core.errors import ConfigError
from pipeline.core.ids import encode_token
from pipeline.ingest import query as query_module
from pipeline.ingest import readers, tables
from pipeline.ingest.parsing import FileText, parse_file
from pipeline.ingest.query import start_query
from pipeline.ingest.readers import directory_in_use, read_direct, read_landing, read_landing_once, url_of
from pipeline.ingest.schemas import FILE_ROW
from pipeline.ingest.transforms import file_texts

ARRIVAL_MS = 1_700_000_000_123
LINE = b'{"message":"m","delay_sec":1}\n'


def _put(path: Path, content: bytes, arrival_ms: int = ARRIVAL_MS) -> None:
    path.parent.mkdir(exist_ok=True)
    work = path.with_name(f".{path.name}.tmp")
    work.write_bytes(content)
    os.utime(work, ns=(arrival_ms * 1_000_000, arrival_ms * 1_000_000))
    work.rename(path)


def _fill_landing(landing: Path) -> None:
    for number in range(3):
        name = f"{encode_token(ARRIVAL_MS + number, 5)}.{1 + number * 1000}.json.a=20b.jsonl"
        _put(landing / name, (LINE + b"x\n\n") * 500)
    _put(landing / f"{encode_token(ARRIVAL_MS + 9, 5)}.2.csv.c.csv", b"message,due\nm,1700000000005\n" * 200)
    _put(landing / f"{encode_token(ARRIVAL_MS + 10, 5)}.1.sock.host=3A9999", (b"77\t" + LINE) * 100)
    _put(landing / ".work-of-the-gatekeeper", LINE)
    for number, folder in enumerate((".stored", ".waiting")):
        _put(landing / folder / f"{encode_token(ARRIVAL_MS + 11 + number, 5)}.1.json.a", LINE)
    _put(landing / "foreign.jsonl", LINE)


def _files(rows: list[Row]) -> list[FileText]:
    return [*file_texts([pa.RecordBatch.from_pylist([row.asDict() for row in rows], to_arrow_schema(FILE_ROW))])]


def _parsed(rows: list[Row]) -> list[tuple[str, int, object]]:
    """What becomes of the lines of files: the file's token, and the due time and member or the line and reason."""
    found: list[tuple[str, int, object]] = []
    for file in _files(rows):
        for part in parse_file(file):
            found += zip(repeat(file.token), part.due_ms.tolist(), part.members.to_pylist(), strict=False)
            found += [(file.token, line.line_no, line.rejection.reason.value) for line in part.rejected]
    return sorted(found, key=str)


class _BrokenError(Exception):
    """Stands in for a crash while a batch is written."""


def _run(lines: DataFrame, checkpoint: Path, broken_batch: int = -1, kept: list[Row] | None = None) -> list[Row]:
    """Take in what is there; rows of the batch that breaks are not kept."""
    kept = [] if kept is None else kept

    def keep(batch: DataFrame, batch_id: int) -> None:
        rows = batch.collect()
        if batch_id == broken_batch:
            raise _BrokenError
        kept.extend(rows)

    writer = lines.writeStream.foreachBatch(keep).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(120), "the query did not finish within two minutes"
    finally:
        query.stop()
    return kept


def _read_all(
    spark: SparkSession, work: Path, max_bytes: int, broken_batch: int = -1, kept: list[Row] | None = None
) -> list[Row]:
    """Take in the same files in a folder of their own, as what is read is deleted."""
    if not work.exists():
        work.mkdir()
        _fill_landing(work / "landing")
    return _run(read_landing(spark, str(work / "landing"), max_bytes), work / "checkpoint", broken_batch, kept)


@pytest.mark.parametrize("folder", ["landing", ".landing", "with [brackets] {and} *stars*"])
def test_a_landing_folder_is_read_whatever_its_name(spark: SparkSession, tmp_path: Path, folder: str) -> None:
    name = f"{encode_token(ARRIVAL_MS, 5)}.1.json.a+jsonl"
    _put(tmp_path / folder / name, LINE)
    files = read_landing(spark, str(tmp_path / folder), 64_000_000)
    (row,) = _run(files, tmp_path / "checkpoint")
    (file,) = _files([row])
    assert (file.content, file.arrival_ms, file.token, file.name) == (LINE, ARRIVAL_MS, name[:14], "a.jsonl")


@pytest.fixture
def elsewhere(spark: SparkSession) -> Iterator[None]:
    """The default file system of a Hadoop cluster; nobody answers there."""
    hadoop, url = spark.sparkContext._jsc.hadoopConfiguration(), "hdfs://127.0.0.1:9"
    hadoop.set("fs.defaultFS", url)
    spark.conf.set("fs.defaultFS", url)
    yield
    hadoop.unset("fs.defaultFS")
    spark.conf.unset("fs.defaultFS")


@pytest.mark.usefixtures("elsewhere")
def test_local_folders_are_local_where_spark_keeps_its_files_elsewhere(spark: SparkSession, tmp_path: Path) -> None:
    work, kept = tmp_path / "my work%20", list[Row]()
    _put_one(work / "landing")
    writer: Any = lambda batch, batch_id: kept.extend(batch.collect())  # noqa: E731
    files = read_landing(spark, str(work / "landing"), 64_000_000)
    query = start_query(files, writer, str(work / "checkpoint"), None)
    assert query.awaitTermination(120) and len(kept) == 1
    assert (work / "checkpoint" / "commits" / "0").exists()
    assert read_landing_once(spark, str(work / "landing")).count() == 1
    table = spark.createDataFrame([("m", 5)], "message string, delay_sec int")
    campaigns: Any = SimpleNamespace(note_stage=lambda folder: None)
    staged = tables._stage(campaigns, table, "name", url_of(str(work / "staging")), ARRIVAL_MS)
    assert (staged.accepted, staged.files) == (1, len(tables._Folder(spark, f"{staged.folder}/rows").names()))


def test_a_checkpoint_of_before_goes_on_and_reads_nothing_twice(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Row] = []
    writer: Any = lambda batch, batch_id: kept.extend(batch.collect())  # noqa: E731
    for number in range(2):
        with monkeypatch.context() as context:
            if not number:
                for module in (readers, query_module):
                    context.setattr(module, "url_of", str)
            _put_one(tmp_path / "landing", number)
            files = read_landing(spark, str(tmp_path / "landing"), 64_000_000)
            query = start_query(files, writer, str(tmp_path / "checkpoint"), None)
            assert query.awaitTermination(120)
        assert len(kept) == number + 1


def _put_one(landing: Path, number: int = 0) -> None:
    landing.mkdir(parents=True, exist_ok=True)
    _put(landing / f"{encode_token(ARRIVAL_MS + number, 5)}.1.json.a+jsonl", LINE)


def test_a_file_that_somebody_else_has_put_into_the_landing_folder_is_left_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = tmp_path / f"{encode_token(ARRIVAL_MS, 5)}.1.json.a+jsonl", tmp_path / "abcdefghijkl!!.x.json.foo"
    for path in (ours, theirs):
        _put(path, LINE)
    rows = {"value": [None] * 2, "path": [str(theirs), str(ours)], "arrival_ms": [ARRIVAL_MS] * 2}
    assert [file.name for file in file_texts([pa.RecordBatch.from_pydict(rows)])] == ["a.jsonl"]
    assert f"{theirs} is no landing file" in caplog.text and theirs.exists()


def test_only_a_wrong_trigger_is_told_to_be_one(spark: SparkSession, tmp_path: Path) -> None:
    files = read_landing(spark, str(tmp_path), 64_000_000)
    with pytest.raises(ConfigError, match="'soon' is no trigger"):
        start_query(files, print, str(tmp_path / "checkpoint"), "soon")  # type: ignore[arg-type]
    (tmp_path / "interval").touch()
    with pytest.raises(Exception, match="interval") as raised:  # where no folder can be made
        start_query(files, print, str(tmp_path / "interval" / "checkpoint"), "1 second")  # type: ignore[arg-type]
    assert not isinstance(raised.value, ConfigError)


def test_a_replay_with_other_cores_and_splits_gives_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    undisturbed = _parsed(_read_all(spark, tmp_path / "one", 64_000_000))
    assert len(undisturbed) == 3 * 1000 + 399 + 100
    assert {reason for _, _, reason in undisturbed if isinstance(reason, str)} == {"not_json", "not_a_time"}

    first_batches: list[Row] = []
    with pytest.raises(StreamingQueryException, match="_BrokenError"):
        _read_all(spark, tmp_path / "two", 30_000, broken_batch=1, kept=first_batches)
    other = {
        "spark.sql.files.maxPartitionBytes": "5000",
        "spark.sql.files.openCostInBytes": "1",
        "spark.sql.leafNodeDefaultParallelism": "16",
        "spark.sql.shuffle.partitions": "7",
    }
    before = {name: spark.conf.get(name, None) for name in other}
    try:
        for name, value in other.items():
            spark.conf.set(name, value)
        replayed = _read_all(spark, tmp_path / "two", 64_000_000)
        whole = _read_all(spark, tmp_path / "three", 64_000_000)
    finally:
        for name, old in before.items():
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)
    assert first_batches, "the first batch was to be taken in before the second one broke"
    assert replayed, "the batch that broke was to come again"
    assert _parsed(first_batches + replayed) == undisturbed
    assert _parsed(whole) == undisturbed


def test_the_plan_has_nothing_that_changes_in_a_replay(spark: SparkSession, tmp_path: Path) -> None:
    landing = tmp_path / "landing"
    landing.mkdir()
    files = read_landing(spark, str(landing), 64_000_000)
    plan = files._jdf.queryExecution().analyzed().toString().lower()
    assert "unix_millis" in plan
    assert re.findall(r"\b(?:now|uuid|rand\w*|current_\w+|spark_partition_id|monotonically_\w+)\(", plan) == []


def test_old_files_are_not_passed_over(spark: SparkSession, tmp_path: Path) -> None:
    landing = tmp_path / "landing"
    for number, arrival_ms in enumerate([ARRIVAL_MS, ARRIVAL_MS - 20 * 365 * 86_400_000]):
        _put(landing / f"{encode_token(number, 5)}.1.json.a", LINE, arrival_ms)
    rows = _run(read_landing(spark, str(landing), 64_000_000), tmp_path / "checkpoint")
    assert {row.arrival_ms for row in rows} == {ARRIVAL_MS, ARRIVAL_MS - 20 * 365 * 86_400_000}


def test_a_replay_leaves_out_what_is_gone_already(spark: SparkSession, tmp_path: Path) -> None:
    for number in range(2):
        _put(tmp_path / "landing" / f"{encode_token(number, 5)}.1.json.a", LINE)
    files = read_landing(spark, str(tmp_path / "landing"), 64_000_000)
    with pytest.raises(StreamingQueryException, match="_BrokenError"):
        _run(files, tmp_path / "checkpoint", broken_batch=0)
    for path in (tmp_path / "landing").iterdir():
        path.unlink()
    assert _run(files, tmp_path / "checkpoint") == []


def test_a_directory_is_read_directly(spark: SparkSession, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    _put(inbox / "a b.jsonl", LINE)
    _put(inbox / "b.json.gz", gzip.compress(LINE))
    _put(inbox / "c.csv", b"message,due\nm,1700000000005\n")
    _put(inbox / "notes.txt", LINE)
    files = read_direct(spark, f"file://{inbox}", 64_000_000)
    rows = _run(files, tmp_path / "checkpoint")
    assert {(file.name, file.first_line, file.kind) for file in _files(rows)} == {
        ("a b.jsonl", 1, "json"),
        ("b.json.gz", 1, "json"),
        ("c.csv", 2, "csv"),
    }
    assert {bytes(row.value) for row in rows} == {LINE, b"message,due\nm,1700000000005\n"}
    again = _run(files, tmp_path / "other-checkpoint")
    assert sorted(again) == sorted(rows)


def test_a_directory_that_spark_can_not_read_is_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    lacks = r"can't use the input s3a://b/in, as it lacks org\.apache\.hadoop\.fs\.s3a\.S3AFileSystem: add jars with --packages"
    with pytest.raises(ConfigError, match=lacks):
        read_direct(spark, "s3a://b/in", 64_000_000)
    with pytest.raises(
        ConfigError, match="can't use the input nosuch://b/in, as it lacks a file system for it: add jars"
    ):
        read_direct(spark, "nosuch://b/in", 64_000_000)
    with pytest.raises(ConfigError, match=rf"input file://{tmp_path}/no does not exist; make it, or correct --input\."):
        read_direct(spark, f"file://{tmp_path}/no", 64_000_000)


class _JavaError(Py4JJavaError):
    """One without a Java behind it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return f"An error occurred while calling o57.load.\n: {self.text}\n\tat org.apache.X.y(X.java:1)\nCaused by: z"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "java.nio.file.AccessDeniedException: s3a://b/c: o.a.NoAuthWithAWSException: No AWS Credentials provided by A B",
            (
                "Spark has no credentials for the checkpoint s3a://b/c: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "spark.hadoop.fs.s3a.aws.credentials.provider."
            ),
        ),
        (
            "o.a.UnknownStoreException: `s3a://b/c': s.a.NoSuchBucketException: The specified bucket does not exist",
            (
                "Spark can't use the checkpoint s3a://b/c (The specified bucket does not exist): put that right, or correct "
                "--checkpoint."
            ),
        ),
    ],
)
def test_why_spark_can_not_use_a_directory_is_its_innermost_reason(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised, directory_in_use("checkpoint", "s3a://b/c"):
        raise _JavaError(text)
    assert str(raised.value) == sentence
