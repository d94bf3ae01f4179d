"""The usual way from Spark to Redis, as users write it: from_json, foreachPartition, a redis-py pipeline.

It lacks what the pipeline's own writer does besides: lines are not judged, nothing tells a replay from a first attempt, and
who delivers isn't woken. The ids have the width of ours, so that the server stores the same number of bytes.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import islice

import redis
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

PIPELINE_ROWS = 1_000
GROUPED_ROWS = 5_000  # a transaction of our own writer; of 1,000 rows over a day a bucket gets seven
FIELDS = {
    "plain": "message STRING, delay_sec BIGINT",
    "topic": "message STRING, delay_sec BIGINT, topic STRING",
    "due": "message STRING, due STRING",
    "id": "message STRING, delay_sec BIGINT, id STRING",
    "everything": "message STRING, due STRING, topic STRING, id STRING, headers MAP<STRING, STRING>",
    "csv": "message STRING, delay_sec BIGINT",
}


def read_requests(spark: SparkSession, folder: str, form: str) -> DataFrame:
    """Read files and parse them: columns message, which is JSON if it is more than its text, due_ms, and id if there is one."""
    if form == "csv":
        requests = spark.read.csv(folder, FIELDS[form], header=True)
    else:
        requests = spark.read.text(folder).select(F.from_json("value", FIELDS[form]).alias("request"))
        requests = requests.select("request.*")
    due_ms = F.unix_millis(F.current_timestamp()) + F.col("delay_sec") * 1000
    if "due" in requests.columns:
        due_ms = F.unix_millis(F.to_timestamp("due"))
    kept = [name for name in requests.columns if name not in ("due", "delay_sec")]
    message = F.col("message") if kept == ["message"] else F.to_json(F.struct(*kept))
    return requests.select(message.alias("message"), due_ms.alias("due_ms"), *(name for name in kept if name == "id"))


def with_member_and_bucket(requests: DataFrame) -> DataFrame:
    """Give each request an id, and find its bucket of ten minutes."""
    message_id = F.lpad(F.hex(F.monotonically_increasing_id()), 22, "0")
    return requests.select(
        F.concat(message_id, "message").alias("member"),
        "due_ms",
        (F.col("due_ms") - F.col("due_ms") % 600_000).alias("bucket"),
        *(name for name in requests.columns if name == "id"),
    )


def store_row_by_row(requests: DataFrame, url: str) -> None:
    """One ZADD a row, 1,000 to a pipeline; where there is an id, a pipeline of HSETNX before it says which are new."""
    requests.transform(with_member_and_bucket).foreachPartition(partial(_write_rows, url))


def store_grouped(requests: DataFrame, url: str) -> None:
    """One ZADD for all rows of a bucket, of 5,000 rows at a time."""
    requests.transform(with_member_and_bucket).foreachPartition(partial(_write_groups, url))


def _write_rows(url: str, rows: Iterator[Row]) -> None:
    pipeline = redis.Redis.from_url(url).pipeline(transaction=False)
    while page := list(islice(rows, PIPELINE_ROWS)):
        if "id" in page[0]:
            for row in page:
                pipeline.hsetnx("ids", row.id, 1)
            page = [row for row, is_new in zip(page, pipeline.execute(), strict=True) if is_new]
        for row in page:
            pipeline.zadd(f"bucket:{row.bucket}", {row.member: row.due_ms})
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
