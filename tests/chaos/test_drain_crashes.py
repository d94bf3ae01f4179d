"""Drain loops as users run them, killed, stopped and told to end at every point of a claim, while others live on.

Leases are long, so that a busy machine costs no claim; those of a loop that was hit are ended at the server.
"""

import threading
from collections.abc import Callable

import pytest

from tests.chaos.drain_history import KILLED, STOPPED, History
from tests.chaos.drain_rounds import run_round
from tests.chaos.drain_scenario import CLAIM_LIMIT, FIRST_LINES, MESSAGES, DrainScenario, OneTimeFault, when_claimed
from tests.chaos.proxy import WAIT_SEC, Fault, after, before

LEASE_SEC = 5.0  # to its end it is waited for; a loop writes its first lines within milliseconds
EVER = float("inf")

# Where a loop is hit: the script that it calls then, and how the call meets what happens to the loop.
POINTS: dict[str, tuple[str, Callable[[Callable[[], object]], Fault]]] = {
    "before its claim is at the server": ("claim", before),
    "when its claim is made, the reply not read": ("claim", when_claimed),
    "when all is shown, the acknowledgement not at the server": ("ack", before),
    "when it is acknowledged, the reply not read": ("ack", after),
}


@pytest.mark.parametrize("scenario", [1, 3], indirect=True)
def test_killed_at_every_point_nothing_is_lost_and_only_what_was_shown_comes_again(scenario: DrainScenario) -> None:
    """Of three shards a loop may have a claim each, whose points are not in step."""
    others = [scenario.start(), scenario.start()]
    stuck = scenario.stuck_loop()
    scenario.kill(stuck)
    scenario.end_leases(stuck)
    for script, fault in POINTS.values():
        kill_at(scenario, script, fault)
    scenario.wait_until_shown()
    history = scenario.settle()
    seen, unfinished = history.seen(), unfinished_of(history)
    assert seen[KILLED] == len(POINTS) + 1
    if scenario.shards == 1:
        assert len(unfinished) == 3, "a claim that never was, and one that is acknowledged, wait for no lease"
    assert 3 <= len(unfinished) <= (len(POINTS) + 1) * scenario.shards
    assert seen["taken back"] == sum(len(rows) for rows in unfinished)
    shown = {shown.key for shown in history.shown}
    again = [len(shown.intersection(rows)) for rows in unfinished]
    assert seen["redelivered"] == sum(again)
    if scenario.shards == 1:
        assert sorted(map(bool, again)) == [False, True, True], "one was hit before it showed anything"
    assert {*map(bool, again)} == {False, True}
    assert all(other.out for other in others)


def unfinished_of(history: History) -> list[list[tuple[int, str, int]]]:
    """The messages of claims that their holders neither acknowledged nor gave back, as they would be shown."""
    claims = [claim for claim in history.log.claims.values() if not claim.is_finished]
    return [[(claim.loop, row.id, row.attempt) for row in claim.rows] for claim in claims]


def kill_at(scenario: DrainScenario, script: str, fault: Callable[[Callable[[], object]], Fault]) -> None:
    loop = scenario.start()
    kill = OneTimeFault(lambda: scenario.kill(loop))
    scenario.trap(loop, script, fault(kill), last=EVER)
    with scenario.alone(loop):
        scenario.send(MESSAGES)
        kill.wait()
    scenario.end_leases(loop)


def test_killed_when_it_gives_back_the_rest_is_shown_once(scenario: DrainScenario) -> None:
    """What was shown is acknowledged by then."""
    scenario.start()
    for fault in (before, after):
        loop = scenario.stuck_loop()
        kill = OneTimeFault(lambda loop=loop: scenario.kill(loop))
        scenario.trap(loop, "release", fault(kill))
        loop.process.terminate()
        kill.wait()
        scenario.end_leases(loop)
    scenario.wait_until_shown()
    seen = scenario.settle().seen()
    assert (seen[KILLED], seen["redelivered"]) == (2, 0)
    assert seen["taken back"] > 0


def test_stopped_with_all_shown_its_late_acknowledgement_is_refused_and_harms_nobody(scenario: DrainScenario) -> None:
    """It comes while another loop has shown the same messages and is about to acknowledge them."""
    other = scenario.start()
    # Its answer must be there before it gives up: having asked twice within its lease, it would believe itself acknowledged.
    loop = scenario.start(DUETIME_REDIS_REPLY_TIMEOUT_MS=str(round(10 * WAIT_SEC * 1000)))
    late, held = threading.Event(), threading.Event()
    stop = OneTimeFault(lambda: scenario.stop(loop), cuts=False)
    scenario.trap(loop, "ack", before(lambda: (stop(), late.wait(WAIT_SEC))))
    with scenario.alone(loop):
        scenario.send(CLAIM_LIMIT, dues_ms=[-5_000])
        stop.wait()
    shown = scenario.trap(other, "ack", before(lambda: held.wait(WAIT_SEC)))
    scenario.end_leases(loop)
    shown.wait()
    scenario.go_on(loop)
    late.set()
    loop.wait_for_line(f"{CLAIM_LIMIT} messages took longer than the lease, so they will be delivered again")
    assert scenario.in_flight() == 1
    held.set()
    scenario.wait_until_shown()
    seen = scenario.settle().seen()
    assert (seen[STOPPED], seen["late"]) == (1, 1)
    assert seen["redelivered"] == seen["taken back"] == CLAIM_LIMIT


def test_stopped_in_the_middle_it_shows_no_more_and_its_late_acknowledgement_is_refused(
    scenario: DrainScenario,
) -> None:
    other = scenario.start()
    loop = scenario.stuck_loop(LEASE_SEC)
    scenario.stop(loop)
    other.wait_for(lambda _: len(other.out) == MESSAGES, "takeover of everything")
    scenario.go_on(loop)
    loop.wait_for_line("messages took longer than the lease, so they will be delivered again")
    history = scenario.settle()
    seen, [rows] = history.seen(), unfinished_of(history)
    assert (seen[STOPPED], seen["late"]) == (1, 1)
    assert seen["taken back"] == len(rows)
    assert FIRST_LINES <= seen["redelivered"] < len(rows), "what it had started when it was stopped, and no more"


def test_told_to_end_it_gives_back_at_once_what_is_not_shown(scenario: DrainScenario) -> None:
    loop = scenario.stuck_loop()
    assert scenario.in_flight() == 1
    loop.process.terminate()
    loop.process.wait(WAIT_SEC)
    assert scenario.in_flight() == 0
    loop.go_on.set()
    history = scenario.settle()
    first, *_ = history.log.claims.values()
    assert first.given_back
    assert FIRST_LINES <= first.acknowledged < len(first.rows)
    assert {shown.attempt for shown in history.shown} == {1}, "what was not shown was no attempt"
    assert history.seen()["redelivered"] == 0


def test_told_to_end_with_all_shown_it_acknowledges_first(scenario: DrainScenario) -> None:
    loop = scenario.start()
    shown = scenario.trap(loop, "ack", before(loop.process.terminate))
    scenario.send(CLAIM_LIMIT)
    shown.wait()
    assert loop.end() == 0
    assert scenario.in_flight() == 0
    history = scenario.settle()
    assert history.seen()["redelivered"] == 0
    assert unfinished_of(history) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_faults_that_a_seed_draws_lose_nothing(seed: int) -> None:
    """``python -m tests.chaos.long --job drain`` goes on with other seeds."""
    assert run_round(seed) > 0
