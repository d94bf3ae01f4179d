"""The usual way from Spark to Redis, as users write it: from_json, foreachPartition, a redis-py pipeline.

It lacks what the pipeline's own writer does besides: lines are not judged, nothing tells a replay from a first attempt, and
who delivers isn't woken. The ids have the width of ours, so that the server stores the same number of bytes.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import redis
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

PIPELINE_ROWS = 1_000
GROUPED_ROWS = 5_000  # a transaction of our own writer; of 1,000 rows over a day a bucket gets seven
REQUEST = "message STRING, delay_sec BIGINT"


def read_requests(spark: SparkSession, folder: str) -> DataFrame:
    """Read lines and parse them: columns message and due_ms."""
    now_ms = F.unix_millis(F.current_timestamp())
    requests = spark.read.text(folder).select(F.from_json("value", REQUEST).alias("request"))
    return requests.select("request.message", (now_ms + F.col("request.delay_sec") * 1000).alias("due_ms"))


def with_member_and_bucket(requests: DataFrame) -> DataFrame:
    """Give each request an id, and find its bucket of ten minutes."""
    message_id = F.lpad(F.hex(F.monotonically_increasing_id()), 22, "0")
    return requests.select(
        F.concat(message_id, "message").alias("member"),
        "due_ms",
        (F.col("due_ms") - F.col("due_ms") % 600_000).alias("bucket"),
    )


def store_row_by_row(spark: SparkSession, folder: str, url: str) -> None:
    """One ZADD a row, 1,000 to a pipeline."""
    read_requests(spark, folder).transform(with_member_and_bucket).foreachPartition(partial(_write_rows, url))


def store_grouped(spark: SparkSession, folder: str, url: str) -> None:
    """One ZADD for all rows of a bucket, of 5,000 rows at a time."""
    read_requests(spark, folder).transform(with_member_and_bucket).foreachPartition(partial(_write_groups, url))


def _write_rows(url: str, rows: Iterator[Row]) -> None:
    pipeline = redis.Redis.from_url(url).pipeline(transaction=False)
    for row in rows:
        pipeline.zadd(f"bucket:{row.bucket}", {row.member: row.due_ms})
        if len(pipeline) >= PIPELINE_ROWS:
            pipeline.execute()
    pipeline.execute()


def _write_groups(url: str, rows: Iterator[Row]) -> None:
    pipeline = redis.Redis.from_url(url).pipeline(transaction=False)
    groups: dict[int, dict[str, int]] = defaultdict(dict)

    def flush() -> None:
        for bucket, members in groups.items():
            pipeline.zadd(f"bucket:{bucket}", members)
        pipeline.execute()
        groups.clear()

    for count, row in enumerate(rows, start=1):
        groups[row.bucket][row.member] = row.due_ms
        if count % GROUPED_ROWS == 0:
            flush()
    flush()
