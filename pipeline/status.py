"""One look at a namespace and its jobs, and whether all is well."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.core.text import age_text, count_text, span_text
from pipeline.store.cold import HydratorProgress, read_hydrators
from pipeline.store.heartbeats import (
    FRESH_MS,
    LOOP_COUNTERS,
    IngestProgress,
    LoopProgress,
    TopicStats,
    add_up_loops,
    add_up_topics,
    read_ingests,
    read_loops,
)
from pipeline.store.ingest_heartbeat import Waiting, count_running_ingests, read_failovers, read_waiting
from pipeline.store.keys import Keys
from pipeline.store.replication import Failover
from pipeline.store.stats import LATE_MS, Stats, read_stats

LEAD_MS = 2 * 3_600_000  # of a hydrator, where none has told its own
FIRST = 0  # the shard in which jobs tell of themselves
COUNTERS = ("delivered", "cancelled", "rejected", "stored", "duplicates", "reclaimed", "late_acks", "misfiled")


@dataclass(frozen=True, slots=True)
class Status:
    """One look at a namespace and its jobs; the latest heartbeat comes first."""

    stats: Stats
    loops: Sequence[LoopProgress]
    ingests: Sequence[IngestProgress]
    running_ingests: int
    failovers: Sequence[Failover] = ()
    waiting: Sequence[Waiting] = ()
    hydrators: Sequence[HydratorProgress] = ()

    def running_loops(self) -> list[LoopProgress]:
        """Return the loops that have not ended and whose heartbeat is fresh."""
        return [each for each in self.loops if not each.has_ended and self.stats.now_ms - each.seen_ms < FRESH_MS]

    def running_hydrators(self) -> list[HydratorProgress]:
        """Return the processes that bring cold messages into Redis, as ``running_loops``."""
        return [each for each in self.hydrators if not each.has_ended and self.stats.now_ms - each.seen_ms < FRESH_MS]

    def hydrated_until_ms(self) -> int | None:
        """Return before when all is in Redis that is due, in epoch ms UTC; None if nobody has brought anything in."""
        return max((each.until_ms for each in self.hydrators if each.is_done), default=None)

    def last_failover(self) -> Failover | None:
        """Return the last failover that undid something, of those that jobs have told of; see ``replication.Failover``."""
        told = [*self.failovers, *(each.failover for each in self.loops if each.failover)]
        return max(told, key=lambda each: each.found_ms, default=None)

    def is_empty(self) -> bool:
        """Return whether the namespace holds no message, as one that no job has used."""
        stats = self.stats
        return not any((stats.scheduled, stats.held, stats.in_flight, stats.dead))

    def problems(self) -> list[str]:
        """Return what keeps messages from being delivered in time, one clause each; nothing if all is well."""
        stats, found = self.stats, []
        if stats.away:
            names = ", ".join(map(str, stats.away))
            found.append(
                f"shard{'s' if len(stats.away) > 1 else ''} {names} can't be reached and what is there is not counted"
            )
        wait_for_loop = stats.scheduled - stats.held + stats.throttled + stats.in_flight
        if FIRST not in stats.away and not self.running_loops() and wait_for_loop:
            last = max(self.loops, key=lambda each: each.seen_ms, default=None)
            if last is None:
                found.append("no drain loop has been seen in the last hour")
            elif last.has_ended:
                found.append(
                    f"no drain loop is running, the last one ended {age_text(stats.now_ms - last.seen_ms)} ago"
                )
            else:
                found.append(f"no drain loop has been seen for {age_text(stats.now_ms - last.seen_ms)}")
        if stats.late:
            are = "is" if stats.late == 1 else "are"
            found.append(f"{count_text(stats.late, 'message')} {are} late, the oldest by {span_text(stats.overdue_ms)}")
        found += [self._waiting_text(each) for each in self.waiting]
        if FIRST not in stats.away:
            found += self._cold_problems()
        if stats.outbox_ms > LATE_MS:
            wait = "waits" if stats.outbox == 1 else "wait"
            found.append(
                f"{count_text(stats.outbox, 'message')} {wait} to be written to Kafka, the oldest for {span_text(stats.outbox_ms)}"
            )
        if stuck := add_up_loops(each.stats for each in self.running_loops()).stuck_partitions:
            found.append(f"a transaction hangs in {', '.join(stuck)} of Kafka")
        return found

    def _waiting_text(self, waiting: Waiting) -> str:
        names = ", ".join(map(str, waiting.shards))
        shards = f"shard{'s' if len(waiting.shards) > 1 else ''} {names}" if waiting.shards else "a shard"
        wait = "file that was read waits" if waiting.files == 1 else "files that were read wait"
        since = age_text(self.stats.now_ms - waiting.oldest_ms)
        return f"{waiting.files:,} {wait} for {shards} to store the rest, the oldest for {since}"

    def _cold_problems(self) -> list[str]:
        stats, running, found = self.stats, self.running_hydrators(), []
        if stats.cold and not running:
            wait = "waits" if stats.cold == 1 else "wait"
            found.append(f"{count_text(stats.cold, 'message')} {wait} in cold files and no hydrator is running")
        found += sorted({f"a hydrator can't go on ({each.problem.rstrip('.')})" for each in running if each.problem})
        lead_ms = max((each.lead_ms for each in self.hydrators), default=LEAD_MS)
        if stats.cold_due_ms is not None and (left_ms := stats.cold_due_ms - stats.now_ms) < lead_ms // 2:
            due = f"are due in {span_text(left_ms)}" if left_ms > 0 else "may be late"
            found.append(f"cold messages that {due} are not in Redis yet")
        return found

    def verdict(self) -> str:
        """Return whether all is well, in one line that begins with OK or PROBLEM."""
        problems = self.problems()
        if problems:
            return f"PROBLEM: {', '.join(problems)}"
        ingests, loops = self.running_ingests, len(self.running_loops())
        running = f"{_count_or_no(ingests, 'ingest job')} and {_count_or_no(loops, 'drain loop')} running"
        return f"OK: {running}, nothing late{self._throttled_text()}"

    def _throttled_text(self) -> str:
        if not self.stats.throttled:
            return ""
        waits = "waits" if self.stats.throttled == 1 else "wait"
        return f", {count_text(self.stats.throttled, 'message')} {waits} for the rate limit of a topic"

    def counts(self) -> dict[str, int]:
        """Return every number of messages by its name."""
        return {
            "scheduled": self.stats.scheduled,
            "cold": self.stats.cold,
            "held": self.stats.held,
            "throttled": self.stats.throttled,
            "in_flight": self.stats.in_flight,
            "late": self.stats.late,
            "outbox": self.stats.outbox,
            "dead": self.stats.dead,
            **{name: self.stats.counters.get(name, 0) for name in COUNTERS},
        }

    def to_record(self) -> dict[str, Any]:
        """Return it for programs: counts of messages, times in epoch ms UTC."""
        return {
            "verdict": self.verdict(),
            "shards_away": list(self.stats.away),
            **self.counts(),
            "next_due_ms": self.stats.next_due_ms,
            "overdue_ms": self.stats.overdue_ms,
            "outbox_ms": self.stats.outbox_ms,
            "cold_due_ms": self.stats.cold_due_ms,
            "hydrated_until_ms": self.hydrated_until_ms(),
            "running_hydrators": len(self.running_hydrators()),
            "now_ms": self.stats.now_ms,
            "waiting": [asdict(each) for each in self.waiting],
            "failover": asdict(failover) if (failover := self.last_failover()) else None,
            "running_ingest_jobs": self.running_ingests,
            "ingest": [asdict(progress) for progress in self.ingests],
            "drain": _drain_record(self),
        }


def read_status(client: Any, shards: Sequence[Keys]) -> Status:
    """Read everything that is shown.

    Raises:
        StoreError: no answer, or an error.
    """
    stats = read_stats(client, shards)
    if FIRST in stats.away:
        return Status(stats, loops=(), ingests=(), running_ingests=0)
    return Status(
        stats=stats,
        loops=read_loops(client, shards[0]),
        ingests=read_ingests(client, shards[0]),
        running_ingests=count_running_ingests(client, shards[0], stats.now_ms),
        failovers=read_failovers(client, shards[0]),
        waiting=read_waiting(client, shards[0]),
        hydrators=read_hydrators(client, shards[0]),
    )


def _drain_record(status: Status) -> dict[str, object]:
    """Return what the drain loops of the last hour did, each since it started, added up; times are epoch ms UTC."""
    total = add_up_loops(each.stats for each in status.loops)
    return {
        "loops": len(status.loops),
        "running": len(status.running_loops()),
        "seen_ms": max((each.seen_ms for each in status.loops), default=None),
        **{name: getattr(total, name) for name in LOOP_COUNTERS},
        "errors": total.errors,
        "stuck_partitions": total.stuck_partitions,
        "outbox": _lateness_record(TopicStats(total.forwarded, total.outbox)),
        "lateness": _lateness_record(add_up_topics(total.topics.values())),
        "topics": {topic: _lateness_record(each) for topic, each in sorted(total.topics.items())},
    }


def _lateness_record(stats: TopicStats) -> dict[str, int]:
    """Return how many messages were delivered, and how late."""
    return {
        "delivered": stats.delivered,
        "p50_ms": stats.lateness.quantile_ms(0.5),
        "p99_ms": stats.lateness.quantile_ms(0.99),
        "max_ms": stats.lateness.max_ms,
    }


def _count_or_no(number: int, noun: str) -> str:
    """Return ``no loop``, ``1 loop`` or ``2 loops``."""
    return count_text(number, noun) if number else f"no {noun}"
