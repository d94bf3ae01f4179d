"""Does a claim get slower when more messages are scheduled?

Each level has a namespace of its own on one server, so that rounds go from level to level under the same conditions. Half of a
level's messages are due within the ten minutes of the bucket that is claimed from, the others in the day behind it. The store's
own ``claim`` is called, with a limit of 100 and a clock of ours that makes exactly the oldest messages due; the server says what
each call took (``INFO commandstats``). Then the claims are acknowledged, and as many messages scheduled anew.
At the end the first level is measured once more, alone on a server of its own, as a control.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.common import WORK, Options, Sample, format_table, percentile, say
from bench.filling import make_pairs, store_pairs
from bench.server import Server, empty_server
from bench.workload import ARRIVAL_MS, DAY_SEC, SEED, bucket_start_ms
from pipeline.config import DrainSettings, RedisSettings
from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.store.base import Claim
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore

LEVELS, QUICK_LEVELS = (10_000, 1_000_000, 10_000_000), (10_000, 50_000, 200_000)
LIMIT = 100  # messages a claim
CLAIMS = 10  # a visit
ROUNDS, QUICK_ROUNDS = 20, 5
PORTION = 5_000  # sorted and stored at a time, as a transaction of ingest
START_MS = bucket_start_ms(ARRIVAL_MS)


def plan(options: Options) -> dict[str, Any]:
    """Return the settings of a run."""
    levels = [level for level in (QUICK_LEVELS if options.quick else LEVELS) if level <= options.backlog_max]
    return {
        "levels": levels,
        "limit": LIMIT,
        "claims": CLAIMS,
        "rounds": options.choose(options.rounds, ROUNDS, QUICK_ROUNDS),
    }


@dataclass(slots=True)
class Level:
    """A namespace with so many messages scheduled, whose clock we hold."""

    server: Server
    messages: int
    keys: Keys = field(init=False)
    now_ms: int = START_MS
    _generation: int = 0
    _claims: int = 0

    def __post_init__(self) -> None:
        self.keys = Keys(f"level-{self.messages}")

    def fill(self) -> None:
        """Schedule all messages, in portions that are each spread over everything."""
        rng = np.random.default_rng((SEED, self.messages))
        for _ in range(0, self.messages, 2 * PORTION):
            self._store(rng.integers(0, BUCKET_WIDTH_MS, PORTION) + START_MS)
            self._store(rng.integers(BUCKET_WIDTH_MS, DAY_SEC * 1000, PORTION) + START_MS)
        self.server.wait_for_rewrite()

    def visit(self, store: RedisStore) -> list[Sample]:
        """Make some claims; afterwards as many messages are scheduled as before."""
        bucket = self.keys.bucket(START_MS)
        last = CLAIMS * LIMIT - 1
        [(_, due_ms)] = self.server.client.zrange(bucket, last, last, withscores=True)
        self.now_ms = int(due_ms)
        taken, samples = [], []
        for _ in range(CLAIMS):
            claim, sample = self._claim(store)
            taken.append(claim)
            samples.append(sample)
        for claim in taken:
            if not store.ack(claim, LIMIT, []):
                raise RuntimeError("A claim was over before it was acknowledged.")
        rng = random.Random(self._generation)
        self._store(np.array([rng.randrange(self.now_ms, START_MS + BUCKET_WIDTH_MS) for _ in range(CLAIMS * LIMIT)]))
        return samples

    def warm_up(self, store: RedisStore) -> None:
        """Let the store find its bucket, and the server its script."""
        self.now_ms = START_MS - 1
        store.claim("warm-up")

    def _claim(self, store: RedisStore) -> tuple[Claim, Sample]:
        self._claims += 1
        before = self._script_us()
        started = time.perf_counter_ns()
        claim = store.claim(f"bench:{self._claims}").claim
        client_us = (time.perf_counter_ns() - started) / 1000
        after = self._script_us()
        if claim is None or len(claim.messages) != LIMIT or after[0] - before[0] != 1:
            raise RuntimeError("A claim did not take what is due, in one call.")
        return claim, {"server_us": after[1] - before[1], "client_us": round(client_us, 1)}

    def _script_us(self) -> tuple[int, int]:
        about = self.server.info("commandstats").get("cmdstat_evalsha", {"calls": 0, "usec": 0})
        return about["calls"], about["usec"]

    def _store(self, due_ms: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
        self._generation += 1
        store_pairs(self.server, make_pairs(np.sort(due_ms).tolist(), self._generation), self.keys)


def take_samples(settings: dict[str, Any]) -> list[Sample]:
    """Visit each level once a round, then the first one, alone."""
    with empty_server(WORK) as server:
        samples = _visit_levels(server, settings["levels"], settings["rounds"], "")
    with empty_server(WORK) as server:  # an emptied one would still be freeing memory
        return samples + _visit_levels(server, settings["levels"][:1], settings["rounds"], "alone at the end")


def _visit_levels(server: Server, sizes: Sequence[int], rounds: int, remark: str) -> list[Sample]:
    client = connect(RedisSettings(url=server.url))
    levels = [Level(server, size) for size in sizes]
    drain = DrainSettings(claim_limit=LIMIT)
    stores = [RedisStore(client, level.keys, drain, now_ms=lambda at=level: at.now_ms) for level in levels]  # type: ignore[misc]
    samples = []
    for level, store in zip(levels, stores, strict=True):
        level.fill()
        level.warm_up(store)
        say(f"{level.messages:>12,} messages scheduled")
    for number in range(1, rounds + 1):
        for place in range(len(levels)):
            chosen = (number + place) % len(levels)
            taken = levels[chosen].visit(stores[chosen])
            about = {"scheduled": levels[chosen].messages, "remark": remark, "round": number}
            samples += [{**about, **sample} for sample in taken]
    client.close()
    return samples


def table(settings: dict[str, Any], samples: Sequence[Sample]) -> str:
    """Lay the samples out for eyes."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(f"{sample['scheduled']:,} {sample['remark']}".strip(), []).append(sample)
    first = statistics.median(s["server_us"] for s in groups[f"{settings['levels'][0]:,}"])
    rows = []
    for name, taken in sorted(groups.items(), key=lambda group: (group[1][0]["remark"], group[1][0]["scheduled"])):
        server_us = [s["server_us"] for s in taken]
        rows.append(
            (
                name,
                *(f"{percentile(server_us, percent):,.0f}" for percent in (50, 90, 99, 100)),
                f"{statistics.median(server_us) / first:.2f}",
                f"{statistics.median(s['client_us'] for s in taken):,.0f}",
            )
        )
    head = ("messages scheduled", "p50", "p90", "p99", "max", "of the first", "round trip p50")
    return (
        f"{settings['rounds']} rounds of {settings['claims']} claims of {settings['limit']}. Microseconds of the server.\n\n"
        + format_table(head, rows)
    )
