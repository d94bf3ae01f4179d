"""What a loop counts, and that the number of topics is bounded."""

from pipeline.core.errors import SinkClosed, StoreUnavailable
from pipeline.core.messages import Message
from pipeline.drain.totals import OTHER_TOPICS, Totals
from pipeline.sinks.base import Delivery


def delivery(topic: str, due_ms: int = 1_000) -> Delivery:
    return Delivery(Message("P" * 22, "P" * 22, topic, "m", {}), due_ms, 1)


def test_lateness_is_counted_by_topic() -> None:
    totals = Totals()
    totals.count_lateness([delivery("a"), delivery("b", 900), delivery("a", 990)], 1_005)
    assert {name: (late.total(), late.sum_ms, late.max_ms) for name, late in totals.topics.items()} == {
        "a": (2, 20, 15),
        "b": (1, 105, 105),
    }
    assert (totals.lateness().total(), totals.lateness().max_ms) == (3, 105)


def test_topics_beyond_the_bound_are_counted_together() -> None:
    totals = Totals(topics_max=2)
    totals.count_lateness([delivery(topic) for topic in "abcadb"], 1_000)
    assert {name: late.total() for name, late in totals.topics.items()} == {"a": 2, "b": 2, OTHER_TOPICS: 2}


def test_a_topic_that_only_another_producer_can_have_made_takes_no_room() -> None:
    totals = Totals()
    totals.count_lateness([delivery("t" * 64), delivery("t" * 65)], 1_000)
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
    assert totals.count_moved({"mail": [90, 99], "mail:billing": [5]}, at_ms=100) == 3
    assert (totals.delivered, totals.claimed) == (3, 3)
    assert list(totals.topics) == ["mail"]
    assert (totals.topics["mail"].total(), totals.topics["mail"].max_ms) == (2, 10)
