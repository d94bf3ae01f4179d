"""Show whether all is well, what is scheduled, in flight, delivered, rejected and dead, and what the jobs did."""

import json
import sys
from collections.abc import Callable
from threading import Event

from pipeline.cli import (
    EXIT_FAILURE,
    EXIT_SUCCESS,
    Connection,
    Stop,
    new_parser,
    open_connection,
    parse_command,
    run_main,
)
from pipeline.core.errors import StoreUnavailable
from pipeline.core.text import age_text, count_text, nonzero_text, span_text, utc_text, visible
from pipeline.status import Status, read_status
from pipeline.store.heartbeats import LOOP_COUNTERS, IngestProgress, add_up_loops, add_up_topics

SHOWN_IF_NOT_ZERO = ("misfiled", "cold", "outbox", "forwarded", "refused")
TOPICS_SHOWN = 10
WATCH_SEC, WATCH_SEC_MIN, WATCH_SEC_MAX = 2.0, 0.1, 86_400.0
CLEAR = "\x1b[H\x1b[J"  # the cursor to the first line, and everything from there on gone


def main(arguments: list[str], stop: Stop) -> int:
    """Print one look at a namespace, or one after the other."""
    parser = new_parser("status", __doc__ or "")
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="for people or programs (default: text)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--check",
        action="store_true",
        help="exit 1 if there is a problem or nothing is known of the namespace, for probes",
    )
    how.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=WATCH_SEC,
        metavar="SECONDS",
        help=f"show it again and again until Ctrl-C (default: every {WATCH_SEC:g} s)",
    )
    given, settings = parse_command(parser, arguments, "redis")
    if given.watch is not None and not WATCH_SEC_MIN <= given.watch <= WATCH_SEC_MAX:
        parser.error(f"--watch takes {WATCH_SEC_MIN:g} to {WATCH_SEC_MAX:,.0f} seconds")
    render = as_json if given.format == "json" else as_text
    with open_connection(settings, stop, may_create=False) as connection:
        if given.watch is not None:
            watch(
                connection, render, given.watch, CLEAR if given.format == "text" and sys.stdout.isatty() else "", stop
            )
            return EXIT_SUCCESS
        status = read_status(connection.client, connection.shards)
    if given.format == "text" and not connection.exists and status.is_empty():
        print(f"nothing is known of namespace {settings.redis.namespace}: no job has used it so far")
    else:
        print(render(status))
    is_unknown = not connection.exists and status.is_empty()  # a mistyped name must not look healthy to a probe
    return EXIT_FAILURE if given.check and (is_unknown or status.problems()) else EXIT_SUCCESS


def watch(connection: Connection, render: Callable[[Status], str], seconds: float, clear: str, stop: Stop) -> None:
    """Print a look every few ``seconds`` until a stop; a server that does not answer is a look like any other."""
    while not stop():
        try:
            shown = render(read_status(connection.client, connection.shards))
        except StoreUnavailable as exc:
            shown = f"PROBLEM: {exc}"
        print(f"{clear}{shown}", flush=True)
        stop.interrupting(lambda: Event().wait(seconds))


def as_json(status: Status) -> str:
    """Return a look for programs, as one object: counts of messages, times in epoch ms UTC."""
    return json.dumps(status.to_record())


def as_text(status: Status) -> str:
    """Return a look for people."""
    stats = status.stats
    lines = [status.verdict(), ""]
    lines += [
        f"{name.replace('_', ' '):<12}{number:>12,}"
        for name, number in status.counts().items()
        if number or name not in SHOWN_IF_NOT_ZERO
    ]
    if stats.next_due_ms is None:
        lines.append(f"{'next due':<12}{'-':>12}")
    else:
        wait_ms = stats.next_due_ms - stats.now_ms
        when = f"in {span_text(wait_ms)}" if wait_ms > 0 else "now"
        lines.append(f"{'next due':<12}{when:>12}  ({utc_text(stats.next_due_ms)})")
    lines.append(f"{'oldest late':<12}{span_text(stats.overdue_ms) if stats.overdue_ms else '-':>12}")
    if failover := status.last_failover():
        lines.append(
            f"a failover, noticed {age_text(stats.now_ms - failover.found_ms)} ago, undid at least the last "
            f"{count_text(failover.undone_bytes or 0, 'byte')}: "
            f"deliveries since {utc_text(failover.since_ms)} may have come twice"
        )
    lines += [hydrate_text(status)] if status.hydrators else []
    lines += [drain_text(status)] if status.loops else []
    return "\n".join([*lines, *(ingest_text(progress, stats.now_ms) for progress in status.ingests)])


def ingest_text(progress: IngestProgress, now_ms: int) -> str:
    """Return what one ingest job has done, for people; ``now_ms`` is the server's clock."""
    waited_ms = progress.last_oldest_waiting_ms
    backlog = "" if waited_ms is None else f"; backlog {span_text(waited_ms)}"
    backlog += "" if progress.last_lag is None else f"; lag {progress.last_lag:,}"
    phases = sorted(progress.last_phases_ms.items(), key=lambda phase: -phase[1])
    totals = (
        f"{count_text(progress.batches, 'batch', 'batches')}, {count_text(progress.files, 'file')}, "
        f"{count_text(progress.lines, 'line')}: {progress.stored:,} stored, {progress.duplicates:,} duplicates, "
        f"{progress.rejected:,} rejected, {progress.blank:,} blank"
        + nonzero_text(cancelled=progress.cancelled, replaced=progress.replaced, late=progress.late)
        + (f", {progress.stored_again:,} stored again after a failover" if progress.stored_again else "")
    )
    last = (
        f"last batch {age_text(now_ms - progress.last_batch_ms)} ago: {count_text(progress.last_lines, 'line')}, "
        f"{progress.last_lines_per_sec:,}/s, {progress.last_took_ms:,} ms in all{backlog}"
    )
    spent = ", ".join(f"{name} {ms:,}" for name, ms in phases)
    since = f"ingest of {visible(progress.reads)}, since {utc_text(progress.started_ms)}"
    return f"\n{since}\n  {totals}\n  {last}\n  phases (ms): {spent}"


def hydrate_text(status: Status) -> str:
    """Return what those did that bring cold messages into Redis, for people."""
    now_ms, until_ms = status.stats.now_ms, status.hydrated_until_ms()
    seen_ms = max(each.seen_ms for each in status.hydrators)
    until = "" if until_ms is None else f"; all is in that is due before {utc_text(until_ms)}"
    return (
        f"\nhydrate: {len(status.running_hydrators()):,} running, seen {age_text(now_ms - seen_ms)} ago\n"
        f"  {count_text(sum(each.messages for each in status.hydrators), 'message')} brought into Redis{until}"
    )


def drain_text(status: Status) -> str:
    """Return the same for people, with the topics of which most was delivered."""
    total = add_up_loops(each.stats for each in status.loops)
    seen_ms = max(each.seen_ms for each in status.loops)
    most = sorted(total.topics.items(), key=lambda named: (-named[1].delivered, named[0]))
    seen = f"{len(status.running_loops()):,} running, seen {age_text(status.stats.now_ms - seen_ms)} ago"
    lines = [
        f"\ndrain: {count_text(len(status.loops), 'loop')} in the last hour, {seen}",
        "  (these counters cover the listed loops; those above are lifetime totals)",
        "  "
        + ", ".join(
            f"{getattr(total, name):,} {name.replace('_', ' ')}"
            for name in LOOP_COUNTERS
            if getattr(total, name) or name not in SHOWN_IF_NOT_ZERO
        ),
    ]
    if total.forwarded:
        lines.append(f"  to Kafka after {total.outbox}")
    if total.topics:
        lines.append(f"  lateness {add_up_topics(total.topics.values()).lateness}")
    lines += [
        f"  topic {visible(topic)}: {each.delivered:,} delivered, {each.lateness}"
        for topic, each in most[:TOPICS_SHOWN]
    ]
    if len(most) > TOPICS_SHOWN:
        lines.append(f"  and {count_text(len(most) - TOPICS_SHOWN, 'more topic')}, which --format json shows")
    if total.errors:
        counted = sorted(total.errors.items(), key=lambda error: -error[1])
        lines.append("  failed calls: " + ", ".join(f"{count:,} {kind}" for kind, count in counted))
    return "\n".join(lines)


if __name__ == "__main__":
    run_main("status", main)
