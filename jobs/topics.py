"""Look at topics and their groups of consumers; pause and resume topics."""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

from pipeline.cli import EXIT_SUCCESS, Stop, new_parser, reachable_redis, run_main, set_log_level, settings_from
from pipeline.config import check_name
from pipeline.core.clock import SystemClock
from pipeline.core.errors import ConfigError
from pipeline.core.lateness import span_text
from pipeline.sinks.screen import visible
from pipeline.store.checks import check_server
from pipeline.store.connection import connect
from pipeline.store.shards import check_layout, keys_of
from pipeline.store.topics import GroupInfo, TopicInfo, Topics


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; argparse exits 2 with a sentence on wrong use."""
    parser = new_parser("topics", __doc__ or "")
    parser.add_argument(
        "what",
        choices=["list", "pause", "resume", "groups"],
        help="list: what each holds; pause: no message leaves the schedule; resume: what was held meanwhile comes in order; "
        "groups: how far each group of consumers is",
    )
    parser.add_argument("names", nargs="*", metavar="TOPIC", help="some topics (list, groups: default all)")
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="for eyes or programs (default: text)"
    )
    given = parser.parse_args(arguments)
    set_log_level(given.log_level)
    for name in given.names:
        check_name("topic", name)
    if given.what in ("pause", "resume") and not given.names:
        raise ConfigError(f"Say which topics to {given.what}.")
    return given


def main(arguments: list[str], stop: Stop) -> int:
    """Do one thing about topics."""
    given = parse_arguments(arguments)
    settings = settings_from(given, "redis")
    with ExitStack() as stack:
        redis_settings = stack.enter_context(reachable_redis(settings, stop))
        client = connect(redis_settings)
        check_server(client, redis_settings, SystemClock())
        check_layout(client, redis_settings, may_set=False)
        topics = Topics(client, keys_of(redis_settings))
        now_ms = topics.now_ms()
        names: Sequence[str] = given.names or topics.names()
        for name in names:
            if given.what == "pause":
                topics.pause(name, now_ms)
            elif given.what == "resume":
                put_back = sum(topics.resume(name))
                if given.format == "text":
                    print(f"{name}: {put_back:,} messages that were held come now")
        if given.what == "groups":
            for name in names:
                print(groups_text(name, topics.groups(name), given.format, now_ms))
        elif given.what != "resume" or given.format == "json":
            for name in names:
                print(topic_text(topics.look(name), given.format, now_ms))
        if not names and given.format == "text":
            print("no topic has a stream yet")
    return EXIT_SUCCESS


def topic_text(topic: TopicInfo, format: str, now_ms: int) -> str:
    """Return a line about a topic."""
    if format == "json":
        return json.dumps(asdict(topic))
    paused = "" if topic.paused_ms is None else f", paused for {span_text(max(0, now_ms - topic.paused_ms))}"
    return f"{visible(topic.name)}: {topic.in_stream:,} in its stream, {topic.held:,} held, {topic.dead:,} dead{paused}"


def groups_text(topic: str, groups: Sequence[GroupInfo], format: str, now_ms: int) -> str:
    """Return a line about each group of a topic."""
    if format == "json":
        return json.dumps({"topic": topic, "groups": [asdict(group) for group in groups]})
    topic = visible(topic)
    lines = []
    for group in groups:
        oldest_ms = group.oldest_pending_ms
        oldest = "" if oldest_ms is None else f", the oldest of {span_text(max(0, now_ms - oldest_ms))} ago"
        instances = "1 instance" if group.consumers == 1 else f"{group.consumers:,} instances"
        lag = "unknown" if group.lag is None else f"{group.lag:,}"
        name = visible(group.name)
        lines.append(f"{topic} {name}: lag {lag}, pending {group.pending:,}{oldest}; {instances}")
    return "\n".join(lines) or f"{topic}: no groups"


if __name__ == "__main__":
    run_main("topics", main)
