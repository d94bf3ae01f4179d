"""``run`` sends an acknowledgement as soon as a handler returns, and waits for the answers of several together."""

from collections.abc import Callable

import pytest

from pipeline.client.memory import MemoryDuetime
from pipeline.consume import handling
from pipeline.consume.consumer import Consumer
from pipeline.consume.handling import SENT_MAX, SENT_MS_MAX
from pipeline.core.messages import Message
from pipeline.core.stop import Stop
from pipeline.store.entries import Entry
from pipeline.store.groups import GroupStore
from pipeline.store.scripts import SentAhead
from tests.consume.conftest import TOPIC, Stage

LOOKS_MAX = 200
ROUNDS_MAX = 2_000


def bounded(is_done: Callable[[], bool], rounds_max: int = ROUNDS_MAX) -> Callable[[], bool]:
    """Return what stops a consumer, also one that does not come to an end."""
    rounds = 0

    def stopping() -> bool:
        nonlocal rounds
        rounds += 1
        return rounds > rounds_max or is_done()

    return stopping


def confirmed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many acknowledgements are waited for at a time."""
    sizes: list[int] = []
    settle = GroupStore.settle

    def noted(store: GroupStore, verb: str, entries: list[Entry]) -> list[bool]:
        if verb == "ack":
            sizes.append(len(entries))
        return settle(store, verb, entries)

    monkeypatch.setattr(GroupStore, "settle", noted)
    return sizes


def handle_all(stage: Stage, count: int, handler: object = lambda entry: None, **options: object) -> Consumer:
    """Send messages and let them be handled; returns the consumer, which is closed."""
    handled: list[str] = []

    def noting(entry: Entry) -> None:
        handler(entry)  # type: ignore[operator]
        handled.append(entry.body)

    consumer = stage.open(stopping=bounded(lambda: len(handled) == count), **options)
    stage.send(*(f"{number}" for number in range(count)))
    handling.run(consumer, noting)
    consumer.close()
    assert handled == [f"{number}" for number in range(count)]
    return consumer


def test_a_message_is_acknowledged_while_the_next_one_is_handled_and_not_before_its_own_handler_returns(
    stage: Stage,
) -> None:
    left, seen = 8, list[str]()

    def handler(entry: Entry) -> None:
        nonlocal left
        if min(stage.pending() for _ in range(3)) < left:
            seen.append(f"{entry.body} was acknowledged before it was handled")
        if not any(stage.pending() == left for _ in range(LOOKS_MAX)):
            seen.append(f"what was before {entry.body} is not acknowledged")
        left -= 1

    consumer = stage.open(stopping=bounded(lambda: left == 0))
    stage.send(*"abcdefgh")
    handling.run(consumer, handler)
    consumer.close()
    assert (seen, stage.pending(), consumer.late_acks) == ([], 0, 0)


def test_a_message_whose_handler_fails_is_not_acknowledged_with_those_beside_it(stage: Stage) -> None:
    def handler(entry: Entry) -> None:
        seen.append(entry.body)
        if entry.body == "b":
            raise ValueError("never")

    seen: list[str] = []
    consumer = stage.open(settings={"attempts_max": 1}, stopping=bounded(lambda: len(seen) == 3, 100))
    stage.send(*"abc")
    handling.run(consumer, handler)
    consumer.close()
    assert ([letter["message"] for letter in stage.dead()], consumer.late_acks) == (["b"], 0)


def test_answers_are_waited_for_together_but_of_so_many_at_most(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = confirmed(monkeypatch)
    handle_all(stage, 2 * SENT_MAX + 7, limit=1_000)
    assert sizes == [SENT_MAX, SENT_MAX, 7]
    assert stage.pending() == 0


def test_answers_are_not_waited_for_longer_than_a_moment_if_handlers_take_their_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = confirmed(monkeypatch)
    handle_all(stage, 5, lambda entry: stage.clock.advance_ms(SENT_MS_MAX))
    assert sizes == [2, 2, 1]


def test_before_it_waits_for_more_all_is_answered(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = confirmed(monkeypatch)
    handle_all(stage, 9, limit=4)
    assert sizes == [4, 4, 1]


def test_in_an_ordered_group_each_answer_is_waited_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = confirmed(monkeypatch)
    handle_all(stage, 3, ordered=True)
    assert sizes == [1, 1, 1]


@pytest.mark.parametrize("number", [0, 3, 9])
def test_what_a_lost_connection_took_along_is_acknowledged_again_and_nothing_comes_twice(
    stage: Stage, number: int
) -> None:
    def handler(entry: Entry) -> None:
        assert entry.attempt == 1
        if entry.body == f"{number}":
            stage.client.client_kill_filter(_type="normal", skipme=True)

    consumer = handle_all(stage, 10, handler)
    assert (stage.pending(), consumer.late_acks) == (0, 0)


def test_an_acknowledgement_that_was_done_when_its_answer_was_lost_is_not_late(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = SentAhead.gather

    def lose(self: SentAhead) -> None:
        monkeypatch.setattr(SentAhead, "gather", gather)
        assert any(stage.pending() == 0 for _ in range(LOOKS_MAX))
        with self._kept():
            raise OSError("cut")

    monkeypatch.setattr(SentAhead, "gather", lose)
    assert handle_all(stage, 3).late_acks == 0


def test_of_several_only_those_whose_lease_was_over_are_told(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    entries: list[Entry] = []

    def handler(entry: Entry) -> None:
        entries.append(entry)
        if entry.body in "13":
            stage.client.xclaim(entry.stream, "billing", "another", 0, [entry.entry_id])

    consumer = handle_all(stage, 5, handler)
    assert (stage.pending(), consumer.late_acks) == (2, 2)
    assert f"2 of 5 acks came after the lease and are redelivered: {entries[1].id} …" in caplog.text


def test_a_handler_that_closes_its_consumer_gives_back_nothing_that_was_handled(stage: Stage) -> None:
    consumer = stage.open()
    stage.send(*"abcd")
    handling.run(consumer, lambda entry: consumer.close() if entry.body == "c" else None)
    assert consumer.late_acks == 0
    assert [entry.body for entry in stage.open().take()] == ["d"]


def test_in_the_memory_of_a_test_it_is_the_same() -> None:
    duetime, stop, handled = MemoryDuetime(), Stop(), list[str]()

    def handler(message: Message) -> None:
        handled.append(message.body)
        stop.requested = len(handled) == 3

    for text in "abc":
        duetime.schedule(text, delay=1, topic=TOPIC)
    duetime.advance(1)
    duetime.run_until(stop, TOPIC, "g", handler, start="beginning")
    assert handled == ["a", "b", "c"]
