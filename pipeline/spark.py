"""Scheduling from Spark: the rows of a table, each once for a name."""

import os
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame

from pipeline.config import load_settings
from pipeline.consume.opening import open_client
from pipeline.core.errors import ConfigError
from pipeline.ingest.tables import ScheduledTable as ScheduledTable
from pipeline.ingest.tables import schedule_table

KEEP_DAYS: Final = 366  # that a name is known: as long as a delay may be
DAY_SEC: Final = 86_400


def schedule(
    table: DataFrame, name: str, *, staging: str = "", keep_days: int = KEEP_DAYS, **columns: str
) -> ScheduledTable:
    """Schedule the rows of a table, on the server of ``REDIS_URL`` or the configuration.

    The name is an idempotency key: called again with it, from any session or cluster, whatever the table is by then, nothing is
    stored twice. A call that was cut off is completed by the next one with the name. In ``foreachBatch`` let the name have the
    number of the batch.

    Args:
        table: columns ``message`` (text, or a struct, map or array, which is written as JSON); one of ``due`` (timestamp, ISO 8601
            text with a zone, or epoch ms UTC), ``delay_sec`` and ``countdown`` (seconds from this call on); and, if wanted, ``id``,
            ``topic`` and ``headers``. Rows follow the same rules as request lines.

        staging: the URL of a folder that the driver and all executors reach, where rows are written down before they are stored;
            ``staging`` in the state folder of this checkout if Spark runs on this machine alone.

        keep_days: how long the name is known.

        columns: names of columns that are called otherwise, such as ``message="text"``.
    Raises:
        ConfigError: a name, a column or a setting is not valid, or there is no server.
        TypeError: a column has a type that its field can't have.
        PipelineError: staged files are not where they should be.
        StoreUnavailable: no answer from Redis.
    """
    settings = load_settings({}, os.environ)
    is_local = str(table.sparkSession.sparkContext.master).partition("[")[0] == "local"
    if not is_local and not settings.redis.url:
        raise ConfigError("Executors on other machines can't reach the private server: name one by REDIS_URL.")
    if not is_local and "://" not in staging:
        raise ConfigError(
            f"Executors on other machines have no folder {staging or 'staging'}: give its URL as staging."
        )
    folder = staging or str(Path(settings.local.state, "staging"))
    url = folder if "://" in folder else str(Path(folder).absolute())
    with open_client(settings) as (client, opened):
        return schedule_table(table, name, columns, url, keep_days * DAY_SEC, client, opened)
