"""The line of a terminal at rest: what it says, and that nothing is ever mixed with it."""

import logging
import os

import pytest

from pipeline.core.errors import StoreUnavailable
from pipeline.drain.rest_line import COMMANDS_A_SECOND, FREE_MS, QUIET_MS, ClearedSink, RestLine, StreamTerminal
from pipeline.drain.totals import Totals
from pipeline.store.outlook import Waiting
from tests.drain.screen import Screen
from tests.drain.test_loop import ManualClock, RecordingSink
from tests.drain.test_totals import delivery


class Resting:
    """A line on a screen, a clock that the test moves, and a server that is asked what waits."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.totals = Totals()
        self.screen = Screen()
        self.waiting: Waiting | None = Waiting(1_234, True, 3)
        self.looks = 0
        self.line = RestLine(self.screen, self.totals, self.look, self.clock)

    def look(self) -> Waiting:
        self.looks += 1
        if self.waiting is None:
            raise StoreUnavailable("Redis does not answer.")
        return self.waiting

    def rest(self, ms: float = QUIET_MS, free_ms: float = 1_000, next_ms: float | None = 4_200) -> str:
        self.clock.advance_ms(ms)
        self.line(free_ms, next_ms)
        return self.screen.rows[-1]


@pytest.fixture
def resting() -> Resting:
    return Resting()


def test_it_says_what_waits_and_what_was_done(resting: Resting) -> None:
    resting.totals.delivered = 99
    resting.totals.count_lateness([delivery("a", 998)], 1_000)
    assert resting.rest() == "waiting 1,234 · next due in 4.2 s · delivered 99 · lateness p99 2 ms"


def test_it_leaves_out_what_there_is_not(resting: Resting) -> None:
    resting.waiting = None
    assert resting.rest(next_ms=None) == "delivered 0"


def test_more_buckets_than_are_counted_hold_more_than_is_said(resting: Resting) -> None:
    resting.waiting = Waiting(5_000, False, 1_001)
    assert resting.rest().startswith("waiting 5,000+ · ")


def test_it_comes_when_nothing_was_printed_for_a_second(resting: Resting) -> None:
    assert resting.rest(QUIET_MS - 1) == ""
    assert resting.rest(1) != ""
    resting.line.erase()
    assert resting.rest(QUIET_MS - 1) == ""
    assert resting.rest(1) != ""


def test_it_is_not_drawn_when_something_is_due_at_once(resting: Resting) -> None:
    assert resting.rest(free_ms=FREE_MS - 1) == ""
    assert resting.looks == 0


def test_it_goes_on_in_its_place(resting: Resting) -> None:
    resting.rest()
    resting.rest(next_ms=None)
    assert resting.screen.rows == ["waiting 1,234 · delivered 0"]


def test_it_makes_room_for_messages_and_log_lines(resting: Resting) -> None:
    sink = RecordingSink(resting.clock)
    sink.on_deliver = lambda: resting.screen.show("a message\r\n")
    resting.rest()
    ClearedSink(sink, resting.line).deliver([delivery("a")], lambda: True, lambda: True)
    assert resting.screen.rows == ["a message", ""]
    resting.rest()
    assert resting.line.filter(logging.LogRecord("", 0, "", 0, "", (), None)) is True
    resting.screen.show("a log line\r\n")
    assert resting.screen.rows == ["a message", "a log line", ""]


def test_it_stays_within_a_row_of_the_terminal_as_it_is_now(resting: Resting) -> None:
    resting.screen.width = 20
    assert resting.rest() == "waiting 1,234 · nex"
    resting.screen.width = 30
    assert len(resting.rest()) == 29


def test_what_a_narrower_terminal_broke_in_two_is_erased_whole(resting: Resting) -> None:
    resting.rest()
    resting.screen.rows = [resting.screen.rows[0][:20], resting.screen.rows[0][20:]]  # the cursor stays where it was
    resting.line.erase()
    assert resting.screen.rows == [""]


def test_a_terminal_that_is_stopped_is_left_alone_and_cleared_later(resting: Resting) -> None:
    shown = resting.rest()
    resting.screen.is_stopped = True
    resting.line.erase()
    resting.rest(next_ms=None)
    assert resting.screen.rows == [shown]
    resting.screen.is_stopped = False
    resting.line.erase()
    assert resting.screen.rows == [""]


def test_what_is_not_shown_is_not_erased(resting: Resting) -> None:
    resting.screen.show("somebody's prompt")
    resting.line.erase()
    resting.rest()
    resting.line.erase()
    resting.screen.show("$ ")
    resting.line.erase()
    assert resting.screen.rows == ["$ "]


@pytest.mark.parametrize("commands", [1, 2, 36])
def test_looks_cost_an_idle_loop_less_than_a_command_a_second(resting: Resting, commands: int) -> None:
    resting.waiting = Waiting(1, True, commands)
    seconds = 1_000
    for _ in range(seconds):
        resting.rest(1_000)
    asked = resting.looks * commands
    assert COMMANDS_A_SECOND * seconds / 2 < asked <= COMMANDS_A_SECOND * seconds + commands


def test_it_looks_again_after_deliveries(resting: Resting) -> None:
    resting.waiting = Waiting(10, True, 1_000)
    resting.rest()
    resting.waiting = Waiting(7, True, 1_000)
    assert resting.rest().startswith("waiting 10 ")
    resting.totals.delivered = 3
    assert resting.rest().startswith("waiting 7 ")
    resting.rest()
    assert resting.looks == 2


def test_a_server_that_does_not_answer_is_not_asked_at_each_turn(resting: Resting) -> None:
    resting.waiting = None
    for _ in range(10):
        resting.rest(100)
    assert resting.looks == 1


def test_a_stream_that_is_no_terminal_of_ours_gets_nothing() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as seen, os.fdopen(writer, "w") as stream:
        assert StreamTerminal(stream).put("text") is False
        stream.close()
        assert seen.read() == b""
    controller, terminal = os.openpty()  # a terminal, but of no session
    with os.fdopen(controller, "rb"), os.fdopen(terminal, "w") as stream:
        assert StreamTerminal(stream).put("text") is False
