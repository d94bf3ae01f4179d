"""What is said about many messages at once holds for each of them by itself."""

import pytest

from pipeline.store.entries import Entry
from tests.consume.conftest import GROUP, TOPIC, Stage

MANY = 2_345  # more than a call to the server takes
SILENT_MS = 100_001


def pending_of(stage: Stage) -> dict[str, tuple[str, int]]:
    """Who has what is pending, and how often it was delivered, by its text."""
    stream = stage.keys.stream(TOPIC)
    text_of = {entry_id: fields[b"message"].decode() for entry_id, fields in stage.client.xrange(stream)}
    rows = stage.client.xpending_range(stream, GROUP, "-", "+", 10_000)
    return {text_of[r["message_id"]]: (r["consumer"].decode(), r["times_delivered"]) for r in rows}


def test_of_a_batch_those_that_are_anothers_or_came_again_are_refused_and_no_other(stage: Stage) -> None:
    first, other = stage.open("first"), stage.open("other")
    stage.send(*"abcdef")
    entries = first.take()
    b, d = entries[1], entries[3]
    stage.client.xclaim(stage.keys.stream(TOPIC), GROUP, "other", 0, [b.entry_id])
    assert other.store.settle("extend", [b.delivered_once_more()]) == [True]
    assert first.store.settle("start", [d]) == [True]
    assert not first.ack(*entries)
    assert first.late_acks == 2
    assert int(stage.client.hget(stage.keys.counters(), "late_acks")) == 2
    assert pending_of(stage) == {"b": ("other", 2), "d": ("first", 2)}


def test_in_whatever_order_messages_are_named_and_whatever_lies_between_them(stage: Stage) -> None:
    consumer = stage.open()
    stage.send(*"abcdefgh")
    a, _, c, _, _, f, g, h = consumer.take()
    assert consumer.store.settle("ack", [g, a, f]) == [True, True, True]
    assert consumer.store.settle("ack", [h, c]) == [True, True]
    assert consumer.store.settle("ack", [h, c]) == [False, False]
    assert pending_of(stage).keys() == {*"bde"}


@pytest.mark.parametrize("verb", ["ack", "extend", "start", "release", "undo"])
def test_more_messages_than_a_call_takes_are_settled_by_their_own_counts(stage: Stage, verb: str) -> None:
    consumer = stage.open("first")
    stage.send(*(f"{number}" for number in range(MANY)))
    entries = consumer.take(MANY)
    assert consumer.store.settle("start", entries[::2]) == [True] * len(entries[::2])
    entries[::2] = [entry.delivered_once_more() for entry in entries[::2]]
    assert consumer.store.settle(verb, entries) == [True] * MANY
    more = {"start": 1, "undo": -1}.get(verb, 0)
    left: dict[str, tuple[str, int]] = {
        entry.body: ("first", entry.delivery_count + more) for entry in entries if verb != "ack"
    }
    assert pending_of(stage) == left
    idle_ms = stage.client.xpending_range(stage.keys.stream(TOPIC), GROUP, "-", "+", MANY, idle=SILENT_MS)
    assert len(idle_ms) == (MANY if verb in ("release", "undo") else 0)


def test_a_batch_of_an_ordered_group_is_refused_as_a_whole_once_another_one_is_active(stage: Stage) -> None:
    consumer = stage.open("first", ordered=True)
    stage.send(*"abc")
    entries: list[Entry] = consumer.take()
    stage.client.set(stage.keys.active(TOPIC, GROUP), "another", ex=60)
    assert consumer.store.settle("ack", entries) == [False] * 3
    assert len(pending_of(stage)) == 3
