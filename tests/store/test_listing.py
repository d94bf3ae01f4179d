"""Listing what is scheduled: the same whatever the buckets are like."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from pipeline.core.messages import Message
from pipeline.store import listing
from pipeline.store.listing import ScheduledMessage, list_scheduled
from tests.store.builders import BUCKET_MS, TOKEN, transaction
from tests.store.conftest import START_MS, Bench

FIRST_MS = START_MS - START_MS % BUCKET_MS


def walk(bench: Bench, *place: Any) -> Iterator[ScheduledMessage]:
    return list_scheduled(bench.user, [bench.keys], *place)


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
    found = [*walk(bench)]
    assert [each.due_ms for each in found] == dues
    places = [each[:2] for each in found]
    assert places == sorted(set(places)), "each once"
    for _ in range(20):
        after, last = found[chance.randrange(len(found))], chance.choice(dues) + chance.randrange(2)
        rest = [each[:2] for each in walk(bench, 0, last, after[:2])]
        assert rest == [place for place in places if place > after[:2] and place[0] < last]
        rest = [each[:2] for each in walk(bench, after.due_ms, last)]
        assert rest == [place for place in places if after.due_ms <= place[0] < last]


@pytest.mark.parametrize(("apart_ms", "commands"), [(0, 8), (0, 9), (0, 2), (1, 1), (1, 2), (1, 3)])
def test_what_is_claimed_while_it_is_listed_hides_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, apart_ms: int, commands: int
) -> None:
    """A loop takes messages between two pages, and between what a page asks for."""
    monkeypatch.setattr(listing, "PAGE", 5)
    dues = [START_MS + line * apart_ms for line in range(60)]
    bench.store().schedule("s", transaction(*((line, due_ms) for line, due_ms in enumerate(dues, start=1))))
    bench.now_ms = START_MS + BUCKET_MS
    store, claimed = bench.store(claim_limit=12), set[str]()
    execute, asked = bench.user.execute_command, list[str]()

    def execute_and_claim(*command: Any, **options: Any) -> Any:
        asked.append(command[0])
        reply = execute(*command, **options)
        if len(asked) < commands:
            return reply
        monkeypatch.setattr(bench.user, "execute_command", execute)
        claim = store.claim("loop:0").claim
        claimed.update(each.member.decode()[:22] for each in (claim.messages if claim else ()))
        return reply

    found = walk(bench)
    listed = [next(found).message_id for _ in range(5)]
    monkeypatch.setattr(bench.user, "execute_command", execute_and_claim)
    listed += [each.message_id for each in found]
    assert len(claimed) == 12
    assert {f"{TOKEN}{line:08x}" for line in range(1, 61)} - claimed <= {*listed}
    assert listed == sorted({*listed}), "each once, in order"


def test_members_of_one_id_are_all_listed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries of two groups may have the same."""
    monkeypatch.setattr(listing, "PAGE", 2)
    retries = [Message(0, "again", group=f"group{n}").to_member("P" * 14 + "0" * 8, True) for n in range(5)]
    bench.client.zadd(bench.keys.bucket(FIRST_MS), dict.fromkeys(retries, FIRST_MS))
    bench.client.zadd(bench.keys.buckets(), {str(FIRST_MS): FIRST_MS})
    assert [each.message.group for each in walk(bench)] == [f"group{n}" for n in range(5)]


def test_what_comes_meanwhile_before_its_place_is_passed_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE", 3)
    bench.store().schedule("s", transaction(*((line, START_MS + line) for line in range(1, 10))))
    execute = bench.user.execute_command

    def execute_and_add(*command: Any, **options: Any) -> Any:
        monkeypatch.setattr(bench.user, "execute_command", execute)
        reply = execute(*command, **options)
        earlier = transaction(*((line, START_MS) for line in range(1, 20)), token="A" * 14)
        bench.store().schedule("s", earlier)
        return reply

    found = walk(bench)
    listed = [next(found).due_ms for _ in range(3)]
    monkeypatch.setattr(bench.user, "execute_command", execute_and_add)
    assert listed + [each.due_ms for each in found] == [START_MS + line for line in range(1, 10)]


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_due_times_with_a_fraction_are_listed_once(bench: Bench, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Any program may write one."""
    monkeypatch.setattr(listing, "PAGE", 3)
    members = {Message(0, "m").to_member(f"{TOKEN}{n:08x}"): START_MS + n + 0.5 for n in range(count)}
    start = START_MS - START_MS % BUCKET_MS
    bench.client.zadd(bench.keys.bucket(start), members)
    bench.client.zadd(bench.keys.buckets(), {str(start): start})
    for from_ms in (0, START_MS):
        found = islice(walk(bench, from_ms), 2 * count)
        assert [each.due_ms for each in found] == [START_MS + n for n in range(count)]
