"""Show what is scheduled, in flight, delivered, rejected and dead, when the next message is due, and how late the oldest is."""

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

from pipeline.cli import EXIT_SUCCESS, Stop, new_parser, reachable_redis, run_main, set_log_level, settings_from
from pipeline.core.clock import SystemClock
from pipeline.core.lateness import Lateness, add_up, span_text
from pipeline.sinks.screen import utc_text, visible
from pipeline.store.base import Stats
from pipeline.store.checks import check_server
from pipeline.store.connection import connect
from pipeline.store.drains import DrainProgress, add_up_drains, read_drains
from pipeline.store.ingests import IngestProgress, read_progress
from pipeline.store.shards import ShardedStore, check_layout, keys_of, open_shards

COUNTERS = ("delivered", "rejected", "stored", "known", "reclaimed", "stale_acks")
LOOP_COUNTERS = ("delivered", "claimed", "stale", "repeated", "reclaimed")
TOPICS_SHOWN = 10


def main(arguments: list[str], stop: Stop) -> int:
    """Print one look at a namespace."""
    parser = new_parser("status", __doc__ or "")
    parser.add_argument(
        "--format", choices=["text", "json"], default="text", help="for eyes or programs (default: text)"
    )
    given = parser.parse_args(arguments)
    set_log_level(given.log_level)
    settings = settings_from(given, "redis")
    with ExitStack() as stack:
        redis_settings = stack.enter_context(reachable_redis(settings, stop))
        client = connect(redis_settings)
        for warning in check_server(client, redis_settings, SystemClock()):
            logging.getLogger(__name__).warning("%s", warning)
        check_layout(client, redis_settings, may_set=False)
        stats = ShardedStore(open_shards(client, redis_settings)).stats()
        ingests = read_progress(client, keys_of(redis_settings)[0])
        drains = read_drains(client, keys_of(redis_settings)[0])
    if given.format == "json":
        jobs = {"ingest": [asdict(progress) for progress in ingests], "drain": drain_record(drains)}
        print(json.dumps({**as_record(stats), **jobs}))
    else:
        told = [drain_text(drains, stats.now_ms)] if drains else []
        print("\n".join([as_text(stats), *told, *(ingest_text(progress, stats.now_ms) for progress in ingests)]))
    return EXIT_SUCCESS


def as_record(stats: Stats) -> dict[str, int | None]:
    """Return the JSON form: counts of messages, times in epoch ms UTC."""
    return {
        "scheduled": stats.scheduled,
        "held": stats.held,
        "in_flight": stats.in_flight,
        "dead": stats.dead,
        **{name: stats.counters.get(name, 0) for name in COUNTERS},
        "next_due_ms": stats.next_due_ms,
        "overdue_ms": stats.overdue_ms,
        "now_ms": stats.now_ms,
    }


def as_text(stats: Stats) -> str:
    """Return the same for eyes, one number a line."""
    lines = [
        f"{name.replace('_', ' '):<12}{value:>12,}"
        for name, value in as_record(stats).items()
        if name in SHOWN and value is not None
    ]
    if stats.next_due_ms is None:
        lines.append(f"{'next due':<12}{'-':>12}")
    else:
        wait_sec = (stats.next_due_ms - stats.now_ms) / 1000
        when = f"in {wait_sec:,.1f} s" if wait_sec > 0 else "now"
        lines.append(f"{'next due':<12}{when:>12}  ({utc_text(stats.next_due_ms)} UTC)")
    lines.append(f"{'oldest late':<12}{f'{stats.overdue_ms / 1000:,.1f} s':>12}")
    return "\n".join(lines)


def ingest_text(progress: IngestProgress, now_ms: int) -> str:
    """Return what one ingest job has done, for eyes; ``now_ms`` is the server's clock."""
    ago_sec = max(0, now_ms - progress.last_batch_ms) / 1000
    waited_ms = progress.last_oldest_waiting_ms
    waits = "" if waited_ms is None else f"; oldest waited {waited_ms / 1000:,.1f} s"
    phases = sorted(progress.last_phases_ms.items(), key=lambda phase: -phase[1])
    totals = (
        f"{progress.batches:,} batches, {progress.files:,} files, {progress.lines:,} lines: {progress.stored:,} stored, "
        f"{progress.known:,} known, {progress.rejected:,} rejected, {progress.blank:,} blank"
    )
    last = (
        f"last batch {ago_sec:,.1f} s ago: {progress.last_lines:,} lines, {progress.last_lines_per_sec:,}/s, "
        f"{progress.last_took_ms:,} ms in all{waits}"
    )
    spent = ", ".join(f"{name} {ms:,}" for name, ms in phases)
    since = f"ingest of {progress.reads}, since {utc_text(progress.started_ms)} UTC"
    return f"\n{since}\n  {totals}\n  {last}\n  of that {spent} ms"


def drain_record(drains: Sequence[DrainProgress]) -> dict[str, object]:
    """Return what the drain loops of the last hour did, each since it started, added up; times are epoch ms UTC."""
    whole = add_up_drains(drains)
    return {
        "loops": len(drains),
        "seen_ms": whole.seen_ms if drains else None,
        **{name: getattr(whole, name) for name in LOOP_COUNTERS},
        "errors": whole.errors,
        "lateness": lateness_record(add_up(whole.topics.values())),
        "topics": {topic: lateness_record(lateness) for topic, lateness in sorted(whole.topics.items())},
    }


def lateness_record(lateness: Lateness) -> dict[str, int]:
    """Return how late how many messages came."""
    return {
        "delivered": lateness.total(),
        "p50_ms": lateness.within_ms(0.5),
        "p99_ms": lateness.within_ms(0.99),
        "max_ms": lateness.max_ms,
    }


def drain_text(drains: Sequence[DrainProgress], now_ms: int) -> str:
    """Return the same for eyes, with the topics of which most was delivered; ``now_ms`` is the server's clock."""
    whole = add_up_drains(drains)
    loops = "1 loop" if len(drains) == 1 else f"{len(drains):,} loops"
    most = sorted(whole.topics.items(), key=lambda named: (-named[1].total(), named[0]))
    lines = [
        f"\ndrain: {loops} in the last hour, seen {span_text(max(0, now_ms - whole.seen_ms))} ago",
        "  " + ", ".join(f"{getattr(whole, name):,} {name}" for name in LOOP_COUNTERS),
    ]
    if whole.topics:
        lines.append(f"  lateness {add_up(whole.topics.values())}")
    lines += [f"  topic {visible(topic)}: {late.total():,} delivered, {late}" for topic, late in most[:TOPICS_SHOWN]]
    if len(most) > TOPICS_SHOWN:
        lines.append(f"  and {len(most) - TOPICS_SHOWN:,} more topics, which --format json shows")
    if whole.errors:
        counted = sorted(whole.errors.items(), key=lambda error: -error[1])
        lines.append("  failed calls: " + ", ".join(f"{count:,} {kind}" for kind, count in counted))
    return "\n".join(lines)


SHOWN = ("scheduled", "held", "in_flight", "dead", *COUNTERS)

if __name__ == "__main__":
    run_main("status", main)
