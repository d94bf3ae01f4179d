"""Waiting for a server, without one."""

import pytest

from pipeline.core.errors import StoreUnavailable
from pipeline.store.patience import call_patiently


class ManualClock:
    def __init__(self) -> None:
        self.now_ms = 0.0

    def wall_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> float:
        return self.now_ms


class Server:
    """Answers after some calls; waiting for it moves the clock."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.clock = ManualClock()
        self.waits: list[float] = []

    def call(self) -> str:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("Redis does not answer (refused).")
        return "answer"

    def wait(self, ms: float) -> None:
        self.waits.append(ms)
        self.clock.now_ms += ms


def test_a_call_is_made_until_it_is_answered_with_growing_waits() -> None:
    server = Server(failures=9)
    assert call_patiently(server.call, server.wait, server.clock, lambda: 1.0) == "answer"
    assert server.waits == [50, 100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]


def test_an_outage_is_told_at_its_start_once_a_minute_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(failures=40)  # some two and a half minutes
    call_patiently(server.call, server.wait, server.clock, lambda: 1.0)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["waiting for Redis: Redis does not answer (refused)."] * 3 + ["Redis answers again"]


def test_an_answer_at_once_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(failures=0)
    call_patiently(server.call, server.wait, server.clock, lambda: 1.0)
    assert (caplog.records, server.waits) == ([], [])


def test_a_stop_ends_the_wait() -> None:
    server = Server(failures=9)
    with pytest.raises(StoreUnavailable):
        call_patiently(server.call, server.wait, server.clock, lambda: 1.0, lambda: len(server.waits) == 2)
    assert len(server.waits) == 2
