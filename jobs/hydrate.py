"""Bring messages that wait in the cold folder into Redis before they are due. One process is enough, any number may run."""

import argparse
import logging
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

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
from pipeline.core.cold import HOUR_MS
from pipeline.core.errors import ColdUnavailable, ConfigError, PipelineError, StoreUnavailable
from pipeline.core.text import count_text, utc_text
from pipeline.ingest.cold_folder import ColdFolder, ColdPlace
from pipeline.ingest.cold_opening import open_cold
from pipeline.ingest.hydration import Hydrator
from pipeline.ingest.stores import WriterSettings
from pipeline.store.cold import HydratorHeartbeat
from pipeline.store.replication import FailoverWatch, may_fail_over
from pipeline.store.shards import open_shards

if TYPE_CHECKING:
    from pipeline.ingest.metrics import HydratorCollector

LOOK_SEC = 10.0  # between two looks at the folder
LOOK_AGAIN_SEC = 1.0  # of one that runs once, while another process brings in what it waits for

log = logging.getLogger(__name__)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line and the settings.

    Raises:
        ConfigError: wrong use, or a wrong setting.
    """
    parser = new_parser("hydrate", __doc__ or "")
    parser.add_argument("--folder", metavar="DIR", help="the cold folder, or its URL (default: cold.folder)")
    parser.add_argument("--once", action="store_true", help="bring in what is due soon, then exit 0")
    add_metrics_options(parser)
    return parse_command(parser, arguments, "cold", "folder", "metrics_host", "metrics_port")


def open_hydrator(settings: Settings, connection: Connection, cold: ColdPlace, name: str, stop: Stop) -> Hydrator:
    """Return what brings messages into Redis."""
    redis, ingest = connection.settings, settings.ingest
    writer_settings = WriterSettings(
        redis,
        "",
        "",
        ingest.transaction_messages,
        ingest.wait_for_disk,
        settings.drain.id_retention_sec,
        ingest.wait_for_replicas,
    )
    return Hydrator(
        name,
        ColdFolder(cold.folder, cold.folder_id),
        connection.client,
        connection.shards,
        open_shards(connection.client, redis),
        writer_settings,
        round(settings.cold.lead_hours * HOUR_MS),
        ingest.archive_sec * 1000 if may_fail_over(settings.redis.url) else 0,
        ingest.marker_keep_sec * 1000,
        SystemClock(),
        stop,
        lambda ms: stop.interrupting(lambda: Event().wait(ms / 1000)),
    )


def new_collector(namespace: str, hydrator: Hydrator) -> "HydratorCollector":
    """Return what serves the metrics of the job; only who has them served loads their library."""
    from pipeline.ingest.metrics import HydratorCollector

    return HydratorCollector(namespace, hydrator)


def main(arguments: list[str], stop: Stop) -> int:
    """Bring messages in until stopped, or once."""
    given, settings = parse_arguments(arguments)
    with ExitStack() as stack:
        connection = stack.enter_context(open_connection(settings, stop, may_create=True, writes=True))
        cold = open_cold(connection.client, connection.settings, settings.cold)
        if cold is None:
            raise ConfigError("Name the folder where messages wait: set cold.folder, or give --folder.")
        name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(6)}"
        hydrator = open_hydrator(settings, connection, cold, name, stop)
        stack.callback(lambda: log.info("brought %s into Redis", hydrator.totals))
        stack.callback(_quietly, hydrator.leave)
        collector = partial(new_collector, connection.settings.namespace, hydrator)
        serve_metrics(settings.cold.metrics_host, settings.cold.metrics_port, collector)
        heartbeat = HydratorHeartbeat(connection.client, connection.shards[0], name, SystemClock(), hydrator.progress)
        stack.callback(heartbeat.publish, has_ended=True)
        background = Background([heartbeat])
        background.start()
        stack.callback(background.stop)
        watch = FailoverWatch.of(connection.client, connection.shards, SystemClock())
        hydrator.bring_back(0)  # what a failover may have undone while no such job ran
        announce_ready()
        log.info("hydrate is up: it reads %s", cold.folder)
        is_done = False
        while not stop() and not (given.once and is_done):
            is_done = _look(hydrator, watch)
            if not stop() and not (given.once and is_done):
                stop.interrupting(lambda: Event().wait(LOOK_AGAIN_SEC if given.once else LOOK_SEC))
    return EXIT_SUCCESS


def _look(hydrator: Hydrator, watch: FailoverWatch) -> bool:
    """Bring in what is due soon, and say what is in the way; returns whether all of it is in."""
    before = hydrator.totals.messages
    is_done = False
    try:
        if (
            (failover := watch.look())
            and not failover.is_harmless
            and (files := hydrator.bring_back(failover.since_ms))
        ):
            log.info("Redis was restarted, or another server took over: %s read again", count_text(files, "file"))
        if watch.saw_all:
            hydrator.forget_done()
        is_done = hydrator.look()
        hydrator.keep_house()
    except StoreUnavailable as exc:
        log.warning("waiting for Redis: %s", exc)
    except ColdUnavailable as exc:
        log.warning("waiting for the cold folder: %s", exc)
    except PipelineError as exc:
        log.error("%s", exc)
    if brought := hydrator.totals.messages - before:
        log.info("%s due before %s came into Redis", count_text(brought, "message"), utc_text(hydrator.until_ms))
    return is_done


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except PipelineError as exc:
        log.debug("left to its lease: %s", exc)


if __name__ == "__main__":
    run_main("hydrate", main)
