"""What was read of Kafka is read again: after a failover, and for a shard that was away."""

import json
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pyspark.sql import SparkSession

from pipeline.config import KafkaSettings
from pipeline.core.errors import StoreUnavailable
from pipeline.core.text import count_text
from pipeline.ingest.kafka_source import SCHEMA, partition_of
from pipeline.ingest.kafka_windows import PartitionMarker
from pipeline.ingest.summary import Summary
from pipeline.store.redis_store import RedisStore

SLICE: Final = 50_000  # offsets of a partition at a time: the batches of the query run beside it, on the same cores

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RecordsAgain:
    """What was read of Kafka; see ``repair.Repeatable``. A marker that went back says from where on a partition is read again.

    Args:
        write: stores ranges, as ``BatchWriter.write``, which may be told of shards that are not to be asked.

        shards: the stores of all, and ``source_id`` that of the markers.
    """

    spark: SparkSession
    settings: KafkaSettings
    write: Callable[..., Summary]
    shards: Sequence[RedisStore] = ()
    source_id: str = ""
    _unsure: set[int] | None = None  # shards of which it is not known since the start whether they lack something

    def read_again(self, since_ms: int) -> str:
        """Store what is missing of each partition, up to where the query has read it; that does not wait for its next record."""
        rows = []
        for name, end in self._ends().items():
            at = partition_of(name)
            begin = 0 if self.settings.start == "earliest" else end  # for a partition whose marker is gone
            rows.append((at.topic, at.topic_id, at.number, begin, end))
        if not rows:
            return ""
        done = self.write(self.spark.createDataFrame(rows, SCHEMA))
        missing = count_text(done.stored, "message")
        return f"{count_text(len(rows), 'partition')} of Kafka, of which {missing} were missing"

    def catch_up(self, shard: int) -> bool:
        """Store a slice of what a shard lacks that was away, and ask no other; returns whether that is all, but for what is new.

        Raises:
            StoreUnavailable: it is away again, or it can't be known yet what it lacks.
        """
        ends = {partition_of(name): end for name, end in self._ends().items()}
        if not ends:
            raise StoreUnavailable("How far the query has read is not known yet.")
        store, others = self.shards[shard], {*range(len(self.shards))} - {shard}
        part_ids = [each.part_id for each in ends]
        markers = store.markers(self.source_id, part_ids)
        # One without a marker has never been asked: the next batch waits for it.
        places = {at: PartitionMarker.of(each).next for at, each in zip(ends, markers, strict=True) if each}
        rows = [
            (at.topic, at.topic_id, at.number, place, min(ends[at], place + SLICE))
            for at, place in places.items()
            if place < ends[at]
        ]
        if not rows:
            return True
        done = self.write(self.spark.createDataFrame(rows, SCHEMA), others)
        if shard in done.away:
            raise StoreUnavailable(f"Shard {shard} is away again.")
        log.info("%s that waited for shard %d: stored now", count_text(done.stored, "message"), shard)
        has_moved = store.markers(self.source_id, part_ids) != markers  # not for a topic that is gone
        return not has_moved or all(ends[at] <= place + SLICE for at, place in places.items())

    def give_back(self, away: Collection[int]) -> None:
        """Store what a shard lacks since a run before this one; see ``Waits``. A partition may not have a next record for long."""
        if self._unsure is None:
            self._unsure = {*range(len(self.shards))}
        with suppress(StoreUnavailable):
            for shard in sorted(self._unsure - {*away}):
                if not self._ends() or not self.catch_up(shard):
                    return
                self._unsure.discard(shard)

    def look(self) -> None:
        """Return that no files wait."""

    def _ends(self) -> dict[str, int]:
        """Return up to where the query has read each partition."""
        ends: dict[str, int] = {}
        for query in self.spark.streams.active:
            if progress := query.lastProgress:
                ends |= json.loads(progress.sources[0].endOffset)
        return ends

    def forget_archived(self) -> None:
        """Do nothing: Kafka keeps its records for as long as it likes."""

    def newest_are_stored(self) -> bool:
        """Say yes: nothing is known."""
        return True
