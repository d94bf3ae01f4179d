"""When a loop tells what it did, and when it leaves it for later."""

import pytest

from pipeline.core.errors import StoreUnavailable
from pipeline.drain.share import BUSY_MS, FREE_MS, SHARE_MS, SIGN_OF_LIFE_MS, Share
from pipeline.drain.totals import Totals
from pipeline.store.drains import DrainProgress
from tests.drain.test_loop import START_MS, ManualClock


class Sharing:
    """A share whose clock the test moves, and what it told."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.totals = Totals()
        self.told: list[DrainProgress] = []
        self.tries = 0
        self.is_down = False
        self.share = Share(self.write, self.totals, self.clock, "host:1:a")

    def write(self, progress: DrainProgress) -> None:
        self.tries += 1
        if self.is_down:
            raise StoreUnavailable("Redis does not answer.")
        self.told.append(progress)

    def after(self, ms: float, free_ms: float = FREE_MS) -> int:
        """Return how many times it tried, ``ms`` later."""
        self.clock.advance_ms(ms)
        before = self.tries
        self.share(free_ms, free_ms)
        return self.tries - before


@pytest.fixture
def sharing() -> Sharing:
    return Sharing()


def test_it_tells_at_once_that_it_lives_and_then_what_is_new(sharing: Sharing) -> None:
    assert sharing.after(0) == 1
    sharing.totals.delivered = 3
    assert sharing.after(SHARE_MS) == 1
    assert [(told.delivered, told.started_ms, told.seen_ms) for told in sharing.told] == [
        (0, START_MS, START_MS),
        (3, START_MS, START_MS + SHARE_MS),
    ]


def test_it_tells_at_most_once_a_second(sharing: Sharing) -> None:
    sharing.after(0)
    sharing.totals.delivered = 3
    assert sharing.after(SHARE_MS - 1) == 0
    assert sharing.after(1) == 1


def test_with_nothing_new_it_only_gives_a_sign_of_life(sharing: Sharing) -> None:
    sharing.after(0)
    assert [sharing.after(SIGN_OF_LIFE_MS / 4) for _ in range(8)] == [0, 0, 0, 1] * 2


def test_it_waits_for_a_moment_that_is_free(sharing: Sharing) -> None:
    sharing.after(0)
    sharing.totals.delivered = 3
    assert sharing.after(SHARE_MS, free_ms=FREE_MS - 1) == 0
    assert sharing.after(1) == 1


def test_a_loop_that_is_never_free_tells_it_every_ten_seconds(sharing: Sharing) -> None:
    sharing.after(0)
    told = []
    for _ in range(20):
        sharing.totals.delivered += 1
        told.append(sharing.after(BUSY_MS / 5, free_ms=0))
    assert told == [0, 0, 0, 0, 1] * 4


def test_what_could_not_be_told_is_told_ten_seconds_later(sharing: Sharing) -> None:
    sharing.is_down = True
    assert sharing.after(0) == 1
    sharing.is_down = False
    assert sharing.after(BUSY_MS - 1) == 0
    assert sharing.after(1) == 1
    sharing.totals.errors["TimeoutError"] = 1
    assert sharing.after(SHARE_MS) == 1  # all is as before
    assert sharing.told[-1].errors == {"TimeoutError": 1}


@pytest.mark.parametrize("name", ["claimed", "delivered", "stale", "repeated", "reclaimed"])
def test_anything_that_is_counted_is_new(sharing: Sharing, name: str) -> None:
    sharing.after(0)
    setattr(sharing.totals, name, 1)
    assert sharing.after(SHARE_MS) == 1
    assert getattr(sharing.told[-1], name) == 1
