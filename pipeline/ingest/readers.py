"""Files to streaming DataFrames of file rows (``schemas.FILE_ROW``), one row a file."""

import re
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamReader

from pipeline.ingest.transforms import with_direct_columns, with_landing_columns

# By default Spark skips, silently, files a week older than the newest one it has seen.
_FILE_AGE_MAX: Final = "36500d"
_LANDING_NAMES: Final = "??????????????.*.{json,csv,sock}.*"
# A file that the driver lists and an executor can't read must fail the batch, whatever spark-defaults.conf says. Files that are
# gone before that, as in a replay of an older checkpoint, the driver leaves out by itself; landed.py looks after these.
ALL_OR_FAIL: Final = {"ignoreMissingFiles": "false", "ignoreCorruptFiles": "false"}
_DIRECT_NAMES: Final = "*.{json,jsonl,csv,json.gz,jsonl.gz,csv.gz}"


def read_landing(spark: SparkSession, landing_dir: str, max_bytes_per_trigger: int) -> DataFrame:
    """Stream the files of a landing folder: whole, immutable, uniquely named, at most some 8 MiB each.

    ``max_bytes_per_trigger`` bounds a micro-batch; a single larger file is still taken.
    """
    files = _read_whole_files(spark, max_bytes_per_trigger, _LANDING_NAMES).load(_literal(landing_dir))
    return files.transform(with_landing_columns)


def read_landing_once(spark: SparkSession, landing_dir: str) -> DataFrame:
    """Read what is in a landing folder now, as ``read_landing`` would."""
    files = spark.read.format("text").option("wholetext", True).load(_literal(landing_dir))
    return files.transform(with_landing_columns)


def read_direct(spark: SparkSession, url: str, max_bytes_per_trigger: int) -> DataFrame:
    """Stream the files of a directory of HDFS or an object store as they are, with Spark's rules.

    Files must appear whole and never change: Spark reads a path once. Each is held in memory whole, below 2 GB unpacked.
    """
    files = _read_whole_files(spark, max_bytes_per_trigger, _DIRECT_NAMES).load(url)
    return files.transform(with_direct_columns)


def _literal(path: str) -> str:
    """Escape what Spark would take for a pattern in a path."""
    return re.sub(r"([\\\[\]{}*?,])", r"\\\1", path)


def _read_whole_files(spark: SparkSession, max_bytes_per_trigger: int, names: str) -> DataStreamReader:
    return (
        spark.readStream.format("text")
        .option("wholetext", True)
        .option("maxFileAge", _FILE_AGE_MAX)
        .option("maxBytesPerTrigger", max_bytes_per_trigger)
        .option("pathGlobFilter", names)
        .options(**ALL_OR_FAIL)
    )
