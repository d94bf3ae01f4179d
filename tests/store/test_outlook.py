"""A look at what waits: right, and bounded."""

import pytest

from pipeline.store import outlook
from pipeline.store.keys import Keys
from pipeline.store.outlook import Waiting, count_waiting, look_ahead
from pipeline.store.redis_store import RedisStore
from tests.store.builders import BUCKET_MS, transaction
from tests.store.conftest import START_MS, Bench

FIRST_MS = START_MS - START_MS % BUCKET_MS


def test_an_empty_namespace(bench: Bench) -> None:
    seen = look_ahead(bench.client, [bench.keys])
    assert (seen.waiting, seen.is_whole, seen.next_due_ms, seen.overdue_ms) == ({}, True, None, 0)
    assert count_waiting(bench.client, [bench.keys]) == Waiting(0, True, 1)


def test_what_waits_is_counted_by_bucket_in_all_shards(bench: Bench) -> None:
    second = Keys(bench.keys.namespace, 1)
    bench.store().schedule("s", transaction((1, FIRST_MS + 5), (2, FIRST_MS + 6), (3, FIRST_MS + BUCKET_MS)))
    RedisStore(bench.client, second, None, bench.scripts).schedule("s", transaction((4, FIRST_MS), (5, FIRST_MS + 9)))
    seen = look_ahead(bench.client, [bench.keys, second])
    assert seen.waiting == {FIRST_MS: 4, FIRST_MS + BUCKET_MS: 1}
    assert (seen.is_whole, seen.next_due_ms, seen.overdue_ms) == (True, FIRST_MS, seen.now_ms - FIRST_MS)
    assert seen.commands == 1 + (3 + 2) + (3 + 1)
    assert count_waiting(bench.client, [bench.keys, second]) == Waiting(5, True, 3 + 2)


def test_what_is_in_flight_counts_as_late_until_it_is_acknowledged(bench: Bench) -> None:
    bench.store().schedule("s", transaction((1, FIRST_MS + 5), (2, FIRST_MS + BUCKET_MS)))
    claim = bench.store().claim("a:0").claim or bench.store().claim("a:0").claim
    assert claim is not None
    seen = look_ahead(bench.client, [bench.keys])
    assert (seen.next_due_ms, seen.overdue_ms) == (FIRST_MS + BUCKET_MS, seen.now_ms - FIRST_MS - 5)
    bench.store().ack(claim, 1, [])
    seen = look_ahead(bench.client, [bench.keys])
    assert seen.overdue_ms == seen.now_ms - FIRST_MS - BUCKET_MS


def test_what_is_due_later_is_not_late(bench: Bench) -> None:
    due_ms = 4_000_000_200_000
    bench.store().schedule("s", transaction((1, due_ms)))
    seen = look_ahead(bench.client, [bench.keys])
    assert (seen.next_due_ms, seen.overdue_ms) == (due_ms, 0)


def test_it_looks_at_so_many_buckets_and_claims(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "BUCKETS_MAX", 3)
    monkeypatch.setattr(outlook, "CLAIMS_MAX", 2)
    bench.store().schedule("s", transaction(*((line, FIRST_MS + line * BUCKET_MS) for line in range(1, 9))))
    bench.now_ms = FIRST_MS + 9 * BUCKET_MS
    store = bench.store(claim_limit=1)
    for name in "abcd":
        assert store.claim(f"{name}:0").claim is not None
    seen = look_ahead(bench.client, [bench.keys])
    assert seen.waiting == {FIRST_MS + line * BUCKET_MS: 1 for line in (5, 6, 7)}
    assert (seen.is_whole, seen.commands) == (False, 1 + 3 + 3 + 2)
    assert count_waiting(bench.client, [bench.keys]) == Waiting(3, False, 4)
