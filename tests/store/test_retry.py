"""Waiting for a server, without one."""

import pytest

from pipeline.core.errors import StoreUnavailable
from pipeline.store.retry import retry_until_available
from tests.clock import ManualClock


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
    assert retry_until_available(server.call, server.wait, server.clock, lambda: 1.0) == "answer"
    assert server.waits == [50, 100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]


def test_an_outage_is_told_at_its_start_once_a_minute_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(failures=40)  # some two and a half minutes
    retry_until_available(server.call, server.wait, server.clock, lambda: 1.0)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["waiting for Redis: Redis does not answer (refused)."] * 3 + ["Redis answers again"]


def test_an_answer_at_once_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(failures=0)
    retry_until_available(server.call, server.wait, server.clock, lambda: 1.0)
    assert (caplog.records, server.waits) == ([], [])


def test_a_stop_ends_the_wait() -> None:
    server = Server(failures=9)
    with pytest.raises(StoreUnavailable):
        retry_until_available(server.call, server.wait, server.clock, lambda: 1.0, lambda: len(server.waits) == 2)
    assert len(server.waits) == 2
