"""Listing what is scheduled: the same whatever the buckets are like."""

import random

import pytest

from pipeline.store import listing
from pipeline.store.listing import list_scheduled
from tests.store.builders import BUCKET_MS, transaction
from tests.store.conftest import START_MS, Bench

FIRST_MS = START_MS - START_MS % BUCKET_MS


@pytest.mark.parametrize("seed", range(6))
def test_small_and_large_buckets_are_listed_in_order_from_any_place_to_any(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(listing, "PAGE", 5)
    monkeypatch.setattr(listing, "BUCKETS_AHEAD", 3)
    chance = random.Random(seed)
    dues: list[int] = []
    for bucket in sorted(chance.sample(range(60), 25)):
        start = FIRST_MS + bucket * BUCKET_MS
        dues += [start + chance.choice((0, 7, BUCKET_MS - 1)) for _ in range(chance.choice((1, 1, 2, 4, 5, 6, 11)))]
    dues.sort()
    bench.store().schedule("s", transaction(*((line, due_ms) for line, due_ms in enumerate(dues, start=1))))
    found = [*list_scheduled(bench.client, [bench.keys])]
    assert [each.due_ms for each in found] == dues
    places = [each[:2] for each in found]
    assert places == sorted(set(places)), "each once"
    for _ in range(20):
        after, last = found[chance.randrange(len(found))], chance.choice(dues) + chance.randrange(2)
        rest = [each[:2] for each in list_scheduled(bench.client, [bench.keys], 0, last, after[:2])]
        assert rest == [place for place in places if place > after[:2] and place[0] < last]
        rest = [each[:2] for each in list_scheduled(bench.client, [bench.keys], after.due_ms, last)]
        assert rest == [place for place in places if after.due_ms <= place[0] < last]
