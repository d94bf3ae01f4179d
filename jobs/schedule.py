"""Schedule a message, or request lines that a file or another program has."""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace

from pipeline.cli import (
    EXIT_FAILURE,
    EXIT_SUCCESS,
    Stop,
    add_when,
    due_ms_given,
    new_parser,
    open_connection,
    parse_command,
    run_main,
)
from pipeline.client import Duetime, Receipt, RequestRefused
from pipeline.client.commit import MESSAGES_MAX
from pipeline.client.sync import PATIENCE_SEC
from pipeline.config import Settings
from pipeline.core.clock import SystemClock
from pipeline.core.due import time_of_ms
from pipeline.core.errors import ConfigError
from pipeline.core.messages import DEFAULT_TOPIC, Message, Rejection
from pipeline.core.text import count_text, span_text, utc_text, visible
from pipeline.core.validation import REQUEST_BYTES_MAX, validate_line

CHUNK_BYTES = 1 << 20
LINES_PATIENCE_SEC = 60.0  # for a server that does not answer: what comes through a pipe can't be asked for again


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line and the settings.

    Raises:
        ConfigError: wrong use, or a wrong setting.
    """
    parser = new_parser("schedule", __doc__ or "")
    parser.add_argument(
        "message", nargs="?", metavar="MESSAGE", help="what is delivered; - reads it from standard input"
    )
    add_when(parser, "due")
    parser.add_argument("--id", default="", help="idempotency key: a second message with it is not stored")
    parser.add_argument(
        "--fail-if-known",
        action="store_true",
        help="exit with 1 if a message was not stored because its id is known (default: 0, as a repetition is no failure)",
    )
    parser.add_argument("--topic", default=DEFAULT_TOPIC, metavar="NAME", help="where it goes (default: default)")
    parser.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="a header; may be given several times"
    )
    parser.add_argument(
        "--lines",
        action="store_true",
        help="read requests from standard input instead, a JSON object a line; those that break a rule are printed to standard "
        "error as JSON objects, and the exit code is 1",
    )
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="output for people or for programs (default: text)"
    )
    given, settings = parse_command(parser, arguments, "redis")
    given.due_ms_from = due_ms_given(given)
    if given.lines:
        if given.message is not None or given.due_ms_from or given.id or given.header or given.topic != DEFAULT_TOPIC:
            raise ConfigError("--lines takes everything from the lines: leave the message and its options out.")
    elif given.message is None or given.due_ms_from is None:
        raise ConfigError("Say what and when: MESSAGE --in TIME, or MESSAGE --at TIME.")
    given.headers = dict(map(read_header, given.header))
    return given, settings


def read_header(text: str) -> tuple[str, str]:
    """Return name and value of a header that is given as NAME=VALUE.

    Raises:
        ConfigError: there is no =.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--header takes NAME=VALUE, not {text!r}.")
    return name, value


def main(arguments: list[str], stop: Stop) -> int:
    """Schedule; exit code 0 if all that was asked for is stored, or was before and ``--fail-if-known`` is not given."""
    given, settings = parse_arguments(arguments)
    with open_connection(settings, stop, may_create=True, writes=True) as connection:
        settings = replace(settings, redis=connection.settings)
        patience_sec = LINES_PATIENCE_SEC if given.lines else PATIENCE_SEC
        with Duetime.over(connection.client, settings, patience_sec) as duetime:
            if given.lines:
                counts = schedule_lines(duetime, sys.stdin.fileno(), stop)
                print(json.dumps(counts) if given.format == "json" else counts_text(counts))
                is_known = counts["duplicates"] > 0 and given.fail_if_known
                return EXIT_FAILURE if counts["rejected"] or is_known else EXIT_SUCCESS
            now_ms = SystemClock().wall_ms()
            receipt = schedule(duetime, given, now_ms)
            print(as_text(receipt, now_ms) if given.format == "text" else as_json(receipt))
    return EXIT_FAILURE if receipt.is_duplicate and given.fail_if_known else EXIT_SUCCESS


def schedule(duetime: Duetime, given: argparse.Namespace, now_ms: int) -> Receipt:
    """Schedule the message of a command line.

    Raises:
        ConfigError: it breaks a rule.
    """
    try:
        body = sys.stdin.buffer.read().decode() if given.message == "-" else given.message
        due = time_of_ms(given.due_ms_from(now_ms))
        return duetime.schedule(body, due=due, id=given.id, topic=given.topic, headers=given.headers)
    except UnicodeDecodeError as exc:
        raise ConfigError(f"A message is text in UTF-8, and standard input is not ({exc}).") from exc
    except RequestRefused as exc:
        raise ConfigError(str(exc)) from exc


def schedule_lines(duetime: Duetime, descriptor: int, stop: Stop) -> Counter[str]:
    """Schedule the requests of lines as they come; those that break a rule go to standard error.

    Returns:
        How many lines there were, and what became of them.
    Raises:
        StoreError: no answer; the lines of the last portion may be stored.
    """
    counts = Counter(lines=0, stored=0, duplicates=0, rejected=0)
    for lines in read_portions(descriptor, stop):
        messages, changes = [], []
        for raw in lines:
            counts["lines"] += 1
            judged = validate_line(raw.removesuffix(b"\r"), "json", SystemClock().wall_ms())
            if isinstance(judged, Message):
                messages.append(judged)
            elif isinstance(judged, Rejection):
                counts["rejected"] += 1
                record = {"line": counts["lines"], "reason": judged.reason, "detail": judged.detail}
                print(json.dumps(record | {"raw": raw.decode("utf-8", "replace")}), file=sys.stderr, flush=True)
            elif judged is not None:
                changes.append(judged)
        counts.update(
            asdict(duetime.apply(changes))
        )  # before the others, as a cancellation also counts for what comes later
        for first in range(0, len(messages), MESSAGES_MAX):
            done = duetime.store(messages[first : first + MESSAGES_MAX])
            known = sum(each.is_duplicate for each in done)
            counts.update(stored=len(done) - known, duplicates=known)
    return counts


def counts_text(counts: Counter[str]) -> str:
    """Return what became of lines, for people."""
    shown = {
        name: count for name, count in counts.items() if count or name in ("lines", "stored", "duplicates", "rejected")
    }
    lines_text = count_text(shown.pop("lines"), "line")
    rest = ", ".join(f"{count:,} {name}" for name, count in shown.items())
    return f"{lines_text}: {rest}"


def read_portions(descriptor: int, stop: Stop) -> Iterator[list[bytes]]:
    """Yield the lines that are there, whenever there are some, until the end or a stop; then half a line is left out."""
    rest = b""
    while chunk := read_chunk(descriptor, stop):
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[: REQUEST_BYTES_MAX + 1]  # of one that is too long no more is needed to refuse it
        if lines:
            yield lines
    if rest and not stop():
        yield [rest]


def read_chunk(descriptor: int, stop: Stop) -> bytes:
    """Return the next bytes, none at the end or when a stop is requested."""
    found = b""

    def read() -> None:
        nonlocal found
        found = os.read(descriptor, CHUNK_BYTES)

    stop.interrupting(read)
    return found


def as_json(receipt: Receipt) -> str:
    """Return what became of a message, for programs."""
    return json.dumps(
        {"id": receipt.id, "due_ms": receipt.due_ms, "state": receipt.state, "is_duplicate": receipt.is_duplicate}
    )


def as_text(receipt: Receipt, now_ms: int) -> str:
    """Return what became of a message, for people."""
    left_ms = receipt.due_ms - now_ms
    when = f"in {span_text(left_ms)}" if left_ms > 0 else "now"
    if not receipt.is_duplicate:
        return f"{visible(receipt.id)}: due {utc_text(receipt.due_ms)}, {when}"
    if receipt.message is None:
        return f"{visible(receipt.id)}: not stored, as the id is known: {receipt.state.replace('_', ' ')}"
    return f"{visible(receipt.id)}: not stored, as the id is known: due {utc_text(receipt.due_ms)}, {when}"


if __name__ == "__main__":
    run_main("schedule", main)
