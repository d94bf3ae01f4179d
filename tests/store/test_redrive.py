"""A dead letter that is scheduled again, and the id that it had: nobody else loses theirs to it."""

import pytest

from pipeline.config import TopicSettings
from pipeline.core.messages import Message
from pipeline.store.base import Found, Scheduled, State
from pipeline.store.dead_letters import DeadLetters
from tests.store.builders import keyed, set_topic, transaction
from tests.store.conftest import START_MS, Bench
from tests.store.test_by_id import KEY, messages, stored

EXPIRE_SEC, RETENTION_SEC = 10, 3_600
SINKS = pytest.mark.parametrize("sink", ["screen", "stream", "kafka"])


def deliver(bench: Bench) -> list[str]:
    """Deliver what is due; returns what went to the screen."""
    store, bodies = bench.store(id_retention_sec=RETENTION_SEC), []
    for number in range(6):
        if claim := store.claim(f"{bench.now_ms}:{number}").claim:
            bodies += [Message.read_member(each.member, each.due_ms).body for each in claim.messages]
            assert store.ack(claim, len(claim.messages), keyed(claim))
    return bodies


def let_expire(bench: Bench, sink: str) -> DeadLetters:
    """Make a dead letter of a message with an idempotency key, which is remembered for an hour."""
    set_topic(bench.client, bench.keys, "mail", TopicSettings(sink=sink, expire_after_sec=EXPIRE_SEC))
    bench.store().schedule("s", transaction(identified=((1, START_MS, KEY),), member_of=stored))
    bench.now_ms = START_MS + EXPIRE_SEC * 1_000 + 1
    assert deliver(bench) == []
    assert messages(bench).get(KEY) == Found(State.DELIVERED)
    return DeadLetters(bench.user, [bench.keys], bench.scripts)


def redrive(bench: Bench, letters: DeadLetters) -> None:
    [letter] = letters.of_topic("mail")
    assert letters.redrive(letter, bench.now_ms)


@SINKS
def test_a_message_that_has_the_id_by_now_keeps_it(bench: Bench, sink: str) -> None:
    letters = let_expire(bench, sink)
    bench.now_ms += RETENTION_SEC * 1_000
    later_ms = bench.now_ms + 60_000
    another = transaction(identified=((2, later_ms, KEY),), token="Q" * 14, member_of=stored)
    assert bench.store().schedule("s", another) == Scheduled(stored=1)
    redrive(bench, letters)
    assert messages(bench).get(KEY).message == Message(
        later_ms, "message 2", "mail", KEY, message_id=f"{'P' * 14}00000002"
    )
    deliver(bench)
    assert bench.stats().scheduled == 1
    assert messages(bench).get(KEY).state is State.SCHEDULED
    cancelled = messages(bench).cancel(KEY)
    assert cancelled.state is State.CANCELLED and cancelled.message and cancelled.message.body == "message 2"
    assert bench.stats().scheduled == 0


@SINKS
def test_a_redriven_message_is_found_by_its_id_until_it_is_delivered(bench: Bench, sink: str) -> None:
    letters = let_expire(bench, sink)
    redrive(bench, letters)
    found = messages(bench).get(KEY)
    assert found.state is State.SCHEDULED and found.message and found.message.body == "message 1"
    again = transaction(identified=((2, START_MS, KEY),), token="Q" * 14, member_of=stored)
    assert bench.store().schedule("s", again) == Scheduled(stored=0, duplicates=(0,))
    deliver(bench)
    assert messages(bench).get(KEY) == Found(State.DELIVERED)
    assert not bench.client.exists(bench.keys.places())


def test_a_redriven_message_is_rescheduled_and_cancelled_by_its_id(bench: Bench) -> None:
    redrive(bench, let_expire(bench, "stream"))
    by_id = messages(bench)
    assert by_id.reschedule(KEY, bench.now_ms + 5_000).state is State.SCHEDULED
    deliver(bench)
    assert bench.stats().scheduled == 1
    assert by_id.cancel(KEY).state is State.CANCELLED
    assert by_id.get(KEY) == Found(State.CANCELLED)
    assert bench.stats().scheduled == 0


def test_a_letter_of_one_group_takes_no_id(bench: Bench) -> None:
    """For the other groups its message is delivered."""
    fields = {"id": KEY, "message": "again", "topic": "mail", "group": "billing", "reason": "failed"}
    bench.client.xadd(bench.keys.dead("mail"), fields)  # type: ignore[arg-type]
    bench.client.sadd(bench.keys.dead_topics(), "mail")
    redrive(bench, DeadLetters(bench.user, [bench.keys], bench.scripts))
    assert messages(bench).get(KEY) == Found(State.UNKNOWN)
    assert not bench.client.exists(bench.keys.places())
