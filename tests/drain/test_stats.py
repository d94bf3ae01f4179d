"""What a loop counts, that the number of topics is bounded, and when a heartbeat is published."""

from threading import Thread

import pytest

from pipeline.core.errors import SinkClosed, StoreUnavailable
from pipeline.core.ids import ARRIVAL_LENGTH, encode_token, message_id
from pipeline.core.messages import Message
from pipeline.drain.stats import BEAT_MS, OTHER_TOPICS, Heartbeat, Totals
from pipeline.store.base import Moved
from pipeline.store.heartbeats import FRESH_MS, IDLE_BEAT_MS, LOOP_COUNTERS, LoopProgress
from tests.clock import ManualClock
from tests.drain.test_loop import START_MS


def delivery(topic: str, due_ms: int = 1_000, id: str = "P" * 22) -> Message:
    return Message(due_ms, "m", topic, id, message_id=id)


def moved(*dues_ms: int, group: str = "", id: str = "") -> list[Moved]:
    return [Moved("mail", group, id[:ARRIVAL_LENGTH], list(dues_ms))]


def test_lateness_is_counted_by_topic() -> None:
    totals = Totals()
    totals.count_delivered([delivery("a"), delivery("b", 900), delivery("a", 990)], 1_005)
    assert {
        name: (each.delivered, each.lateness.sum_ms, each.lateness.max_ms) for name, each in totals.topics.items()
    } == {
        "a": (2, 20, 15),
        "b": (1, 105, 105),
    }
    assert (totals.delivered, totals.of_all_topics().delivered, totals.of_all_topics().lateness.max_ms) == (3, 3, 105)


def test_topics_beyond_the_bound_are_counted_together() -> None:
    totals = Totals(topics_max=2)
    totals.count_delivered([delivery(topic) for topic in "abcadb"], 1_000)
    assert {name: each.delivered for name, each in totals.topics.items()} == {"a": 2, "b": 2, OTHER_TOPICS: 2}


def test_a_topic_that_only_another_producer_can_have_made_takes_no_room() -> None:
    totals = Totals()
    totals.count_delivered([delivery("t" * 64), delivery("t" * 65)], 1_000)
    assert set(totals.topics) == {"t" * 64, OTHER_TOPICS}


def test_an_error_is_counted_under_the_name_of_its_cause() -> None:
    totals = Totals()
    for cause in (TimeoutError(), None, TimeoutError()):
        error = StoreUnavailable("Redis does not answer.")
        error.__cause__ = cause
        totals.count_error(error)
    totals.count_error(SinkClosed("Nobody reads.", 0))
    assert totals.errors == {"TimeoutError": 2, "StoreUnavailable": 1, "SinkClosed": 1}


def test_what_moved_counts_as_delivered_and_only_the_first_time_for_the_lateness() -> None:
    totals = Totals()
    assert totals.count_moved(moved(90, 99, 99) + moved(5, group="billing"), at_ms=100) == 4
    assert (totals.delivered, totals.claimed) == (4, 4)
    assert list(totals.topics) == ["mail"]
    mail = totals.topics["mail"]
    assert (mail.delivered, mail.lateness.total(), mail.lateness.max_ms) == (4, 3, 10), "a retry was late once"


ARRIVED_MS = START_MS - 300
ARRIVED_ID = message_id(encode_token(ARRIVED_MS, 1), 1)


def test_lateness_counts_from_the_arrival_if_a_message_was_due_before(totals: Totals) -> None:
    dues = [0, ARRIVED_MS - 1, ARRIVED_MS, ARRIVED_MS + 1, START_MS]
    totals.count_delivered([delivery("a", due_ms, ARRIVED_ID) for due_ms in dues], START_MS)
    lateness = totals.topics["a"].lateness
    assert (lateness.max_ms, lateness.sum_ms) == (300, 300 + 300 + 300 + 299 + 0)
    assert (totals.late_on_arrival, totals.delivered) == (2, 5)


@pytest.mark.parametrize(
    "id",
    [
        "3f2b1c9a7de04a5c8b1f60",  # hexadecimal digits, as examples/node makes them: before 1993 or after 2053
        "f" * 22,
        "no token: \n ä" + "x" * 10,
        "",
        message_id(encode_token(START_MS + 60_001, 1), 1),  # nothing arrives after it was delivered
    ],
)
def test_an_id_of_another_producer_says_nothing_about_the_arrival(totals: Totals, id: str) -> None:
    totals.count_delivered([delivery("a", START_MS - 1_000, id)], START_MS)
    assert (totals.topics["a"].lateness.max_ms, totals.late_on_arrival) == (1_000, 0)


def test_a_clock_that_is_a_little_ahead_makes_nothing_late(totals: Totals) -> None:
    totals.count_delivered([delivery("a", 0, message_id(encode_token(START_MS + 50, 1), 1))], START_MS)
    assert (totals.topics["a"].lateness.max_ms, totals.late_on_arrival) == (0, 1)


def test_what_moved_into_a_stream_counts_from_its_arrival_too(totals: Totals) -> None:
    totals.count_moved(moved(0, ARRIVED_MS + 1, id=ARRIVED_ID), START_MS)
    totals.count_moved(moved(0, group="billing", id=ARRIVED_ID), START_MS)
    lateness = totals.topics["mail"].lateness
    assert (lateness.max_ms, lateness.total(), totals.late_on_arrival) == (300, 2, 1)


@pytest.fixture
def totals() -> Totals:
    return Totals()


def test_several_forwarders_count_at_once() -> None:
    totals = Totals()

    def count() -> None:
        for _ in range(1_000):
            totals.count_forwarded([START_MS, START_MS], START_MS + 1)
            totals.count_refused()
            totals.count_error(StoreUnavailable("away"))

    threads = [Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (totals.forwarded, totals.outbox.total(), totals.refused) == (8_000, 8_000, 4_000)
    assert totals.errors == {"StoreUnavailable": 4_000}


def test_a_snapshot_stays_as_it_is() -> None:
    totals = Totals()
    totals.count_delivered([delivery("a")], 1_005)
    seen = totals.snapshot()
    totals.count_delivered([delivery("a"), delivery("b")], 1_005)
    totals.count_forwarded([1_000], 1_005)
    totals.stuck_partitions.append("T/0")
    totals.count_error(StoreUnavailable("Redis does not answer."))
    assert (seen.delivered, seen.topics["a"].lateness.total(), list(seen.topics), seen.errors) == (1, 1, ["a"], {})
    assert (seen.forwarded, seen.outbox.total(), seen.stuck_partitions) == (0, 0, [])


class Beating:
    """A heartbeat whose clock the test moves, and what it published."""

    def __init__(self) -> None:
        self.clock = ManualClock(now_ms=START_MS)
        self.totals = Totals()
        self.published: list[LoopProgress] = []
        self.tries = 0
        self.is_down = False
        self.heartbeat = Heartbeat(self.write, self.totals, self.clock, "host:1:a")

    def write(self, progress: LoopProgress) -> None:
        self.tries += 1
        if self.is_down:
            raise StoreUnavailable("Redis does not answer.")
        self.published.append(progress)

    def after(self, ms: float) -> int:
        """Return how many times it tried, ``ms`` later."""
        self.clock.advance_ms(ms)
        before = self.tries
        assert self.heartbeat.step() == BEAT_MS
        return self.tries - before


@pytest.fixture
def beating() -> Beating:
    return Beating()


def test_a_loop_is_seen_at_once_and_then_with_what_is_new(beating: Beating) -> None:
    assert beating.after(0) == 1
    beating.totals.delivered = 3
    assert beating.after(BEAT_MS) == 1
    assert [(each.stats.delivered, each.started_ms) for each in beating.published] == [(0, START_MS), (3, START_MS)]


def test_with_nothing_new_it_only_shows_that_it_runs(beating: Beating) -> None:
    beating.after(0)
    assert [beating.after(IDLE_BEAT_MS / 4) for _ in range(8)] == [0, 0, 0, 1] * 2
    assert FRESH_MS >= 3 * IDLE_BEAT_MS, "one that is lost does no harm"


def test_what_could_not_be_published_is_published_later(beating: Beating) -> None:
    beating.is_down = True
    assert [beating.after(BEAT_MS), beating.after(BEAT_MS)] == [1, 1]
    beating.is_down = False
    beating.totals.errors["TimeoutError"] = 1
    assert [beating.after(BEAT_MS), beating.after(BEAT_MS)] == [1, 0]
    assert beating.published[-1].stats.errors == {"TimeoutError": 1}


@pytest.mark.parametrize("name", LOOP_COUNTERS)
def test_anything_that_is_counted_is_new(beating: Beating, name: str) -> None:
    beating.after(0)
    setattr(beating.totals, name, 1)
    assert beating.after(BEAT_MS) == 1
    assert getattr(beating.published[-1].stats, name) == 1


def test_the_last_one_says_that_the_loop_has_ended(beating: Beating) -> None:
    beating.after(0)
    beating.heartbeat.publish(has_ended=True)
    assert [each.has_ended for each in beating.published] == [False, True]
