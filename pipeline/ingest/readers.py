"""Files to streaming DataFrames of file rows (``schemas.FILE_ROW``), one row a file."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamReader

from pipeline.core.errors import ConfigError
from pipeline.ingest.transforms import with_direct_columns, with_landing_columns

# By default Spark skips, silently, files a week older than the newest one it has seen.
_FILE_AGE_MAX: Final = "36500d"
_LANDING_NAMES: Final = "??????????????.*.{json,csv,sock}.*"
# A file that the driver lists and an executor can't read must fail the batch, whatever spark-defaults.conf says. Files that are
# gone before that, as in a replay of an older checkpoint, the driver leaves out by itself; landed.py looks after these.
ALL_OR_FAIL: Final = {"ignoreMissingFiles": "false", "ignoreCorruptFiles": "false"}
_NO_JARS: Final = re.compile(
    r"(?:ClassNotFoundException: (?:Class )?|NoClassDefFoundError: )([\w./$]+)|No FileSystem for scheme"
)
_CLASSES: Final = re.compile(r"[\w.$]+(?:Exception|Error): ")
REASON_LENGTH_MAX: Final = 200
# The columns of Spark's binaryFile, which a stream has to name.
_BINARY_FILE: Final = "path string, modificationTime timestamp, length long, content binary"
_DIRECT_NAMES: Final = "*.{json,jsonl,csv,json.gz,jsonl.gz,csv.gz}"


def read_landing(spark: SparkSession, landing_dir: str, max_bytes_per_trigger: int) -> DataFrame:
    """Stream the files of a landing folder: whole, immutable, uniquely named, at most some 8 MiB each. Spark only finds them.

    ``max_bytes_per_trigger`` bounds a micro-batch; a single larger file is still taken.
    """
    reader = _read_files(spark, max_bytes_per_trigger, _LANDING_NAMES).format("binaryFile").schema(_BINARY_FILE)
    # No folder in it is read, as the names of all begin with a dot. Without this Spark looks, ten times a second, whether names of
    # folders are columns of a table.
    files = reader.option("recursiveFileLookup", True).load(literal(url_of(landing_dir)))
    return files.transform(with_landing_columns)


def read_landing_once(spark: SparkSession, landing_dir: str) -> DataFrame:
    """Read what is in a landing folder now, as ``read_landing`` would."""
    files = spark.read.format("binaryFile").load(literal(url_of(landing_dir)))
    return files.transform(with_landing_columns)


def read_direct(spark: SparkSession, url: str, max_bytes_per_trigger: int) -> DataFrame:
    """Stream the files of a directory of HDFS or an object store as they are, with Spark's rules.

    Files must appear whole and never change: Spark reads a path once. Each is held in memory whole, below 2 GB unpacked.

    Raises:
        ConfigError: Spark can't read it.
    """
    with directory_in_use("input", url):
        reader = _read_files(spark, max_bytes_per_trigger, _DIRECT_NAMES).format("text").option("wholetext", True)
        files = reader.load(url)
    return files.transform(with_direct_columns)


@contextmanager
def directory_in_use(what: str, url: str) -> Iterator[None]:
    """Say in one sentence why Spark can't use a directory of HDFS or an object store; Java's text is pages.

    Raises:
        ConfigError: it has no jars or no credentials for that, or there is no such directory.
    """
    try:
        yield
    except (Py4JJavaError, AnalysisException) as exc:
        text = str(exc)
        if found := _NO_JARS.search(text):
            raise ConfigError(
                f"Spark can't use the {what} {url}, as it lacks {found[1] or 'a file system for it'}: add jars with --packages "
                "or --jars; docs/how-to/spark.md names them."
            ) from exc
        if "NoAuthWithAWSException" in text:
            raise ConfigError(
                f"Spark has no credentials for the {what} {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "spark.hadoop.fs.s3a.aws.credentials.provider."
            ) from exc
        if "[PATH_NOT_FOUND]" in text:
            raise ConfigError(f"The {what} {url} does not exist; make it, or correct --{what}.") from exc
        line = text.partition("\n\tat ")[0]
        reason = _CLASSES.split(line)[-1].strip()  # the innermost: causes are named from the outside in
        raise ConfigError(
            f"Spark can't use the {what} {url} ({reason[:REASON_LENGTH_MAX]}): put that right, or correct --{what}."
        ) from exc


def url_of(folder: str) -> str:
    """Return the URL of a local folder, by which Spark finds it also where HDFS is its default; a URL stays as it is.

    Hadoop takes ``%`` and spaces for what they are, so nothing is encoded as ``Path.as_uri`` does.
    """
    return folder if "://" in folder else f"file://{os.path.abspath(folder)}"


def literal(path: str) -> str:
    """Escape what Spark would take for a pattern in a path."""
    return re.sub(r"([\\\[\]{}*?,])", r"\\\1", path)


def _read_files(spark: SparkSession, max_bytes_per_trigger: int, names: str) -> DataStreamReader:
    return (
        spark.readStream.option("maxFileAge", _FILE_AGE_MAX)
        .option("maxBytesPerTrigger", max_bytes_per_trigger)
        .option("pathGlobFilter", names)
        .options(**ALL_OR_FAIL)
    )
