"""The histogram of lateness, against the plain list that it stands for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.lateness import BOUNDS_MS, Lateness, add_up
from pipeline.core.text import count_text, span_text


def counted(*lateness_ms: int) -> Lateness:
    histogram = Lateness()
    for ms in lateness_ms:
        histogram.add(ms)
    return histogram


def test_a_bound_belongs_to_what_is_below_it() -> None:
    histogram = counted(0, 1, 2, 3, 4, 5, 6)
    assert histogram.counts[:5] == [2, 1, 1, 2, 1]
    assert (histogram.total(), histogram.sum_ms, histogram.max_ms) == (7, 21, 6)


def test_many_at_once_are_as_many_one_by_one() -> None:
    histogram = counted(7)
    histogram.add(4, 3)
    assert histogram == counted(4, 4, 4, 7)


@given(
    st.lists(st.lists(st.integers(-5, 20) | st.sampled_from(BOUNDS_MS) | st.integers(0, 10**8))), st.integers(0, 10**13)
)
def test_messages_in_order_of_time_are_counted_as_one_by_one(parts: list[list[int]], at_ms: int) -> None:
    histogram = Lateness()
    for part in parts:
        histogram.add_all(sorted(at_ms - ms for ms in part), at_ms)
    assert histogram == counted(*(ms for part in parts for ms in part))


def test_what_is_later_than_all_bounds_is_counted_last() -> None:
    histogram = counted(BOUNDS_MS[-1], BOUNDS_MS[-1] + 1)
    assert histogram.counts[-2:] == [1, 1]
    assert histogram.quantile_ms(1) == BOUNDS_MS[-1] + 1


def test_what_seems_early_was_not_late() -> None:
    assert counted(-5) == counted(0)


def test_nothing_is_not_late() -> None:
    assert (Lateness().total(), Lateness().quantile_ms(0.99), add_up([])) == (0, 0, Lateness())


@pytest.mark.parametrize(("share", "quantile_ms"), [(0.5, 1), (0.98, 1), (0.985, 5), (0.99, 5), (1, 7)])
def test_a_share_is_within_a_bound_or_the_maximum(share: float, quantile_ms: int) -> None:
    assert counted(*[1] * 98, 4, 7).quantile_ms(share) == quantile_ms


@given(st.lists(st.integers(0, 10**9), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_never_too_early(lateness_ms: list[int], share: float) -> None:
    quantile_ms = counted(*lateness_ms).quantile_ms(share)
    assert sum(ms <= quantile_ms for ms in lateness_ms) >= share * len(lateness_ms)
    true_ms = sorted(lateness_ms)[math.ceil(share * len(lateness_ms)) - 1]
    assert true_ms <= quantile_ms <= max(lateness_ms)


@given(st.lists(st.lists(st.integers(0, 10**9))))
def test_parts_add_up_to_the_whole(parts: list[list[int]]) -> None:
    assert add_up(counted(*part) for part in parts) == counted(*(ms for part in parts for ms in part))


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999.9, "999 ms"),
        (1_000, "1.0 s"),
        (59_999, "59.9 s"),
        (60_000, "1 min 0 s"),
        (3_599_999, "59 min 59 s"),
        (3_600_000, "1 h 0 min"),
        (86_399_999, "23 h 59 min"),
        (86_400_000, "1 d 0 h"),
        (31_622_400_000, "366 d 0 h"),
    ],
)
def test_a_time_is_shown_in_the_unit_that_suits_it(ms: float, text: str) -> None:
    assert span_text(ms) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 messages"), (1, "1 message"), (2_000, "2,000 messages")])
def test_a_count_has_its_noun(number: int, text: str) -> None:
    assert count_text(number, "message") == text
    assert count_text(number, "batch", "batches") == text.replace("messages", "batches").replace("message", "batch")


def test_a_histogram_is_shown_as_three_numbers() -> None:
    assert str(counted(*[1] * 60, *[4] * 40)) == "p50 1 ms, p99 4 ms, max 4 ms"
