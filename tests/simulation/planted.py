"""Faults that somebody could write into the drain loop. The simulation must find each, or it is the simulation that is at fault."""

from dataclasses import dataclass
from types import ModuleType

from pipeline.drain import loop, tick
from pipeline.drain.loop import DrainLoop
from tests.planting import load_again, read_module, replace_once


@dataclass(frozen=True)
class Planted:
    """A text of a module of the loop, and the faulty text in its place; the old one must be there exactly once."""

    name: str
    module: ModuleType
    old: str
    new: str

    def loop_type(self) -> type[DrainLoop]:
        """Return the loop with the fault planted; the modules themselves stay as they are."""
        faulty_tick = self._load(tick)
        faulty_loop = self._load(loop)
        faulty_loop.Ticker = faulty_tick.Ticker  # type: ignore[attr-defined]
        return faulty_loop.DrainLoop  # type: ignore[no-any-return]

    def _load(self, module: ModuleType) -> ModuleType:
        source = read_module(module)
        if module is self.module:
            source = replace_once(source, self.old, self.new, self.name)
        return load_again(module, source)


CLOSED = """\
            with suppress(StoreError):  # the sink's error is the one to report; the lease gives the messages back
                self._store.release(claim, min(exc.started, len(messages)))
            raise"""

PLANTED = [
    # tick
    Planted(
        "it delivers after the lease", tick, "return self._clock.monotonic_ms() < self._deadline_ms", "return True"
    ),
    Planted("it leaves no margin", tick, "LEASE_MARGIN = 0.1", "LEASE_MARGIN = 0.0"),
    Planted(
        "it counts the lease from the reply", tick, "_deadline_ms = asked_ms +", "_deadline_ms = clock.monotonic_ms() +"
    ),
    Planted(
        "it acknowledges before it delivers",
        tick,
        "            count = self._sink.deliver(",
        "            self._store.ack(claim, len(messages), [])\n            count = self._sink.deliver(",
    ),
    Planted(
        "it acknowledges what it did not deliver",
        tick,
        "claim, messages[:count], self._clock.wall_ms()",
        "claim, messages, self._clock.wall_ms()",
    ),
    Planted(
        "it acknowledges nothing",
        tick,
        "return self.store.ack(*self.ack)",
        "return True",
    ),
    Planted(
        "it ignores a closed sink",
        tick,
        CLOSED,
        "            count = len(messages)",
    ),
    Planted(
        "it keeps its claim when the sink closes",
        tick,
        CLOSED,
        "            raise",
    ),
    Planted("an attempt does not count when the sink closes", tick, "min(exc.started, len(messages))", "0"),
    Planted(
        "it keeps what it did not deliver", tick, "if not settled[-1].is_late and count < len(messages):", "if False:"
    ),
    Planted(
        "it asks for another claim when a reply is lost",
        tick,
        "return self.store.claim(self.name)",
        'return self.store.claim(f"{self.name}:{self.asked_ms}")',
    ),
    Planted(
        "it takes every acknowledgement for accepted",
        tick,
        "held = held or (call.tries > 1 and call.lease.is_running())",
        "held = True",
    ),
    Planted("it asks under one name", tick, 'f"{self._loop_id}:{self._claims - 1}"', "self._loop_id"),
    Planted(
        "it forgets what it acknowledged with the next claim",
        tick,
        "self.exchange = self.claim.begin(self.ack)",
        "self.exchange = self.claim.begin(None)",
    ),
    Planted(
        "it forgets what it delivered before",
        tick,
        "        if self._asked is None:\n            self._settle(settled)\n        messages =",
        "        messages =",
    ),
    Planted(
        "it keeps what it asked ahead when it ends", tick, "            self._release(claim, 0)", "            pass"
    ),
    Planted(
        "it does not read what it asked ahead when it ends",
        tick,
        "        self._read_answers(settled)\n        self._settle(settled)\n",
        "        self._settle(settled)\n",
    ),
    Planted(
        "it drops what it asked ahead",
        tick,
        "            self._answered = asked.claim, reply",
        "            pass",
    ),
    # loop
    Planted(
        "it takes nothing back",
        loop,
        "        if tick.is_lease_over:",
        "        if False:",
    ),
    Planted("it waits without a cap", loop, "idle_ms = self.wait_ms_max", "idle_ms = 86_400_000.0"),
    Planted("it waits past the next due time", loop, "idle_ms = min(idle_ms, tick.next_ms)", "pass"),
    Planted("it does not wait", loop, "return max(idle_ms, 0.0)", "return 0.0"),
    Planted(
        "it gives up when the server does not answer",
        loop,
        "return retry_until_available(counted, self.waiter.wait, self.clock, self.random, self.stopping)",
        "return call()",
    ),
    Planted("it does not stop", loop, "while not self.stopping():", "while True:"),
    Planted(
        "it counts what was stale as delivered",
        loop,
        "            if each.is_late:",
        "            if False:",
    ),
    Planted(
        "it does not count what moved",
        loop,
        "self.totals.count_moved(tick.reply.moved, tick.reply.now_ms)",
        "len(tick.reply.moved) - 1",
    ),
]
