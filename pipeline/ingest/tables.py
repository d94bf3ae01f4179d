"""Scheduling the rows of a table, each once for the name of a campaign.

A plan may give other rows, or the same in another order, each time it runs. So its rows are written down first, as blocks of
messages (``blocks.py``), and what is written down is stored like the parts of a landing file: exactly once, by progress markers.
The first who has written down all rows of a name makes that known in Redis; from then on the name means those blocks, for whoever
comes with it.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.sql import Column, DataFrame, DataFrameReader, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from pipeline.config import Settings, check_name
from pipeline.core.clock import SystemClock
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.ids import TOKEN_HALF_BITS
from pipeline.core.text import count_text
from pipeline.ingest.blocks import BlockWriter, Packer, add_digests, count_rows
from pipeline.ingest.cold_folder import ColdPlace
from pipeline.ingest.cold_opening import open_cold
from pipeline.ingest.readers import ALL_OR_FAIL, literal, url_of
from pipeline.ingest.stages import REFUSED, ROWS, delete_old_stages, done_folder, new_stage
from pipeline.ingest.stores import WriterSettings
from pipeline.ingest.summary import Summary
from pipeline.ingest.transforms import with_due_ms, with_message_text, with_refusal, with_rest
from pipeline.ingest.writer import BatchWriter
from pipeline.store.campaigns import Campaign, Campaigns
from pipeline.store.connection import server_ms
from pipeline.store.keys import keys_of

FIELDS: Final = ("message", "due", "delay_sec", "countdown", "id", "topic", "headers")

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
    campaign = campaigns.find(check_name("table", name))
    ours = None
    if campaign is None:
        delete_old_stages(campaigns, staging, lambda folder: _Folder(spark, folder).delete())
        ours = _stage(campaigns, requests, name, staging, server_ms(client))
        campaign = campaigns.begin(name, ours, keep_sec)
        if campaign.stage != ours.stage:
            log.info("another call has staged the rows of %s meanwhile: these count", name)
            _Folder(spark, ours.folder).delete()
    elif campaign.is_done:  # one that was cut off is completed, whatever rows come now
        ours = _counted(campaign, requests.transform(with_lines, campaign.arrival_ms))
    if ours and not campaign.has_rows_of(ours):
        log.warning("%s: give them another name.", other_rows(name, campaign, ours))
    cold = open_cold(client, settings.redis, settings.cold)
    campaign, stored = complete(
        campaigns, name, campaign, lambda found: _load(spark, found, settings, cold), settings.ingest.marker_keep_sec
    )
    _Folder(spark, done_folder(campaign)).delete()
    refused = _refused(spark, campaign, requests.schema)
    log.info("%s: %s stored, %s refused", name, count_text(stored, "message"), f"{campaign.refused:,}")
    return ScheduledTable(name, stored, campaign.accepted - stored, campaign.refused, refused)


def _requests_of(table: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """Return a table whose columns have the names of fields; see ``fields_of``.

    Raises:
        TypeError: a column has a type that its field can't have.
    """
    fields = fields_of(table.columns, columns)
    return table.select(*(F.col(f"`{column}`").alias(field) for field, column in fields.items()))


def fields_of(names: Iterable[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of the fields that a table has.

    Args:
        names: of its columns.

        columns: those of fields whose columns are called otherwise.
    Raises:
        ConfigError: a column is none of a request, or one is named that is not there.
    """
    names = [*names]
    if unknown := sorted({*columns} - {*FIELDS}):
        raise ConfigError(f"A request has no {unknown[0]}; its fields are {', '.join(FIELDS)}.")
    if missing := sorted({*columns.values()} - {*names}):
        raise ConfigError(f"The table has no column {missing[0]}; it has {', '.join(names)}.")
    fields = {name: name for name in FIELDS if name in names} | dict(columns)
    if unused := [name for name in names if name not in fields.values()]:
        raise ConfigError(
            f"The column {unused[0]} is no field of a request: leave it out, or say which one it is, as in message="
            f'"{unused[0]}"; the fields are {", ".join(FIELDS)}.'
        )
    return fields


def _stage(campaigns: Campaigns, requests: DataFrame, name: str, staging: str, arrival_ms: int) -> Campaign:
    """Write down the rows: the messages as blocks, and those that are no requests as they are, in a folder each."""
    stage = new_stage(name)
    folder = f"{staging.rstrip('/')}/{stage}"
    campaigns.note_stage(folder)
    rows, counts = requests.transform(with_lines, arrival_ms), Observation()
    lines = rows.mapInArrow(Packer(arrival_ms, secrets.randbits(TOKEN_HALF_BITS)), Packer.COLUMNS)
    lines.observe(counts, *_totals()).select("value").write.text(f"{folder}/{ROWS}")
    files = len(_Folder(requests.sparkSession, f"{folder}/{ROWS}").names())
    begun = Campaign(stage=stage, folder=folder, arrival_ms=arrival_ms, files=files, refused=0)
    begun = _with_totals(begun, counts.get)
    if begun.refused:
        staged = _reader(requests.sparkSession).text(literal(f"{folder}/{ROWS}"))
        staged.where(F.startswith("value", F.lit("{"))).write.text(f"{folder}/{REFUSED}")
    return begun


def _counted(campaign: Campaign, rows: DataFrame) -> Campaign:
    """Return a campaign as it would be of rows of ``with_lines``."""
    return _with_totals(campaign, rows.mapInArrow(count_rows, Packer.COLUMNS).agg(*_totals()).first().asDict())  # type: ignore[union-attr]


def _totals() -> list[Column]:
    """Return what is told of all rows. Digests are added up as decimals, as a sum that is too large for a number is an error."""
    digest = F.sum(F.col("digest").cast("decimal(20,0)"))
    return [F.sum("accepted").alias("accepted"), F.sum("refused").alias("refused"), digest.alias("digest")]


def _with_totals(campaign: Campaign, totals: Mapping[str, Any]) -> Campaign:
    accepted, refused, digest = (int(totals[column] or 0) for column in ("accepted", "refused", "digest"))
    return replace(campaign, accepted=accepted, refused=refused, digest=digest_text([digest]))


def digest_text(digests: Iterable[int]) -> str:
    """Return the digest of a campaign from those of its blocks."""
    return f"{add_digests(digests):016x}"


def other_rows(name: str, known: Campaign, ours: Campaign) -> str:
    """Say that a name has been scheduled with other rows than those that come now."""
    now = f"{ours.rows:,} others" if known.rows == ours.rows else f"{ours.rows:,} rows that are not the same"
    return (
        f"{name} has been scheduled with {count_text(known.rows, 'row')} and comes now with {now}, which are left out"
    )


def with_lines(requests: DataFrame, arrival_ms: int) -> DataFrame:
    """Judge requests: ``due_ms``, ``rest``, ``id`` and ``asked_ms`` of those that are accepted; ``refused``, the others as JSON.

    Args:
        arrival_ms: which delays count from, epoch ms UTC.
    """
    rows = requests.withColumn("_row", F.struct(*requests.columns))
    judged = rows.transform(with_message_text).transform(with_due_ms, arrival_ms).transform(with_refusal)
    refused = F.to_json(F.struct("_row.*", F.col("refusal").alias("reason")))
    has_due = F.col("due").isNotNull() if "due" in requests.columns else F.lit(False)
    asked_ms = F.when(has_due, F.col("due_ms")).otherwise(F.lit(arrival_ms - 1) - F.col("due_ms"))  # see ``digest_of``
    return judged.transform(with_rest).select(
        "due_ms",
        F.when(F.col("refusal").isNull(), F.col("rest")).alias("rest"),
        (F.col("id") if "id" in requests.columns else F.lit(None)).cast("string").alias("id"),
        asked_ms.alias("asked_ms"),
        F.when(F.col("refusal").isNotNull(), refused).alias("refused"),
    )


def complete(
    campaigns: Campaigns, name: str, campaign: Campaign, load: Callable[[Campaign], Summary], keep_sec: int
) -> tuple[Campaign, int]:
    """Store what is left of a campaign; returns what is known of it now, and how many messages that were.

    Args:
        load: stores the staged rows of a campaign that are not stored yet, all of them or it raises.

        keep_sec: for how long its progress markers stay.
    """
    stored = 0
    if not campaign.is_done:
        try:
            stored = load(campaign).stored
        except Exception:
            # Somebody else may have stored all of it, and deleted the files that we read.
            if not (found := campaigns.find(name)) or not found.is_done:
                raise
    campaign = replace(campaign, is_done=True)
    campaigns.finish(name, campaign, keep_sec)
    return campaign, stored


def _load(spark: SparkSession, campaign: Campaign, settings: Settings, cold: ColdPlace | None) -> Summary:
    """Store the messages that are written down, those that are not stored yet.

    Raises:
        PipelineError: files are not there, or were not read.
    """
    folder, done = f"{campaign.folder}/{ROWS}", Summary()
    check_files(campaign, len(_Folder(spark, folder).names()))
    if campaign.files:
        to_write = writer_settings(campaign, settings, cold)
        write = BatchWriter(to_write, SystemClock(), lambda _, summary, __: done.add(summary), BlockWriter(to_write))
        write(_reader(spark).text(literal(url_of(folder))).where(~F.startswith("value", F.lit("{"))), 0)
    check_rows(campaign, done)
    return done


def writer_settings(campaign: Campaign, settings: Settings, cold: ColdPlace | None) -> WriterSettings:
    """Return what those who store the rows of a campaign need to know."""
    return WriterSettings(
        settings.redis,
        campaign.stage,
        "",  # there are no rejects
        settings.ingest.transaction_messages,
        settings.ingest.wait_for_disk,
        settings.drain.id_retention_sec,
        settings.ingest.wait_for_replicas,
        cold=cold,
    )


def check_files(campaign: Campaign, there: int) -> None:
    """See that no staged file is missing.

    Raises:
        PipelineError: one is.
    """
    if there != campaign.files:
        raise PipelineError(
            f"The folder {campaign.folder}/{ROWS} has {there} of its {campaign.files} files: see that the driver and all "
            "executors reach it, and call again."
        )


def check_rows(campaign: Campaign, done: Summary) -> None:
    """See that all rows were read that were staged.

    Raises:
        PipelineError: some were not.
    """
    if done.lines != campaign.accepted:
        raise PipelineError(
            f"Of the {campaign.accepted:,} rows in {campaign.folder}/{ROWS} {done.lines:,} were read: its files are not as they "
            "were written."
        )


def _refused(spark: SparkSession, campaign: Campaign, schema: T.StructType) -> DataFrame:
    of_refused = T.StructType([*schema.fields, T.StructField("reason", T.StringType())])
    if not campaign.refused:
        return spark.createDataFrame([], of_refused)
    return _reader(spark).schema(of_refused).json(literal(url_of(f"{campaign.folder}/{REFUSED}")))


def _reader(spark: SparkSession) -> DataFrameReader:
    return spark.read.options(**ALL_OR_FAIL)


class _Folder:
    """A folder on any file system that Spark knows, which has no such verbs in Python."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        self._path = spark._jvm.org.apache.hadoop.fs.Path(url_of(url))  # type: ignore[union-attr]
        self._files = self._path.getFileSystem(spark._jsc.hadoopConfiguration())

    def names(self) -> list[str]:
        """Return the files with data; none if the folder is not there."""
        if not self._files.exists(self._path):
            return []
        names = [status.getPath().getName() for status in self._files.listStatus(self._path)]
        return [name for name in names if not name.startswith(("_", "."))]

    def delete(self) -> bool:
        """Delete it with all that is in it; returns whether it was there."""
        return bool(self._files.delete(self._path, True))
