"""An acknowledgement that also reads the next messages: they are this consumer's as if it had read them by itself."""

from collections.abc import Callable

import pytest
import redis

from jobs import consume
from pipeline.consume.consumer import Consumer
from pipeline.core.errors import SinkClosed
from pipeline.core.messages import Message
from pipeline.store.entries import Entry
from tests.consume.conftest import GROUP, TOPIC, Stage

LEASE_MS = 100_000


def open_ahead(stage: Stage, limit: int = 2, **options: object) -> Consumer:
    return stage.open(reads_ahead=True, limit=limit, **options)


def texts(entries: list[Entry]) -> list[str]:
    return [entry.body for entry in entries]


def reads_of(stage: Stage) -> int:
    return int(stage.client.info("commandstats").get("cmdstat_xreadgroup", {"calls": 0})["calls"])


def test_while_there_is_a_backlog_each_batch_is_read_with_the_acknowledgement_before_it(stage: Stage) -> None:
    consumer = open_ahead(stage)
    stage.send(*"abcde")
    assert texts(batch := consumer.take()) == ["a", "b"]
    before = reads_of(stage)
    for following in (["c", "d"], ["e"]):
        assert consumer.ack(*batch)
        assert stage.pending() == len(following), "those before are acknowledged, and the next are read"
        assert texts(batch := consumer.take()) == following
    assert reads_of(stage) == before + 2
    assert consumer.ack(*batch)
    assert (reads_of(stage), stage.pending()) == (before + 2, 0), "there is no backlog any more"


@pytest.mark.parametrize(
    "cause", ["not asked for", "an ordered group", "a part", "no backlog", "a stop", "the time to look for silent ones"]
)
def test_an_acknowledgement_reads_nothing_when_something_else_comes_first(stage: Stage, cause: str) -> None:
    stopped = False
    consumer = stage.open(
        reads_ahead=cause != "not asked for",
        limit=2,
        stopping=lambda: stopped,
        ordered=cause == "an ordered group" or None,
    )
    stage.send(*("a" if cause == "no backlog" else "abcd"))
    batch = consumer.take()
    stopped = cause == "a stop"
    if cause == "the time to look for silent ones":
        stage.clock.advance_ms(1_001)
    if cause == "no backlog":
        stage.send(*"bcd")
    before = reads_of(stage)
    assert consumer.ack(*batch[: 1 if cause == "a part" else 2])
    assert reads_of(stage) == before
    assert stage.pending() == (1 if cause == "a part" else 0)


def test_a_backlog_does_not_keep_it_from_taking_over_what_is_silent(stage: Stage) -> None:
    dead = stage.open()
    stage.send("silent")
    dead.take()
    stage.silence_ms(LEASE_MS + 1)
    consumer = open_ahead(stage)
    consumer._looked_ms = stage.clock.monotonic_ms()
    stage.send(*"abcdefgh")
    seen: list[str] = []
    for _ in range(4):
        seen += texts(batch := consumer.take())
        stage.clock.advance_ms(400)
        assert consumer.ack(*batch)
    assert "silent" in seen and len(seen) < 9, "only when all else was done"


def test_what_was_read_ahead_is_given_back_at_the_end_as_if_it_had_not_been_delivered(stage: Stage) -> None:
    leaving, staying = open_ahead(stage), stage.open()
    stage.send(*"abc")
    assert leaving.ack(*leaving.take())
    assert stage.pending() == 1
    leaving.close()
    [entry] = staying.take() or staying.take()
    assert (entry.body, entry.attempt) == ("c", 1)


def test_what_was_read_ahead_keeps_its_lease_or_is_not_given_out(stage: Stage) -> None:
    consumer, other = open_ahead(stage), stage.open()
    stage.send(*"abcdef")
    assert consumer.ack(*consumer.take())
    stage.silence_ms(LEASE_MS / 2)
    batch = consumer.take()
    rows = stage.client.xpending_range(stage.keys.stream(TOPIC), GROUP, "-", "+", 10)
    assert [row["time_since_delivered"] < LEASE_MS / 2 for row in rows] == [True, True], "half a lease is left of it"
    consumer._looked_ms = stage.clock.monotonic_ms()
    assert consumer.ack(*batch)
    stage.silence_ms(LEASE_MS + 1)
    assert texts(other.take()) == ["e", "f"]
    assert consumer.take() == []


@pytest.mark.parametrize("is_done", [True, False], ids=["executed", "not executed"])
def test_a_reply_that_is_lost_costs_no_attempt_and_brings_nothing_twice(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    consumer = open_ahead(stage)
    stage.send(*"abcde")
    batch = consumer.take()
    execute = redis.client.Pipeline.execute

    def lose_reply(self: redis.client.Pipeline, *arguments: object, **options: object) -> None:
        monkeypatch.setattr(redis.client.Pipeline, "execute", execute)
        if is_done:
            self.execute(*arguments, **options)
        raise redis.exceptions.ConnectionError("cut")

    monkeypatch.setattr(redis.client.Pipeline, "execute", lose_reply)
    assert consumer.ack(*batch)
    assert (consumer.late_acks, stage.pending()) == (0, 2 if is_done else 0)
    rest: list[Entry] = []
    for _ in range(3):
        rest += (batch := consumer.take())
        assert consumer.ack(*batch)
    assert [(entry.body, entry.attempt) for entry in rest] == [("c", 1), ("d", 1), ("e", 1)]
    assert stage.pending() == 0


class Slow:
    """A sink that takes two messages and no more, and notes what was pending when it was asked."""

    def __init__(self, stage: Stage, closes: bool) -> None:
        self.stage, self.closes = stage, closes
        self.pending: list[int] = []

    def deliver(
        self,
        messages: list[Message],
        in_time: Callable[[], bool],
        may_wait: Callable[[], bool],
    ) -> int:
        self.pending.append(self.stage.pending())
        if self.closes:
            raise SinkClosed("closed", 2)
        return 2


@pytest.mark.parametrize("closes", [False, True])
def test_what_was_not_printed_is_not_acknowledged(stage: Stage, closes: bool) -> None:
    rounds = 0

    def stop() -> bool:
        nonlocal rounds
        rounds += 1
        return rounds > 1

    consumer, sink, printed = open_ahead(stage, limit=4), Slow(stage, closes), consume.Printed()
    stage.send(*"abcdefgh")
    try:
        consume.print_all(consumer, sink, stage.clock, printed, stop, once=False)
    except SinkClosed:
        assert closes
    assert sink.pending == [4], "acknowledged before it was printed"
    assert stage.pending() == (4 if closes else 2)
    assert printed.messages == (0 if closes else 2)
    assert [entry.attempt for entry in stage.open().take()] == [1, 1], "what was not begun is anybody's at once"
