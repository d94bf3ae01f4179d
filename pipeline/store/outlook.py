"""What waits and for when: a bounded look at the buckets, for eyes and metrics."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.store.connection import server_ms, translated_errors
from pipeline.store.keys import Keys
from pipeline.store.survey import ask_each, first_due_ms

BUCKETS_MAX = 1_000  # of each shard, the oldest that are not empty: a week, if every ten minutes have messages
CLAIMS_MAX = 100  # of each shard, those whose leases end first


@dataclass(frozen=True, slots=True)
class Outlook:
    """What all shards hold; times are epoch ms UTC, ``now_ms`` of the server's clock.

    ``waiting`` has the messages of each bucket by its start; it is not ``is_whole`` if there are more buckets than are looked at.
    ``next_due_ms`` is of what waits, None if nothing does; ``overdue_ms`` is how late the oldest message is that waits or is in
    flight. ``commands`` is what the look cost.
    """

    now_ms: int
    waiting: Mapping[int, int]
    is_whole: bool
    next_due_ms: int | None
    overdue_ms: int
    commands: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many messages wait in all shards, with ``is_whole`` and ``commands`` as in ``Outlook``."""

    messages: int
    is_whole: bool
    commands: int


def look_ahead(client: Any, shards: Sequence[Keys]) -> Outlook:
    """Look at the shards one after the other. Not atomic: what is claimed meanwhile may be missed or seen twice.

    Raises:
        StoreError: no answer, or an error.
    """
    waiting = Counter[int]()
    dues: list[int] = []
    in_flight: list[int] = []
    is_whole, commands = True, 1
    now_ms = server_ms(client)
    with translated_errors():
        for keys in shards:
            buckets = _count_buckets(client, keys)
            waiting.update(buckets)
            is_whole = is_whole and len(buckets) < BUCKETS_MAX
            due_ms = first_due_ms(client, keys, list(buckets))
            dues += [] if due_ms is None else [due_ms]
            claims = [keys.claim(token.decode()) for token in client.zrange(keys.claims(), 0, CLAIMS_MAX - 1)]
            heads = ask_each(client, ("LINDEX",), claims, (1,))
            in_flight += [int(head) for head in heads if head is not None]
            commands += 3 + len(buckets) + len(claims)
    return Outlook(
        now_ms=now_ms,
        waiting=waiting,
        is_whole=is_whole,
        next_due_ms=min(dues, default=None),
        overdue_ms=max(0, now_ms - min([*dues, *in_flight], default=now_ms)),
        commands=commands,
    )


def count_waiting(client: Any, shards: Sequence[Keys]) -> Waiting:
    """Count what waits, with as few commands as that takes.

    Raises:
        StoreError: no answer, or an error.
    """
    with translated_errors():
        each = [_count_buckets(client, keys) for keys in shards]
    return Waiting(
        messages=sum(sum(buckets.values()) for buckets in each),
        is_whole=all(len(buckets) < BUCKETS_MAX for buckets in each),
        commands=sum(1 + len(buckets) for buckets in each),
    )


def _count_buckets(client: Any, keys: Keys) -> dict[int, int]:
    """Return the messages of each bucket by its start, the oldest first."""
    starts = [int(start) for start in client.zrange(keys.buckets(), 0, BUCKETS_MAX - 1)]
    counts = ask_each(client, ("ZCARD",), [keys.bucket(start) for start in starts])
    return dict(zip(starts, counts, strict=True))
