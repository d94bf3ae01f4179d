"""Leases that are renewed while a handler works. Real time: leases are short, and a handler waits for several of them."""

import threading
from dataclasses import replace

import pytest

from pipeline.consume.consumer import Consumer
from pipeline.consume.handling import run
from pipeline.core.clock import SystemClock
from pipeline.core.errors import StoreUnavailable
from pipeline.store.entries import Entry
from tests.consume.conftest import GROUP, TOPIC, Stage

LEASE_SEC = 0.3
SLOW_SEC = 4 * LEASE_SEC


def open_timed(stage: Stage, **options: object) -> Consumer:
    consumer = stage.open(settings={"lease_sec": LEASE_SEC, **options.pop("settings", {})}, **options)  # type: ignore
    return replace(consumer, clock=SystemClock(), wait=lambda ms: threading.Event().wait(ms / 1000))


def poll(consumer: Consumer, seconds: float) -> list[str]:
    """Look for messages for a while; returns what came first."""
    clock, found = SystemClock(), []
    end_ms = clock.monotonic_ms() + seconds * 1000
    while not found and clock.monotonic_ms() < end_ms:
        found += [entry.body for entry in consumer.take()]
        consumer._looked_ms = float("-inf")  # it looks for silent ones each time
        threading.Event().wait(0.02)
    return found


@pytest.mark.parametrize("ordered", [False, True])
def test_a_handler_that_is_slower_than_its_lease_keeps_what_is_in_flight(stage: Stage, ordered: bool) -> None:
    handled: list[tuple[str, int]] = []
    others: list[str] = []
    busy = open_timed(stage, ordered=ordered, stopping=lambda: len(handled) == 2)
    other = open_timed(stage)

    def handler(entry: Entry) -> None:
        others.extend(poll(other, SLOW_SEC))
        handled.append((entry.body, entry.attempt))

    stage.send("a", "b")
    run(busy, handler)
    busy.close()
    assert (handled, others, busy.late_acks) == ([("a", 1), ("b", 1)], [], 0)
    assert stage.pending() == 0 and stage.dead() == []


def test_a_handler_that_works_for_too_long_loses_its_message(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    handled: list[str] = []
    busy = open_timed(stage, stopping=lambda: bool(handled), settings={"handler_timeout_sec": 1})
    other = open_timed(stage)

    def handler(entry: Entry) -> None:
        handled.extend(poll(other, 1 + SLOW_SEC))

    stage.send("a")
    run(busy, handler)
    busy.close()
    assert handled == ["a"]
    assert "longer than handler_timeout_sec" in caplog.text
    assert busy.late_acks == 1
    assert "1 of 1 acks came after the lease" in caplog.text


def test_a_renewal_that_fails_is_tried_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[str] = []
    busy = open_timed(stage, stopping=lambda: bool(handled))
    settle, failures = busy.store.settle, 0

    def fail_once(verb: str, entries: list[Entry]) -> list[bool]:
        nonlocal failures
        if verb == "extend" and not failures:
            failures += 1
            raise StoreUnavailable("cut")
        return settle(verb, entries)

    monkeypatch.setattr(busy.store, "settle", fail_once)
    stage.send("a")
    run(busy, lambda entry: handled.append(entry.body + "".join(poll(open_timed(stage), SLOW_SEC))))
    busy.close()
    assert (handled, failures) == (["a"], 1)


def test_nothing_is_renewed_after_the_handler(stage: Stage) -> None:
    consumer = open_timed(stage)
    stage.send("a")
    [entry] = consumer.take()
    with consumer.renewing():
        pass
    consumer.give_back(entry)
    assert poll(open_timed(stage), SLOW_SEC) == ["a"], "it was released, and stays so"
    consumer.close()
    assert not any(thread.name == "lease-renewer" for thread in threading.enumerate())
    assert stage.client.xpending(stage.keys.stream(TOPIC), GROUP)["pending"] == 1
