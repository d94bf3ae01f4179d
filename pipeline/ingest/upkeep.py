"""What an ingest job does beside its batches: it keeps files, markers and checkpoint bounded, and looks after the servers."""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession

from pipeline.config import Settings
from pipeline.core.background import Background, Task
from pipeline.core.clock import Clock, SystemClock
from pipeline.ingest.checkpoint import CheckpointRoller
from pipeline.ingest.landed import LandingFiles, archive_ms_of
from pipeline.ingest.loop import MarkerSweeper
from pipeline.ingest.repair import DirectoryAgain, Repair
from pipeline.ingest.sources import DirectSource, Source
from pipeline.ingest.stores import Retry, WriterSettings
from pipeline.ingest.waiting import watch_shards
from pipeline.ingest.writer import BatchWriter
from pipeline.store.ingest_heartbeat import IngestHeartbeat
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.replication import FailoverWatch, may_fail_over
from pipeline.store.shards import ShardedMarkers

AWAKE_MS: Final = 25_000  # so that one that comes late does not come too late

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pipeline.ingest.kafka_again import RecordsAgain


def landing_upkeep(
    settings: Settings, source: Source, checkpoint: str, store: ShardedMarkers
) -> tuple[LandingFiles | None, MarkerSweeper | None, CheckpointRoller | None]:
    """Return what keeps files, markers and checkpoint bounded, and tidy up the checkpoint.

    A directory that Spark reads itself keeps its files, and so all.
    """
    if isinstance(source, DirectSource):
        return None, None, None
    location, clock = Path(source.location), SystemClock()
    local = None if "://" in checkpoint else Path(checkpoint)
    archive_ms = archive_ms_of(settings)
    keep_ms = settings.ingest.marker_keep_sec * 1000
    markers_of = partial(store.markers, source.source_id)
    # A marker is forgotten so long after it moved last, which may be long before its file is archived.
    landing = LandingFiles(location, local, markers_of, clock, archive_ms, marked_ms=keep_ms / 2)
    sweeper = MarkerSweeper(store, source.source_id, location, keep_ms, clock)
    roller = (
        CheckpointRoller(local, landing.delete_marked, settings.ingest.checkpoint_files_max, clock) if local else None
    )
    if roller is not None and (rolled := roller.prepare()):
        log.info("rolled the checkpoint: its log named %s files", f"{rolled:,}")
    return landing, sweeper, roller


def what_is_read_again(
    spark: SparkSession,
    settings: Settings,
    writer: BatchWriter,
    checkpoint: str,
    shards: Sequence[RedisStore],
    source_id: str,
) -> "RecordsAgain | DirectoryAgain":
    """Return what can be read again of an input that is not landed."""
    if settings.ingest.source == "kafka":
        from pipeline.ingest.kafka_again import RecordsAgain

        return RecordsAgain(spark, settings.kafka, writer.write, shards, source_id)
    return DirectoryAgain(checkpoint)


def look_after_servers(
    client: Any,
    shards: Sequence[Keys],
    writer: BatchWriter,
    settings: WriterSettings,
    what: "LandingFiles | RecordsAgain | DirectoryAgain",
    heartbeat: IngestHeartbeat,
    clock: Clock,
    retry: Retry,
) -> list[Background]:
    """Return what notices failovers, and shards that are away, while the writer works; what was read is read again after either.

    Args:
        client: one that gives up soon, if there are several shards.
    """
    tasks: list[Task] = []
    if may_fail_over(settings.redis.url):
        watch = FailoverWatch.of(client, shards, clock)
        histories = what.histories if isinstance(what, LandingFiles) else None
        repair = Repair(watch, what, histories, heartbeat.tell, clock, settings.patience_ms)
        repair.start(retry)
        writer.is_there = repair.is_there
        tasks.append(repair)
    if not isinstance(what, DirectoryAgain):
        waits = what.waiting if isinstance(what, LandingFiles) else what
        away = watch_shards(client, settings, waits, heartbeat.tell_waiting, clock)
        writer.away, writer.note = away.away, away.note
        tasks.append(away)
    return [Background([task]) for task in tasks]


class WorkersAwake:
    """Has a Python worker of this machine do a little now and then.

    Spark ends its workers when none has done anything for a minute (``PythonWorkerFactory``), and the file that comes then would
    wait 0.7 s for a new one to import.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def step(self) -> float:
        """Do it; see ``background.Task``."""
        try:
            self._spark.range(0, 1, 1, 1).mapInArrow(_as_they_are, "id long").collect()
        except Exception:  # whoever needs Spark says what has become of it
            log.debug("no worker was kept awake", exc_info=True)
        return AWAKE_MS


def _as_they_are(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches
