"""Scheduling from Spark: the rows of a table, each once for a name, and what is scheduled as a table."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from pipeline.config import load_settings
from pipeline.consume.opening import open_client
from pipeline.core.errors import ConfigError
from pipeline.ingest.data_source import DAY_SEC, FORMAT, KEEP_DAYS, DuetimeSource
from pipeline.ingest.executors import check_workers
from pipeline.ingest.readers import url_of
from pipeline.ingest.tables import ScheduledTable as ScheduledTable
from pipeline.ingest.tables import schedule_table


def schedule(
    table: DataFrame, name: str, *, staging: str = "", keep_days: int = KEEP_DAYS, **columns: str
) -> ScheduledTable:
    """Schedule the rows of a table, on the server of ``REDIS_URL`` or the configuration.

    The name is an idempotency key: called again with it, from any session or cluster, whatever the table is by then, nothing is
    stored twice; if it has other rows than then, a warning is logged. A call that was cut off is completed by the next one with
    the name. In ``foreachBatch`` let the name have the id of the query and the number of the batch.

    Args:
        table: columns ``message`` (text, or a struct, map or array, which is written as JSON); one of ``due`` (timestamp, ISO 8601
            text with a zone, or epoch ms UTC), ``delay_sec`` and ``countdown`` (seconds from this call on); and, if wanted, ``id``,
            ``topic`` and ``headers``. Rows follow the same rules as request lines.

        staging: the URL of a folder that the driver and all executors reach, where rows are written down before they are stored;
            ``staging`` in the state folder of this checkout if Spark runs on this machine alone.

        keep_days: how long the name is known.

        columns: names of columns that are called otherwise, such as ``message="text"``.
    Raises:
        ConfigError: a name, a column or a setting is not valid, there is no server, or the session is one of Spark Connect.
        TypeError: a column has a type that its field can't have.
        PipelineError: staged files are not where they should be, or Spark's workers lack this package.
        StoreUnavailable: no answer from Redis.
    """
    if _is_connect(table.sparkSession):
        raise ConfigError(
            "schedule() does not work over Spark Connect, as it needs the driver in its own process: use register(spark) and "
            'table.write.format("duetime").'
        )
    settings = load_settings({}, os.environ)
    is_local = str(table.sparkSession.sparkContext.master).partition("[")[0] == "local"
    if not is_local and not settings.redis.url:
        raise ConfigError("Executors on other machines can't reach the private server: name one by REDIS_URL.")
    if not is_local and "://" not in staging:
        raise ConfigError(
            f"Executors on other machines have no folder {staging or 'staging'}: give its URL as staging."
        )
    folder = staging or str(Path(settings.local.state, "staging"))
    with open_client(settings) as (client, opened):
        check_workers(table.sparkSession, opened.redis)
        return schedule_table(table, name, columns, url_of(folder), keep_days * DAY_SEC, client, opened)


def register(spark: SparkSession) -> None:
    """Let a session read and write ``format("duetime")``, on the server of ``REDIS_URL`` or the configuration, as they are now.

    ``spark.read.format("duetime").load()`` gives what is scheduled; see ``scheduled``.

    ``df.write.format("duetime").option("name", "trials").mode("append").save()`` schedules a table as ``schedule`` does, and
    ``df.writeStream.format("duetime")`` each batch of a stream, for the name ``<name>-<id of the query>-<number of the batch>``.
    Options are the arguments of ``schedule``, and two more. ``refused``: with ``fail``, the default, rows that are no requests fail
    the write before anything is scheduled, with ``keep`` they are left out. ``changedRows``: with ``error``, the default, other
    rows than those that a name is known for fail the write, with ``ignore`` they are left out.

    Raises:
        ConfigError: a setting is not valid.
        PipelineError: Spark's workers lack this package.
    """
    settings = load_settings({}, os.environ)
    if not _is_connect(spark):
        check_workers(spark)
    staging = str(Path(settings.local.state, "staging").absolute())
    known = {
        "settings": settings,
        "open_client": staticmethod(open_client),
        "open_to_look": staticmethod(partial(open_client, may_create=False)),
        "staging": staging,
    }
    spark.dataSource.register(type("ConfiguredSource", (DuetimeSource,), known))


def _is_connect(spark: SparkSession) -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def scheduled(spark: SparkSession, *, since: str = "", until: str = "", columns: Sequence[str] = ()) -> DataFrame:
    """Return what is scheduled, a row a message.

    It has the columns ``due``, ``bucket``, ``topic``, ``id``, ``message``, ``headers``, ``message_id``, ``attempt`` and ``group``.
    What a pause holds, and what is in flight, is not there.

    Each action reads anew, while messages come and go. A message that waits for the same due time all the while is there once. One
    that is scheduled, cancelled or delivered meanwhile may be there or not, and one that is moved may even be there with both due
    times.

    Args:
        since: only what is due from then on, and ``until``, before then: ISO 8601 with a zone, or epoch ms UTC.

        columns: only these.
    Raises:
        ConfigError: a setting, time or column is not valid.
    """
    register(spark)
    given = {"from": since, "until": until, "columns": ",".join(columns)}
    return spark.read.format(FORMAT).options(**{name: value for name, value in given.items() if value}).load()
