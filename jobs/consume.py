"""Print the messages of a topic as a consumer of a group: each message goes to one consumer of every group."""

import argparse
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from pipeline.cli import EXIT_SUCCESS, Stop, announce_ready, new_parser, open_connection, parse_command, run_main
from pipeline.config import Settings
from pipeline.consume.consumer import Consumer
from pipeline.consume.opening import (
    new_consumer,
    new_store,
    parse_start,
    place_from_now,
    run_together,
    shards_of_consumers,
    stoppable,
)
from pipeline.core.clock import Clock, SystemClock
from pipeline.core.errors import ConfigError, SinkClosed, StoreUnavailable
from pipeline.core.lateness import Lateness
from pipeline.core.text import command_text, count_text
from pipeline.drain.side_by_side import SharedSink
from pipeline.sinks import DELIVERING
from pipeline.sinks.base import Sink
from pipeline.store.entries import NO_ENTRY, Entry, EntryId, entry_id_of
from pipeline.store.groups import GroupStore
from pipeline.store.namespace import adopt_topic_settings
from pipeline.store.topics import Topics

LEASE_SHARE = 0.5  # of the lease, in which a batch is printed or given back

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Printed:
    """What a run has printed; threads may count at the same time.

    Args:
        began_at: the last entry of each stream when the group was set to an earlier one. What is printed again, or was there before
            the group, is not late, and not counted as such.
    """

    began_at: dict[str, EntryId] = field(default_factory=dict)
    messages: int = 0
    lateness: Lateness = field(default_factory=Lateness)
    _lock: Lock = field(default_factory=Lock)

    def count(self, entries: Sequence[Entry], at_ms: int) -> None:
        """Count messages that are printed now."""
        with self._lock:
            self.messages += len(entries)
            for entry in entries:
                if entry.attempt == 1 and entry_id_of(entry.entry_id) > self.began_at.get(entry.stream, NO_ENTRY):
                    self.lateness.add(at_ms - entry.due_ms)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line and the settings.

    Raises:
        ConfigError: wrong use, or a wrong setting.
    """
    parser = new_parser("consume", __doc__ or "")
    parser.add_argument(
        "--topic",
        required=True,
        metavar="T",
        help="topic to read; the command topics set TOPIC sink=stream sends its messages into its stream",
    )
    parser.add_argument("--group", required=True, metavar="G", help="consumer group, registered if it is new")
    parser.add_argument(
        "--consumer", default="", metavar="C", help="name of this consumer in the group (default: a unique one)"
    )
    parser.add_argument("--format", choices=["text", "json"], default="text", help="one line a message (default: text)")
    parser.add_argument(
        "--from",
        dest="start",
        default="new",
        metavar="PLACE",
        help="where a new group starts to read: beginning, new, after an entry ID, or a time in ISO 8601 (default: new)",
    )
    parser.add_argument(
        "--replay",
        metavar="PLACE",
        help="first set the group back to beginning, after an entry ID, or to a time; the messages retained since then are "
        "redelivered",
    )
    parser.add_argument(
        "--ordered",
        action="store_true",
        help="one active consumer in a new group at a time, the others stand by; who joins later need not say so",
    )
    parser.add_argument("--once", action="store_true", help="print what is there now, then exit 0")
    given, settings = parse_command(parser, arguments, "topics")
    if given.replay == "new":
        raise ConfigError("--replay new would skip what is unread; name beginning, an entry's id or a time.")
    return given, settings


def main(arguments: list[str], stop: Stop) -> int:
    """Consume until stopped."""
    given, settings = parse_arguments(arguments)
    start, replay = parse_start(given.start), given.replay and parse_start(given.replay)
    clock = SystemClock()
    with ExitStack() as stack:
        connection = stack.enter_context(open_connection(settings, stop, may_create=True))
        settings = adopt_topic_settings(connection.client, settings)
        store = new_store(connection.client, settings, given.topic, given.group, given.consumer)
        known, _ = Topics(connection.client, connection.shards).names_that_answer()
        place = place_from_now(store, start)
        is_new = store.register(start, given.ordered or None, passes_over=True)
        if is_new:
            log.info("registered the group %s of the topic %s, from %s on", given.group, given.topic, given.start)
            if given.topic not in known:
                log.info("No message of topic %s has come into its stream yet; the group is registered.", given.topic)
        if (where := settings.of_topic(given.topic).sink) != "stream":
            log.warning(
                "the messages of topic %s go to %s; %s sends them into its stream",
                given.topic,
                "Kafka" if where == "kafka" else "the screen",
                command_text("topics", f"set {given.topic} sink=stream"),
            )
        if replay:
            store.replay(replay)
        options = stoppable(stop) | {"reads_ahead": True} | ({"block_ms": 1} if given.once else {})
        printed, consumers = Printed(), []

        def enter(share: GroupStore) -> None:
            share.register(place)
            if is_new or replay:
                printed.began_at.update(share.last_ids())

        for shards in shards_of_consumers(connection.client, settings, 1, store.ordered):
            share = new_store(connection.client, settings, given.topic, given.group, given.consumer, shards=shards)
            opened = new_consumer(share, settings, enter=partial(enter, share), **options)
            consumers.append(stack.enter_context(opened))
        stack.callback(lambda: log.info("%s", summary(printed, consumers)))
        screen = DELIVERING["screen"](given.format, clock)
        sink = screen if len(consumers) == 1 else SharedSink(screen)
        announce_ready()
        try:
            calls = [partial(print_all, each, sink, clock, printed, stop, given.once) for each in consumers]
            run_together(calls, stop)
        except StoreUnavailable as exc:
            log.warning(
                "stopped while Redis does not answer, so unacknowledged messages are redelivered after their lease: %s",
                exc,
            )
    return EXIT_SUCCESS


def print_all(consumer: Consumer, sink: Sink, clock: Clock, printed: Printed, stop: Stop, once: bool) -> None:
    """Print and acknowledge until stopped, or, with ``once``, until there is nothing new.

    Raises:
        SinkClosed: nobody reads the output any more; what was not printed is given back.
        StoreUnavailable: stopped while the server did not answer.
    """
    while not stop():
        entries = consumer.take()
        if not entries and once:
            return
        end_ms = clock.monotonic_ms() + consumer.settings.lease_sec * 1000 * LEASE_SHARE
        try:
            delivered = sink.deliver(
                entries,
                lambda: clock.monotonic_ms() < end_ms,  # noqa: B023 - asked before the next round
                lambda: clock.monotonic_ms() < end_ms and not stop(),  # noqa: B023
            )
        except SinkClosed as exc:
            consumer.give_back(*entries[exc.started :])
            raise
        delivered_ms = clock.wall_ms()
        consumer.ack(*entries[:delivered])
        consumer.give_back(*entries[delivered:])
        printed.count(entries[:delivered], delivered_ms)


def summary(printed: Printed, consumers: Sequence[Consumer]) -> str:
    """Return what a run did, in one line."""
    lateness = f", lateness {printed.lateness}" if printed.lateness.total() else ""
    messages = count_text(printed.messages, "message")
    return f"printed {messages}{lateness}; {sum(each.late_acks for each in consumers):,} late acks"


if __name__ == "__main__":
    run_main("consume", main)
