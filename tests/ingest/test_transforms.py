"""The DataFrame transforms: what they add, and to which rows."""

import re

from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.messages import Reason
from pipeline.ingest import transforms
from pipeline.ingest.schemas import FILE_ROW, LINE_ROW
from tests.ingest.files import ARRIVAL_MS, TOKEN, file_rows


def _named_files(spark: SparkSession, *names: str) -> DataFrame:
    rows = spark.createDataFrame([(name,) for name in names], "name string")
    written = F.timestamp_millis(F.lit(ARRIVAL_MS)).alias("file_modification_time")
    metadata = F.struct(
        F.col("name").alias("file_name"), F.concat(F.lit("s3://b/"), "name").alias("file_path"), written
    )
    return rows.select(F.lit("x").alias("value"), metadata.alias("_metadata"))


def test_a_landing_name_tells_token_line_kind_and_name(spark: SparkSession) -> None:
    files = _named_files(spark, f"{TOKEN}.7.csv.a=20b+=C3=A9.csv", f"{TOKEN}.1.json.=ZZ=", f"{TOKEN}.x.json.a")
    wanted = [
        (bytearray(b"x"), TOKEN, 7, "csv", "a b.é.csv", ARRIVAL_MS),
        (bytearray(b"x"), TOKEN, 1, "json", "=ZZ=", ARRIVAL_MS),
        (bytearray(b"x"), TOKEN, 1, "json", "a", ARRIVAL_MS),
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


def test_a_request_becomes_a_message_with_an_absolute_due_time(spark: SparkSession) -> None:
    content = (
        b'{"message":"tea","delay_sec":90.5}\n\n{"message":"no time"}\n'
        b'{"message":"rent","due":"2026-01-31T12:00:00+02:00","id":"rent-1","topic":"home"}\n'
    )
    rent_ms = 1_769_853_600_000
    rows = file_rows(spark, [(TOKEN, 1, "json", content)]).transform(transforms.select_line_rows)
    tea, rent = f"{TOKEN}00000001mtea", f'{TOKEN}00000004j{{"message":"rent","topic":"home","id":"rent-1"}}'
    due_ms = ARRIVAL_MS + 90_500
    wanted = [
        (TOKEN, due_ms, bucket_start_ms(due_ms), bytearray(tea.encode()), None, None, None),
        (TOKEN, rent_ms, rent_ms, bytearray(rent.encode()), "rent-1", None, None),
        (TOKEN, None, None, None, None, 3, Reason.MISSING_DUE.value),
    ]
    assert_df_equality(rows, spark.createDataFrame(wanted, LINE_ROW))


def test_the_same_files_give_the_same_rows_however_spark_cuts_its_work(spark: SparkSession) -> None:
    content = b'{"message":"m","delay_sec":1}\n{"message":"m","delay_sec":1}\nx\n' * 50
    files = file_rows(spark, [(f"{TOKEN[:-1]}{n}", 1, "json", content) for n in range(6)])
    one, many = files.coalesce(1), files.repartition(5)
    assert_df_equality(
        one.transform(transforms.select_line_rows),
        many.transform(transforms.select_line_rows),
        ignore_row_order=True,
    )
