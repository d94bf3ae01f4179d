"""A thread for what a job does beside its work."""

import logging
import threading
from collections.abc import Callable, Iterator
from math import inf

import pytest

from pipeline.core.background import Background, made_ahead
from pipeline.runtime.process import wait_until


class CountingTask:
    """A task that waits for the test to let it go on."""

    def __init__(self, wait_ms: float) -> None:
        self.wait_ms = wait_ms
        self.steps = 0
        self.changed = threading.Condition()
        self.fail: Callable[[], None] = lambda: None

    def step(self) -> float:
        with self.changed:
            self.steps += 1
            self.changed.notify_all()
        self.fail()
        return self.wait_ms

    def wait_for(self, steps: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.steps >= steps, 10)


def test_a_step_lets_each_task_have_its_step_and_says_when_the_next_is_due() -> None:
    tasks = [CountingTask(300), CountingTask(20), CountingTask(inf)]
    assert Background(tasks).step() == 20
    assert [task.steps for task in tasks] == [1, 1, 1]
    assert Background([]).step() == inf


def test_its_thread_steps_when_it_is_time_and_when_it_is_woken_and_stops_at_once() -> None:
    timed, requested = CountingTask(1), CountingTask(inf)
    for task in (timed, requested):
        background = Background([task])
        background.start()
        task.wait_for(1)
        if task is requested:
            background.wake()
        task.wait_for(2)
        background.stop()
        steps = task.steps
        assert not [thread for thread in threading.enumerate() if thread.name == "background"]
        assert task.steps == steps


def test_an_error_that_nobody_expected_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    task = CountingTask(inf)

    def fail() -> None:
        raise ValueError("odd")

    task.fail = fail
    background = Background([task])
    with caplog.at_level(logging.WARNING):
        background.start()
        task.wait_for(1)
        background.wake()
        task.wait_for(2)
        background.stop()
    assert "work in the background failed and goes on in a minute: ValueError: odd" in caplog.text


def test_items_are_made_one_ahead_in_order_and_an_error_comes_in_its_place() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(3):
            made.append(number)
            yield number
        raise ValueError("the end")

    found = made_ahead(items())
    assert next(found) == 0
    assert wait_until(lambda: made == [0, 1], 10)
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(ValueError, match="the end"):
        next(found)


def test_what_is_made_ahead_has_ended_when_it_is_closed() -> None:
    made: list[int] = []
    found = made_ahead(made.append(number) for number in range(9))
    next(found)
    found.close()
    assert made == [0, 1]
