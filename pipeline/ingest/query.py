"""The Spark session and the streaming query: landing files to Redis."""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import random
from tempfile import TemporaryDirectory

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pipeline.core.backoff import backoff_ms
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.files import write_whole
from pipeline.core.ids import encode_token
from pipeline.ingest.readers import directory_in_use, read_landing_once, url_of
from pipeline.ingest.worker_sockets import settings_for
from pipeline.ingest.writer import BatchWriter, count_lines

log = logging.getLogger(__name__)

BINDING_NAME = "duetime-source.json"
# Correctness rests on these, and a checkpoint does not keep them: set here, whatever the configuration says.
PINNED = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    # A kill during the first batch may leave half an entry of a log, with which Spark would refuse the checkpoint for ever.
    "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
}
_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_BY_RENAME = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
# What suits this job, and not the programs of users that the same command runs; what somebody has configured counts instead.
SUITABLE = {
    # Each batch is small and planned once: re-planning costs time, and streaming queries warn that they switch it off.
    "spark.sql.adaptive.enabled": "false",
    # Nothing here shuffles much; the default of 200 would mean 200 tasks for a handful of rows.
    "spark.sql.shuffle.partitions": "2",
    # Plain files and renames for the checkpoint: milliseconds less for each batch than the default.
    _MANAGER: _BY_RENAME,
    # How many batches back a checkpoint can be inspected; the default of 100 only costs files.
    "spark.sql.streaming.minBatchesToRetain": "20",
    # Ten thousand tiny files are a few tasks, not hundreds: what opening one costs is little next to what a task costs.
    "spark.sql.files.openCostInBytes": "65536",
    # More than 32 files are listed by tasks, one for each file by default: ten thousand took 42 s, and by 16 tasks 3 s.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "16",
    # An Arrow batch of paths; of HDFS or an object store a row is a whole file: many tiny ones together, of 8 MiB two at most.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.arrow.maxBytesPerBatch": "16777216",
    # Publish the rates and delays of streaming queries with Spark's metrics.
    "spark.sql.streaming.metricsEnabled": "true",
    # The web UI takes a port and half a second at start; --conf spark.ui.enabled=true brings it back.
    "spark.ui.enabled": "false",
}
# Why a task failed is said once, by the scheduler, and why a query ended by the job, in its last line.
_SILENT = ("org.apache.spark.executor.Executor", "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution")
_AT_ONCE = "org.apache.spark.internal.io.cloud.AbortableStreamBasedCheckpointFileManager"
_OBJECT_STORES = "s3a://"
_CAUSE = re.compile(r"^\s*(?:Caused by: )?([\w.$]+(?:Exception|Error): .+)$", re.MULTILINE)
# Of a worker, and of the daemon that was to start one.
_WORKER_GONE = re.compile("Python worker exited unexpectedly|occurred while reading the port number from ")
# A machine that is busy has not started a worker within the ten seconds that Spark gives it.
_OF_THE_MOMENT = re.compile("Python worker (?:failed )?to connect back")
TRIES_MAX = 10  # in a row, two minutes or more, of what fails for a reason of the moment
_DISK_FULL = re.compile("No space left on device|Disk quota exceeded")
_OWN_ERROR = re.compile(r"pipeline\.core\.errors\.(\w+): (.*)")


def open_session(sockets: Path | None = None) -> SparkSession:
    """Start Spark, or join the session that spark-submit made.

    Args:
        sockets: a private folder through which Python workers on this machine talk to Java; None: they do so over TCP.
    """
    builder = SparkSession.builder.appName("duetime-ingest")
    SparkContext._ensure_initialized()  # without Java, SparkConf would not see what is given on the command line
    given = SparkConf()
    ours = {name: value for name, value in SUITABLE.items() if not given.contains(name)}
    for name, value in (ours | (settings_for(sockets, given) if sockets is not None else {})).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    for name, value in PINNED.items():
        spark.conf.set(name, value)
    _write_no_checksums(spark)
    _quieten(spark)
    return spark


def stop_session(spark: SparkSession) -> None:
    """Stop Spark. Java may have ended before, by the signal that stops us or by what ``java_watched`` saw."""
    with warnings.catch_warnings(action="ignore"):  # PySpark would print it as well
        try:
            spark.stop()
        except (Py4JError, OSError):
            log.debug("Java has ended before", exc_info=True)


def _write_no_checksums(spark: SparkSession) -> None:
    """Have Hadoop write no ``.crc`` beside each local file, here in the driver.

    For each file that it makes it starts a process, ``chmod``: for the checkpoint's logs six a batch with them, and three without.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    local = jvm.org.apache.hadoop.fs.Path("file:///").getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
    local.setWriteChecksum(False)


def _quieten(spark: SparkSession) -> None:
    """Keep PySpark from printing pages of traces: the job says in one sentence how a query, or Java, has ended."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    for name in _SILENT:
        jvm.org.apache.logging.log4j.core.config.Configurator.setLevel(name, jvm.org.apache.logging.log4j.Level.OFF)
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_py4j)

    def note(request: object, client_address: object) -> None:
        log.debug("Spark's counters are no longer read", exc_info=True)

    # When Java ends first, as at a SIGTERM to the whole process group, the thread that receives counters prints a trace on the
    # terminal. There is no public switch for that.
    spark.sparkContext._accumulatorServer.handle_error = note  # type: ignore[method-assign]


def _is_not_py4j(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"  # it logs with the root logger


@contextmanager
def java_watched(stopping: Callable[[], bool]) -> Iterator[None]:
    """Turn the end of Java under a block that uses Spark into one sentence.

    Raises:
        PipelineError: Java has ended, and no stop was requested, which may reach all processes of the job at once.
    """
    try:
        yield
    except Py4JJavaError:
        raise
    except (Py4JError, ConnectionRefusedError, ConnectionResetError, EOFError) as exc:
        if not stopping():
            raise PipelineError(
                "The Java process in which Spark runs has ended: it was killed, or ran out of memory. "
                "Start the job again; it goes on where it was."
            ) from exc
        log.warning("Spark was stopped first, so the batch in flight is replayed at the next start")


@contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """Turn what Spark says of a job that failed into one sentence.

    Raises:
        PipelineError: that.
    """
    try:
        yield
    except Py4JJavaError as exc:
        raise query_failure(exc) from exc


class Tries:
    """Tries of something that may fail for a reason of the moment.

    Args:
        wait: pauses for so many milliseconds, or less.
    """

    def __init__(self, wait: Callable[[float], object]) -> None:
        self._wait = wait
        self._failures = 0

    def has_another(self, exc: Exception) -> bool:
        """Tell whether to try again after a failure, after a pause that grows with each; False if it is none of the moment."""
        self._failures += 1
        if self._failures >= TRIES_MAX or not _OF_THE_MOMENT.search(str(exc)):
            return False
        wait_ms = backoff_ms(self._failures, random)
        log.warning(
            "Spark could not start a Python worker in time, as on a busy machine: tried again in %.1f s",
            wait_ms / 1_000,
        )
        self._wait(wait_ms)
        return True

    def reset(self) -> None:
        """Count from the beginning: it has worked in between."""
        self._failures = 0

    def call(self, call: Callable[[], object], stopping: Callable[[], bool]) -> None:
        """Make a call until it does not fail for such a reason, or a stop is requested; raises what it has raised last."""
        while True:
            try:
                call()
            except Exception as exc:
                if stopping() or not self.has_another(exc):
                    raise
            else:
                return self.reset()


def warm_up(spark: SparkSession) -> None:
    """Run one request through the same plan and a Python worker, so that the first batch of users is as fast as the second.

    A cold batch takes seconds: classes are loaded, code is generated, a Python worker starts and imports.
    """
    with TemporaryDirectory(prefix="duetime-warm-up-") as folder:
        landing_name = f"{encode_token(0, 0)}.1.json.warm+up"
        Path(folder, landing_name).write_text('{"message":"m","delay_sec":0}\n', encoding="utf-8")
        read_landing_once(spark, folder).mapInArrow(count_lines, "lines long").collect()


def start_query(files: DataFrame, write: BatchWriter, checkpoint: str, trigger: str | None) -> StreamingQuery:
    """Start storing what ``files`` brings.

    Args:
        files: rows of ``schemas.FILE_ROW``.

        trigger: how often to look for files, such as ``100 milliseconds``; None takes in what is there and ends.
    Raises:
        ConfigError: Spark does not understand the trigger, or can't use the checkpoint.
    """
    if "://" in checkpoint:
        _prepare_checkpoint(files.sparkSession, checkpoint)
    writer = files.writeStream.queryName("duetime-ingest").foreachBatch(write)
    writer = writer.option("checkpointLocation", url_of(checkpoint))
    if trigger is None:
        return writer.trigger(availableNow=True).start()
    try:
        writer = writer.trigger(processingTime=trigger)
    except Exception as exc:
        if "interval" in str(exc).lower():
            raise ConfigError(f"{trigger!r} is no trigger; write for example --trigger '100 milliseconds'.") from exc
        raise
    return writer.start()


def _prepare_checkpoint(spark: SparkSession, checkpoint: str) -> None:
    """Find out now that a checkpoint which is not in a local folder can be used.

    An object store has no rename: there Spark's manager for such stores writes each file at once, if its jar is there. The
    other one copies each file into place: as safe, since nobody else writes this checkpoint, but twice the work.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    with directory_in_use("checkpoint", checkpoint):
        path = jvm.org.apache.hadoop.fs.Path(checkpoint)
        path.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration()).mkdirs(path)
    is_ours = spark.conf.get(_MANAGER, _BY_RENAME) == _BY_RENAME  # the user may have named another one
    if checkpoint.startswith(_OBJECT_STORES) and is_ours:
        try:
            jvm.Thread.currentThread().getContextClassLoader().loadClass(_AT_ONCE)
        except Py4JJavaError:
            log.debug("no jar of %s", _AT_ONCE)
        else:
            spark.conf.set(_MANAGER, _AT_ONCE)


def bind_checkpoint(checkpoint: str, source_id: str, reads: str) -> None:
    """Make a checkpoint belong to one input; Spark itself would silently mix two.

    Raises:
        ConfigError: it belongs to another one, or can't be written.
    """
    if "://" in checkpoint:
        return  # not a local folder: left to whoever chose it
    path = Path(checkpoint) / BINDING_NAME
    try:
        if path.exists():
            bound = json.loads(path.read_text(encoding="utf-8"))
            if bound.get("source_id") != source_id:
                raise ConfigError(
                    f"The checkpoint {checkpoint} belongs to another input ({bound.get('reads')}), not to {reads}; "
                    "name another folder with --checkpoint."
                )
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"source_id": source_id, "reads": reads}).encode())
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"The checkpoint folder {checkpoint} can't be used ({exc}); name another with --checkpoint."
        ) from exc


def query_failure(exc: Exception, checkpoint: str = "") -> PipelineError:
    """Say in one sentence why a query ended; Spark's text is a page of stack traces with the cause somewhere in it."""
    text = str(exc)
    own = _OWN_ERROR.findall(text)
    if own:
        kind, sentence = own[-1]
        return (ConfigError if kind == "ConfigError" else PipelineError)(sentence)
    if _WORKER_GONE.search(text):
        return PipelineError(
            "A Python worker of Spark has ended in the middle of a batch: it was killed, or ran out of memory. "
            "Start the job again; it goes on where it was."
        )
    if checkpoint and _DISK_FULL.search(text):
        return PipelineError(
            f"The disk of the checkpoint {checkpoint}, or of Spark's temporary files, is full: make room and start the job again, "
            "as it has ended; nothing is lost, and it goes on where it was."
        )
    causes = _CAUSE.findall(text)
    cause = causes[-1] if causes else text.partition("\n")[0]
    return PipelineError(f"The streaming query ended: {cause.strip()}")
