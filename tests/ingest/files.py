"""File rows for the transforms, from bytes."""

from collections.abc import Sequence

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from pipeline.ingest.transforms import select_line_rows

ARRIVAL_MS = 1_700_000_000_123
TOKEN = "OZ0aaaabbbbbbb"

FileParts = tuple[str, int, str, bytes]


def file_rows(spark: SparkSession, files: Sequence[FileParts], arrival_ms: int = ARRIVAL_MS) -> DataFrame:
    """Make file rows of (token, first line, kind, content); the content may be any bytes."""
    rows = [(token, first_line, kind, bytearray(content)) for token, first_line, kind, content in files]
    frame = spark.createDataFrame(rows, "file_token string, first_line long, kind string, content binary")
    return frame.select(
        F.col("content").cast("string").alias("value"),
        "file_token",
        "first_line",
        "kind",
        F.lit("a.jsonl").alias("file_name"),
        F.lit(arrival_ms).cast("bigint").alias("file_arrival_ms"),
    )


def line_rows(spark: SparkSession, files: Sequence[FileParts], arrival_ms: int = ARRIVAL_MS) -> list[Row]:
    """Run the whole way and bring the rows back."""
    return file_rows(spark, files, arrival_ms).transform(select_line_rows).collect()
