"""A handler that raises, and a target that is down."""

from collections import Counter

import pytest

from pipeline.consume.handling import DOWN_MS_MAX, FAILURES_MAX, TargetDown, handle_all
from pipeline.core.errors import StoreProtocolError
from pipeline.store.entries import Entry
from tests.consume.conftest import Stage

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
    handle_all(consumer, handler)  # type: ignore[arg-type]
    consumer.close()


def test_what_a_handler_raises_ends_nothing_and_the_message_comes_again(stage: Stage) -> None:
    handled: list[tuple[str, int]] = []

    def handler(entry: Entry) -> None:
        if entry.message == "bad" and entry.attempt < 3:
            raise (ValueError, StoreProtocolError)[entry.attempt - 1]("not yet")
        handled.append((entry.message, entry.attempt))

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
    assert (letter["detail"], letter["attempt"]) == ("ValueError: never", "3")
    assert "is a dead letter after 3 attempts: ValueError: never" in caplog.text


def test_a_target_that_is_down_costs_no_message_its_attempts(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    handled: list[str] = []
    tries: Counter[str] = Counter()

    def handler(entry: Entry) -> None:
        tries[entry.message] += 1
        if sum(tries.values()) < 60:
            raise ConnectionError("refused")
        handled.append(entry.message)

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
        if entry.message.startswith("bad"):
            raise ValueError(entry.message)
        handled.append(entry.message)

    stage.open().close()
    stage.send(*(f"{kind} {number}" for number in range(FAILURES_MAX) for kind in ("bad", "good")))
    handle(stage, handler, lambda: len(stage.dead()) == FAILURES_MAX)
    assert len(handled) == FAILURES_MAX
    assert "seems to be down" not in caplog.text
