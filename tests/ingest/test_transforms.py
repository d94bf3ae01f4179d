"""Each transform by itself: what it adds, and to which rows."""

import re

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.core.ids import LINE_NO_MAX
from pipeline.core.messages import Reason
from pipeline.ingest import transforms
from pipeline.ingest.rejects import reject_record
from pipeline.ingest.schemas import FILE_ROW, LINE_ROW, OUTCOME_BLANK, OUTCOME_OK, OUTCOME_REJECTED
from tests.ingest.files import ARRIVAL_MS, TOKEN, file_rows, line_rows

_NAMED = "value string, _metadata struct<file_name: string, file_path: string, file_modification_time: timestamp>"


def _named_files(spark: SparkSession, *names: str) -> DataFrame:
    rows = spark.createDataFrame([(name,) for name in names], "name string")
    written = F.timestamp_millis(F.lit(ARRIVAL_MS)).alias("file_modification_time")
    metadata = F.struct(
        F.col("name").alias("file_name"), F.concat(F.lit("s3://b/"), "name").alias("file_path"), written
    )
    return rows.select(F.lit("x").alias("value"), metadata.alias("_metadata"))


def _assert_lines(spark: SparkSession, lines: DataFrame, wanted: list[tuple[int, str]]) -> None:
    assert_df_equality(
        lines.select("line_no", "line"),
        spark.createDataFrame(wanted, "line_no long, line string"),
        ignore_nullable=True,
    )


def test_a_landing_name_tells_token_line_kind_and_name(spark: SparkSession) -> None:
    files = _named_files(spark, f"{TOKEN}.7.csv.a=20b+=C3=A9.csv", f"{TOKEN}.1.json.=ZZ=", f"{TOKEN}.x.json.a")
    wanted = [
        ("x", TOKEN, 7, "csv", "a b.é.csv", ARRIVAL_MS),
        ("x", TOKEN, 1, "json", "=ZZ=", ARRIVAL_MS),
        ("x", TOKEN, 1, "json", "a", ARRIVAL_MS),
    ]
    found = files.transform(transforms.with_landing_columns)
    assert_df_equality(found, spark.createDataFrame(wanted, FILE_ROW), ignore_nullable=True)


def test_a_direct_file_gets_a_token_from_its_path_and_time(spark: SparkSession) -> None:
    names = ("a.json", "a.jsonl.gz", "b.csv", "b.CSV.gz", "a.csv.json")
    rows = _named_files(spark, *names).transform(transforms.with_direct_columns).collect()
    assert [(row.kind, row.first_line) for row in rows] == [
        ("json", 1), ("json", 1), ("csv", 2), ("csv", 2), ("json", 1)
    ]  # fmt: skip
    assert len({row.file_token for row in rows}) == len(names)
    assert all(re.fullmatch(r"[0-9A-Za-z_-]{14}", row.file_token) for row in rows)
    again = _named_files(spark, *names).transform(transforms.with_direct_columns).collect()
    assert rows == again


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", []),
        (b"\n", [(1, "")]),
        (b"a", [(1, "a")]),
        (b"a\n", [(1, "a")]),
        (b"a\n\n", [(1, "a"), (2, "")]),
        (b"\na\n \nb", [(1, ""), (2, "a"), (3, " "), (4, "b")]),
        (b"a\r\nb\r\r\nc\rd\n\r\n", [(1, "a"), (2, "b\r"), (3, "c\rd"), (4, "")]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", [(1, "a"), (2, "\ufeffb")]),
        (b"\xef\xbb\xbf", [(1, "")]),
        ("a\u2028b\x0bc\x85d\0e\n".encode(), [(1, "a\u2028b\x0bc\x85d\0e")]),
    ],
)
def test_lines_end_with_a_newline_only(spark: SparkSession, content: bytes, wanted: list[tuple[int, str]]) -> None:
    _assert_lines(spark, file_rows(spark, [(TOKEN, 1, "json", content)]).transform(transforms.with_lines), wanted)


def test_a_later_segment_counts_on_and_has_no_byte_order_mark(spark: SparkSession) -> None:
    files = file_rows(spark, [(TOKEN, 1001, "json", b"\xef\xbb\xbfa\nb\n")])
    _assert_lines(spark, files.transform(transforms.with_lines), [(1001, "\ufeffa"), (1002, "b")])


def test_a_csv_header_is_no_line_and_rows_are_numbered_from_the_first_line(spark: SparkSession) -> None:
    files = file_rows(spark, [(TOKEN, 2, "csv", b"\xef\xbb\xbfdue,message\r\n5,m\r\n\r\n6,n")])
    lines = files.transform(transforms.with_lines)
    _assert_lines(spark, lines, [(2, "5,m"), (3, ""), (4, "6,n")])
    assert {(row.header, tuple(row.names)) for row in lines.collect()} == {("due,message", ("due", "message"))}


@pytest.mark.parametrize("content", [b"", b"due,message", b"due,message\n"])
def test_a_csv_file_without_rows_has_no_lines(spark: SparkSession, content: bytes) -> None:
    assert line_rows(spark, [(TOKEN, 2, "csv", content)]) == []


def test_a_socket_line_brings_its_own_arrival(spark: SparkSession) -> None:
    files = file_rows(spark, [(TOKEN, 1, "sock", b'17\t{"a":1}\r\n18\t\n19\ta\tb\n')])
    found = files.transform(transforms.with_lines).select("arrival_ms", "line")
    wanted = spark.createDataFrame([(17, '{"a":1}'), (18, ""), (19, "a\tb")], "arrival_ms long, line string")
    assert_df_equality(found, wanted, ignore_nullable=True)


@pytest.mark.parametrize("line", [b"x", b'{"message":"m","due":5}', b"-1\tx", b"\tx", b"1" * 30 + b"\tx", b"1x\ty"])
def test_a_socket_line_without_an_arrival_is_rejected(spark: SparkSession, line: bytes) -> None:
    (row,) = line_rows(spark, [(TOKEN, 1, "sock", line)])
    assert (row.outcome, row.raw, row.reason) == (OUTCOME_REJECTED, line.decode(), Reason.BAD_SOCKET_LINE)
    assert reject_record(row.asDict())["reason"] == Reason.BAD_SOCKET_LINE


def test_one_bad_byte_spoils_its_own_line_only(spark: SparkSession) -> None:
    content = 'é\n{"message":"é","due":5}\n'.encode() + b'\xff{"x"\xc3\n{"message":"\xc3\xa9","due":6}\r\n'
    rows = line_rows(spark, [(TOKEN, 1, "json", content)])
    assert [row.outcome for row in rows] == [OUTCOME_REJECTED, OUTCOME_OK, OUTCOME_REJECTED, OUTCOME_OK]
    assert [row.raw for row in rows] == ["é", None, '\ufffd{"x"\ufffd', None]
    assert [row.reason for row in rows] == [None, None, Reason.NOT_UTF8, None]
    assert rows[3].member == f"{TOKEN}00000004mé"


def test_half_a_character_before_a_carriage_return_is_not_lost(spark: SparkSession) -> None:
    (row,) = line_rows(spark, [(TOKEN, 1, "json", b'{"message":"m","due":5}\xc3\r\n')])
    assert (row.outcome, row.reason) == (OUTCOME_REJECTED, Reason.NOT_UTF8)


def test_the_highest_line_number_is_taken_and_the_next_is_not(spark: SparkSession) -> None:
    line = b'{"message":"m","due":5}\n'
    last, beyond = line_rows(spark, [(TOKEN, LINE_NO_MAX, "json", line * 2)])
    assert (last.outcome, last.member) == (OUTCOME_OK, f"{TOKEN}ffffffffmm")
    assert (beyond.outcome, beyond.reason) == (OUTCOME_REJECTED, Reason.LINE_NO_TOO_HIGH)


@pytest.mark.parametrize("arrival_ms", [-1, 253_402_300_800_000])
def test_an_arrival_outside_the_years_makes_a_rejection(spark: SparkSession, arrival_ms: int) -> None:
    (row,) = line_rows(spark, [(TOKEN, 1, "json", b'{"message":"m","delay_sec":0}')], arrival_ms)
    assert reject_record(row.asDict())["reason"] == Reason.DUE_OUT_OF_RANGE


def test_equal_lines_are_two_messages(spark: SparkSession) -> None:
    rows = line_rows(spark, [(TOKEN, 1, "json", b'{"message":"m","due":5}\n' * 2)])
    assert [row.member for row in rows] == [f"{TOKEN}00000001mm", f"{TOKEN}00000002mm"]


def test_rows_come_in_the_order_of_lines_with_the_stated_columns(spark: SparkSession) -> None:
    content = b'{"message":"m","due":5}\n\nx\n' * 500
    rows = file_rows(spark, [(TOKEN, 1, "json", content)]).transform(transforms.select_line_rows)
    assert [(field.name, field.dataType) for field in rows.schema] == [(f.name, f.dataType) for f in LINE_ROW]
    found = [(row.line_no, row.outcome) for row in rows.collect()]
    outcomes = [OUTCOME_OK, OUTCOME_BLANK, OUTCOME_REJECTED]
    assert found == [(number + 1, outcomes[number % 3]) for number in range(1500)]


def test_a_line_that_only_spark_refuses_is_told_as_unexplained() -> None:
    row = {"file_name": "a", "line_no": 3, "raw": '{"message":"m","due":5}', "kind": "json", "arrival_ms": 1}
    record = reject_record(row | {"header": None, "reason": None})
    assert (record["reason"], record["file"], record["line"]) == (Reason.UNEXPLAINED, "a", 3)


def test_the_generated_code_stays_small_enough_for_the_jit(spark: SparkSession) -> None:
    # The JVM never compiles a method of more than 8000 bytes; one such method made all of this three times slower.
    frame = file_rows(spark, [(TOKEN, 1, "json", b"x")]).transform(transforms.select_line_rows)
    debug = getattr(getattr(spark._jvm.org.apache.spark.sql.execution.debug, "package$"), "MODULE$")
    subtrees = debug.codegenStringSeq(frame._jdf.queryExecution().executedPlan()).iterator()
    sizes = []
    while subtrees.hasNext():
        sizes.append(subtrees.next()._3().maxMethodCodeSize())
    assert sizes
    assert 0 < min(sizes) <= max(sizes) < 8000
