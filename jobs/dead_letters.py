"""List and show dead letters: messages that were given up. Redrive (schedule again) or purge (delete) them."""

import argparse
import json
from collections.abc import Iterator

from pipeline.cli import EXIT_SUCCESS, Stop, new_parser, open_connection, parse_command, run_main
from pipeline.config import Settings
from pipeline.core.dead import DeadReason
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.text import count_text, span_ms, span_text, utc_text, visible
from pipeline.store.dead_letters import DeadLetters
from pipeline.store.entries import DeadLetter
from pipeline.store.topics import Topics

SHOWN = 60  # characters of a message, and of an error, in a list


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line and the settings.

    Raises:
        ConfigError: wrong use, or a wrong setting.
    """
    parser = new_parser("dead_letters", __doc__ or "")
    parser.add_argument(
        "what",
        choices=["list", "show", "redrive", "purge"],
        help="list: one line each; show: everything about them; redrive: schedule them again, as never tried; purge: delete them",
    )
    parser.add_argument("names", nargs="*", metavar="LETTER", help="names of dead letters, as list prints them")
    parser.add_argument("--topic", metavar="T", help="only those of one topic")
    parser.add_argument("--group", metavar="G", help="only those that one group gave up")
    parser.add_argument("--reason", choices=[*DeadReason], help="only those with this reason")
    parser.add_argument(
        "--older-than", metavar="AGE", help="only those that died longer ago than 90s, 15m, 2h or 7d, for example"
    )
    parser.add_argument("--all", action="store_true", help="redrive or purge every dead letter")
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="output for people or for programs (default: text)"
    )
    given, settings = parse_command(parser, arguments, "redis")
    filters = [given.names, given.topic, given.group, given.reason, given.older_than, given.all]
    if given.what in ("redrive", "purge") and not any(filters):
        raise ConfigError(
            f"Say which dead letters to {given.what}: name some, choose by --topic and the like, or give --all."
        )
    return given, settings


def main(arguments: list[str], stop: Stop) -> int:
    """List, show, redrive or purge dead letters."""
    given, settings = parse_arguments(arguments)
    older_ms = parse_age(given.older_than) if given.older_than else None
    with open_connection(settings, stop, may_create=False) as connection:
        letters = DeadLetters(connection.client, connection.shards)
        now_ms = Topics(connection.client, connection.shards).now_ms()
        done, missing = 0, set(given.names)
        for letter in chosen(letters, given, now_ms, older_ms):
            if stop():
                missing.clear()  # whether the rest is there is not known
                break
            missing.discard(letter.name)
            if given.what in ("list", "show"):
                print(as_text(letter, given.what, given.format, now_ms))
                done += 1
            else:
                done += letters.redrive(letter, now_ms) if given.what == "redrive" else letters.purge(letter)
    if given.what in ("redrive", "purge"):
        said = f"{count_text(done, 'dead letter')} {'redriven' if given.what == 'redrive' else 'purged'}"
        print(json.dumps({given.what: done}) if given.format == "json" else said)
    if missing:
        raise PipelineError(f"There is no dead letter {' or '.join(sorted(missing))}.")
    if not done and given.what in ("list", "show") and given.format == "text":
        print("no dead letters")
    return EXIT_SUCCESS


def chosen(letters: DeadLetters, given: argparse.Namespace, now_ms: int, older_ms: int | None) -> Iterator[DeadLetter]:
    """Yield the dead letters that the command line selects."""
    names = set(given.names)
    for topic in [given.topic] if given.topic else letters.topics():
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
        ConfigError: it is not an age.
    """
    age_ms = span_ms(text)
    if age_ms is None:
        raise ConfigError(f"{text!r} is not an age; write a number and s, m, h or d, such as 15m.")
    return age_ms


def shortened(text: str) -> str:
    """Return the start of a text that is too long for a list."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def as_text(letter: DeadLetter, what: str, format: str, now_ms: int) -> str:
    """Return a letter as it is printed."""
    if format == "json":
        return json.dumps({"name": letter.name, **letter.to_record()})
    if what == "list":
        message = visible(letter.body)
        error = f" ({shortened(visible(letter.detail))})" if letter.detail else ""
        ago = span_text(max(0, now_ms - letter.died_ms))
        whose = f" by {visible(letter.group)}" if letter.group else ""
        given_up = f"{visible(letter.reason)}{whose} {ago} ago, attempt {letter.attempt}"
        return f"{visible(letter.name)}  {given_up}: {shortened(message)}{error}"
    lines = {
        "id": letter.id,
        "topic": letter.topic,
        "due": f"{utc_text(letter.due_ms)}",
        "died": f"{utc_text(letter.died_ms)}",
        "reason": letter.reason,
        "detail": letter.detail,
        "group": letter.group,
        "attempts": str(letter.attempt),
        "headers": json.dumps(dict(letter.headers), ensure_ascii=False),
        "message": letter.body,
    }
    shown = (f"  {name:<9}{visible(value)}" for name, value in lines.items() if value)
    return "\n".join([visible(letter.name), *shown])


if __name__ == "__main__":
    run_main("dead_letters", main)
