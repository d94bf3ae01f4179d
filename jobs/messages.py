"""Show, list, cancel or move messages that wait."""

import argparse
import json
from collections.abc import Iterator
from itertools import islice

from pipeline.cli import (
    EXIT_FAILURE,
    EXIT_SUCCESS,
    Stop,
    add_when,
    due_ms_given,
    new_parser,
    no_time,
    open_connection,
    parse_command,
    run_main,
)
from pipeline.client.cold import cold_reader
from pipeline.config import Settings
from pipeline.core.clock import SystemClock
from pipeline.core.due import DUE_MS_MAX, due_ms_of_text
from pipeline.core.errors import ConfigError
from pipeline.core.messages import DEFAULT_TOPIC
from pipeline.core.text import span_text, utc_text, visible
from pipeline.store.base import Found, State
from pipeline.store.by_id import MessagesById
from pipeline.store.connection import server_ms
from pipeline.store.listing import ScheduledMessage, list_scheduled
from pipeline.store.places import handle_of

LIMIT = 50  # messages that are listed
BODY_MAX = 100  # characters of a message that a line shows
SENTENCES = {
    State.IN_FLIGHT: "is in flight: a drain loop has it",
    State.DELIVERED: "is delivered, or a dead letter",
    State.CANCELLED: "was cancelled before",
    State.UNKNOWN: "is unknown: never scheduled here, or forgotten",
}


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line and the settings.

    Raises:
        ConfigError: wrong use, or a wrong setting.
    """
    parser = new_parser("messages", __doc__ or "")
    parser.add_argument(
        "what",
        choices=["show", "list", "cancel", "move"],
        help="show: state and content; list: what is scheduled, in order of due time; cancel: never deliver it, also if its file "
        "is read again; move: give it another due time",
    )
    parser.add_argument(
        "ids",
        nargs="*",
        default=[],
        metavar="ID",
        help="the id of the request, or the handle of a message without one; list takes none",
    )
    add_when(parser, "move: due")
    parser.add_argument(
        "--from", dest="from_", metavar="TIME", help="list: due from this time on (ISO 8601 with its zone)"
    )
    parser.add_argument("--until", metavar="TIME", help="list: due before this time")
    parser.add_argument("--topic", default="", metavar="NAME", help="list: of this topic alone")
    parser.add_argument(
        "--limit", type=int, default=LIMIT, metavar="N", help=f"list: at most so many (default: {LIMIT})"
    )
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="output for people or for programs (default: text)"
    )
    given, settings = parse_command(parser, arguments, "redis")
    given.due_ms_from = due_ms_given(given)
    if (given.what == "move") != (given.due_ms_from is not None):
        raise ConfigError("Say when: move ID --in TIME or --at TIME, which the others do not take.")
    if (given.what == "list") == bool(given.ids):
        raise ConfigError("show, cancel and move take the ids of messages, and list takes none.")
    if given.limit < 1:
        raise ConfigError(f"--limit takes a number from 1 on, not {given.limit}.")
    given.from_ms, given.until_ms = read_time("--from", given.from_, 0), read_time("--until", given.until, DUE_MS_MAX)
    return given, settings


def read_time(option: str, text: str | None, otherwise: int) -> int:
    """Return the epoch ms of an option.

    Raises:
        ConfigError: it is no time.
    """
    if text is None:
        return otherwise
    found = due_ms_of_text(text)
    if found is None:
        raise no_time(option, text)
    return found


def main(arguments: list[str], stop: Stop) -> int:
    """Show, cancel or move messages; exit code 1 if one of them did not wait any more."""
    given, settings = parse_arguments(arguments)
    exit_code = EXIT_SUCCESS
    with open_connection(settings, stop, may_create=False) as connection:
        messages = MessagesById(
            connection.client,
            connection.shards,
            settings.drain.id_retention_sec * 1_000,
            read_cold=cold_reader(settings, connection.client, SystemClock()),
        )
        now_ms = server_ms(connection.client)
        if given.what == "list":
            print_list(list_scheduled(connection.client, connection.shards, given.from_ms, given.until_ms), given)
            return EXIT_SUCCESS
        for name in given.ids:
            if given.what == "move":
                found = messages.reschedule(name, given.due_ms_from(now_ms))
            else:
                found = messages.cancel(name) if given.what == "cancel" else messages.get(name)
            print(as_text(name, found, given.what, now_ms) if given.format == "text" else as_json(name, found))
            is_known = given.what == "show" and found.state is not State.UNKNOWN
            is_cancelled = given.what == "cancel" and found.state is State.CANCELLED
            if not (found.message or is_known or is_cancelled):
                exit_code = EXIT_FAILURE
    return exit_code


def print_list(scheduled: Iterator[ScheduledMessage], given: argparse.Namespace) -> None:
    """Print a line for each message; on a terminal its end is cut off."""
    found = (each for each in scheduled if given.topic in ("", each.message.topic))
    page = [*islice(found, given.limit)]
    for each in page:
        if given.format == "json":
            print(json.dumps(each.message.to_record() | {"id": each.id, "due_ms": each.due_ms}))
        else:
            topic = "" if each.message.topic == DEFAULT_TOPIC else f" {each.message.topic}"
            print(f"{utc_text(each.due_ms)}{topic} {visible(each.id)}: {visible(each.message.body[:BODY_MAX])}")
    if given.format == "text" and not page:
        print("Nothing is scheduled there.")
    elif given.format == "text" and next(found, None):
        print("There are more: --limit N shows so many.")


def as_json(name: str, found: Found) -> str:
    """Return what was found, for programs."""
    record = {"id": name, "state": found.state}
    if found.message:
        record |= found.message.to_record() | {"id": handle_of(found.message)}
    return json.dumps(record)


def as_text(name: str, found: Found, what: str, now_ms: int) -> str:
    """Return what was found, for people."""
    if found.message is None:
        return f"{visible(name)} {SENTENCES[found.state]}"
    message = found.message
    left_ms = message.due_ms - now_ms
    when = f"in {span_text(left_ms)}" if left_ms > 0 else f"{span_text(-left_ms)} ago"
    due = f"due {utc_text(message.due_ms)} ({when})"
    if what == "cancel":
        return f"{visible(name)} cancelled; it was {due}"
    if what == "move":
        return f"{visible(handle_of(message))} moved: {due}"
    lines = {
        "state": found.state.replace("_", " "),
        "due": due.removeprefix("due "),
        "topic": message.topic,
        "headers": json.dumps(dict(message.headers), ensure_ascii=False) if message.headers else "",
        "message": message.body,
    }
    return "\n".join([visible(name), *(f"  {title:<9}{visible(value)}" for title, value in lines.items() if value)])


if __name__ == "__main__":
    run_main("messages", main)
