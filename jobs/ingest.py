"""Take requests in from a folder or a socket, and schedule each message in Redis exactly once."""

import argparse
import logging
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from pipeline.cli import (
    EXIT_SUCCESS,
    Stop,
    announce_ready,
    new_parser,
    reachable_redis,
    run_main,
    set_log_level,
    settings_from,
)
from pipeline.config import RedisSettings, Settings
from pipeline.core.clock import SystemClock
from pipeline.core.errors import ConfigError
from pipeline.ingest.bar import intake_bar
from pipeline.ingest.checkpoint import CheckpointKeeper
from pipeline.ingest.feeds import DirectFeed, Feed, FilesFeed, SocketFeed
from pipeline.ingest.loop import FenceSweeper, run_once, run_to_the_end, run_until_stopped
from pipeline.ingest.progress import BatchReporter, WaitingFiles
from pipeline.ingest.query import bind_checkpoint, java_watched, open_session, start_query, warm_up
from pipeline.ingest.sources import read_direct, read_landing
from pipeline.ingest.writer import BatchWriter, WriterSettings
from pipeline.store.checks import check_server, what_stored_means
from pipeline.store.connection import connect
from pipeline.store.ingests import write_progress
from pipeline.store.shards import ShardedStore, check_layout, keys_of, open_shards

log = logging.getLogger(__name__)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line; argparse exits 2 with a sentence on wrong use."""
    parser = new_parser("ingest", __doc__ or "")
    parser.add_argument("--source", choices=["files", "socket"], help="where requests come from (default: files)")
    parser.add_argument("--input", metavar="DIR", help="folder that request files are dropped into (default: inbox)")
    parser.add_argument("--host", metavar="H", help="line server of --source socket (default: 127.0.0.1)")
    parser.add_argument("--port", metavar="P", help="its port (default: 9999)")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="Spark's progress (default: one for each input, in .duetime)"
    )
    parser.add_argument("--rejects", metavar="DIR", help="lines that are not accepted, and why (default: rejects)")
    parser.add_argument("--trigger", metavar="TIME", help="how often to look for files (default: '100 milliseconds')")
    parser.add_argument("--once", action="store_true", help="take in what is there, then exit 0")
    given = parser.parse_args(arguments)
    set_log_level(given.log_level)
    names = ("source", "input", "host", "port", "checkpoint", "rejects", "trigger")
    return given, settings_from(given, "ingest", *names)


def open_feed(settings: Settings) -> Feed:
    """Open the input that the settings name."""
    if settings.ingest.source == "socket":
        return SocketFeed(settings.ingest, Path(settings.local.state))
    if "://" in settings.ingest.input:
        return DirectFeed(settings.ingest, Event().wait)
    return FilesFeed(settings.ingest)


def check_folders(settings: Settings) -> None:
    """Find out now, not at the first reject, that a folder can't be written."""
    folder = Path(settings.ingest.rejects)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise ConfigError(
            f"The rejects folder {folder} can't be written ({exc.strerror}); name another with --rejects."
        ) from exc


def landing_keepers(
    settings: Settings, feed: Feed, checkpoint: str, store: ShardedStore
) -> tuple[FenceSweeper | None, CheckpointKeeper | None]:
    """Return what keeps fences and checkpoint bounded; a directory that Spark reads itself keeps its files, and so both."""
    if isinstance(feed, DirectFeed):
        return None, None
    landing, clock = Path(feed.location), SystemClock()
    sweeper = FenceSweeper(store, feed.source_id, landing, settings.ingest.fence_keep_sec * 1000, clock)
    if "://" in checkpoint:
        return sweeper, None
    return sweeper, CheckpointKeeper(Path(checkpoint), landing, settings.ingest.checkpoint_files_max, clock)


def check_master(spark: SparkSession, settings: Settings) -> None:
    """Refuse executors on other machines together with a server that only this machine reaches."""
    if not settings.redis.url and not str(spark.sparkContext.master).startswith("local"):
        raise ConfigError(
            "Executors on other machines can't reach the private server; name one with --redis or REDIS_URL."
        )


def main(arguments: list[str], stop: Stop) -> int:
    """Run the ingest query until it is stopped, or once."""
    given, settings = parse_arguments(arguments)
    with ExitStack() as stack:
        redis_settings = stack.enter_context(reachable_redis(settings, stop))
        client = connect(redis_settings)
        for warning in check_server(client, redis_settings, SystemClock()):
            log.warning("%s", warning)
        check_layout(client, redis_settings, may_set=True)
        log.info("a stored message %s", what_stored_means(client, settings.ingest.wait_for_disk))
        check_folders(settings)
        feed = open_feed(settings)
        stack.callback(feed.close)
        checkpoint = settings.ingest.checkpoint or str(Path(settings.local.state) / "checkpoints" / feed.source_id)
        bind_checkpoint(checkpoint, feed.source_id, feed.reads)
        with ThreadPoolExecutor(1) as beside:  # started by the main thread, Spark would take SIGINT over
            spark = beside.submit(open_session).result()
        stack.callback(_stop_spark, spark)
        stack.enter_context(java_watched(stop))
        check_master(spark, settings)
        if not stop():
            _run(given.once, settings, redis_settings, client, spark, feed, checkpoint, stop)
    return EXIT_SUCCESS


def _stop_spark(spark: SparkSession) -> None:
    # Java may have ended before, by the signal that stops us or by what java_watched tells; PySpark would print it as well.
    with warnings.catch_warnings(action="ignore"):
        try:
            spark.stop()
        except (Py4JError, OSError):
            log.debug("Java has ended before", exc_info=True)


def _run(
    once: bool,
    settings: Settings,
    redis_settings: RedisSettings,
    client: Any,
    spark: SparkSession,
    feed: Feed,
    checkpoint: str,
    stop: Stop,
) -> None:
    clock, store = SystemClock(), ShardedStore(open_shards(client, redis_settings))
    sweeper, keeper = landing_keepers(settings, feed, checkpoint, store)
    if keeper is not None and (rolled := keeper.prepare()):
        log.info("rolled the checkpoint: its log named %s files", f"{rolled:,}")
    waiting = WaitingFiles(keeper.checkpoint, keeper.landing, clock) if keeper else None
    tell = partial(write_progress, client, keys_of(redis_settings)[0])
    reporter = BatchReporter(feed.source_id, feed.reads, waiting, tell, clock)
    spark.streams.addListener(reporter)
    writer_settings = WriterSettings(
        redis_settings,
        feed.source_id,
        settings.ingest.rejects,
        settings.ingest.transaction_messages,
        settings.ingest.wait_for_disk,
    )
    read = read_direct if isinstance(feed, DirectFeed) else read_landing
    files = read(spark, feed.location, settings.ingest.max_bytes_per_trigger)
    writer = BatchWriter(writer_settings, clock, reporter.report)
    if once:
        run_once(feed, stop, stop.interrupting)
    else:
        warm_up(spark)
    if stop():
        return
    with ExitStack() as stack:
        look = None
        if once and sweeper is not None:
            fences_of = partial(store.fences, feed.source_id)
            look = stack.enter_context(intake_bar(Path(feed.location), fences_of, sys.stderr, clock))
        start = partial(start_query, files, writer, checkpoint, None if once else settings.ingest.trigger)
        query = start()
        log.info("ingest is up: it reads %s", feed.reads)
        announce_ready()
        if once:
            run_to_the_end(query, stop, clock, keeper, look)
        else:
            run_until_stopped(feed, query, start, clock, stop, stop.interrupting, sweeper, keeper)
    reporter.wait_for_the_end()
    if once and sweeper is not None:
        sweeper.sweep()


if __name__ == "__main__":
    run_main("ingest", main)
