"""A handler that raises, and a target that is down."""

import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from pipeline.consume.handling import (
    DOWN_MS_MAX,
    FAILURES_MAX,
    PAUSE_MS_FIRST,
    Breaker,
    Gone,
    Refused,
    RetryLater,
    TargetDown,
    run,
)
from pipeline.core.due import DELAY_SEC_MAX
from pipeline.core.errors import StoreProtocolError
from pipeline.store.entries import Entry
from tests.consume.conftest import GROUP, TOPIC, Stage

ROUNDS_MAX = 400


def handle(stage: Stage, handler: object, until: object) -> None:
    """Handle messages until a condition holds, letting what comes again move meanwhile."""
    rounds = 0

    def stopping() -> bool:
        nonlocal rounds
        rounds += 1
        stage.move()
        assert rounds < ROUNDS_MAX, "it does not come to an end"
        return bool(until())  # type: ignore[operator]

    consumer = stage.open(stopping=stopping)
    run(consumer, handler)  # type: ignore[arg-type]
    consumer.close()


def test_what_a_handler_raises_ends_nothing_and_the_message_comes_again(stage: Stage) -> None:
    handled: list[tuple[str, int]] = []

    def handler(entry: Entry) -> None:
        if entry.body == "bad" and entry.attempt < 3:
            raise (ValueError, StoreProtocolError)[entry.attempt - 1]("not yet")
        handled.append((entry.body, entry.attempt))

    stage.open().close()
    stage.send("a", "bad", "b")
    handle(stage, handler, lambda: len(handled) == 3)
    assert sorted(handled) == [("a", 1), ("b", 1), ("bad", 3)]
    assert stage.pending() == 0
    assert stage.dead() == []


def test_a_message_that_always_fails_is_dead_and_tells_why(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def handler(entry: Entry) -> None:
        raise ValueError("never")

    stage.open().close()
    stage.send("bad")
    handle(stage, handler, stage.dead)
    [letter] = stage.dead()
    first_line, _, trace = letter["detail"].partition("\n")
    assert (first_line, letter["attempt"]) == ("ValueError: never", "3")
    assert 'in handler\n    raise ValueError("never")' in trace and "consume/handling.py" not in trace
    assert "is a dead letter after 3 attempts: ValueError: never" in caplog.text


def test_a_target_that_is_down_costs_no_message_its_attempts(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    handled: list[str] = []
    tries: Counter[str] = Counter()

    def handler(entry: Entry) -> None:
        tries[entry.body] += 1
        if sum(tries.values()) < 60:
            raise ConnectionError("refused")
        handled.append(entry.body)

    stage.open().close()
    sent = [f"message {number}" for number in range(12)]
    stage.send(*sent)
    handle(stage, handler, lambda: len(handled) == len(sent))
    assert sorted(handled) == sorted(sent)
    assert stage.dead() == []
    assert caplog.text.count("the target seems to be down") == 1
    assert caplog.text.count("the target works again") == 1
    assert stage.clock.now_ms > 60_000, "the pauses grow"


def test_a_handler_can_say_that_its_target_is_down(stage: Stage) -> None:
    attempts: list[int] = []

    def handler(entry: Entry) -> None:
        attempts.append(entry.attempt)
        if len(attempts) < 10:
            raise TargetDown("closed on Sundays")

    stage.open().close()
    stage.send("a")
    handle(stage, handler, lambda: len(attempts) == 10)
    assert attempts == [1] * 10


def test_messages_that_nobody_can_handle_end_in_the_end(stage: Stage) -> None:
    def handler(entry: Entry) -> None:
        raise ValueError("never")

    stage.open().close()
    stage.send(*(f"bad {number}" for number in range(FAILURES_MAX + 2)))
    handle(stage, handler, lambda: len(stage.dead()) == FAILURES_MAX + 2)
    assert stage.clock.now_ms > DOWN_MS_MAX


def test_bad_messages_among_good_ones_are_no_reason_to_stop(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    handled: list[str] = []

    def handler(entry: Entry) -> None:
        if entry.body.startswith("bad"):
            raise ValueError(entry.body)
        handled.append(entry.body)

    stage.open().close()
    stage.send(*(f"{kind} {number}" for number in range(FAILURES_MAX) for kind in ("bad", "good")))
    handle(stage, handler, lambda: len(stage.dead()) == FAILURES_MAX)
    assert len(handled) == FAILURES_MAX
    assert "seems to be down" not in caplog.text


def test_each_failure_is_logged_with_its_attempt_and_the_wait_before_the_next(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(entry: Entry) -> None:
        raise ValueError("never\nagain")

    stage.open().close()
    stage.send("bad", id="order-1")
    caplog.set_level("DEBUG", "pipeline")
    handle(stage, handler, stage.dead)
    said = [record.getMessage() for record in caplog.records if "order-1" in record.getMessage()]
    assert said == [
        "message order-1 failed (attempt 1 of 3), next try in 1 ms: ValueError: never",
        "message order-1 failed (attempt 2 of 3), next try in 2 ms: ValueError: never",
        "message order-1 is a dead letter after 3 attempts: ValueError: never",
    ]
    assert sum(record.levelname == "DEBUG" and bool(record.exc_info) for record in caplog.records) == 3


def test_what_a_dead_letter_keeps_of_a_failure_is_bounded(stage: Stage) -> None:
    def handler(entry: Entry) -> None:
        if len(stage.dead()) < 1:
            nested(handler, 100)

    def nested(call: object, depth: int) -> None:
        if depth == 0:
            raise ValueError("x" * 100_000)
        nested(call, depth - 1)

    stage.open().close()
    stage.send("bad")
    handle(stage, handler, stage.dead)
    assert len(stage.dead()[0]["detail"]) < 5_000


@pytest.mark.parametrize("ordered", [False, True])
def test_a_pause_holds_up_no_other_consumer_and_an_ordered_group_does_not_change_hands(
    stage: Stage, ordered: bool
) -> None:
    asked_ms: list[float] = []
    handled: list[str] = []

    def handler(entry: Entry) -> None:
        if len(handled) < 12:
            handled.append(entry.body)
            raise TargetDown("closed on Sundays")

    stage.settings = replace(stage.settings, lease_sec=30)
    stage.open(ordered=ordered).close()
    stage.send("a", "b")
    consumer = stage.open(stopping=lambda: stage.move() < 0 or len(handled) == 12)
    acquire = consumer.store.acquire_active

    def acquire_active(lease_ms: int) -> bool:
        asked_ms.append(stage.clock.now_ms)
        return acquire(lease_ms)

    def wait(ms: float) -> None:
        rows = stage.client.xpending_range(stage.keys.stream(TOPIC), GROUP, "-", "+", 10)
        assert all(row["time_since_delivered"] > 10**9 for row in rows), "it was not released first"
        stage.clock.advance_ms(ms)

    consumer.store.acquire_active = acquire_active  # type: ignore[method-assign]
    consumer.wait = wait
    run(consumer, handler)
    assert stage.clock.now_ms > 120_000, "the pauses are longer than a lease"
    gaps = [later - earlier for earlier, later in pairwise(asked_ms)]
    assert bool(gaps) == ordered
    assert max(gaps, default=0) < 30_000
    consumer.close()


def test_a_failure_that_costs_no_attempt_is_logged_as_such(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    failures, handled = [TargetDown("no connection")], []

    def handler(entry: Entry) -> None:
        if failures:
            raise failures.pop()
        handled.append(entry)

    stage.open().close()
    stage.send("a", id="hk1")
    handle(stage, handler, lambda: bool(handled))
    told = [record.getMessage() for record in caplog.records if "message hk1 failed" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith("message hk1 failed (which costs no attempt), next try in ")


def test_a_message_that_is_refused_is_dead_at_once_with_what_was_said(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(entry: Entry) -> None:
        raise Refused("no such customer\nat all")

    stage.open().close()
    stage.send(*(f"bad {number}" for number in range(FAILURES_MAX + 3)))
    handle(stage, handler, lambda: len(stage.dead()) == FAILURES_MAX + 3)
    assert {(each["reason"], each["attempt"], each["detail"]) for each in stage.dead()} == {
        ("refused", "1", "no such customer\nat all")
    }
    assert stage.clock.now_ms == 0, "a target that refuses works"
    assert "is a dead letter: it was refused at attempt 1: no such customer" in caplog.text


def test_a_target_that_is_gone_is_left_in_peace_though_each_message_that_it_refuses_is_dead(stage: Stage) -> None:
    def handler(entry: Entry) -> None:
        raise Gone("410")

    stage.open().close()
    stage.send(*(f"lost {number}" for number in range(FAILURES_MAX + 3)))
    handle(stage, handler, lambda: len(stage.dead()) == FAILURES_MAX + 3)
    assert {(each["reason"], each["attempt"]) for each in stage.dead()} == {("refused", "1")}
    assert stage.clock.now_ms >= PAUSE_MS_FIRST + 2 * PAUSE_MS_FIRST


def test_a_handler_says_when_a_message_comes_again(stage: Stage) -> None:
    said: list[str] = []

    def handler(entry: Entry) -> None:
        said.append(f"{entry.attempt}")
        raise RetryLater(3600, "not before noon")

    consumer = stage.open(stopping=lambda: bool(said))
    stage.send("a")
    before_ms = consumer.store.now_ms()
    run(consumer, handler)
    consumer.close()
    [start_ms] = stage.client.zrange(stage.keys.buckets(), 0, -1)
    [(_, due_ms)] = stage.client.zrange(stage.keys.bucket(int(start_ms)), 0, -1, withscores=True)
    assert 3_600_000 <= due_ms - before_ms < 3_660_000
    assert (said, stage.dead()) == (["1"], [])


def test_a_message_that_is_to_come_later_every_time_is_dead_in_the_end(stage: Stage) -> None:
    def handler(entry: Entry) -> None:
        raise RetryLater(0 if entry.attempt == 1 else None, "never")

    stage.open().close()
    stage.send("a")
    handle(stage, handler, stage.dead)
    [letter] = stage.dead()
    assert (letter["reason"], letter["detail"], letter["attempt"]) == ("failed", "never", "3")


def test_a_target_says_how_long_it_is_down(stage: Stage) -> None:
    tried_ms: list[float] = []

    def handler(entry: Entry) -> None:
        tried_ms.append(stage.clock.now_ms)
        if len(tried_ms) < 3:
            raise TargetDown("closed on Sundays", 86.4)

    stage.open().close()
    stage.send("a", "b", "c", "d")
    handle(stage, handler, lambda: len(tried_ms) == 4)
    assert [later - earlier for earlier, later in pairwise(tried_ms)] == [86_400, 86_400, 0]
    assert stage.dead() == []


@pytest.mark.parametrize("after_sec", [-1, float("nan"), float("inf"), DELAY_SEC_MAX + 1])
def test_a_time_that_is_none_is_refused_where_it_is_said(after_sec: float) -> None:
    for kind in (lambda: RetryLater(after_sec), lambda: TargetDown("down", after_sec)):
        with pytest.raises(ValueError, match="after_sec must be 0 to"):
            kind()


def entry_of(stage: Stage, text: str) -> Entry:
    return Entry(due_ms=1, body=text, id=text, shard=0, stream="s", entry_id="1-1", delivery_count=1)


def test_consumers_that_share_a_target_try_one_message_at_a_time_while_it_is_down(stage: Stage) -> None:
    breaker, entries = Breaker(), [entry_of(stage, f"{number}") for number in range(16)]
    assert all(breaker.begin(1_000) for _ in entries)
    blamed = [breaker.count_failure(entry, TargetDown("down"), 1_000, 1_001) for entry in entries]
    assert not any(blamed)
    assert breaker.wait_ms(1_001) == PAUSE_MS_FIRST, "those in flight made the pause longer"
    assert not breaker.begin(2_000)
    assert breaker.begin(2_001)
    assert not breaker.begin(2_001), "two at a time"
    assert breaker.wait_ms(900_000) > 0, "it is forgotten that one is tried"
    assert not breaker.count_failure(entries[0], TargetDown("down"), 2_001, 3_000)
    assert breaker.wait_ms(3_000) == 2 * PAUSE_MS_FIRST
    assert breaker.begin(5_000)
    breaker.count_success(entries[1], 2_999)
    assert not breaker.begin(5_000), "what was taken before the last failure tells nothing"
    breaker.count_success(entries[0], 5_000)
    assert all(breaker.begin(5_001) for _ in entries)


def test_of_messages_in_flight_together_only_the_first_failures_count(stage: Stage) -> None:
    breaker = Breaker()
    entries = [entry_of(stage, f"{number}") for number in range(16)]
    assert all(breaker.begin(1_000) for _ in entries)
    blamed = [breaker.count_failure(entry, RetryLater(None), 1_000, 1_001) for entry in entries]
    assert blamed == [True] * FAILURES_MAX + [False] * (16 - FAILURES_MAX)


def test_a_consumer_holds_its_message_while_another_one_tries_the_target(stage: Stage) -> None:
    handled: list[tuple[str, int, float]] = []
    breaker = Breaker()
    stage.open().close()
    stage.send("a")
    breaker.begin(0)
    breaker.count_failure(entry_of(stage, "another"), TargetDown("down", 300), 0, 0)
    consumer = stage.open(stopping=lambda: bool(handled))
    run(consumer, lambda entry: handled.append((entry.body, entry.attempt, stage.clock.now_ms)), breaker)
    consumer.close()
    assert handled == [("a", 1, 300_000)]
    assert (stage.pending(), stage.dead()) == (0, [])


class Turns(threading.Semaphore):
    """Turns that are waited for on the clock of a stage; after ``until_ms`` there is one more."""

    def __init__(self, stage: Stage, turns: int, until_ms: float = float("inf")) -> None:
        super().__init__(turns)
        self._clock, self._until_ms, self.left = stage.clock, until_ms, turns

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        self._clock.advance_ms((timeout or 0) * 1_000)
        if self._clock.now_ms >= self._until_ms:
            self._until_ms = float("inf")
            self.release()
        self.left -= (has_turn := super().acquire(blocking=False))
        return has_turn

    def release(self, n: int = 1) -> None:
        self.left += n
        super().release(n)


def test_a_message_waits_for_its_turn_and_gives_it_on(stage: Stage) -> None:
    handled: list[tuple[str, float, int]] = []
    turns = Turns(stage, 0, until_ms=3_000)

    def handler(entry: Entry) -> None:
        handled.append((entry.body, stage.clock.now_ms, turns.left))
        if entry.body == "b":
            raise Refused("no")

    stage.open().close()
    stage.send("a", "b", "c")
    consumer = stage.open(stopping=lambda: len(handled) == 3)
    run(consumer, handler, turns=turns)
    consumer.close()
    assert handled == [("a", 3_000, 0), ("b", 3_000, 0), ("c", 3_000, 0)]
    assert (turns.left, stage.pending(), len(stage.dead())) == (1, 0, 1)


@pytest.mark.parametrize("held_by", ["a target that is down", "others"])
@pytest.mark.parametrize("cause", ["a stop", "the end of its renewal"])
def test_a_message_that_is_held_is_given_back(stage: Stage, cause: str, held_by: str) -> None:
    """It is not tried, and others can have it, before its lease is let go."""
    stop_ms, handler_timeout_sec = (5_000, 0) if cause == "a stop" else (30_000, 20)
    breaker, turns = Breaker(), Turns(stage, int(held_by != "others"))
    if held_by != "others":
        breaker.begin(0)
        breaker.count_failure(entry_of(stage, "another"), TargetDown("down", 300), 0, 0)
    stage.open().close()
    stage.send("a")

    def is_given_back() -> bool:
        rows = stage.client.xpending_range(stage.keys.stream(TOPIC), GROUP, "-", "+", 10)
        return [(row["time_since_delivered"] > 10**9, row["times_delivered"]) for row in rows] == [(True, 0)]

    seen: list[bool] = []

    def stopping() -> bool:
        if 10_000 < stage.clock.now_ms < 12_000:  # the half of its renewal is over
            seen.append(is_given_back())
        if handler_timeout_sec and held_by != "others" and stage.clock.now_ms > 12_000:
            assert is_given_back()
        return stage.clock.now_ms >= stop_ms

    consumer = stage.open(stopping=stopping, settings={"handler_timeout_sec": handler_timeout_sec})
    consumer.wait = lambda ms: stage.clock.advance_ms(min(ms, 1_000))
    run(consumer, lambda entry: pytest.fail("it was tried"), breaker, turns)
    assert is_given_back()
    assert any(seen) == bool(handler_timeout_sec)
    assert turns.left == int(held_by != "others")
    consumer.close()
