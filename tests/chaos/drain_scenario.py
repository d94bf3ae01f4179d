"""Drain loops as users run them, faults that hit them at exact points, and the truth about what was stored."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import redis

from pipeline.config import RedisSettings
from pipeline.core.clock import SystemClock
from pipeline.store.base import Transaction
from pipeline.store.connection import connect
from pipeline.store.keys import Keys, keys_of
from pipeline.store.retry import retry_until_available
from pipeline.store.shards import open_shards
from tests.chaos.drain_history import KILLED, SERVER_KILLED, STOPPED, History, Interruption, LoopExit, Shown, check
from tests.chaos.drain_log import asking, read_log, request_of, value_of
from tests.chaos.drain_loop import Loop
from tests.chaos.drain_mail import DUES_MS, make_mail
from tests.chaos.proxy import WAIT_SEC, Cut, Exchange, Fault, Proxy, Trap, before
from tests.e2e.commands import Checkout
from tests.servers import RealServer
from tests.waiting import wait_until

# What a namespace without messages may have.
KEPT = ("meta", "topic_settings", "counters", "ids", "marker:", "markers:", "drain:", "drains")
CLAIM_LIMIT = 40
MESSAGES = 4 * CLAIM_LIMIT
LARGE = "x" * 8_000  # with it a claim is larger than what a pipe and its reader take
FIRST_LINES = 7
HELD_SEC = 10 * WAIT_SEC  # a lease that no test lives to see the end of

clock = SystemClock()


class OneTimeFault:
    """Something that is done at a call once, however many calls meet it; then the connection ends, if it ``cuts``."""

    def __init__(self, hit: Callable[[], object] = lambda: None, cuts: bool = True) -> None:
        self._hit = hit
        self._cuts = cuts
        self._lock = threading.Lock()
        self._landed = threading.Event()

    def __call__(self) -> None:
        with self._lock:
            if self._landed.is_set():
                return
            self._hit()
            self._landed.set()
        if self._cuts:
            raise Cut

    def wait(self) -> None:
        """Return when it was done; a fault that never came is a failure."""
        assert self._landed.wait(WAIT_SEC), "the fault never came"


def when_claimed(action: Callable[[], object]) -> Fault:
    """Do something when the server has made a claim, and the loop does not know."""

    def fault(exchange: Exchange) -> None:
        reply = exchange.forward()
        if value_of(reply)[0] == b"OK":
            action()
        exchange.answer(reply)

    return fault


@dataclass
class DrainScenario:
    """A server, a proxy before it, loops behind that, and messages."""

    checkout: Checkout
    server: RealServer
    shards: int = 1
    history: History = field(default_factory=History)
    loops: list[Loop] = field(default_factory=list)
    _exchanges: list[Exchange] = field(default_factory=list)
    _transactions: int = 0
    _stopped_ms: dict[int, int] = field(default_factory=dict)
    _over: list[Loop] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.proxy = Proxy(self.server.folder / "s", self.server.folder / "p", self._exchanges.append)
        self.settings = RedisSettings(url=self.server.url, shards=self.shards)

    def start(self, *options: str, lease_sec: float = HELD_SEC, reads: float = float("inf"), **environ: str) -> Loop:
        """Start a loop, whose reader stops after ``reads`` lines."""
        argv = ["./spark-submit.sh", "jobs/drain.py", "--format", "json", "--lease", str(lease_sec), *options]
        settings = {
            "PATH": os.environ["PATH"],
            "REDIS_URL": self.proxy.url,
            "DUETIME_REDIS_SHARDS": str(self.shards),
            "DUETIME_DRAIN_CLAIM_LIMIT": str(CLAIM_LIMIT),
        }
        loop = Loop(argv, {**settings, **environ}, self.checkout, reads)
        self.loops.append(loop)
        return loop

    def stuck_loop(self, lease_sec: float = HELD_SEC) -> Loop:
        """Start a loop and let it show the first of some messages; it can't go on, in the middle of a claim, as nobody reads."""
        loop = self.start(lease_sec=lease_sec, reads=FIRST_LINES)
        with self.alone(loop):
            self.send(MESSAGES, LARGE)
            assert loop.is_stuck.wait(WAIT_SEC), self.screens()
        return loop

    def send(self, count: int, text: str = "", dues_ms: Sequence[int] = DUES_MS) -> None:
        """Store messages; see ``make_mail``."""
        self._transactions += 1
        transaction, sent = make_mail(self._transactions, count, text, dues_ms)
        self.history.sent.update(sent)
        self._store(transaction)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Store messages all the time, twenty every twentieth of a second, while the block lasts."""
        over = threading.Event()

        def source() -> None:
            while not over.wait(1 / 20):
                self.send(20)

        feeder = threading.Thread(target=source)
        feeder.start()
        try:
            yield
        finally:
            over.set()
            feeder.join()

    def trap(self, loop: Loop, script: str, fault: Fault, first: int = 1, last: float | None = None) -> Trap:
        """Set a trap for the calls of a script by a loop for a claim of its own."""
        return self.proxy.trap(asking(script, loop.number), fault, first, last)

    @contextmanager
    def alone(self, loop: Loop) -> Iterator[None]:
        """Let no other loop claim anything while the block lasts."""
        gate = threading.Event()
        others = self.proxy.trap(
            lambda call: (
                (request := request_of(call)) is not None and request.script == "claim" and request.loop != loop.number
            ),
            before(lambda: gate.wait(WAIT_SEC)),
            last=float("inf"),
        )
        try:
            yield
        finally:
            gate.set()
            self.proxy.remove(others)

    def kill(self, loop: Loop) -> None:
        """End a loop as kill -9 does."""
        loop.process.kill()
        loop.process.wait()
        loop.go_on.set()  # what is in the pipe was shown
        self.history.interruptions.append(Interruption(KILLED, clock.wall_ms(), loop=loop.number))

    def stop(self, loop: Loop) -> None:
        """Stop a loop where it is; see ``go_on``."""
        loop.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, loop.number, os.WSTOPPED | os.WNOWAIT)
        self._stopped_ms[loop.number] = clock.wall_ms()

    def go_on(self, loop: Loop) -> None:
        self.history.interruptions.append(
            Interruption(STOPPED, self._stopped_ms.pop(loop.number), clock.wall_ms(), loop=loop.number)
        )
        loop.process.send_signal(signal.SIGCONT)
        loop.go_on.set()

    def restart_server(self) -> None:
        """Kill the server and start it again with what it has on disk."""
        begun_ms = clock.wall_ms()
        self.server.kill()
        self.server.start()
        self.history.interruptions.append(Interruption(SERVER_KILLED, begun_ms, clock.wall_ms()))

    def wait_for(self, seen: Callable[[], bool], what: str) -> None:
        """Wait until ``seen``; fails with everything on the screens."""

        def is_seen() -> bool:
            self._end_leases()
            return seen()

        wait_until(is_seen, lambda: f"{what}\n{self.screens()}", WAIT_SEC)

    def wait_until_up(self, loop: Loop) -> None:
        """Return when a loop has made a call; before that it may not know what a signal asks of it."""
        asks = asking("claim", loop.number)
        self.wait_for(lambda: any(asks(exchange.call) for exchange in self._exchanges), "a first call")

    def wait_for_more(self, count: int) -> None:
        """Return when so many messages more are shown than now."""
        shown = sum(len(loop.out) for loop in self.loops) + count
        self.wait_for(lambda: sum(len(loop.out) for loop in self.loops) >= shown, f"{count} messages more")

    def wait_until_shown(self) -> None:
        """Return when each message that was sent is on a screen."""
        sent = self.history.sent
        self.wait_for(
            lambda: (
                sum(len(loop.out) for loop in self.loops) >= len(sent)
                and sent.keys() <= {shown.id for shown in self.shown()}
            ),
            "everything is shown",
        )

    def shown(self) -> list[Shown]:
        return [shown for loop in self.loops for shown in loop.shown()]

    def was_said(self, words: bytes) -> bool:
        """Tell whether the server began a reply like this."""
        return any((exchange.said or b"").startswith(words) for exchange in self._exchanges)

    def in_flight(self) -> int:
        """Claims that are held now."""
        return sum(self.server.client().zcard(keys.claims()) for keys in keys_of(self.settings))

    def holds(self, loop: Loop) -> bool:
        """Tell whether the server knows of a claim of a loop."""
        return any(self._tokens(keys, loop) for keys in keys_of(self.settings))

    def end_leases(self, loop: Loop) -> None:
        """Let the server take the leases of a loop for over from now on, also of claims that calls under way still make."""
        self._over.append(loop)
        self._end_leases()

    def settle(self) -> History:
        """Let loops deliver what is left, end them all, and compare what happened with what was promised."""
        self.proxy.clear()
        last = self.start("--until-empty")
        self.wait_for(lambda: last.process.poll() is not None, "nothing is left")
        assert last.end() == 0, self.screens()
        for loop in self.loops:
            if loop.process.poll() is None:
                self.wait_until_up(loop)
                loop.stop()
        history = self.history
        history.shown = self.shown()
        history.log = read_log(self._exchanges)
        for loop in self.loops:
            history.exits[loop.number] = LoopExit(loop.end(), [line for _, line in loop.err])
        self._look_at_the_server()
        problems = check(history)
        assert not problems, "\n".join([*problems, self.screens()])
        return history

    def screens(self) -> str:
        """What the loops said, without what they showed."""
        return "\n".join(f"{loop.number}: {line}" for loop in self.loops for _, line in loop.err)

    def close(self) -> None:
        for loop in self.loops:
            loop.go_on.set()
            if loop.process.poll() is None:
                loop.process.kill()
                loop.process.wait()
        self.proxy.close()

    def _tokens(self, keys: Keys, loop: Loop) -> list[bytes]:
        tokens = self.server.client().zrange(keys.claims(), 0, -1)
        return [token for token in tokens if token.rsplit(b":", 3)[1] == b"%d" % loop.number]

    def _end_leases(self) -> None:
        for loop in self._over:
            for keys in keys_of(self.settings):
                if tokens := self._tokens(keys, loop):
                    self.server.client().zadd(keys.claims(), dict.fromkeys(tokens, 1), xx=True)

    def _store(self, transaction: Transaction) -> None:
        """Store a transaction directly, in any shard, also while the server is being restarted."""
        client = connect(self.settings)
        store = open_shards(client, self.settings)[self._transactions % self.shards]
        pause, end_ms = threading.Event(), clock.monotonic_ms() + WAIT_SEC * 1000
        retry_until_available(
            lambda: store.schedule("chaos", transaction),
            wait=lambda ms: pause.wait(ms / 1000),
            clock=clock,
            random=lambda: 0.0,
            stopping=lambda: clock.monotonic_ms() > end_ms,
        )
        client.close()

    def _look_at_the_server(self) -> None:
        client: redis.Redis = self.server.client()
        counters: dict[str, int] = {}
        for keys in keys_of(self.settings):
            for name, count in client.hgetall(keys.counters()).items():
                counters[name.decode()] = counters.get(name.decode(), 0) + int(count)
        self.history.counters = counters
        names = [key.decode() for key in client.scan_iter("{duetime:*")]
        self.history.left = [name for name in names if not name.partition("}:")[2].startswith(KEPT)]
