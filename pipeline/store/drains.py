"""What drain loops tell about themselves, for eyes: nothing of the work rests on it."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pipeline.core.lateness import BOUNDS_MS, Lateness, add_up
from pipeline.store.accounts import replace_account
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys

KEEP_SEC = 3_600  # after the last word of a loop
READ_MAX = 1_000  # loops that are read at a time, those that said something last


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainProgress:
    """What one loop has done since it started; times are epoch ms UTC on its machine's clock, the rest as in ``drain.totals``."""

    loop_id: str
    started_ms: int
    seen_ms: int
    claimed: int
    delivered: int
    stale: int
    repeated: int
    reclaimed: int
    errors: dict[str, int] = field(default_factory=dict)
    topics: dict[str, Lateness] = field(default_factory=dict)


def write_drain(client: Any, keys: Keys, progress: DrainProgress) -> None:
    """Replace what is known of a loop, in one round trip.

    Raises:
        StoreError: no answer, or an error.
    """
    replace_account(
        client,
        keys.drain(progress.loop_id),
        keys.drains(),
        progress.loop_id,
        progress.seen_ms,
        KEEP_SEC,
        asdict(progress),
    )


def read_drains(client: Any, keys: Keys) -> list[DrainProgress]:
    """Return what is known of each loop of the last hour, the latest first.

    Raises:
        StoreError: no answer, or an error.
    """
    with translated_errors():
        loops = client.zrange(keys.drains(), 0, READ_MAX - 1, desc=True)
        pipeline = client.pipeline(transaction=False)
        for loop in loops:
            pipeline.hgetall(keys.drain(loop.decode()))
        found = pipeline.execute()
    names = [f.name for f in fields(DrainProgress)]
    # A hash that is gone has expired; one that lacks a field, or has other bounds of lateness, is of another version.
    told = [
        {name: json.loads(values[name.encode()]) for name in names}
        for values in found
        if all(name.encode() in values for name in names)
    ]
    return [
        DrainProgress(**{**values, "topics": {topic: Lateness(**late) for topic, late in values["topics"].items()}})
        for values in told
        if all(len(late["counts"]) == len(BOUNDS_MS) + 1 for late in values["topics"].values())
    ]


def add_up_drains(drains: Iterable[DrainProgress]) -> DrainProgress:
    """Return what loops did together; ``started_ms`` is of the first, ``seen_ms`` of the last word of any, 0 if there is none."""
    each = list(drains)
    topics = {topic for progress in each for topic in progress.topics}
    errors = Counter[str]()
    for progress in each:
        errors.update(progress.errors)
    return DrainProgress(
        loop_id="",
        started_ms=min((progress.started_ms for progress in each), default=0),
        seen_ms=max((progress.seen_ms for progress in each), default=0),
        claimed=sum(progress.claimed for progress in each),
        delivered=sum(progress.delivered for progress in each),
        stale=sum(progress.stale for progress in each),
        repeated=sum(progress.repeated for progress in each),
        reclaimed=sum(progress.reclaimed for progress in each),
        errors=dict(errors),
        topics={topic: add_up(p.topics[topic] for p in each if topic in p.topics) for topic in topics},
    )
