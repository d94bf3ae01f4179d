"""Print the messages of a topic as a consumer of a group: each message goes to one instance of every group."""

import argparse
import logging
import select
from contextlib import ExitStack
from dataclasses import dataclass, field

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
from pipeline.config import Settings
from pipeline.consume.consumer import Consumer
from pipeline.consume.opening import new_consumer, new_store, parse_start
from pipeline.core.clock import Clock, SystemClock
from pipeline.core.errors import SinkClosed, StoreUnavailable
from pipeline.core.lateness import Lateness
from pipeline.core.messages import Message
from pipeline.sinks.base import Delivery, Sink
from pipeline.sinks.screen import ScreenSink
from pipeline.store.checks import check_server
from pipeline.store.connection import connect
from pipeline.store.entries import Entry
from pipeline.store.shards import check_layout

LEASE_SHARE = 0.5  # of the lease, in which a batch is printed or given back

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Printed:
    """What a run has printed."""

    messages: int = 0
    lateness: Lateness = field(default_factory=Lateness)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line; argparse exits 2 with a sentence on wrong use."""
    parser = new_parser("consume", __doc__ or "")
    parser.add_argument(
        "--topic", required=True, metavar="T", help="whose messages; a drain loop with --sink stream moves them there"
    )
    parser.add_argument("--group", required=True, metavar="G", help="the logical consumer, registered if it is new")
    parser.add_argument("--consumer", default="", metavar="C", help="this instance (default: a name of its own)")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="one line a message (default: text)")
    parser.add_argument(
        "--from",
        dest="start",
        default="new",
        metavar="PLACE",
        help="where a new group begins: beginning, new, after an entry's ID, or at a time in ISO 8601 (default: new)",
    )
    parser.add_argument(
        "--replay",
        metavar="PLACE",
        help="set the group to beginning or a time first: what is retained since then comes again",
    )
    parser.add_argument(
        "--ordered",
        action="store_true",
        help="one instance of the group at a time, the others stand by; all must say so",
    )
    parser.add_argument("--once", action="store_true", help="print what is there now, then exit 0")
    given = parser.parse_args(arguments)
    set_log_level(given.log_level)
    return given, settings_from(given, "topics")


def main(arguments: list[str], stop: Stop) -> int:
    """Consume until told to stop."""
    given, settings = parse_arguments(arguments)
    start, replay = parse_start(given.start), given.replay and parse_start(given.replay)
    clock = SystemClock()
    with ExitStack() as stack:
        redis_settings = stack.enter_context(reachable_redis(settings, stop))
        client = connect(redis_settings)
        for warning in check_server(client, redis_settings, clock):
            log.warning("%s", warning)
        check_layout(client, redis_settings, may_set=True)
        store = new_store(client, settings, given.topic, given.group, given.consumer, given.ordered)
        if store.register(start):
            log.info("registered the group %s of the topic %s, from %s on", given.group, given.topic, given.start)
        if replay:
            store.replay(replay)
        consumer = new_consumer(
            store,
            settings,
            given.ordered,
            wait=lambda ms: stop.interrupting(lambda: _pause(ms)),
            stopping=stop,
            interruptible=stop.interrupting,
            **({"block_ms": 1} if given.once else {}),
        )
        stack.enter_context(consumer)
        printed = Printed()
        stack.callback(lambda: log.info("%s", summary(printed, consumer)))
        announce_ready()
        try:
            print_all(consumer, ScreenSink(given.format, clock), clock, printed, stop, given.once)
        except StoreUnavailable as exc:
            log.warning("stopped while Redis does not answer, so what was in hand comes again after its lease: %s", exc)
    return EXIT_SUCCESS


def print_all(consumer: Consumer, sink: Sink, clock: Clock, printed: Printed, stop: Stop, once: bool) -> None:
    """Print and acknowledge until told to stop, or, with ``once``, until there is nothing new.

    Raises:
        SinkClosed: nobody reads any more; what was not begun is given back.
        StoreUnavailable: told to stop while the server did not answer.
    """
    while not stop():
        entries = consumer.take()
        if not entries and once:
            return
        end_ms = clock.monotonic_ms() + consumer.settings.lease_sec * 1000 * LEASE_SHARE
        deliveries = [as_delivery(entry) for entry in entries]
        try:
            delivered = sink.deliver(
                deliveries,
                lambda: clock.monotonic_ms() < end_ms,  # noqa: B023 - asked before the next round
                lambda: clock.monotonic_ms() < end_ms and not stop(),  # noqa: B023
            )
        except SinkClosed as exc:
            consumer.give_back(*entries[exc.begun :])
            raise
        delivered_ms = clock.wall_ms()
        consumer.ack(*entries[:delivered])
        consumer.give_back(*entries[delivered:])
        printed.messages += delivered
        for entry in entries[:delivered]:
            printed.lateness.add(delivered_ms - entry.due_ms)


def as_delivery(entry: Entry) -> Delivery:
    """Return an entry as the screen shows it."""
    message = Message(entry.entry_id, entry.id, entry.topic, entry.message, entry.headers)
    return Delivery(message, entry.due_ms, entry.attempt)


def summary(printed: Printed, consumer: Consumer) -> str:
    """Return what a run did, in one line."""
    messages = "1 message" if printed.messages == 1 else f"{printed.messages:,} messages"
    lateness = f", lateness {printed.lateness}" if printed.messages else ""
    return f"printed {messages}{lateness}; {consumer.stale:,} stale"


def _pause(ms: float) -> None:
    select.select([], [], [], ms / 1000)


if __name__ == "__main__":
    run_main("consume", main)
