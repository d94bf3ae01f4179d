"""Scheduling the rows of a table, each once for the name of a campaign.

A plan may give other rows, or the same in another order, each time it runs. So its rows are written down first, as files of request
lines, and what is written down is stored like any other files: exactly once, by their progress markers. The first who has written
down all rows of a name makes that known in Redis; from then on the name means those files, for whoever comes with it.
"""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from pipeline.config import Settings, check_name
from pipeline.core.clock import SystemClock
from pipeline.core.due import EPOCH_MS_MIN
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.text import count_text
from pipeline.ingest.cold_folder import ColdPlace
from pipeline.ingest.cold_opening import open_cold
from pipeline.ingest.readers import ALL_OR_FAIL
from pipeline.ingest.shard_writer import Summary
from pipeline.ingest.stores import WriterSettings
from pipeline.ingest.transforms import with_due_ms, with_message_text, with_refusal, with_staged_columns
from pipeline.ingest.writer import BatchWriter
from pipeline.store.campaigns import Campaign, Campaigns
from pipeline.store.connection import server_ms
from pipeline.store.keys import keys_of

FIELDS: Final = ("message", "due", "delay_sec", "countdown", "id", "topic", "headers")
ROWS_PER_FILE: Final = 10_000  # an executor holds a file whole, and half of one costs as many transactions
_ACCEPTED, _REFUSED = "refused=false", "refused=true"  # as Spark names the folders

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScheduledTable:
    """What became of the rows of a table.

    ``stored`` are messages that this call has scheduled, ``known`` those that were before: by another call with the same name, or
    by whoever used their ``id``. ``refused`` has the rows that are no requests, each as it was, with a ``reason``; there are
    ``refused_count`` of them. It reads files in the staging folder, which stay there.
    """

    name: str
    stored: int
    known: int
    refused_count: int
    refused: DataFrame


def schedule_table(
    table: DataFrame,
    name: str,
    columns: Mapping[str, str],
    staging: str,
    keep_sec: int,
    client: Any,
    settings: Settings,
) -> ScheduledTable:
    """Schedule the rows of a table; see ``pipeline.spark.schedule``."""
    requests = _requests_of(table, columns)
    spark, campaigns = table.sparkSession, Campaigns(client, keys_of(settings.redis))
    campaign = campaigns.find(check_name("campaign", name))
    if campaign is None:
        ours = _stage(requests, name, staging, server_ms(client))
        campaign = campaigns.begin(name, ours, keep_sec)
        if campaign.stage != ours.stage:
            log.info("another call has staged the rows of %s meanwhile: these count", name)
            _Folder(spark, ours.folder).delete()
    stored = 0
    if not campaign.is_done:
        try:
            done = _load(spark, campaign, settings, open_cold(client, settings.redis, settings.cold))
        except Exception:
            # Somebody else may have stored all of it, and deleted the files that we read.
            if not (found := campaigns.find(name)) or not found.is_done:
                raise
            campaign = found
        else:
            stored = done.stored
            campaign = replace(campaign, accepted=done.lines, is_done=True)
    campaigns.finish(name, campaign, settings.ingest.marker_keep_sec)
    _Folder(spark, f"{campaign.folder}/{_ACCEPTED}").delete()
    refused = _refused(spark, campaign, requests.schema)
    log.info("%s: %s stored, %s refused", name, count_text(stored, "message"), f"{campaign.refused:,}")
    return ScheduledTable(name, stored, campaign.accepted - stored, campaign.refused, refused)


def _requests_of(table: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """Return a table whose columns have the names of fields.

    Raises:
        ConfigError: a column is none of a request, or one is named that is not there.
        TypeError: a column has a type that its field can't have.
    """
    if unknown := sorted({*columns} - {*FIELDS}):
        raise ConfigError(f"A request has no {unknown[0]}; its fields are {', '.join(FIELDS)}.")
    if missing := sorted({*columns.values()} - {*table.columns}):
        raise ConfigError(f"The table has no column {missing[0]}; it has {', '.join(table.columns)}.")
    fields = {name: name for name in FIELDS if name in table.columns} | dict(columns)
    if unused := [name for name in table.columns if name not in fields.values()]:
        raise ConfigError(
            f"The column {unused[0]} is no field of a request: leave it out, or say which one it is, as in message="
            f'"{unused[0]}"; the fields are {", ".join(FIELDS)}.'
        )
    return table.select(*(F.col(f"`{column}`").alias(field) for field, column in fields.items()))


def _stage(requests: DataFrame, name: str, staging: str, arrival_ms: int) -> Campaign:
    """Write down the rows as lines: those that are requests, and those that are not, in a folder each."""
    stage = f"{name}-{uuid.uuid4().hex}"
    folder = f"{staging.rstrip('/')}/{stage}"
    rows = requests.withColumn("_row", F.struct(*requests.columns))
    judged = rows.transform(with_message_text).transform(with_due_ms, arrival_ms).transform(with_refusal)
    is_refused = F.col("refusal").isNotNull()
    refused_line = F.to_json(F.struct("_row.*", F.col("refusal").alias("reason")))
    lines = judged.select(
        F.when(is_refused, refused_line).otherwise(_line(judged)).alias("value"), is_refused.alias("refused"), "due_ms"
    )
    # Files that are near in time cost the server less, and Spark would sort by the first of the two anyway.
    lines = lines.sortWithinPartitions("refused", "due_ms").drop("due_ms")
    lines.write.partitionBy("refused").option("maxRecordsPerFile", ROWS_PER_FILE).text(folder)
    spark = requests.sparkSession
    has_refused = _Folder(spark, f"{folder}/{_REFUSED}").names()
    return Campaign(
        stage=stage,
        folder=folder,
        arrival_ms=arrival_ms,
        files=len(_Folder(spark, f"{folder}/{_ACCEPTED}").names()),
        refused=_reader(spark).text(f"{folder}/{_REFUSED}").count() if has_refused else 0,
    )


def _line(judged: DataFrame) -> Column:
    """Write a request. A due time of so long ago that its milliseconds look like seconds is a little later."""
    due = F.greatest("due_ms", F.lit(EPOCH_MS_MIN)).alias("due")
    texts = [name for name in ("id", "topic") if name in judged.columns]
    headers = [F.col("headers").cast("map<string,string>").alias("headers")] if "headers" in judged.columns else []
    return F.to_json(F.struct("message", due, *texts, *headers))


def _load(spark: SparkSession, campaign: Campaign, settings: Settings, cold: ColdPlace | None) -> Summary:
    """Store the messages that are written down, those that are not stored yet.

    Raises:
        PipelineError: files are not there, or were not read.
    """
    folder, done = f"{campaign.folder}/{_ACCEPTED}", Summary()
    there = len(_Folder(spark, folder).names())
    if there == campaign.files != 0:
        writer_settings = WriterSettings(
            settings.redis,
            campaign.stage,
            str(Path(settings.ingest.rejects).absolute()),
            settings.ingest.transaction_messages,
            settings.ingest.wait_for_disk,
            settings.drain.id_retention_sec,
            settings.ingest.wait_for_replicas,
            cold=cold,
        )
        write = BatchWriter(writer_settings, SystemClock(), lambda number, summary, elapsed_sec: done.add(summary))
        whole = _reader(spark).text(folder, wholetext=True)
        write(whole.transform(with_staged_columns, campaign.stage, campaign.arrival_ms), 0)
        there = len(done.file_tokens)
    if there != campaign.files:
        raise PipelineError(
            f"The folder {folder} has {there} of its {campaign.files} files: see that the driver and all executors reach it, "
            "and call again."
        )
    return done


def _refused(spark: SparkSession, campaign: Campaign, schema: T.StructType) -> DataFrame:
    of_refused = T.StructType([*schema.fields, T.StructField("reason", T.StringType())])
    if not campaign.refused:
        return spark.createDataFrame([], of_refused)
    return _reader(spark).schema(of_refused).json(f"{campaign.folder}/{_REFUSED}")


def _reader(spark: SparkSession) -> DataFrameReader:
    return spark.read.options(**ALL_OR_FAIL)


class _Folder:
    """A folder on any file system that Spark knows, which has no such verbs in Python."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        self._path = spark._jvm.org.apache.hadoop.fs.Path(url)  # type: ignore[union-attr]
        self._files = self._path.getFileSystem(spark._jsc.hadoopConfiguration())

    def names(self) -> list[str]:
        """Return the files with data; none if the folder is not there."""
        if not self._files.exists(self._path):
            return []
        names = [status.getPath().getName() for status in self._files.listStatus(self._path)]
        return [name for name in names if not name.startswith(("_", "."))]

    def delete(self) -> None:
        """Delete it with all that is in it."""
        self._files.delete(self._path, True)
