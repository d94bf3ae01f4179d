"""Show, cancel or move messages that wait, by their ids."""

import argparse
import json

from pipeline.cli import EXIT_FAILURE, EXIT_SUCCESS, Stop, new_parser, open_connection, parse_command, run_main
from pipeline.config import Settings
from pipeline.core.due import DELAY_SEC_MAX, due_ms_of_text, is_due_in_range
from pipeline.core.errors import ConfigError
from pipeline.core.text import span_ms, span_text, utc_text, visible
from pipeline.store.by_id import Found, MessagesById, State, handle_of
from pipeline.store.connection import server_ms

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
        choices=["show", "cancel", "move"],
        help="show: state and content; cancel: never deliver it, also if its file is read again; move: give it another due time",
    )
    parser.add_argument(
        "ids", nargs="+", metavar="ID", help="the id of the request, or the handle of a message without one"
    )
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--in", dest="delay", metavar="TIME", help="move: due so long from now, such as 90s, 15m, 2h or 7d; 0s is now"
    )
    when.add_argument("--at", metavar="TIME", help="move: due at this time in ISO 8601 with Z or an offset")
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="output for people or for programs (default: text)"
    )
    given, settings = parse_command(parser, arguments, "redis")
    if (given.what == "move") != (given.delay is not None or given.at is not None):
        raise ConfigError("Say when: move ID --in TIME or --at TIME, which show and cancel do not take.")
    given.delay_ms = span_ms(given.delay) if given.delay is not None else 0
    if given.delay_ms is None or given.delay_ms > DELAY_SEC_MAX * 1_000:
        raise ConfigError(f"--in takes a number and s, m, h or d, at most 366d, not {given.delay!r}.")
    given.due_ms = due_ms_of_text(given.at) if given.at is not None else 0
    if given.due_ms is None or not is_due_in_range(given.due_ms):
        raise ConfigError(f"--at takes a time such as 2026-01-31T12:00:00Z, not {given.at!r}.")
    return given, settings


def main(arguments: list[str], stop: Stop) -> int:
    """Show, cancel or move messages; exit code 1 if one of them did not wait any more."""
    given, settings = parse_arguments(arguments)
    exit_code = EXIT_SUCCESS
    with open_connection(settings, stop, may_create=False) as connection:
        messages = MessagesById(connection.client, connection.shards, settings.drain.id_retention_sec * 1_000)
        now_ms = server_ms(connection.client)
        for name in given.ids:
            if given.what == "move":
                found = messages.reschedule(name, given.due_ms or now_ms + given.delay_ms)
            else:
                found = messages.cancel(name) if given.what == "cancel" else messages.get(name)
            print(as_text(name, found, given.what, now_ms) if given.format == "text" else as_json(name, found))
            is_known = given.what == "show" and found.state is not State.UNKNOWN
            is_cancelled = given.what == "cancel" and found.state is State.CANCELLED
            if not (found.message or is_known or is_cancelled):
                exit_code = EXIT_FAILURE
    return exit_code


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
