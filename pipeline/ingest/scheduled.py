"""What is scheduled, as rows for reports: a task reads a span of due times of one shard, a page at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Self

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from pipeline.config import Settings
from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.due import DUE_MS_MAX, due_ms_of_text
from pipeline.core.errors import ConfigError
from pipeline.ingest.stores import Opener, open_client_once
from pipeline.store.keys import keys_of
from pipeline.store.listing import count_scheduled, list_scheduled

SPAN_ROWS: Final = 50_000  # about so many messages are read by a task
BATCH_ROWS: Final = 5_000  # what a task holds at a time

_TYPES: Final[Mapping[str, T.DataType]] = {
    "due": T.TimestampType(),
    "bucket": T.TimestampType(),
    "topic": T.StringType(),
    "id": T.StringType(),
    "message": T.StringType(),
    "headers": T.MapType(T.StringType(), T.StringType()),
    "message_id": T.StringType(),
    "attempt": T.IntegerType(),
    "group": T.StringType(),
}


@dataclass(frozen=True, slots=True)
class Selection:
    """What of all that is scheduled is read: what is due from ``from_ms`` on and before ``until_ms`` (epoch ms UTC), as columns."""

    from_ms: int
    until_ms: int
    columns: tuple[str, ...]

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options ``from``, ``until`` and ``columns``.

        Raises:
            ConfigError: there is another one, or one has a wrong value.
        """
        given = {name.lower(): value for name, value in options.items()}
        if unknown := sorted(given.keys() - {"from", "until", "columns", "path"}):
            raise ConfigError(f"There is no option {unknown[0]} to read by; there are from, until and columns.")
        columns = tuple(name.strip() for name in given.get("columns", ",".join(_TYPES)).split(","))
        if strange := [name for name in columns if name not in _TYPES]:
            raise ConfigError(f"There is no column {strange[0]!r}; there are {', '.join(_TYPES)}.")
        return cls(_time_in(given, "from", 0), _time_in(given, "until", DUE_MS_MAX + 1), columns)

    @property
    def schema(self) -> T.StructType:
        return T.StructType([T.StructField(name, _TYPES[name]) for name in self.columns])


def _time_in(options: Mapping[str, str], name: str, otherwise: int) -> int:
    text = options.get(name)
    if text is None:
        return otherwise
    due_ms = int(text) if text.isdecimal() else due_ms_of_text(text)
    if due_ms is None:
        raise ConfigError(
            f"The option {name} takes a time such as 2026-01-31T12:00:00Z or epoch milliseconds, not {text!r}."
        )
    return due_ms


class Span(InputPartition):
    """What one task reads: a shard by its number, and due times from ``from_ms`` on and before ``until_ms``."""

    def __init__(self, shard: int, from_ms: int, until_ms: int) -> None:
        self.shard = shard
        self.from_ms = from_ms
        self.until_ms = until_ms


class ScheduledReader(DataSourceReader):
    """Reads what is scheduled. A source of messages besides the buckets would have spans of its own."""

    def __init__(self, open_client: Opener, settings: Settings, selection: Selection) -> None:
        self._open_client = open_client
        self._settings = settings
        self._selection = selection
        with open_client(settings) as (_, opened):
            self._redis = opened.redis  # for the tasks: Spark pickles the reader before it asks for partitions

    def partitions(self) -> list[InputPartition]:
        """Divide the buckets into spans."""
        with self._open_client(self._settings) as (client, opened):
            return [
                Span(shard, start, end)
                for shard, keys in enumerate(keys_of(opened.redis))
                for start, end in spans_of(
                    count_scheduled(client, keys, self._selection.from_ms, self._selection.until_ms),
                    self._selection.from_ms,
                    self._selection.until_ms,
                )
            ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of a span."""
        if not isinstance(partition, Span):  # Spark's own, if there is none of ours
            return
        keys = keys_of(self._redis)[partition.shard]
        found = list_scheduled(open_client_once(self._redis), [keys], partition.from_ms, partition.until_ms)
        schema = to_arrow_schema(self._selection.schema, timezone="UTC")
        while messages := [*islice(found, BATCH_ROWS)]:
            columns = [
                pa.array([_VALUES[name](each) for each in messages], schema.field(name).type) for name in schema.names
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def spans_of(counts: Mapping[int, int], from_ms: int, until_ms: int) -> Iterator[tuple[int, int]]:
    """Divide a time into spans that touch, of some ``SPAN_ROWS`` messages each.

    Args:
        counts: of the messages in each bucket, by its start.
    """
    start, rows = from_ms, 0
    for bucket, count in sorted(counts.items()):
        if rows and rows + count > SPAN_ROWS and bucket > start:
            yield start, bucket
            start, rows = bucket, 0
        rows += count
        parts = -(-count // SPAN_ROWS)  # of a bucket that has too many
        for part in range(1, parts):
            end = bucket + BUCKET_WIDTH_MS * part // parts
            if start < end < until_ms:
                yield start, end
                start, rows = end, count // parts
    if start < until_ms:
        yield start, until_ms


_VALUES: Final[Mapping[str, Any]] = {
    "due": lambda found: found.due_ms * 1_000,
    "bucket": lambda found: bucket_start_ms(found.due_ms) * 1_000,
    "topic": lambda found: found.message.topic,
    "id": lambda found: found.id,
    "message": lambda found: found.message.body,
    "headers": lambda found: list(found.message.headers.items()),
    "message_id": lambda found: found.message_id,
    "attempt": lambda found: found.message.attempt,
    "group": lambda found: found.message.group,
}
