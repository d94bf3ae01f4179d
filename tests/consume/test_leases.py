"""Leases that are renewed while a handler works: the renewing thread is real, the time that it goes by is the test's.

What a handler raises is a failure of its message: so handlers take notes, which are looked at afterwards.
"""

import threading
from typing import Any

import pytest

from pipeline.consume import leases
from pipeline.consume.consumer import Consumer
from pipeline.consume.handling import run
from pipeline.core.errors import StoreUnavailable
from pipeline.store.entries import Entry
from tests.consume.conftest import GROUP, SETTINGS, TOPIC, Stage
from tests.waiting import wait_until

LEASE_MS = SETTINGS.lease_sec * 1000
STEP_MS = 0.4 * LEASE_MS  # longer than a lease stays before it is renewed
SLOW_STEPS = 4


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the threads look all the time whether it is time to renew a lease."""
    monkeypatch.setattr(leases, "LOOK_SHARE", 1 / LEASE_MS)


def let_time_pass(stage: Stage, ms: float) -> None:
    """Let so much more time pass, here and for all leases on the server."""
    for stream in (stage.keys.stream(TOPIC), stage.keys.retry(TOPIC, GROUP)):
        for row in stage.client.xpending_range(stream, GROUP, "-", "+", 1_000):
            stage.client.xclaim(
                *(stream, GROUP, row["consumer"], 0, [row["message_id"]]),
                idle=int(row["time_since_delivered"] + ms),
                retrycount=row["times_delivered"],
                justid=True,
            )
    active = stage.keys.active(TOPIC, GROUP)
    if (left_ms := stage.client.pttl(active)) > 0:
        stage.client.pexpire(active, max(0, int(left_ms - ms)))  # 0 deletes it
    stage.clock.advance_ms(ms)


def work(stage: Stage, consumer: Consumer, steps: int = SLOW_STEPS) -> None:
    """Take so many steps of time, each of which makes a renewal due, and wait for it."""
    for _ in range(steps):
        let_time_pass(stage, STEP_MS)
        now_ms = stage.clock.monotonic_ms()
        wait_until(lambda now_ms=now_ms: (found := consumer._renewer._renewal) and found.asked_ms >= now_ms, "renewed")


def take(consumer: Consumer) -> list[str]:
    """Look for messages, those of silent consumers among them."""
    consumer._looked_ms = float("-inf")
    return [entry.body for entry in consumer.take()]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_handler_that_is_slower_than_its_lease_keeps_what_is_in_flight(stage: Stage, ordered: bool) -> None:
    handled: list[tuple[str, int]] = []
    others: list[str] = []
    busy = stage.open(ordered=ordered, stopping=lambda: len(handled) == 2 or bool(others))
    other = stage.open()

    def handler(entry: Entry) -> None:
        handled.append((entry.body, entry.attempt))
        work(stage, busy)
        others.extend(take(other))

    stage.send("a", "b")
    run(busy, handler)
    busy.close()
    assert (handled, others, busy.late_acks) == ([("a", 1), ("b", 1)], [], 0)
    assert stage.pending() == 0 and stage.dead() == []


def test_a_handler_that_works_for_too_long_loses_its_message(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    handled: list[str] = []
    others: list[list[str]] = []
    timeout_sec = SLOW_STEPS * STEP_MS / 1000
    busy = stage.open(stopping=lambda: bool(handled), settings={"handler_timeout_sec": timeout_sec})
    other = stage.open()

    def handler(entry: Entry) -> None:
        handled.append(entry.body)
        work(stage, busy)
        others.append(take(other))
        let_time_pass(stage, STEP_MS)
        wait_until(lambda: "longer than handler_timeout_sec" in caplog.text)
        let_time_pass(stage, LEASE_MS)
        others.append(take(other))

    stage.send("a")
    run(busy, handler)
    busy.close()
    assert (handled, others) == (["a"], [[], ["a"]])
    assert busy.late_acks == 1
    assert "1 of 1 acks came after the lease" in caplog.text


def test_a_renewal_that_fails_is_tried_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[str] = []
    others: list[list[str]] = []
    busy = stage.open(stopping=lambda: bool(handled))
    other = stage.open()
    settle, failures = busy.store.settle, 0

    def fail_once(verb: str, entries: list[Entry]) -> list[bool]:
        nonlocal failures
        if verb == "extend" and not failures:
            failures += 1
            raise StoreUnavailable("cut")
        return settle(verb, entries)

    def handler(entry: Entry) -> None:
        handled.append(entry.body)
        work(stage, busy)
        others.append(take(other))

    monkeypatch.setattr(busy.store, "settle", fail_once)
    stage.send("a")
    run(busy, handler)
    busy.close()
    assert (handled, others, failures) == (["a"], [[]], 1)


def test_nothing_is_renewed_after_the_handler(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = stage.open()
    looks, wait = 0, consumer._renewer._lock.wait
    verbs: list[str] = []
    settle = consumer.store.settle

    def counted(timeout: float) -> Any:
        nonlocal looks
        looks += 1
        return wait(timeout)

    monkeypatch.setattr(consumer._renewer._lock, "wait", counted)
    monkeypatch.setattr(consumer.store, "settle", lambda verb, entries: verbs.append(verb) or settle(verb, entries))
    stage.send("a")
    [entry] = consumer.take()
    with consumer.renewing():
        pass
    consumer.give_back(entry)
    let_time_pass(stage, STEP_MS)
    before = looks
    wait_until(lambda: looks > before + 1, "the thread has looked")
    assert verbs == ["undo"]
    assert take(stage.open()) == ["a"], "it was released, and stays so"
    consumer.close()
    assert not any(thread.name == "lease-renewer" for thread in threading.enumerate())
    assert stage.client.xpending(stage.keys.stream(TOPIC), GROUP)["pending"] == 1
