"""The DataFrame transforms: what they add, and to which rows."""

import json
import math
import re
import socket
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.errors import PipelineError
from pipeline.core.messages import Message, Reason, Replacement
from pipeline.core.validation import Kind
from pipeline.ingest import transforms
from pipeline.ingest.parsing import FileText
from pipeline.ingest.schemas import FILE_ROW
from tests.cases.requests import CASES, Case, Expected
from tests.ingest.files import ARRIVAL_MS, TOKEN


def _named_files(spark: SparkSession, *names: str) -> DataFrame:
    rows = spark.createDataFrame([(name,) for name in names], "name string")
    written = F.timestamp_millis(F.lit(ARRIVAL_MS)).alias("file_modification_time")
    metadata = F.struct(
        F.col("name").alias("file_name"), F.concat(F.lit("s3://b/"), "name").alias("file_path"), written
    )
    return rows.select(F.lit("x").alias("value"), metadata.alias("_metadata"))


def test_a_landing_file_is_a_row_of_its_path_and_arrival(spark: SparkSession) -> None:
    paths = [f"file:/some where/{TOKEN}.7.csv.a=20b+=C3=A9+csv", f"file:/{TOKEN}.2.csv.a+csv=.3w"]
    rows = spark.createDataFrame([(path,) for path in paths], "path string")
    files = rows.withColumn("modificationTime", F.timestamp_millis(F.lit(ARRIVAL_MS)))
    wanted = [(None, path, ARRIVAL_MS) for path in paths]
    found = files.transform(transforms.with_landing_columns)
    assert_df_equality(found, spark.createDataFrame(wanted, FILE_ROW), ignore_nullable=True)


def _texts(row: dict[str, object]) -> list[FileText]:
    return [*transforms.file_texts([pa.RecordBatch.from_pylist([row])])]


def test_a_worker_reads_the_file_that_is_not_in_its_row(tmp_path: Path) -> None:
    path = tmp_path / "ü 100% [a]+b" / f"{TOKEN}.1.json.a+jsonl"
    row = {"value": None, "path": f"file:{path}", "arrival_ms": ARRIVAL_MS}
    with pytest.raises(
        PipelineError, match=rf"^{socket.gethostname()} can't read a landing file \(.*{TOKEN}.*\): let the user"
    ):
        _texts(row)
    path.parent.mkdir()
    path.write_bytes(b"x\n\xff")
    assert _texts(row) == [FileText(TOKEN, 1, "json", "a.jsonl", ARRIVAL_MS, b"x\n\xff")]


@pytest.mark.parametrize(
    ("name", "first_line", "kind", "original", "is_repeated", "has_waited"),
    [
        (f"{TOKEN}.7.csv.a=20b+=C3=A9.csv", 7, "csv", "a b.é.csv", False, False),
        (f"{TOKEN}.2.csv.a+csv=.12", 2, "csv", "a.csv", True, False),
        (f"{TOKEN}.2.csv.a+csv=.3w", 2, "csv", "a.csv", True, True),
        (f"{TOKEN}.2.csv.aw", 2, "csv", "aw", False, False),
        (f"{TOKEN}.x.json.a", 1, "json", f"{TOKEN}.x.json.a", False, False),  # no landing name: somebody put it there
    ],
)
def test_the_name_of_a_landing_file_says_the_rest(
    name: str, first_line: int, kind: Kind, original: str, is_repeated: bool, has_waited: bool
) -> None:
    found = FileText(TOKEN, first_line, kind, original, ARRIVAL_MS, b"x", is_repeated, has_waited)
    assert _texts({"value": b"x", "path": name, "arrival_ms": ARRIVAL_MS}) == [found]


def test_a_direct_file_gets_a_token_from_its_path_and_time(spark: SparkSession) -> None:
    names = ("a.json", "a.jsonl.gz", "b.csv", "b.CSV.gz", "a.csv.json", "a%20=b+%25.json", "a=.1.csv")
    rows = _named_files(spark, *names).transform(transforms.with_direct_columns).collect()
    files = [*transforms.file_texts([pa.RecordBatch.from_pylist([row.asDict() for row in rows])])]
    assert [(file.kind, file.first_line, file.name) for file in files] == [
        ("json", 1, "a.json"), ("json", 1, "a.jsonl.gz"), ("csv", 2, "b.csv"), ("csv", 2, "b.CSV.gz"), ("json", 1, "a.csv.json"),
        ("json", 1, "a =b+%.json"), ("csv", 2, "a=.1.csv"),
    ]  # fmt: skip
    assert not any(file.is_repeated for file in files)
    assert len({file.token for file in files}) == len(names)
    assert all(re.fullmatch(r"[0-9A-Za-z_-]{14}", file.token) for file in files)
    again = _named_files(spark, *names).transform(transforms.with_direct_columns).collect()
    assert rows == again


REQUEST = (
    "message string, due string, delay_sec double, countdown int, id string, topic string, headers map<string,string>, "
    "cancel string, replace boolean"
)
FIELDS = [column.split()[0] for column in REQUEST.split(", ")]
NEW_YEAR_MS = 1_767_225_600_000


def judged(table: DataFrame) -> DataFrame:
    """Due time, bucket and refusal of each request, as a table input sees them."""
    rows = table.transform(transforms.with_message_text).transform(transforms.with_due_ms, ARRIVAL_MS)
    return rows.transform(transforms.with_bucket).transform(transforms.with_refusal)


def test_each_row_of_a_table_gets_its_due_time_its_bucket_and_why_it_is_refused(spark: SparkSession) -> None:
    table = spark.createDataFrame(
        [
            ("tea", None, 90.5, None, None, None, None, None, None),
            ("rent", "2026-01-01T00:00:00+00:00", None, None, "rent-1", "home", {"a": "b"}, None, True),
            ("again", None, None, 5, None, None, None, None, None),
            (None, None, 1.0, None, None, None, None, None, None),
            ("when?", None, None, None, None, None, None, None, None),
            ("when?", "2026-01-01T00:00:00", None, None, None, None, None, None, None),
            ("late", None, -1.0, None, None, None, None, None, None),
            ("who?", None, 1.0, None, "a b", None, None, None, None),
            (None, None, None, None, None, None, None, "rent-1", None),
            ("no", None, None, None, None, None, None, "rent-1", False),
            ("which?", None, 1.0, None, None, None, None, None, True),
        ],
        REQUEST,
    )
    found = judged(table).select("message", "due_ms", "bucket_start_ms", "refusal")
    wanted = [
        ("tea", ARRIVAL_MS + 90_500, bucket_start_ms(ARRIVAL_MS + 90_500), None),
        ("rent", NEW_YEAR_MS, NEW_YEAR_MS, None),
        ("again", ARRIVAL_MS + 5_000, bucket_start_ms(ARRIVAL_MS + 5_000), None),
        (None, ARRIVAL_MS + 1_000, bucket_start_ms(ARRIVAL_MS + 1_000), "missing_message"),
        ("when?", None, None, "missing_due"),
        ("when?", None, None, "due_without_zone"),
        ("late", None, None, "delay_out_of_range"),
        ("who?", ARRIVAL_MS + 1_000, bucket_start_ms(ARRIVAL_MS + 1_000), "bad_id"),
        (None, None, None, None),
        ("no", None, None, "cancel_not_alone"),
        ("which?", ARRIVAL_MS + 1_000, bucket_start_ms(ARRIVAL_MS + 1_000), "replace_without_id"),
    ]
    assert_df_equality(found, spark.createDataFrame(wanted, found.schema), ignore_nullable=True)


def test_a_message_of_fields_is_written_as_json_and_a_timestamp_is_a_due_time(spark: SparkSession) -> None:
    table = spark.range(1).select(
        F.struct(F.lit(7).alias("order"), F.lit("tea").alias("what")).alias("message"),
        F.timestamp_micros(F.lit(NEW_YEAR_MS * 1_000 + 1)).alias("due"),
    )
    found = judged(table).select("message", "due_ms", "refusal")
    wanted = [('{"order":7,"what":"tea"}', NEW_YEAR_MS + 1, None)]
    assert_df_equality(found, spark.createDataFrame(wanted, found.schema), ignore_nullable=True)


def test_a_whole_number_is_a_due_time_in_ms_and_seconds_are_refused(spark: SparkSession) -> None:
    table = spark.createDataFrame(
        [("m", NEW_YEAR_MS), ("m", NEW_YEAR_MS // 1000), ("m", -1)], "message string, due bigint"
    )
    found = judged(table).select("due_ms", "refusal")
    wanted = [(NEW_YEAR_MS, None), (NEW_YEAR_MS // 1000, "due_in_seconds"), (-1, "due_out_of_range")]
    assert_df_equality(found, spark.createDataFrame(wanted, found.schema), ignore_nullable=True)


@pytest.mark.parametrize(
    "column", ["due timestamp_ntz", "due date", "delay_sec string", "message bigint", "headers string"]
)
def test_a_column_of_a_type_that_no_request_has_is_an_error(spark: SparkSession, column: str) -> None:
    with pytest.raises(TypeError, match=rf"^The column {column.split()[0]} is of type"):
        judged(spark.createDataFrame([], column))


# Reasons that are about the text of a line, or about a type that no column of ``REQUEST`` has.
OF_LINES = [
    Reason.NOT_JSON, Reason.NOT_UTF8, Reason.TRAILING_TEXT, Reason.NOT_AN_OBJECT, Reason.LINE_TOO_LONG, Reason.TOO_DEEP,
    Reason.DUPLICATE_KEY, Reason.UNKNOWN_FIELD, Reason.WRONG_TYPE, Reason.BAD_HEADERS,
]  # fmt: skip


def request_of(case: Case) -> dict[str, Any] | None:
    """The fields of a JSON line of the table, if a row of ``REQUEST`` (or with ``due`` as a number) can say the same."""
    if case.kind != "json" or case.expected is None or case.expected in OF_LINES:
        return None
    row: dict[str, Any] = json.loads(case.line, parse_float=Decimal)
    delay_sec = row.get("delay_sec")
    if isinstance(delay_sec, int | Decimal):
        row["delay_sec"] = float(str(delay_sec))  # infinite where it is too much for a double
        if math.isfinite(row["delay_sec"]) and Decimal(repr(row["delay_sec"])) != delay_sec:
            return None  # no double is this number
    due, countdown = row.get("due"), row.get("countdown")
    is_long = isinstance(due, int) and abs(due) >= 2**63
    return None if is_long or not isinstance(countdown, int | None) else row


def due_ms_of(expected: Expected) -> int | None:
    message = expected.message if isinstance(expected, Replacement) else expected
    return message.due_ms if isinstance(message, Message) else None


def test_columns_judge_the_table_of_cases_as_the_reference_does(spark: SparkSession) -> None:
    cases = [(case, row) for case in CASES if (row := request_of(case))]
    assert len(cases) > 150
    for schema, kind in ((REQUEST, str), (REQUEST.replace("due string", "due bigint"), int)):
        chosen = [(case, row) for case, row in cases if isinstance(row.get("due"), kind | None)]
        rows = [tuple(row.get(name) for name in FIELDS) for _, row in chosen]
        found = judged(spark.createDataFrame(rows, schema)).select("due_ms", "refusal").collect()
        wrong = [
            (case.name, row.due_ms, row.refusal)
            for (case, _), row in zip(chosen, found, strict=True)
            if (case.expected.value if isinstance(case.expected, Reason) else None) != row.refusal
            or due_ms_of(case.expected) not in (None, row.due_ms)
        ]
        assert wrong == []


def test_the_rest_of_a_member_is_written_as_the_reference_writes_it(spark: SparkSession) -> None:
    """All that JSON escapes, in each text that may have it, and headers in every order."""
    odd = "".join(chr(code) for code in (*range(1, 128), 0xA0, 0xE9, 0x2028, 0xD7FF, 0xE000, 0xFFFD, 0xFFFF, 0x1F600))
    messages = [
        Message(0, odd),
        Message(0, odd, "mail"),
        Message(0, "tea", "mail", "k:1"),
        Message(0, "tea", id="k:1"),
        Message(0, "tea", headers={"b": odd, "a": "", odd: "x", "\uffff": "1", "\U0001f600": "2"}),
        Message(0, '"\\', "mail", "k", {"B": "1", "a": "2", "": "3"}),
    ]
    rows = [(m.body, m.topic, m.id or None, dict(m.headers)) for m in messages]
    rows.append(("tea", None, None, None))
    table = spark.createDataFrame(rows, "message string, topic string, id string, headers map<string,string>")
    wanted = [m.to_member(f"{TOKEN}{1:08x}").decode()[len(TOKEN) + 8 :] for m in (*messages, Message(0, "tea"))]
    found = table.transform(transforms.with_rest).select("rest")
    assert_df_equality(found, spark.createDataFrame([(rest,) for rest in wanted], "rest string"), ignore_nullable=True)
    alone = table.select("message").limit(1).transform(transforms.with_rest).select("rest")
    assert_df_equality(alone, spark.createDataFrame([(f"m{odd}",)], "rest string"), ignore_nullable=True)


def test_text_that_is_no_utf_8_becomes_readable(spark: SparkSession) -> None:
    table = spark.range(1).select(F.expr("cast(x'61FF62' as string)").alias("message"))
    found = table.transform(transforms.with_rest).select("rest")
    assert_df_equality(found, spark.createDataFrame([("ma\ufffdb",)], "rest string"), ignore_nullable=True)


def test_headers_that_are_longer_than_a_line_may_be_are_refused(spark: SparkSession) -> None:
    long = F.create_map(F.lit("a"), F.repeat(F.lit("x"), F.lit(4 * 1024 * 1024)))
    table = spark.range(1).select(F.lit("m").alias("message"), F.lit(1).alias("delay_sec"), long.alias("headers"))
    assert [row.refusal for row in judged(table).collect()] == ["line_too_long"]
