"""Print messages when they are due. Any number of these may run; each message goes to one of them."""

import argparse
import logging
import os
import random
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

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
from pipeline.config import SINKS, DrainSettings, Settings, TopicSettings
from pipeline.core.clock import Clock, SystemClock
from pipeline.core.messages import DEFAULT_TOPIC
from pipeline.drain.housekeeping import Housekeeping
from pipeline.drain.loop import DrainLoop
from pipeline.drain.pace import Pace
from pipeline.drain.rest_line import ClearedSink, RestLine, StreamTerminal, has_room_for_a_line
from pipeline.drain.share import Share
from pipeline.drain.totals import Totals
from pipeline.sinks.base import Sink
from pipeline.sinks.screen import ScreenSink
from pipeline.store.checks import check_server
from pipeline.store.connection import connect
from pipeline.store.doorbell import Doorbell
from pipeline.store.drains import write_drain
from pipeline.store.outlook import Outlook, Waiting, count_waiting, look_ahead
from pipeline.store.routes import TopicRules
from pipeline.store.shards import ShardedStore, check_layout, keys_of, open_shards
from pipeline.store.topics import Topics

ASIDE_TIMEOUT_MS = 500  # what is done beside the deliveries gives up soon when the server does not answer

log = logging.getLogger(__name__)


class _InterruptibleDoorbell:
    """The loop's waits: ended by the doorbell, the time, or a signal."""

    def __init__(self, doorbell: Doorbell, stop: Stop) -> None:
        self._doorbell = doorbell
        self._stop = stop

    def wait(self, timeout_ms: float) -> None:
        self._stop.interrupting(lambda: self._doorbell.wait(timeout_ms))


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line; argparse exits 2 with a sentence on wrong use."""
    parser = new_parser("drain", __doc__ or "")
    parser.add_argument(
        "--sink",
        choices=SINKS,
        help="where messages go: onto the screen, or into streams for jobs/consume.py (default: screen)",
    )
    parser.add_argument("--format", choices=["text", "json"], help="one line a message (default: text)")
    parser.add_argument(
        "--lease", dest="lease_sec", metavar="SECONDS", help="how long a claim is this loop's (default: 30)"
    )
    parser.add_argument(
        "--metrics-port", metavar="N", help="serve metrics for Prometheus on that port (default: 0, not served)"
    )
    parser.add_argument("--metrics-host", metavar="ADDRESS", help="on that address (default: 127.0.0.1)")
    parser.add_argument("--max-rate", metavar="N", help="messages a second, at most (default: 0, as fast as it can)")
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
    given = parser.parse_args(arguments)
    set_log_level(given.log_level)
    names = ("sink", "format", "lease_sec", "max_rate", "metrics_host", "metrics_port")
    return given, settings_from(given, "drain", *names)


def topic_rules(settings: Settings) -> TopicRules:
    """Return what the store has to know of topics."""
    none_is_special = settings.topics == TopicSettings(sink=settings.topics.sink) and not settings.topic
    all_to_screen = none_is_special and settings.of_topic(DEFAULT_TOPIC).sink == "screen"
    return TopicRules(settings.of_topic, all_to_screen, settings.redis.shards)


def serve_metrics(settings: DrainSettings, totals: Totals, look: Callable[[], Outlook], clock: Clock) -> None:
    """Serve metrics, if a port is given; only then their library is loaded."""
    if settings.metrics_port:
        from pipeline.drain import metrics

        metrics.serve_metrics(settings.metrics_host, settings.metrics_port, metrics.LoopCollector(totals, look, clock))
        log.info("metrics are on http://%s:%d/metrics", settings.metrics_host, settings.metrics_port)


def rest_line_on_stderr(stack: ExitStack, totals: Totals, look: Callable[[], Waiting], clock: Clock) -> RestLine | None:
    """Return the line for a terminal at rest, None where there is no room for it."""
    if not has_room_for_a_line(sys.stderr):
        return None
    line = RestLine(StreamTerminal(sys.stderr), totals, look, clock)
    for handler in logging.getLogger().handlers:
        handler.addFilter(line)
        stack.callback(handler.removeFilter, line)
    stack.callback(line.erase)
    return line


def main(arguments: list[str], stop: Stop) -> int:
    """Run the drain loop until it is stopped or done."""
    given, settings = parse_arguments(arguments)
    clock = SystemClock()
    with ExitStack() as stack:
        redis_settings = stack.enter_context(reachable_redis(settings, stop))
        client, shards = connect(redis_settings), keys_of(redis_settings)
        for warning in check_server(client, redis_settings, clock):
            log.warning("%s", warning)
        # Also a loop that is there first: it would not look into the shards of a later job that means more of them.
        check_layout(client, redis_settings, may_set=True)
        # What is done beside the deliveries has a client of its own, so that a connection that stalls there holds up no claim.
        aside_client = connect(
            replace(redis_settings, connect_timeout_ms=ASIDE_TIMEOUT_MS, reply_timeout_ms=ASIDE_TIMEOUT_MS)
        )
        loop_id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(6)}"
        totals = Totals(topics_max=settings.drain.topics_max)
        serve_metrics(settings.drain, totals, partial(look_ahead, aside_client, shards), clock)
        share = Share(partial(write_drain, aside_client, shards[0]), totals, clock, loop_id)
        stack.callback(share.tell)
        housekeeping = Housekeeping(Topics(aside_client, shards), shards, settings.of_topic, clock)
        sink: Sink = ScreenSink(settings.drain.format, clock)
        line = rest_line_on_stderr(stack, totals, partial(count_waiting, aside_client, shards), clock)
        if line:
            sink = ClearedSink(sink, line)
        pace = Pace(settings.drain.max_rate)
        claims = replace(settings.drain, claim_limit=pace.claim_limit(settings.drain.claim_limit))
        doorbell = Doorbell(client, shards)
        stack.callback(doorbell.close)
        loop = DrainLoop(
            store=ShardedStore(open_shards(client, redis_settings, claims, topic_rules(settings))),
            sink=sink,
            clock=clock,
            waiter=_InterruptibleDoorbell(doorbell, stop),
            loop_id=loop_id,
            wait_ms_max=settings.drain.wait_ms_max,
            until=given.until,
            stopping=stop,
            random=random.random,
            pace=pace,
            totals=totals,
            asides=[share, housekeeping, *([line] if line else [])],
        )
        announce_ready()
        stack.callback(lambda: log.info("%s", summary(totals)))
        loop.run()
    return EXIT_SUCCESS


def summary(totals: Totals) -> str:
    """Return what a run did, in one line."""
    lateness = f", lateness {totals.lateness()}" if totals.delivered else ""
    messages = "1 message" if totals.delivered == 1 else f"{totals.delivered:,} messages"
    return f"delivered {messages}{lateness}; {totals.stale:,} stale, {totals.reclaimed:,} reclaimed"


if __name__ == "__main__":
    run_main("drain", main)
