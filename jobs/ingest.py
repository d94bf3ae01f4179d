"""Read requests from a folder, a socket or Kafka, and schedule each message in Redis exactly once."""

import argparse
import logging
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

from pyspark.sql import DataFrame, SparkSession

from pipeline.cli import (
    EXIT_SUCCESS,
    Connection,
    Stop,
    add_metrics_options,
    announce_ready,
    new_parser,
    open_connection,
    parse_command,
    run_main,
    serve_metrics,
)
from pipeline.config import Settings
from pipeline.core.background import Background
from pipeline.core.clock import SystemClock
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.ingest.bar import intake_bar
from pipeline.ingest.cold_folder import ColdPlace
from pipeline.ingest.cold_opening import open_cold
from pipeline.ingest.executors import check_executors
from pipeline.ingest.loop import Restarts, run_once, run_to_the_end, run_until_stopped, wait_for_first_look
from pipeline.ingest.progress import BatchReporter, collector_of
from pipeline.ingest.query import (
    Tries,
    bind_checkpoint,
    java_watched,
    open_session,
    start_query,
    stop_session,
    told_in_a_sentence,
    warm_up,
)
from pipeline.ingest.readers import read_direct, read_landing
from pipeline.ingest.rejects import check_rejects_folder
from pipeline.ingest.sources import DirectSource, FilesSource, SocketSource, Source
from pipeline.ingest.stores import Retry, WriterSettings, no_slower_than, patience_ms_of
from pipeline.ingest.summary import Summary
from pipeline.ingest.upkeep import WorkersAwake, landing_upkeep, look_after_servers, what_is_read_again
from pipeline.ingest.waiting import waiting_text
from pipeline.ingest.worker_sockets import socket_folder
from pipeline.ingest.writer import BatchWriter, PartitionWriter
from pipeline.runtime.class_archive import archive_made_beside
from pipeline.store.checks import meaning_of_stored
from pipeline.store.connection import connect
from pipeline.store.heartbeats import write_ingest
from pipeline.store.ingest_heartbeat import IngestHeartbeat
from pipeline.store.replication import may_fail_over
from pipeline.store.retry import retry_until_available
from pipeline.store.shards import ShardedMarkers, open_shards

BESIDE_TIMEOUT_MS = 500  # what is done beside the batches gives up soon when a shard of several does not answer

log = logging.getLogger(__name__)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line and the settings.

    Raises:
        ConfigError: wrong use, or a wrong setting.
    """
    parser = new_parser("ingest", __doc__ or "")
    parser.add_argument(
        "--source", choices=["files", "socket", "kafka"], help="where requests come from (default: files)"
    )
    parser.add_argument("--input", metavar="DIR", help="folder that request files are dropped into (default: inbox)")
    parser.add_argument("--host", metavar="H", help="line server of --source socket (default: 127.0.0.1)")
    parser.add_argument("--port", metavar="P", help="port of that server (default: 9999)")
    parser.add_argument("--kafka-servers", metavar="H:P,…", help="cluster of --source kafka")
    parser.add_argument("--kafka-topics", metavar="T,…", help="its topics; one that begins with ^ is a pattern")
    parser.add_argument(
        "--kafka-format",
        choices=["json", "raw"],
        help="json: the value of a record is a request (default); raw: it is the message, and headers say the rest",
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="where Spark keeps its progress (default: one for each input, in .duetime)"
    )
    parser.add_argument(
        "--rejects", metavar="DIR", help="folder for lines that are not accepted, with the reason (default: rejects)"
    )
    parser.add_argument("--trigger", metavar="TIME", help="how often to look for files (default: '100 milliseconds')")
    parser.add_argument("--once", action="store_true", help="read what is there, then exit 0")
    add_metrics_options(parser)
    names = ("source", "input", "host", "port", "checkpoint", "rejects", "trigger", "metrics_host", "metrics_port")
    kafka = {f"kafka_{name}": ("kafka", name) for name in ("servers", "topics", "format")}
    return parse_command(parser, arguments, "ingest", *names, **kafka)


def open_source(settings: Settings) -> Source:
    """Open the input that the settings name."""
    if settings.ingest.source == "kafka":
        try:
            from pipeline.ingest.kafka_source import KafkaSource
        except ImportError as exc:
            raise ConfigError(f"--source kafka needs the Kafka client ({exc}): install confluent-kafka.") from exc
        return KafkaSource(settings.kafka, Event().wait)
    if settings.ingest.source == "socket":
        return SocketSource(settings.ingest, Path(settings.local.state))
    if "://" in settings.ingest.input:
        return DirectSource(settings.ingest, Event().wait)
    return FilesSource(settings.ingest)


def open_rows(
    spark: SparkSession,
    settings: Settings,
    source: Source,
    writer_settings: WriterSettings,
    store: ShardedMarkers,
    retry: Retry,
) -> tuple[DataFrame, PartitionWriter]:
    """Return what Spark reads, and what stores a partition of it."""
    if settings.ingest.source == "kafka":
        from pipeline.ingest.kafka_reader import ReadSettings
        from pipeline.ingest.kafka_source import KafkaSource, name_of, read_kafka
        from pipeline.ingest.kafka_windows import PartitionMarker, is_begun
        from pipeline.ingest.kafka_writer import RangeWriter

        assert isinstance(source, KafkaSource)
        kafka = settings.kafka
        write = RangeWriter(writer_settings, ReadSettings(source.properties, kafka.format, kafka.accept_loss))
        part_ids = [each.part_id for each in source.partitions]
        found = retry(partial(store.markers_that_answer, source.marker_source_id, part_ids))
        markers, shards = dict(zip(source.partitions, found, strict=True)), writer_settings.redis.shards
        write.learn(Summary(file_tokens=[each.part_id for each in markers if is_begun(markers[each], shards)]))
        stored = {
            name_of(partition): min(PartitionMarker.of(each).next for each in known if each)
            for partition, known in markers.items()
            if any(known)
        }
        return read_kafka(spark, kafka, source.properties, stored), write
    read = read_direct if isinstance(source, DirectSource) else read_landing
    return read(spark, source.location, settings.ingest.max_bytes_per_trigger), PartitionWriter(writer_settings)


def settings_of_writers(
    settings: Settings,
    connection: Connection,
    source: Source,
    rejects_mark: str,
    patience_ms: float,
    cold: ColdPlace | None,
) -> WriterSettings:
    """Return what travels to the executors."""
    return WriterSettings(
        no_slower_than(connection.settings, patience_ms),
        getattr(source, "marker_source_id", source.source_id),
        settings.ingest.rejects,
        settings.ingest.transaction_messages,
        settings.ingest.wait_for_disk,
        settings.drain.id_retention_sec,
        settings.ingest.wait_for_replicas,
        tells_history=may_fail_over(settings.redis.url),
        rejects_mark=rejects_mark,
        patience_ms=patience_ms,
        cold=cold,
    )


def main(arguments: list[str], stop: Stop) -> int:
    """Run the ingest query until it is stopped, or once."""
    given, settings = parse_arguments(arguments)
    with ExitStack() as stack:
        connection = stack.enter_context(open_connection(settings, stop, may_create=True, writes=True))
        log.info("%s", meaning_of_stored(connection.client, connection.shards, settings.ingest.wait_for_disk))
        if len(connection.shards) > 1:
            beside = connect(no_slower_than(connection.settings, BESIDE_TIMEOUT_MS))
            connection = replace(connection, client=beside)
        check_rejects_folder(Path(settings.ingest.rejects))
        is_kafka = settings.ingest.source == "kafka"  # whose messages wait in Redis
        cold = None if is_kafka else open_cold(connection.client, connection.settings, settings.cold)
        source = open_source(settings)
        stack.callback(source.close)
        checkpoint = settings.ingest.checkpoint or str(Path(settings.local.state) / "checkpoints" / source.source_id)
        bind_checkpoint(checkpoint, source.source_id, source.reads)
        # Of Kafka's offsets Spark's own daemon keeps processes, which are not quiet when they are cut off.
        sockets = None if is_kafka else stack.enter_context(socket_folder())
        announce_ready("open")
        with _stopped_with_java(stop):
            with ThreadPoolExecutor(1) as beside:  # started by the main thread, Spark would take SIGINT over
                spark = beside.submit(open_session, sockets).result()
            stack.callback(stop_session, spark)
            stack.enter_context(java_watched(stop))
            rejects_mark = check_executors(spark, settings, connection.settings, source, cold)
        if stop():
            log.info("stopped while Spark was starting")
            return EXIT_SUCCESS
        heartbeat = IngestHeartbeat(connection.client, connection.shards[0], source.source_id)
        stack.callback(heartbeat.publish, has_ended=True)
        background = Background([heartbeat])
        background.start()
        stack.callback(background.stop)
        if not stop():
            _run(given.once, settings, connection, spark, source, checkpoint, heartbeat, rejects_mark, cold, stop)
    return EXIT_SUCCESS


@contextmanager
def _stopped_with_java(stop: Stop) -> Iterator[None]:
    """Take what fails after a stop for its consequence: nothing is stored yet, and Java may have got the signal as well."""
    try:
        yield
    except Exception:
        if not stop():
            raise
        log.debug("Java has ended before", exc_info=True)


def _run(
    once: bool,
    settings: Settings,
    connection: Connection,
    spark: SparkSession,
    source: Source,
    checkpoint: str,
    heartbeat: IngestHeartbeat,
    rejects_mark: str,
    cold: ColdPlace | None,
    stop: Stop,
) -> None:
    clock, stores = SystemClock(), open_shards(connection.client, connection.settings)
    store = ShardedMarkers(stores)
    landing, sweeper, roller = landing_upkeep(settings, source, checkpoint, store)
    # Of a directory that Spark reads itself nothing is read again, and a run of Kafka that ends could leave what was.
    can_wait = landing is not None or (settings.ingest.source == "kafka" and not once)
    patience_ms = patience_ms_of(connection.settings, settings.ingest.shard_patience_sec if can_wait else 0)
    publish = partial(write_ingest, connection.client, connection.shards[0])
    reporter = BatchReporter(source.source_id, source.reads, landing, publish, clock, settings.ingest.rejects)
    serve_metrics(settings.ingest.metrics_host, settings.ingest.metrics_port, partial(collector_of, settings, reporter))
    spark.streams.addListener(reporter)
    writer_settings = settings_of_writers(settings, connection, source, rejects_mark, patience_ms, cold)
    # Redis was there when the job was started: a restart of it, while Spark starts, is waited for as later.
    retry = partial(
        retry_until_available, wait=lambda ms: Event().wait(ms / 1000), clock=clock, random=random.random, stopping=stop
    )
    rows, write = open_rows(spark, settings, source, writer_settings, store, retry)
    writer = BatchWriter(writer_settings, clock, reporter.report, write)
    what = landing or what_is_read_again(spark, settings, writer, checkpoint, stores, writer_settings.source_id)
    beside = look_after_servers(
        connection.client, connection.shards, writer, writer_settings, what, heartbeat, clock, retry
    )
    if not (once or rejects_mark):  # which there is where executors are on other machines
        beside.append(Background([WorkersAwake(spark)]))
    if once and landing:
        landing.waiting.give_back((), all_at_once=True)  # a query that takes in what is there looks once
    tries = Tries(lambda ms: stop.interrupting(partial(Event().wait, ms / 1000)))
    with _stopped_with_java(stop), told_in_a_sentence():
        if once:
            run_once(source, stop, stop.interrupting)
        elif settings.ingest.source == "kafka":
            from pipeline.ingest.kafka_source import read_no_ranges

            tries.call(partial(writer.warm_up, read_no_ranges(spark)), stop)
        else:
            tries.call(partial(warm_up, spark), stop)
    if stop():
        return
    with ExitStack() as stack:
        for background in beside:
            background.start()
            stack.callback(background.stop)
        look = None
        if once and sweeper is not None:
            markers_of = partial(store.markers, source.source_id)
            look = stack.enter_context(intake_bar(Path(source.location), markers_of, sys.stderr, clock))
        start = partial(start_query, rows, writer, checkpoint, None if once else settings.ingest.trigger)
        query, restarts = start(), Restarts(start, checkpoint, tries)
        wait_for_first_look(query, stop)
        log.info("ingest is up: it reads %s", source.reads)
        announce_ready()
        if once:
            run_to_the_end(query, restarts, stop, clock, look)
        else:
            with archive_made_beside(Path(__file__).resolve().parents[1]):
                run_until_stopped(source, query, restarts, clock, stop, stop.interrupting, sweeper, roller)
    reporter.wait_for_the_end()
    log.info("%s after %s", "stopped" if stop() else "done", reporter.total_text())
    if once and sweeper is not None:
        sweeper.sweep()
    if landing and (left := landing.waiting.look()):
        if once and not stop():
            raise PipelineError(f"{waiting_text(left)}: start the job again when that answers.")
        log.warning("%s: the next start goes on with that", waiting_text(left))


if __name__ == "__main__":
    run_main("ingest", main)
