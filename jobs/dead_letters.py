"""Look at messages that were given up, schedule them again, or drop them."""

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict

from pipeline.cli import EXIT_SUCCESS, Stop, new_parser, reachable_redis, run_main, set_log_level, settings_from
from pipeline.core.clock import SystemClock
from pipeline.core.errors import ConfigError
from pipeline.core.lateness import span_text
from pipeline.sinks.screen import utc_text, visible
from pipeline.store.checks import check_server
from pipeline.store.connection import connect
from pipeline.store.dead_letters import DeadLetter, DeadLetters
from pipeline.store.shards import check_layout, keys_of
from pipeline.store.topics import Topics

AGE = re.compile(r"([0-9]+)(s|m|h|d)")
UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
MESSAGE_SHOWN = 60  # characters of a message in a list


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; argparse exits 2 with a sentence on wrong use."""
    parser = new_parser("dead_letters", __doc__ or "")
    parser.add_argument(
        "what",
        choices=["list", "show", "redrive", "purge"],
        help="list: a line each; show: all there is; redrive: schedule again, as never tried; purge: drop for good",
    )
    parser.add_argument("names", nargs="*", metavar="LETTER", help="some letters, as list names them")
    parser.add_argument("--topic", metavar="T", help="those of one topic")
    parser.add_argument("--group", metavar="G", help="those that one group gave up")
    parser.add_argument("--reason", metavar="R", help="failed, abandoned or expired")
    parser.add_argument("--older-than", metavar="AGE", help="those that died longer ago, such as 90s, 15m, 2h, 7d")
    parser.add_argument("--all", action="store_true", help="redrive or purge all that there are")
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="for eyes or programs (default: text)"
    )
    given = parser.parse_args(arguments)
    set_log_level(given.log_level)
    filters = [given.names, given.topic, given.group, given.reason, given.older_than, given.all]
    if given.what in ("redrive", "purge") and not any(filters):
        raise ConfigError(
            f"Say which letters to {given.what}: name some, choose by --topic and the like, or say --all."
        )
    return given


def main(arguments: list[str], stop: Stop) -> int:
    """Do one thing about dead letters."""
    given = parse_arguments(arguments)
    settings = settings_from(given, "redis")
    older_ms = parse_age(given.older_than) if given.older_than else None
    with ExitStack() as stack:
        redis_settings = stack.enter_context(reachable_redis(settings, stop))
        client, shards = connect(redis_settings), keys_of(redis_settings)
        check_server(client, redis_settings, SystemClock())
        check_layout(client, redis_settings, may_set=False)
        letters, topics = DeadLetters(client, shards), Topics(client, shards)
        now_ms = topics.now_ms()
        done = 0
        for letter in chosen(letters, topics, given, now_ms, older_ms):
            if stop():
                break
            if given.what in ("list", "show"):
                print(as_text(letter, given.what, given.format, now_ms))
                done += 1
            else:
                done += letters.redrive(letter, now_ms) if given.what == "redrive" else letters.purge(letter)
    if given.what in ("redrive", "purge"):
        said = "scheduled again" if given.what == "redrive" else "dropped"
        print(json.dumps({given.what: done}) if given.format == "json" else f"{done:,} {said}")
    elif not done and given.format == "text":
        print("no dead letters")
    return EXIT_SUCCESS


def chosen(
    letters: DeadLetters, topics: Topics, given: argparse.Namespace, now_ms: int, older_ms: int | None
) -> Iterator[DeadLetter]:
    """Yield the letters that the command line asks for."""
    names = set(given.names)
    for topic in [given.topic] if given.topic else topics.names():
        for letter in letters.of_topic(topic):
            if (
                (not names or letter.name in names)
                and given.group in (None, letter.group)
                and given.reason in (None, letter.reason)
                and (older_ms is None or now_ms - letter.died_ms > older_ms)
            ):
                yield letter


def parse_age(text: str) -> int:
    """Return an age such as ``15m`` in milliseconds.

    Raises:
        ConfigError: it is none.
    """
    found = AGE.fullmatch(text)
    if not found:
        raise ConfigError(f"{text!r} is no age; write a number and s, m, h or d, such as 15m.")
    return int(found[1]) * UNIT_MS[found[2]]


def as_text(letter: DeadLetter, what: str, format: str, now_ms: int) -> str:
    """Return a letter as it is printed."""
    if format == "json":
        return json.dumps({"name": letter.name, **asdict(letter)})
    if what == "list":
        message = visible(letter.message)
        short = message if len(message) <= MESSAGE_SHOWN else f"{message[:MESSAGE_SHOWN]}…"
        ago = span_text(max(0, now_ms - letter.died_ms))
        whose = f" by {visible(letter.group)}" if letter.group else ""
        return f"{visible(letter.name)}  {visible(letter.reason)}{whose} {ago} ago, attempt {letter.attempt}: {short}"
    lines = {
        "id": letter.id,
        "topic": letter.topic,
        "due": utc_text(letter.due_ms),
        "died": utc_text(letter.died_ms),
        "reason": letter.reason,
        "detail": letter.detail,
        "group": letter.group,
        "attempts": str(letter.attempt),
        "headers": json.dumps(dict(letter.headers), ensure_ascii=False),
        "message": letter.message,
    }
    shown = (f"  {name:<9}{visible(value)}" for name, value in lines.items() if value)
    return "\n".join([visible(letter.name), *shown])


if __name__ == "__main__":
    run_main("dead_letters", main)
