"""Consumers as users run them, killed, frozen and cut off at every point: nothing is lost, and each copy is explained."""

import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from pipeline.store.keys import Keys
from tests.chaos.proxy import (
    WAIT_SEC,
    Fault,
    Matches,
    Proxy,
    after,
    before,
    instead,
    lose_reply,
    naming,
    refuse,
    running,
)
from tests.e2e.commands import Checkout, Command
from tests.servers import RealServer, real_server

KEYS = Keys("duetime")
TOPIC, GROUP = "mail", "billing"
MESSAGES = 300
LEASE_SEC = round(10 * WAIT_SEC)  # no machine is so slow that one ends by itself; see end_leases
SHORT_SEC = 5  # one that does end
SETTLES, GATHERS, READS = running("settle"), running("reclaim"), naming("XREADGROUP")
EVER = float("inf")
PAGE = 100  # messages that a consumer has in hand, at most
When = Callable[[Callable[[], object]], Fault]


class Readers:
    """A stream with messages, a group, and a proxy in front of the server."""

    def __init__(self, checkout: Checkout, server: RealServer) -> None:
        self.client = server.client()
        self.proxy = Proxy(server.folder / "s", server.folder / "p")
        self._checkout = checkout
        self.url = server.url
        for stream in (KEYS.stream(TOPIC), KEYS.retry(TOPIC, GROUP)):
            self.client.xgroup_create(stream, GROUP, "0", mkstream=True)

    def send(self, count: int = MESSAGES, padding: str = "") -> None:
        for number in range(count):
            text = f"{number}{padding}"
            fields = {"id": f"id-{number}", "message": text, "topic": TOPIC, "due_ms": 1_000, "attempt": 1}
            self.client.xadd(KEYS.stream(TOPIC), fields)

    def start(self, *options: str, hit: bool = False, lease_sec: int = LEASE_SEC) -> Command:
        """Start a consumer; one that is to be ``hit`` talks to the server by the proxy."""
        environ = {"REDIS_URL": self.proxy.url if hit else self.url, "DUETIME_TOPICS_LEASE_SEC": str(lease_sec)}
        words = ("--topic", TOPIC, "--group", GROUP, "--format", "json", *options)
        return self._checkout.run("jobs/consume.py", *words, environ=environ)

    def read_by_somebody(self) -> bool:
        return bool(self.client.xinfo_consumers(KEYS.stream(TOPIC), GROUP))

    def pending(self) -> int:
        return int(self.client.xpending(KEYS.stream(TOPIC), GROUP)["pending"])

    def end_leases(self) -> None:
        """Let consumers have been silent for longer than a lease with all that is pending."""
        stream, silent_ms = KEYS.stream(TOPIC), LEASE_SEC * 1000
        for each in self.client.xpending_range(stream, GROUP, "-", "+", MESSAGES):
            self.client.xclaim(stream, GROUP, each["consumer"], 0, [each["message_id"]], idle=silent_ms, justid=True)
        self.client.delete(KEYS.active(TOPIC, GROUP))

    def wait_until_all_is_handled(self, *consumers: Command) -> None:
        def is_done(_: Command) -> bool:
            [group] = self.client.xinfo_groups(KEYS.stream(TOPIC))
            return bool(group["lag"] == 0 and group["pending"] == 0)

        consumers[0].wait_for(is_done, "end of the messages")

    def check(self, *consumers: Command, copies: int = 0) -> None:
        """Each message came, none but so many came twice, and what came twice says so."""
        records = [record for consumer in consumers for record in consumer.records()]
        counts = Counter(record["message"] for record in records)
        assert counts.keys() == {f"{number}" for number in range(MESSAGES)}, "lost"
        assert counts.total() - MESSAGES <= copies
        seen: Counter[str] = Counter()
        for record in sorted(records, key=lambda record: record["attempt"]):
            seen[record["message"]] += 1
            assert record["attempt"] >= seen[record["message"]], "a copy that does not say so"
        assert self.client.xlen(KEYS.dead(TOPIC)) == 0


@pytest.fixture
def readers(checkout: Checkout) -> Iterator[Readers]:
    with real_server() as server:
        made = Readers(checkout, server)
        yield made
        made.proxy.close()


@pytest.mark.parametrize(
    ("calls", "when"),
    [(READS, after), (SETTLES, instead), (SETTLES, after)],
    ids=["handed out, reply not read", "printed, not acknowledged", "acknowledged, reply not read"],
)
def test_killed_it_loses_nothing_and_the_living_take_over(readers: Readers, calls: Matches, when: When) -> None:
    victim = readers.start(hit=True)
    victim.wait_for(lambda _: readers.read_by_somebody(), "consumer that reads")
    # A read that brings nothing may be on its way when the messages come.
    hit = readers.proxy.trap(
        calls, when(lambda: (readers.pending() or calls is SETTLES) and victim.process.kill()), last=EVER
    )
    readers.send()
    hit.wait()
    assert victim.end() == -signal.SIGKILL
    left = readers.pending()
    assert left or (calls, when) == (SETTLES, after), "the kill hit another moment"
    readers.end_leases()
    living = readers.start()
    readers.wait_until_all_is_handled(living)
    assert living.stop() == 0
    assert ("took over" in living.screen()) == bool(left)
    readers.check(victim, living, copies=left if (calls, when) == (SETTLES, instead) else 0)


def test_frozen_for_longer_than_its_lease_its_late_word_does_no_harm(readers: Readers) -> None:
    frozen = readers.start(hit=True, lease_sec=SHORT_SEC)
    frozen.wait_for(lambda _: readers.read_by_somebody(), "consumer that reads")
    taken_over = threading.Event()

    def freeze() -> None:
        frozen.process.send_signal(signal.SIGSTOP)
        taken_over.wait(WAIT_SEC)

    late = readers.proxy.trap(SETTLES, before(freeze))
    readers.send()
    late.wait()
    living = readers.start(lease_sec=SHORT_SEC)
    readers.wait_until_all_is_handled(living)
    taken_over.set()
    frozen.process.send_signal(signal.SIGCONT)
    assert frozen.stop() == 0
    assert living.stop() == 0
    stale = int(readers.client.hget(KEYS.counters(), "late_acks") or 0)
    assert stale == len(frozen.records()) > 0
    assert f"; {stale} late acks" in frozen.screen()
    assert "took over" in living.screen()
    readers.check(frozen, living, copies=PAGE)


@pytest.mark.parametrize("fault", [lose_reply, refuse], ids=["executed, reply lost", "lost before"])
def test_cut_off_it_handles_each_message_once_and_says_so(readers: Readers, fault: Fault) -> None:
    traps = [
        readers.proxy.trap(calls, fault, first=first)
        for calls, first in ((READS, 2), (READS, 4), (SETTLES, 1), (SETTLES, 3), (GATHERS, 5))
    ]
    readers.send()
    consumer = readers.start(hit=True)
    readers.wait_until_all_is_handled(consumer)
    for trap in traps:
        trap.wait()
    assert consumer.stop() == 0
    assert len(consumer.records()) == MESSAGES
    assert {record["attempt"] for record in consumer.records()} == {1}, "found only after a lease, or counted as tried"
    readers.check(consumer)
    assert "waiting for Redis: Redis does not answer" in consumer.screen()
    assert "Redis answers again" in consumer.screen()
    assert "0 late acks" in consumer.screen()


def test_of_an_ordered_group_the_next_one_goes_on_in_order_where_a_killed_one_stopped(readers: Readers) -> None:
    active = readers.start("--ordered", hit=True)
    active.wait_for(lambda _: bool(readers.client.exists(KEYS.active(TOPIC, GROUP))), "acquire_active")
    standby = readers.start("--ordered")
    killed = readers.proxy.trap(SETTLES, instead(active.process.kill), first=2)
    readers.send()
    killed.wait()
    assert active.end() == -signal.SIGKILL
    readers.end_leases()
    readers.wait_until_all_is_handled(standby)
    assert standby.stop() == 0
    before_it, after_it = ([int(r["message"]) for r in consumer.records()] for consumer in (active, standby))
    assert before_it == list(range(len(before_it)))
    assert 0 < after_it[0] < len(before_it), "the second lot was printed and not acknowledged"
    assert after_it == list(range(after_it[0], MESSAGES))
    readers.check(active, standby, copies=PAGE)


def test_a_closed_pipe_ends_it_and_gives_back_what_was_not_begun(checkout: Checkout, readers: Readers) -> None:
    readers.send(padding="x" * 1_000)  # so that the pipe, of 64 KiB, has no room for a page
    words = f"jobs/consume.py --topic {TOPIC} --group {GROUP}"
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"./spark-submit.sh {words} | head -1"],
        cwd=checkout.root,
        env={**os.environ, "REDIS_URL": readers.url},
        capture_output=True,
        text=True,
        timeout=WAIT_SEC,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.count("\n") <= 3 and "Nobody reads the output any more" in ended.stderr
    readers.end_leases()
    rest = readers.start()
    readers.wait_until_all_is_handled(rest)
    assert rest.stop() == 0
    assert len(rest.records()) >= MESSAGES - PAGE
