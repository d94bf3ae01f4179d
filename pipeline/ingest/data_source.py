"""``format("duetime")`` for Spark: rows of a table or of a stream go into the schedule, and what is scheduled comes out as rows."""

import secrets
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from pipeline.config import Settings, check_name
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.ids import TOKEN_HALF_BITS
from pipeline.ingest.scheduled import ScheduledReader, Selection
from pipeline.ingest.staged_rows import WORK, Staged, Target, commit, forget, stage_rows, works_of
from pipeline.ingest.stores import Opener
from pipeline.ingest.tables import fields_of
from pipeline.ingest.transforms import check_types
from pipeline.store.connection import server_ms

FORMAT: Final = "duetime"
KEEP_DAYS: Final = 366  # that a name is known: as long as a delay may be
DAY_SEC: Final = 86_400
OF_SPARK: Final = ("path", "checkpointlocation")  # options that Spark hands on


class DuetimeSource(DataSource):
    """The data source; ``pipeline.spark.register`` makes a class of it that has settings."""

    settings: Settings
    open_client: Opener
    open_to_look: Opener  # without the rights of who stores
    staging: str  # where rows are staged if no option says it

    @classmethod
    def name(cls) -> str:
        """Return what ``format`` takes."""
        return FORMAT

    def schema(self) -> T.StructType:
        """Return the columns that ``load`` gives."""
        return Selection.of(self.options).schema

    def reader(self, schema: T.StructType) -> DataSourceReader:
        """Read what is scheduled."""
        return ScheduledReader(type(self).open_to_look, self.settings, Selection.of(self.options))

    def writer(self, schema: T.StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Schedule a table."""
        return TableWriter(self._target(schema, overwrite))

    def streamWriter(self, schema: T.StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """Schedule the batches of a stream."""
        return BatchesWriter(self._target(schema, overwrite))

    def _target(self, schema: T.StructType, overwrite: bool) -> Target:
        if overwrite:
            raise ConfigError('What is scheduled is only added to: say mode("append"), or outputMode("append").')
        options = dict(self.options)
        staging = options.pop("staging", self.staging)
        if "://" in staging.removeprefix("file://"):
            raise ConfigError(f"The staging folder {staging} must be one that all machines have mounted, not a URL.")
        keep_days = options.pop("keep_days", str(KEEP_DAYS))
        if not keep_days.isdecimal() or not 0 < int(keep_days) <= 100 * KEEP_DAYS:
            raise ConfigError(f"The option keep_days takes a number of days from 1 on, not {keep_days!r}.")
        refused = options.pop("refused", "fail")
        if refused not in ("fail", "keep"):
            raise ConfigError(f"The option refused takes fail or keep, not {refused!r}.")
        name = options.pop("name", "")
        if not name:
            raise ConfigError(
                'Give the rows a name, by which they are known when they come again: .option("name", "trials-2026-11").'
            )
        check_name("table", name)
        changed = options.pop("changedrows", "error")
        if changed not in ("error", "ignore"):
            raise ConfigError(f"The option changedRows takes error or ignore, not {changed!r}.")
        columns = {key: value for key, value in options.items() if key not in OF_SPARK}
        fields = fields_of(schema.fieldNames(), columns)
        by_field = T.StructType([T.StructField(field, schema[column].dataType) for field, column in fields.items()])
        check_types(by_field)
        if not isinstance(by_field["message"].dataType if "message" in fields else T.StringType(), T.StringType):
            raise TypeError(f"The column {fields['message']} must be text here: write it with to_json.")
        work = str(Path(staging.removeprefix("file://"), WORK, f"{name}-{uuid.uuid4().hex}").absolute())
        with type(self).open_client(self.settings) as (client, _):
            arrival_ms = server_ms(client)
        return Target(
            settings=self.settings,
            open_client=type(self).open_client,
            name=name,
            keep_sec=int(keep_days) * DAY_SEC,
            keeps_refused=refused == "keep",
            keeps_first=changed == "ignore",
            fields=fields,
            work=work,
            arrival_ms=arrival_ms,
            seed=secrets.randbits(TOKEN_HALF_BITS),
        )


class TableWriter(DataSourceArrowWriter):
    """Schedules a table for its name."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Write down the rows of a task."""
        return stage_rows(iterator, self._target)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Store what all tasks have written down."""
        commit(self._target, self._target.name, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Forget what tasks have written down."""
        forget(self._target.work)


class BatchesWriter(DataSourceStreamArrowWriter):
    """Schedules each batch of a stream, for the name, the query and its number.

    The query is that of the checkpoint: with another one, Spark counts from 0 again, and the batches of a number have other rows.
    """

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Write down the rows of a task."""
        return stage_rows(iterator, self._target)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Store what all tasks have written down of a batch."""
        queries = {message.query for message in messages if isinstance(message, Staged)}
        if len(queries) != 1 or "" in queries:
            raise PipelineError(
                "Spark did not say of which query this batch is, so it can't be told from others: see its version."
            )
        commit(self._target, f"{self._target.name}-{queries.pop()}-{batchId}", messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Forget what tasks have written down of a batch."""
        forget(*works_of(messages))
