"""Kafka as a source of the query: which ranges of offsets a batch reads.

Spark's checkpoint holds the offsets, as for any source, but nothing rests on them: how far a partition is stored, its progress
marker in Redis says (``kafka_writer.py``). So a checkpoint may be deleted, restored or used twice.
"""

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from pipeline.config import KafkaSettings
from pipeline.core.background import Background
from pipeline.core.errors import ConfigError, SourceError
from pipeline.ingest.sources import DirectSource
from pipeline.kafka.cluster import Cluster, KafkaAway, Partition, TopicGone
from pipeline.kafka.properties import client_properties

CHECK_MS: Final = 5_000
READY_TRIES: Final = 3  # of --once, which has to know where the topics end
SCHEMA: Final = "topic string, topic_id string, partition int, begin bigint, end bigint"

Offsets = Mapping[str, int]  # "topic/topic id/partition" -> offset

log = logging.getLogger(__name__)


def read_kafka(
    spark: SparkSession, settings: KafkaSettings, properties: Mapping[str, str], stored: Offsets | None = None
) -> DataFrame:
    """Stream the ranges of offsets that are new, of ``SCHEMA``.

    Args:
        stored: how far partitions are stored, for a query without checkpoint that begins at the end of all others.
    """

    # Made here, so that what is secret travels with the code, and not as an option that Spark shows.
    source = type(
        "Ranges", (KafkaRanges,), {"reads": settings, "client": dict(properties), "stored": dict(stored or {})}
    )
    spark.dataSource.register(source)
    return spark.readStream.format(KafkaRanges.name()).load()


def read_no_ranges(spark: SparkSession) -> DataFrame:
    """Return no ranges, from the same source as a batch, for ``BatchWriter.warm_up``; after ``read_kafka``."""
    return spark.read.format(KafkaRanges.name()).load()


class KafkaRanges(DataSource):
    """The data source."""

    reads: KafkaSettings
    client: Mapping[str, str]
    stored: Offsets

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "duetime-kafka"

    def schema(self) -> str:
        """Return the columns of a range."""
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """Return what plans the batches."""
        return RangePlanner(self.reads, self.client, self.stored)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads nothing."""
        return _NoRanges()


class _NoRanges(DataSourceReader):
    def read(self, partition: InputPartition) -> Iterator[tuple[str, str, int, int, int]]:
        return iter(())


@dataclass(frozen=True, slots=True)
class RangePartition(InputPartition):
    """A range, which one task reads."""

    partition: Partition
    begin: int
    end: int


class RangePlanner(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches, in a process beside the driver. While Kafka is away there is nothing new."""

    def __init__(self, settings: KafkaSettings, properties: Mapping[str, str], stored: Offsets) -> None:
        self._settings = settings
        self._stored = stored
        self._properties = properties
        self._cluster: Cluster | None = None
        self._last: dict[str, int] | None = None  # where a run ends that takes in what is there

    def __reduce__(self) -> tuple[type["RangePlanner"], tuple[KafkaSettings, Mapping[str, str], Offsets]]:
        return RangePlanner, (self._settings, self._properties, self._stored)

    def stop(self) -> None:
        """Let this process end without a stack trace if Spark has ended first: PySpark tells it of the end, and nobody listens."""
        report = sys.excepthook

        def report_others(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not issubclass(kind, ConnectionError):
                report(kind, error, trace)

        sys.excepthook = report_others

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        """Return how much a batch reads."""
        return ReadMaxRows(self._settings.offsets_per_trigger)

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 (Spark's name)
        """Return where to begin without a checkpoint. What is not named begins at its first offset."""
        return {} if self._settings.start == "earliest" else {**self._ends_at_last(), **self._stored}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        """Note where the topics end."""
        self._last = self._ends_at_last()

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> dict[str, int]:  # noqa: N802 (Spark's name)
        """Return where the next batch ends."""
        try:
            ends = self._ends() if self._last is None else self._last
        except (KafkaAway, TopicGone):
            return dict(start)
        return share_out(start, ends, limit.max_rows if isinstance(limit, ReadMaxRows) else None)

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802 (Spark's name)
        """Return where the topics end, from which the lag follows."""
        try:
            return self._ends()
        except (KafkaAway, TopicGone):
            return None

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        """Return the ranges of a batch, one a partition: its progress marker moves in order."""
        return [
            RangePartition(partition_of(name), start.get(name, 0), to)
            for name, to in end.items()
            if to > start.get(name, 0)
        ]

    def read(self, partition: InputPartition) -> Iterator[tuple[str, str, int, int, int]]:
        """Return a range as a row; its records are read where they are stored."""
        assert isinstance(partition, RangePartition)
        at = partition.partition
        yield at.topic, at.topic_id, at.number, partition.begin, partition.end

    def _ends(self) -> dict[str, int]:
        self._cluster = self._cluster or Cluster(self._properties)
        ends = self._cluster.end_offsets(self._cluster.partitions_of(self._settings.topics))
        return {name_of(partition): end for partition, end in ends.items()}

    def _ends_at_last(self) -> dict[str, int]:
        for tried in range(1, READY_TRIES + 1):
            try:
                return self._ends()
            except (KafkaAway, TopicGone) as exc:
                if tried == READY_TRIES:
                    raise SourceError(f"Kafka does not answer ({exc}); start the job again when it does.") from exc
        raise AssertionError


def name_of(partition: Partition) -> str:
    """Return how the offsets name a partition."""
    return f"{partition.topic}/{partition.topic_id}/{partition.number}"


def partition_of(name: str) -> Partition:
    """Return the partition of a name."""
    topic, topic_id, number = name.split("/")
    return Partition(topic, topic_id, int(number))


def share_out(start: Offsets, ends: Offsets, budget: int | None) -> dict[str, int]:
    """Return where a batch ends that reads ``budget`` offsets, shared by the partitions that have some; None means all.

    A partition that is not there now keeps its place, as it may be back at the next look. So does one whose log was cut off.
    """
    places = {**start, **{name: start.get(name, 0) for name in ends}}
    left = {name: end - places[name] for name, end in ends.items() if end > places[name]}
    if budget is None or budget >= sum(left.values()):
        return places | {name: max(end, places[name]) for name, end in ends.items()}
    # The smallest first: what they leave of their share goes to the others.
    for count, (name, wanted) in enumerate(sorted(left.items(), key=lambda item: (item[1], item[0]))):
        taken = min(wanted, max(1, budget // (len(left) - count)))
        places[name] += taken
        budget = max(0, budget - taken)
    return places


class KafkaSource(DirectSource):
    """Topics of a cluster, which Spark reads itself.

    Raises:
        ConfigError: no cluster or topic is named, there is no such topic, or the cluster does not let us in.
        SourceError: it does not answer.
    """

    def __init__(self, settings: KafkaSettings, pause: Callable[[float], object]) -> None:
        if not settings.topics.replace(",", "").strip():
            raise ConfigError("Name the topics to read with --kafka-topics, such as --kafka-topics requests.")
        self.properties = client_properties(settings.servers, settings.client_config)
        self._pause = pause
        cluster = Cluster(self.properties)
        try:
            cluster_id = cluster.cluster_id()
            self.partitions = there = cluster.partitions_of(settings.topics)
        except KafkaAway as exc:
            raise SourceError(
                f"Kafka can't be reached ({exc}); start it, name it with --kafka-servers, or see kafka.client_config."
            ) from exc
        wanted = {name for each in settings.topics.split(",") if (name := each.strip()) and not name.startswith("^")}
        missing = sorted(wanted - {each.topic for each in there})
        if missing:
            raise ConfigError(f"Kafka at {settings.servers} has no topic {', '.join(missing)}; create it first.")
        self.reads = self.location = f"{settings.topics} of Kafka at {settings.servers}"
        self.source_id = hashlib.sha256(f"kafka\n{cluster_id}\n{settings.topics}".encode()).hexdigest()[:16]
        self.marker_source_id = f"kafka-{cluster_id}"  # of all jobs: what one has stored is stored for the others
        self._watch = Background([_Watch(cluster)])
        self._watch.start()

    def close(self) -> None:
        self._watch.stop()


class _Watch:
    """Says when the cluster does not answer, for which the query only waits."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._is_away = False

    def step(self) -> float:
        try:
            self._cluster.cluster_id()
        except KafkaAway as exc:
            if not self._is_away:
                log.warning("waiting for Kafka: %s", exc)
            self._is_away = True
        else:
            if self._is_away:
                log.warning("Kafka answers again")
            self._is_away = False
        return CHECK_MS
