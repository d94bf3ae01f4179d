"""The tests of drain loops notice what they are there for: each protection, taken out of the copy that runs, is missed."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.chaos import drain_scenario
from tests.chaos import test_drain_connections as connections
from tests.chaos import test_drain_crashes as crashes
from tests.chaos.drain_scenario import DrainScenario, when_claimed
from tests.chaos.proxy import after
from tests.planting import replace_once

WAIT_SEC = 10.0  # what a fault keeps from happening need not be waited for any longer
TICK, LOOP = "pipeline/drain/tick.py", "pipeline/drain/loop.py"
DELIVER = "count = self._sink.deliver(messages,"
WRITE = "written = self._write(data, may_wait)"
BUFFERED = 'late, self._late = getattr(self, "_late", b""), data'
SUBSCRIBED = "self._pubsub.subscribe(*self._channels)"

# The fault, its place, old and new text, the test that fails, and how.
PLANTED: dict[str, tuple[str, str, str, Callable[[DrainScenario], None], str]] = {
    "messages are acknowledged before they are shown": (
        TICK,
        DELIVER,
        f"self._store.ack(claim, len(messages), []); {DELIVER}",
        crashes.test_killed_at_every_point_nothing_is_lost_and_only_what_was_shown_comes_again,
        "seconds: everything is shown",
    ),
    "what is shown stays in a buffer": (
        "pipeline/sinks/screen.py",
        WRITE,
        f"{BUFFERED}; self._write(late, may_wait); written = len(self._late)",
        crashes.test_killed_at_every_point_nothing_is_lost_and_only_what_was_shown_comes_again,
        "seconds: everything is shown",
    ),
    "what is not shown is not given back": (
        TICK,
        "if not settled[-1].is_late and count < len(messages):",
        "if False:",
        crashes.test_told_to_end_it_gives_back_at_once_what_is_not_shown,
        "assert 1 == 0",
    ),
    "messages are shown after the lease": (
        TICK,
        "return self._clock.monotonic_ms() < self._deadline_ms",
        "return True",
        crashes.test_stopped_in_the_middle_it_shows_no_more_and_its_late_acknowledgement_is_refused,
        "what it had started when it was stopped, and no more",
    ),
    "nobody takes back what a dead loop held": (
        LOOP,
        "        if tick.is_lease_over:",
        "        if False:",
        crashes.test_killed_when_it_gives_back_the_rest_is_shown_once,
        "seconds: everything is shown",
    ),
    "a claim is asked for again under another name": (
        TICK,
        "return self.store.claim(self.name)",
        'return self.store.claim(f"{self.name}{self.asked_ms}")',
        partial(connections.test_a_call_that_is_lost_costs_nothing, script="claim", fault=when_claimed),
        "seconds: everything is shown",
    ),
    "an acknowledgement that was unheard counts as late": (
        TICK,
        "held = held or (call.tries > 1 and call.lease.is_running())",
        "held = bool(held)",
        partial(connections.test_a_call_that_is_lost_costs_nothing, script="ack", fault=after),
        r"exits: \d+ says \d+ messages delivered and acknowledged 40",
    ),
    "a loop waits for the wake_listener's confirmation": (
        "pipeline/store/wakeup.py",
        SUBSCRIBED,
        f"{SUBSCRIBED}; self._pubsub.get_message(timeout=None)",
        connections.test_a_wake_listener_that_is_never_confirmed_holds_nothing_up,
        "seconds: everything is shown",
    ),
    "a loop says at every try that it waits": (
        "pipeline/store/retry.py",
        "if failures == 1 or",
        "if True or",
        partial(connections.test_every_mood_of_the_server_is_waited_for, script="ack"),
        r"assert \(2, 2\) == \(1, 1\)",
    ),
    "a loop gives up on a cluster that is down": (
        "pipeline/store/connection.py",
        "    redis.exceptions.ClusterDownError,\n",
        "",
        partial(connections.test_every_mood_of_the_server_is_waited_for, script="claim"),
        "Redis answered with an error that is not expected here: The cluster is down",
    ),
}


@pytest.mark.planted
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_noticed(name: str, scenario: DrainScenario, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old, new, test, said = PLANTED[name]
    planted = scenario.checkout.root / path
    planted.write_text(replace_once(planted.read_text(encoding="utf-8"), old, new, name), encoding="utf-8")
    monkeypatch.setattr(drain_scenario, "WAIT_SEC", WAIT_SEC)
    with pytest.raises(AssertionError, match=said):
        test(scenario)
