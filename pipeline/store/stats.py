"""One look at what a namespace holds: all of it for ``jobs/status.py``, a bounded part of it for the metrics."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.cold import HOUR_MS
from pipeline.core.errors import StoreUnavailable
from pipeline.store.cold import read_cold_hours
from pipeline.store.connection import members_of, server_ms, translated_errors
from pipeline.store.entries import entry_id_of
from pipeline.store.heartbeats import read_ingests
from pipeline.store.ingest_heartbeat import Waiting, read_waiting
from pipeline.store.keys import Keys
from pipeline.store.shards import first_that_answers
from pipeline.store.topology import client_of

# What a forecast looks at in each shard.
BUCKETS_MAX = 1_000  # the oldest that are not empty: a week, if every ten minutes have messages
CLAIMS_MAX = 100  # those whose leases end first
HELD_MAX = 100  # topics that are paused, and others of which something is held
KEYS_PER_ROUND_TRIP = 1_000
LATE_MS = 10_000  # a message that was due longer ago counts as late; one that is being delivered was due a moment ago
EPOCH_MS_MAX = 2**53  # a score beyond this, such as infinity, is not a time that any program meant


@dataclass(frozen=True, slots=True)
class Stats:
    """What a namespace holds, in messages; times are epoch ms UTC on the server's clock.

    ``held`` is due and waits for the end of a pause or, as many as are ``throttled``, for the rate limit of its topic: it counts as
    ``scheduled``, and not as late. So does what is ``cold`` and waits in files; the hour in which the first of it is due begins at
    ``cold_due_ms``. ``next_due_ms`` is of what is scheduled in Redis and not held, None if nothing is. ``overdue_ms`` is how late
    the oldest message is that is scheduled or in flight, 0 if none is; ``late`` how many of these were due more than ``LATE_MS``
    ago: of a claim all, if its first was. ``dead`` are the dead letters that are there, ``counters`` the totals of the namespace.
    ``outbox`` are those that have left the schedule and are to be written to Kafka, the oldest for ``outbox_ms``. ``buckets`` has
    the number of messages of each ten minutes by their start, without those that are held; of cold ones a sixth of their hour.
    What the shards hold that are ``away`` is not counted.
    """

    now_ms: int
    scheduled: int
    held: int
    in_flight: int
    late: int
    dead: int
    next_due_ms: int | None
    overdue_ms: int
    counters: Mapping[str, int]
    throttled: int = 0
    outbox: int = 0
    outbox_ms: int = 0
    buckets: Mapping[int, int] = field(default_factory=dict)
    cold: int = 0
    cold_due_ms: int | None = None
    away: Sequence[int] = ()  # shards that do not answer


@dataclass(frozen=True, slots=True)
class Forecast:
    """How many messages are due when; what has the same name is as in ``Stats``.

    ``buckets`` has the number of scheduled messages of each ten minutes by their start, of the oldest ``BUCKETS_MAX`` of each
    shard; ``held`` is of the first ``HELD_MAX`` topics that are paused, and of so many others. ``lags`` has what the last batch of
    each ingest job left of Kafka, in offsets, by what it reads; ``waiting`` which of its files wait for shards that are away. What
    the shards hold that are ``away`` is not counted.
    """

    now_ms: int
    buckets: Mapping[int, int]
    held: int
    next_due_ms: int | None
    overdue_ms: int
    throttled: int = 0
    outbox: int = 0
    outbox_ms: int = 0
    lags: Mapping[str, int] = field(default_factory=dict)
    waiting: Sequence[Waiting] = ()
    away: Sequence[int] = ()  # shards that do not answer
    cold: int = 0
    cold_due_ms: int | None = None


def read_stats(client: Any, shards: Sequence[Keys], now_ms: int | None = None) -> Stats:
    """Count all that is there. Not atomic: a message that is claimed meanwhile may count as scheduled and as in flight.

    Args:
        client: a ``redis.Redis``.

        now_ms: tests pass a time; None means the server's clock.
    Raises:
        StoreError: no shard answers, or an error.
    """
    looks, outboxes, counters = [], [], Counter[str]()
    buckets, cold = Counter[int](), Counter[int]()
    held = throttled = in_flight = late = dead = 0
    away = []
    for keys in shards:
        try:
            now_ms = server_ms(client_of(client, keys)) if now_ms is None else now_ms
            with translated_errors():
                look = _look(client, keys)
                lengths = [length // 2 for length in ask_each(client, ("LLEN",), look.claims)]
                dues = zip(lengths, look.claimed_due_ms, strict=True)
                late_here = sum(length for length, due_ms in dues if due_ms < now_ms - LATE_MS)
                started = [keys.bucket(start) for start in look.buckets if start < now_ms - LATE_MS]
                late_here += sum(ask_each(client, ("ZCOUNT",), started, ("-inf", f"({now_ms - LATE_MS}")))
                paused = {*client.hkeys(keys.pauses())}
                others = {*client.zrange(keys.held_topics(), 0, -1)} - paused
                paused_here, throttled_here = (_count_held(client, keys, topics) for topics in (paused, others))
                dying = members_of(client, keys.dead_topics())
                dead_here = sum(ask_each(client, ("XLEN",), [keys.dead(topic) for topic in dying]))
                outbox = _look_into_outbox(client, keys)
                counted = client.hgetall(keys.counters())
            cold_here = read_cold_hours(client, [keys])
        except StoreUnavailable:
            away.append(keys.shard)
            if len(away) == len(shards):
                raise
            continue
        looks.append(look)
        buckets.update(look.buckets)
        cold.update(cold_here)
        outboxes.append(outbox)
        counters.update({name.decode(): int(value) for name, value in counted.items()})
        in_flight, late = in_flight + sum(lengths), late + late_here
        held, throttled = held + paused_here + throttled_here, throttled + throttled_here
        dead += dead_here
    assert now_ms is not None  # one shard has answered
    return Stats(
        away=away,
        now_ms=now_ms,
        scheduled=sum(buckets.values()) + held + cold.total(),
        held=held,
        throttled=throttled,
        in_flight=in_flight,
        late=late,
        dead=dead,
        next_due_ms=_next_due_ms(looks),
        overdue_ms=_overdue_ms(looks, now_ms),
        counters=counters,
        outbox=sum(length for length, _ in outboxes),
        outbox_ms=_outbox_ms(outboxes, now_ms),
        buckets=buckets + _by_bucket(cold),
        cold=cold.total(),
        cold_due_ms=_first_of(cold),
    )


def read_forecast(client: Any, shards: Sequence[Keys]) -> Forecast:
    """Count what is scheduled, with a bounded number of commands. Not atomic either.

    Raises:
        StoreError: no shard answers, or an error.
    """
    now_ms = first_that_answers(shards, lambda keys: server_ms(client_of(client, keys)))
    looks, outboxes, buckets, held, throttled, away = [], [], Counter[int](), 0, 0, []
    cold = Counter[int]()
    for keys in shards:
        try:
            with translated_errors():
                cold_here = read_cold_hours(client, [keys])
                look, outbox = _look(client, keys, BUCKETS_MAX, CLAIMS_MAX), _look_into_outbox(client, keys)
                paused = client.hkeys(keys.pauses())
                others = [topic for topic in client.zrange(keys.held_topics(), 0, HELD_MAX - 1) if topic not in paused]
                paused_here, throttled_here = (
                    _count_held(client, keys, topics) for topics in (paused[:HELD_MAX], others)
                )
        except StoreUnavailable:
            away.append(keys.shard)
            if len(away) == len(shards):
                raise
            continue
        looks.append(look)
        outboxes.append(outbox)
        buckets.update(look.buckets)
        held, throttled = held + paused_here + throttled_here, throttled + throttled_here
        cold.update(cold_here)
    is_told = shards[0].shard not in away  # jobs tell of themselves there
    lags = {each.reads: each.last_lag for each in read_ingests(client, shards[0])} if is_told else {}
    return Forecast(
        now_ms=now_ms,
        buckets=buckets + _by_bucket(cold),
        held=held,
        throttled=throttled,
        next_due_ms=_next_due_ms(looks),
        overdue_ms=_overdue_ms(looks, now_ms),
        outbox=sum(length for length, _ in outboxes),
        outbox_ms=_outbox_ms(outboxes, now_ms),
        lags={reads: lag for reads, lag in lags.items() if lag is not None},
        waiting=read_waiting(client, shards[0]) if is_told else (),
        away=away,
        cold=cold.total(),
        cold_due_ms=_first_of(cold),
    )


def _count_held(client: Any, keys: Keys, topics: Collection[bytes]) -> int:
    return sum(ask_each(client, ("ZCARD",), [keys.held(topic.decode("utf-8", "replace")) for topic in topics]))


def ask_each(client: Any, command: tuple[str, ...], names: Sequence[str], rest: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Give one command to each key, many in a round trip."""
    for first in range(0, len(names), KEYS_PER_ROUND_TRIP):
        pipeline = client.pipeline(transaction=False)
        for name in names[first : first + KEYS_PER_ROUND_TRIP]:
            pipeline.execute_command(*command, name, *rest)
        yield from pipeline.execute()


@dataclass(frozen=True, slots=True)
class _Look:
    """The messages of each bucket of a shard, the oldest first, and the keys of its claims; due times of the first of either."""

    buckets: Mapping[int, int]
    first_due_ms: int | None
    claims: Sequence[str]
    claimed_due_ms: Sequence[int]


def _look(client: Any, keys: Keys, buckets_max: int = 0, claims_max: int = 0) -> _Look:
    """Look at the oldest buckets and claims of a shard; 0: at all of them."""
    members = client.zrange(keys.buckets(), 0, buckets_max - 1)
    starts = [int(start) for start in members if start.lstrip(b"-").isdigit()]
    counts = ask_each(client, ("ZCARD",), [keys.bucket(start) for start in starts])
    first_due_ms = None
    for start in starts:  # a bucket that was emptied may still be listed for a moment
        if head := client.zrange(keys.bucket(start), 0, 0, withscores=True):
            first_due_ms = _epoch_ms(head[0][1])
            break
    found = [keys.claim(token.decode()) for token in client.zrange(keys.claims(), 0, claims_max - 1)]
    heads = zip(found, ask_each(client, ("LINDEX",), found, (1,)), strict=True)
    claims = {claim: _epoch_ms(float(due_ms)) for claim, due_ms in heads if due_ms is not None}
    return _Look(
        buckets=dict(zip(starts, counts, strict=True)),
        first_due_ms=first_due_ms,
        claims=list(claims),
        claimed_due_ms=list(claims.values()),
    )


def _look_into_outbox(client: Any, keys: Keys) -> tuple[int, int]:
    """Return how many messages are in an outbox, and since when the oldest is."""
    pipeline = client.pipeline(transaction=False)
    pipeline.xlen(keys.outbox())
    pipeline.xrange(keys.outbox(), count=1)
    length, first = pipeline.execute()
    return length, entry_id_of(first[0][0].decode())[0] if first else 0


def _by_bucket(cold: Counter[int]) -> Counter[int]:
    """Spread what is cold evenly over the ten minutes of its hour: when each is due is known to its file alone."""
    parts = HOUR_MS // BUCKET_WIDTH_MS
    spread = Counter[int]()
    for hour, messages in cold.items():
        for part in range(parts):
            spread[hour * HOUR_MS + part * BUCKET_WIDTH_MS] = (messages + parts - 1 - part) // parts
    return spread


def _first_of(cold: Counter[int]) -> int | None:
    return min(cold) * HOUR_MS if cold else None


def _outbox_ms(outboxes: Sequence[tuple[int, int]], now_ms: int) -> int:
    return max(0, now_ms - min((since_ms for length, since_ms in outboxes if length), default=now_ms))


def _next_due_ms(looks: Sequence[_Look]) -> int | None:
    return min((look.first_due_ms for look in looks if look.first_due_ms is not None), default=None)


def _overdue_ms(looks: Sequence[_Look], now_ms: int) -> int:
    firsts = [look.first_due_ms for look in looks if look.first_due_ms is not None]
    claimed = [due_ms for look in looks for due_ms in look.claimed_due_ms]
    return max(0, now_ms - min([*firsts, *claimed], default=now_ms))


def _epoch_ms(score: float) -> int:
    return int(min(max(score, -EPOCH_MS_MAX), EPOCH_MS_MAX))
