"""Spark as the jobs start it, and our own way from a landing folder to Redis."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from bench.common import WORK
from pipeline.config import IngestSettings, RedisSettings, Settings
from pipeline.core.clock import SystemClock
from pipeline.ingest.query import open_session
from pipeline.ingest.readers import read_landing_once
from pipeline.ingest.stores import WriterSettings
from pipeline.ingest.tables import schedule_table
from pipeline.ingest.worker_sockets import socket_folder
from pipeline.ingest.writer import BatchWriter, count_lines
from pipeline.runtime.submit import spark_environ
from pipeline.store.connection import connect
from pipeline.store.namespace import open_namespace

SOURCE_ID = "bench"
KEEP_SEC = 3_600


@contextmanager
def spark_session(master: str) -> Iterator[SparkSession]:
    """Run Spark with the project's conf/ while the block lasts."""
    os.environ |= spark_environ(os.environ)
    os.environ |= {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": shlex.join(["--master", master, "pyspark-shell"]),
    }
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with socket_folder() as sockets:
        spark = open_session(sockets)
        try:
            yield spark
        finally:
            with suppress(Exception):  # a signal may have cut a call to the JVM short; it ends with this process
                spark.stop()


def java_version(spark: SparkSession) -> str:
    """Return the version of the Java that Spark runs on."""
    return str(spark._jvm.System.getProperty("java.version"))  # type: ignore[union-attr]


def collect_garbage(spark: SparkSession) -> None:
    """Let no measurement pay for the garbage of the one before."""
    spark._jvm.System.gc()  # type: ignore[union-attr]


def store_ours(spark: SparkSession, folder: Path, url: str, rejects: Path) -> None:
    """Take a landing folder in as one micro-batch of the ingest job, with the default settings."""
    settings = WriterSettings(
        redis=RedisSettings(url=url),
        source_id=SOURCE_ID,
        rejects=str(rejects),
        transaction_messages=IngestSettings().transaction_messages,
    )
    BatchWriter(settings, SystemClock(), lambda *told: None)(read_landing_once(spark, str(folder)), 0)


def schedule_ours(table: DataFrame, url: str) -> None:
    """Schedule a table for a name that nobody has used, staged in the bench's folder."""
    settings = replace(Settings(), redis=RedisSettings(url=url))
    client = connect(settings.redis)
    open_namespace(client, settings.redis, may_create=True)
    schedule_table(table, "bench", {}, str(WORK / "staging"), KEEP_SEC, client, settings)


def parse_ours(spark: SparkSession, folder: Path) -> None:
    """Parse a landing folder as the ingest job does, and store nothing."""
    read_landing_once(spark, str(folder)).mapInArrow(count_lines, "lines long").collect()
