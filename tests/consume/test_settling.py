"""What is said about many messages at once holds for each of them by itself."""

import pytest

from tests.consume.conftest import GROUP, TOPIC, Stage

MANY = 9_001  # more words than a call of a script takes
RELEASED_MS = 10**9


def pending_of(stage: Stage) -> dict[str, tuple[str, int]]:
    """Who has what is pending, and how often it was delivered, by its text."""
    stream = stage.keys.stream(TOPIC)
    text_of = {entry_id: fields[b"message"].decode() for entry_id, fields in stage.client.xrange(stream)}
    rows = stage.client.xpending_range(stream, GROUP, "-", "+", 10_000)
    return {text_of[r["message_id"]]: (r["consumer"].decode(), r["times_delivered"]) for r in rows}


def test_of_a_batch_those_that_are_anothers_or_came_again_are_refused_and_no_other(stage: Stage) -> None:
    first = stage.open("first")
    stage.send(*"abcdef")
    entries = first.take()
    b, d, e = entries[1], entries[3], entries[4]
    stage.client.xclaim(stage.keys.stream(TOPIC), GROUP, "other", 0, [b.entry_id])
    stage.client.xclaim(stage.keys.stream(TOPIC), GROUP, "other", 0, [e.entry_id], retrycount=1, justid=True)
    assert first.store.settle("start", [d]) == [True]
    assert not first.ack(*entries)
    assert first.late_acks == 3
    assert int(stage.client.hget(stage.keys.counters(), "late_acks") or 0) == 3
    assert pending_of(stage) == {"b": ("other", 2), "d": ("first", 2), "e": ("other", 1)}


def test_in_whatever_order_messages_are_named_and_whatever_lies_between_them(stage: Stage) -> None:
    consumer = stage.open()
    stage.send(*"abcdefgh")
    a, _, c, _, _, f, g, h = consumer.take()
    assert consumer.store.settle("ack", [g, a, f]) == [True, True, True]
    assert consumer.store.settle("ack", [h, c]) == [True, True]
    assert consumer.store.settle("ack", [h, c]) == [False, False]
    assert pending_of(stage).keys() == {*"bde"}


@pytest.mark.parametrize("verb", ["ack", "extend", "start", "release", "undo"])
def test_more_messages_than_a_call_takes_are_settled_each_by_its_own_count(stage: Stage, verb: str) -> None:
    consumer = stage.open("first")
    pipeline = stage.client.pipeline()
    for number in range(MANY):
        pipeline.xadd(stage.keys.stream(TOPIC), {"message": f"{number}"})
    pipeline.execute()
    entries = consumer.take(MANY)
    few = {5, 7, 8, MANY - 1}
    assert consumer.store.settle("start", [entries[at] for at in few]) == [True] * len(few)
    entries = [entry.delivered_once_more() if at in few else entry for at, entry in enumerate(entries)]
    assert consumer.store.settle(verb, entries) == [True] * MANY
    more = {"start": 1, "undo": -1}.get(verb, 0)
    left = {entry.body: ("first", entry.delivery_count + more) for entry in entries if verb != "ack"}
    assert pending_of(stage) == left
    released = stage.client.xpending_range(stage.keys.stream(TOPIC), GROUP, "-", "+", MANY, idle=RELEASED_MS)
    assert len(released) == (MANY if verb in ("release", "undo") else 0)


def test_a_batch_of_an_ordered_group_is_refused_as_a_whole_once_another_one_is_active(stage: Stage) -> None:
    consumer = stage.open("first", ordered=True)
    stage.send(*"abc")
    entries = consumer.take()
    stage.client.set(stage.keys.active(TOPIC, GROUP), "another", ex=60)
    assert consumer.store.settle("ack", entries) == [False] * 3
    assert len(pending_of(stage)) == 3
