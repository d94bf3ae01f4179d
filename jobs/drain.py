"""Deliver messages when they are due. Any number of these loops may run; each message goes to one of them."""

import argparse
import gc
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

from pipeline.cli import (
    EXIT_SUCCESS,
    Stop,
    add_metrics_options,
    announce_ready,
    new_parser,
    open_connection,
    parse_command,
    run_main,
    serve_metrics,
)
from pipeline.config import SINKS, RedisSettings, Settings, TopicSettings
from pipeline.core.background import Background
from pipeline.core.clock import Clock, SystemClock
from pipeline.core.errors import ConfigError, StoreUnavailable
from pipeline.core.text import count_text, redact_url
from pipeline.drain.housekeeping import Forgetter, Reclaimer, Trimmer
from pipeline.drain.loop import DrainLoop
from pipeline.drain.rate_limit import RateLimit
from pipeline.drain.side_by_side import SharedSink, SideBySide
from pipeline.drain.stats import FailoverLog, Heartbeat, Totals
from pipeline.sinks import DELIVERING
from pipeline.store.connection import connect
from pipeline.store.heartbeats import write_loop
from pipeline.store.ids import forget_ids
from pipeline.store.keys import Keys
from pipeline.store.namespace import adopt_topic_settings, current_topic_settings
from pipeline.store.replication import FailoverWatch
from pipeline.store.scripts import Scripts
from pipeline.store.shards import open_shards
from pipeline.store.stats import read_forecast
from pipeline.store.topics import Topics
from pipeline.store.wakeup import WakeListener, notify_loops

if TYPE_CHECKING:
    from pipeline.drain.metrics import LoopCollector
    from pipeline.kafka.forwarding import Forwarding

GC_THRESHOLD = 50_000  # objects: messages have no cycles, and looking for some took a tenth of a flood
FINISH_LOOK_MS = 50  # between two looks whether all is in Kafka, of a loop that ends then
SIDE_TIMEOUT_MS = 500  # what is done beside the deliveries gives up soon when the server does not answer

log = logging.getLogger(__name__)


class _InterruptibleListener:
    """The loop's waits: ended by a notification, the time, or a signal."""

    def __init__(self, wake_listener: WakeListener, stop: Stop) -> None:
        self._wake_listener = wake_listener
        self._stop = stop

    def wait(self, timeout_ms: float) -> None:
        self._stop.interrupting(lambda: self._wake_listener.wait(timeout_ms))


def request_reclaim(reclaimer: Reclaimer, background: Background) -> None:
    """Have the claims of a shard given back whose lease is over."""
    reclaimer.request()
    background.wake()


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line and the settings.

    Raises:
        ConfigError: wrong use, or a wrong setting.
    """
    parser = new_parser("drain", __doc__ or "")
    parser.add_argument(
        "--sink",
        choices=SINKS,
        help="where messages go: onto the screen, into streams for consumers, or into Kafka topics (default: screen)",
    )
    parser.add_argument("--kafka-servers", metavar="H:P,…", help="cluster that messages for Kafka are written to")
    parser.add_argument("--format", choices=["text", "json"], help="one line a message (default: text)")
    parser.add_argument(
        "--lease",
        dest="lease_sec",
        metavar="SECONDS",
        help="after so long, other loops redeliver what this one claimed and did not deliver (default: 30)",
    )
    add_metrics_options(parser)
    parser.add_argument(
        "--max-rate", metavar="N", help="deliver at most so many messages a second (default: 0, no limit)"
    )
    until = parser.add_mutually_exclusive_group()
    until.add_argument(
        "--once", dest="until", action="store_const", const="now", help="deliver what is due now, then exit 0"
    )
    until.add_argument(
        "--until-empty",
        dest="until",
        action="store_const",
        const="empty",
        help="exit 0 when nothing is scheduled or in flight",
    )
    names = ("sink", "format", "lease_sec", "max_rate", "metrics_host", "metrics_port")
    return parse_command(parser, arguments, "drain", *names, kafka_servers=("kafka", "servers"))


def new_collector(namespace: str, totals: Totals, client: Any, shards: Sequence[Keys], clock: Clock) -> "LoopCollector":
    """Return what serves the metrics of a loop; only who has them served loads their library."""
    from pipeline.drain.metrics import LoopCollector

    return LoopCollector(namespace, totals, partial(read_forecast, client, shards), clock)


def start_forwarding(
    redis: RedisSettings,
    settings: Settings,
    of_topic: Callable[[str], TopicSettings],
    totals: Totals,
    loop_id: str,
    clock: Clock,
) -> "Forwarding | None":
    """Begin to write the outboxes to Kafka, if a cluster is named; only then its client is loaded."""
    if not settings.kafka.servers:
        if any(each.sink == "kafka" for each in (settings.topics, *settings.topic.values())):
            log.warning("messages for Kafka wait in the outbox until some loop has --kafka-servers; this one has not")
        return None
    try:
        from pipeline.kafka.forwarding import Forwarding
    except ImportError as exc:
        raise ConfigError(f"kafka.servers needs the Kafka client ({exc}): install confluent-kafka.") from exc
    forwarding = Forwarding(connect(redis), redis, settings.kafka, of_topic, totals, loop_id, clock)
    forwarding.start()
    return forwarding


def finish_forwarding(forwarding: "Forwarding", stop: Stop) -> None:
    """Return when what came due is in Kafka, or on a stop."""
    while not stop():
        try:
            if forwarding.is_done():
                return
        except StoreUnavailable as exc:
            log.debug("looked for later: %s", exc)  # the forwarder itself tells what is wrong
        stop.interrupting(lambda: Event().wait(FINISH_LOOK_MS / 1000))


def main(arguments: list[str], stop: Stop) -> int:
    """Run the drain loop until it is stopped or done."""
    given, settings = parse_arguments(arguments)
    clock = SystemClock()
    with ExitStack() as stack:
        # A loop that is there first creates the namespace, too: it would not look into the shards of a later job that means
        # more of them.
        connection = stack.enter_context(open_connection(settings, stop, may_create=True, writes=True))
        client, redis_settings, shards = connection.client, connection.settings, connection.shards
        settings = adopt_topic_settings(client, settings, complete=True)
        # What is done beside the deliveries has threads and a client of its own, so that it holds up no claim.
        side_client = stack.enter_context(closing(connect_aside(redis_settings)))
        loop_id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(6)}"
        totals = Totals(topics_max=settings.drain.topics_max)
        collector = partial(new_collector, redis_settings.namespace, totals, side_client, shards, clock)
        serve_metrics(settings.drain.metrics_host, settings.drain.metrics_port, collector)
        stack.callback(lambda: log.info("%s", summary(totals)))
        heartbeat = Heartbeat(partial(write_loop, side_client, shards[0]), totals, clock, loop_id)
        stack.callback(heartbeat.publish, has_ended=True)
        scripts = Scripts()
        reclaimers = [
            Reclaimer(store.reclaim, partial(notify_loops, side_client, [keys]), totals)
            for store, keys in zip(open_shards(side_client, redis_settings, scripts=scripts), shards, strict=True)
        ]
        forgetter = Forgetter([partial(forget_ids, side_client, keys, scripts) for keys in shards], clock)
        of_topic = partial(current_topic_settings, side_client, settings)
        trimmer = Trimmer(Topics(side_client, shards), shards, of_topic, clock)
        # A reclaimer has a thread for itself, as the others would wait for a shard that is away.
        reclaiming = [Background([each]) for each in reclaimers]
        failovers = FailoverLog(FailoverWatch.of(side_client, shards, clock), heartbeat.tell)
        for background in (Background([heartbeat, trimmer, forgetter]), Background([failovers]), *reclaiming):
            background.start()
            stack.callback(background.stop)

        forwarding = start_forwarding(redis_settings, settings, of_topic, totals, loop_id, clock)
        if forwarding:
            stack.callback(forwarding.stop)
        rate_limit = RateLimit(settings.drain.max_rate)
        claims = replace(settings.drain, claim_limit=rate_limit.claim_limit(settings.drain.claim_limit))
        wake_listener = WakeListener(client, shards)
        stack.callback(wake_listener.close)
        listener = _InterruptibleListener(wake_listener, stop)
        of_shards = SideBySide(shards, wake_listener, listener.wait, stop)
        screen = DELIVERING["screen"](settings.drain.format, clock)
        sink = screen if len(shards) == 1 else SharedSink(screen)
        loops = [
            DrainLoop(
                store=store,
                sink=sink,
                clock=clock,
                waiter=listener if len(shards) == 1 else of_shards.waiter(keys),
                loop_id=loop_id if len(shards) == 1 else f"{loop_id}.{keys.shard}",  # no two claims have one name
                wait_ms_max=settings.drain.wait_ms_max,
                until=given.until,
                stopping=of_shards.stopping,
                random=random.random,
                request_reclaim=partial(request_reclaim, reclaimer, background),
                rate_limit=rate_limit,
                totals=totals,
                prefetch_from=0 if settings.drain.max_rate else claims.claim_limit,
            )
            for store, keys, reclaimer, background in zip(
                open_shards(client, redis_settings, claims), shards, reclaimers, reclaiming, strict=True
            )
        ]
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        log.info("%s", start_text(redis_settings, settings))
        announce_ready()
        of_shards.run(loops)
        if forwarding and given.until:
            finish_forwarding(forwarding, stop)
    return EXIT_SUCCESS


def connect_aside(redis: RedisSettings) -> Any:
    """Return a client that waits for no answer as long as the loop's own does."""
    return connect(replace(redis, connect_timeout_ms=SIDE_TIMEOUT_MS, reply_timeout_ms=SIDE_TIMEOUT_MS))


def start_text(redis: RedisSettings, settings: Settings) -> str:
    """Return from where a loop delivers what to where, in one line: the settings of topics may change later."""
    others = sorted({each.sink for each in settings.topic.values()} - {settings.topics.sink})
    of_some = f", of some topics {' or '.join(others)}" if others else ""
    return f"delivering from {redact_url(redis.url)}, namespace {redis.namespace}; sink {settings.topics.sink}{of_some}"


def summary(totals: Totals) -> str:
    """Return what a run did, in one line."""
    lateness = f", lateness {totals.of_all_topics().lateness}" if totals.delivered else ""
    if totals.late_on_arrival:
        lateness += f", {totals.late_on_arrival:,} late on arrival"
    if totals.forwarded or totals.refused:
        lateness += f"; {totals.forwarded:,} written to Kafka, {totals.refused:,} refused"
    messages = count_text(totals.delivered, "message")
    return f"delivered {messages}{lateness}; {totals.late_acks:,} late acks, {totals.reclaimed:,} reclaimed"


if __name__ == "__main__":
    run_main("drain", main)
