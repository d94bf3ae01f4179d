"""Drain loops as users run them, and a server that loses their calls, is in a mood, does not answer, or dies.

None of it may cost a lease or repeat a message, and each loop says once that it waits, and once that it goes on.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import pytest
import redis

from tests.chaos.drain_history import AGAIN, ENDS, SERVER_KILLED, UNREACHABLE, WAITS, Interruption
from tests.chaos.drain_scenario import CLAIM_LIMIT, DrainScenario, Loop, OneTimeFault, clock, when_claimed
from tests.chaos.proxy import (
    WAIT_SEC,
    Exchange,
    Fault,
    after,
    before,
    lose_reply,
    naming,
    refuse,
    reply_with,
    running,
    swallow,
)
from tests.e2e.commands import Checkout
from tests.servers import DURABLE, real_server

EVER = float("inf")

NO_ANSWER = f"{WAITS}: Redis does not answer"
SOON = {"DUETIME_REDIS_REPLY_TIMEOUT_MS": "500"}
# What the server says, and what the loop makes of it.
MOODS = {
    b"-LOADING Redis is loading the dataset in memory": "Redis is loading the dataset in memory",
    b"-READONLY You can't write against a read only replica.": "You can't write against a read only replica",
    b"-OOM command not allowed when used memory > 'maxmemory'.": "used memory > 'maxmemory'",
    b"-BUSY Redis is busy running a script.": "BUSY Redis is busy running a script",
    b"-MISCONF Errors writing to the AOF file: No space left on device": "MISCONF Errors writing to the AOF file",
    b"-CLUSTERDOWN The cluster is down": "The cluster is down",
    b"-MASTERDOWN Link with MASTER is down": "Link with MASTER is down",
    b"-NOREPLICAS Not enough good replicas to write.": "NOREPLICAS Not enough good replicas",
    b"-TRYAGAIN Multiple keys request during rehashing of slot": "Multiple keys request during rehashing of slot",
    b"-UNBLOCKED instance state changed (master -> replica?)": "UNBLOCKED instance state changed",
    b"-NOSCRIPT No matching script. Please use EVAL.": "Redis forgets its scripts as soon as it has them",
}


def expect_one_outage(loop: Loop, reason: str = NO_ANSWER) -> None:
    assert loop.count(reason) == loop.count(WAITS) == loop.count(AGAIN) == 1, loop.screen()


@pytest.mark.parametrize(
    ("script", "fault"),
    [("claim", when_claimed), ("claim", before), ("ack", after), ("ack", before)],
    ids=["claim made", "claim not made", "acknowledged", "not acknowledged"],
)
def test_a_call_that_is_lost_costs_nothing(
    scenario: DrainScenario, script: str, fault: Callable[[Callable[[], object]], Fault]
) -> None:
    loop = scenario.start()
    lost = OneTimeFault()
    scenario.trap(loop, script, fault(lost), last=EVER)
    scenario.send(CLAIM_LIMIT)
    lost.wait()
    scenario.wait_until_shown()
    seen = scenario.settle().seen()
    expect_one_outage(loop)
    assert seen["redelivered"] == seen["taken back"] == 0


@pytest.mark.parametrize("script", ["ack", "release"])
@pytest.mark.parametrize("fault", [lose_reply, refuse], ids=["executed", "not executed"])
def test_told_to_end_and_unheard_it_ends_and_says_what_that_means(
    scenario: DrainScenario, script: str, fault: Fault
) -> None:
    """What it could not acknowledge or give back comes after the lease; what it knows to be acknowledged counts."""
    loop = scenario.stuck_loop()
    unheard = scenario.trap(loop, script, fault)
    begun_ms = clock.wall_ms()
    loop.process.terminate()
    unheard.wait()
    loop.process.wait(WAIT_SEC)
    loop.go_on.set()
    scenario.end_leases(loop)
    is_given_back = script == "release" and fault is lose_reply
    if not is_given_back:
        scenario.history.interruptions.append(Interruption(UNREACHABLE, begun_ms, clock.wall_ms(), loop.number))
    seen = scenario.settle().seen()
    assert loop.count(ENDS) == 1
    shown = len(loop.out) - loop.is_torn
    assert loop.count(f"delivered {shown if script == 'release' else 0} messages") == 1
    assert seen["redelivered"] == (shown if (script, fault) == ("ack", refuse) else 0)
    assert (seen["taken back"] == 0) == is_given_back


@pytest.mark.parametrize("script", ["claim", "ack"])
def test_every_mood_of_the_server_is_waited_for(scenario: DrainScenario, script: str) -> None:
    loop = scenario.start()
    for number, (said, reason) in enumerate(MOODS.items(), start=1):
        moody = scenario.trap(loop, script, reply_with(said + b"\r\n"), last=4 if b"NOSCRIPT" in said else 2)
        scenario.send(CLAIM_LIMIT // 2)
        moody.wait()
        loop.wait_for(lambda _, number=number: loop.count(AGAIN) == number, "answer again")
        scenario.wait_until_shown()
        assert (loop.count(WAITS), loop.count(reason)) == (number, 1), loop.screen()
    assert scenario.settle().seen()["redelivered"] == 0


def test_a_server_that_keeps_no_script_is_not_asked_without_pause(scenario: DrainScenario) -> None:
    asked_sec: list[float] = []
    enough = threading.Event()

    def forget(exchange: Exchange) -> None:
        asked_sec.append(monotonic())
        if len(asked_sec) == 12:
            enough.set()
        reply_with(b"-NOSCRIPT No matching script. Please use EVAL.\r\n")(exchange)

    loop = scenario.start()
    scenario.proxy.trap(running("claim"), forget, last=EVER)
    scenario.send(CLAIM_LIMIT)
    assert enough.wait(WAIT_SEC), "it gave up"
    # Each try calls twice; the waits are half of 50, 100, 200, 400 and 800 ms at least, and the wake_listener may end two of them.
    assert asked_sec[11] - asked_sec[0] >= (50 + 100 + 200) / 2 / 1000
    scenario.proxy.clear()
    scenario.wait_until_shown()
    scenario.settle()
    expect_one_outage(loop, "Redis forgets its scripts as soon as it has them")


@pytest.mark.parametrize("script", ["claim", "ack"])
def test_a_connection_that_only_the_loop_believes_in_is_given_up(scenario: DrainScenario, script: str) -> None:
    loop = scenario.start(**SOON)
    swallowed = scenario.trap(loop, script, swallow)
    scenario.send(CLAIM_LIMIT)
    swallowed.wait()
    scenario.wait_until_shown()
    assert scenario.settle().seen()["redelivered"] == 0
    expect_one_outage(loop)


def test_a_wake_listener_that_is_never_confirmed_holds_nothing_up(scenario: DrainScenario) -> None:
    swallowed = scenario.proxy.trap(naming("SUBSCRIBE"), swallow, last=EVER)
    loop = scenario.start(**SOON)
    swallowed.wait()
    scenario.send(CLAIM_LIMIT)
    scenario.wait_until_shown()
    scenario.settle()
    assert loop.count(WAITS) == 0


@contextmanager
def busy_script(scenario: DrainScenario) -> Iterator[None]:
    """Let another client run a script without end, and kill it when the block ends."""
    client = scenario.server.client()
    client.config_set("busy-reply-threshold", 20)

    def run() -> None:
        with pytest.raises(redis.exceptions.ResponseError, match="killed"):
            scenario.server.client().eval("while true do end", 0)

    script = threading.Thread(target=run)
    script.start()
    try:
        yield
    finally:
        client.script_kill()
        script.join(WAIT_SEC)


@contextmanager
def paused(scenario: DrainScenario) -> Iterator[None]:
    client = scenario.server.client()
    client.client_pause(round(WAIT_SEC * 1000), all=False)  # what may write; the end of the pause must be heard
    try:
        yield
    finally:
        client.client_unpause()


@pytest.mark.parametrize(
    ("away", "reason"), [(busy_script, f"{WAITS}: Redis can't do it now (BUSY"), (paused, NO_ANSWER)]
)
def test_a_server_that_is_held_up_by_others_is_waited_for(
    scenario: DrainScenario, away: Callable[[DrainScenario], Iterator[None]], reason: str
) -> None:
    """What it was asked meanwhile and is given up, it may still do when it is back."""
    loop = scenario.start(**SOON)
    scenario.send(CLAIM_LIMIT, dues_ms=[0])
    scenario.wait_until_shown()
    scenario.send(CLAIM_LIMIT, dues_ms=[700])
    with away(scenario):
        loop.wait_for_line(reason)
    scenario.wait_until_shown()
    assert scenario.settle().seen()["redelivered"] == 0
    expect_one_outage(loop, reason)


def test_a_server_that_dies_again_and_again_under_load_repeats_nothing(scenario: DrainScenario) -> None:
    """What it says is on its disk; a loop whose call it may have executed or not finds out which."""
    loops = [scenario.start() for _ in range(3)]
    for loop in loops:
        scenario.wait_until_up(loop)  # one that is starting ends, and says why
    with scenario.load():
        for script, fault in (("claim", when_claimed), ("ack", after), ("ack", before)):
            scenario.wait_for_more(CLAIM_LIMIT)
            restart = OneTimeFault(scenario.restart_server)
            scenario.trap(loops[0], script, fault(restart), last=EVER)
            restart.wait()
        scenario.wait_for_more(CLAIM_LIMIT)
        scenario.restart_server()
        scenario.wait_for_more(CLAIM_LIMIT)
    scenario.wait_until_shown()
    history = scenario.settle()
    assert history.seen()[SERVER_KILLED] == 4
    assert history.seen()["outages"] >= 4
    assert {shown.attempt for shown in history.shown} == {1}
    assert not any(loop.count("longer than the lease") for loop in loops), "nobody took what was acknowledged for late"


def test_scripts_that_are_flushed_under_load_are_taught_again(scenario: DrainScenario) -> None:
    loops = [scenario.start() for _ in range(2)]
    with scenario.load():
        for _ in range(10):
            scenario.wait_for_more(20)
            scenario.server.client().script_flush()
    scenario.wait_until_shown()
    seen = scenario.settle().seen()
    assert seen["scripts forgotten"] >= 10
    assert (seen["redelivered"], seen["taken back"]) == (0, 0)
    assert all(loop.out for loop in loops)


@pytest.mark.slow
def test_a_server_that_takes_long_to_load_is_waited_for(checkout: Checkout) -> None:
    with real_server(*DURABLE, "--key-load-delay", "100") as server:
        scenario = DrainScenario(checkout, server)
        keys = server.client().pipeline(transaction=False)
        for number in range(10_000):
            keys.set(f"other-{number}", "x")
        keys.execute()
        loop = scenario.start()
        scenario.send(CLAIM_LIMIT, dues_ms=[0, 1_000])
        scenario.wait_for_more(1)
        scenario.restart_server()
        scenario.wait_until_shown()
        assert scenario.was_said(b"-LOADING")
        assert scenario.settle().seen()["redelivered"] == 0
        expect_one_outage(loop)
        scenario.close()
