"""Drain loops under load and faults that a seed draws: who is hit, where, and by what."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.chaos.drain_history import UNREACHABLE, Interruption
from tests.chaos.drain_scenario import DrainScenario, Loop, OneTimeFault, clock, when_claimed
from tests.chaos.proxy import Fault, after, before, reply_with, swallow
from tests.e2e.commands import Checkout
from tests.servers import real_server

LOOPS = 3
FAULTS_PER_ROUND = 12
LEASE_SEC = 4.0  # longer than what a busy machine makes a loop wait
EVER = float("inf")
POINTS: tuple[tuple[str, Callable[[Callable[[], object]], Fault]], ...] = (
    ("claim", before),
    ("claim", when_claimed),
    ("ack", before),
    ("ack", after),
)
MOODS = (
    b"-LOADING loading\r\n",
    b"-READONLY replica\r\n",
    b"-OOM full\r\n",
    b"-BUSY busy\r\n",
    b"-CLUSTERDOWN down\r\n",
)


class Round:
    """Loops of a scenario, of which each that ends is followed by another."""

    def __init__(self, scenario: DrainScenario, random: Random) -> None:
        self._scenario = scenario
        self._random = random
        self._loops = [self._start() for _ in range(LOOPS)]

    def run(self) -> None:
        """Let faults happen under load, one after the other, then settle."""
        faults = (
            self.kill,
            self.stop,
            self.end,
            self.break_off,
            self.lose,
            self.be_moody,
            self.keep_silent,
            self.restart,
        )
        with self._scenario.load():
            for _ in range(FAULTS_PER_ROUND):
                fault = self._random.choice((*faults, self.flush_scripts))
                print(f"  {fault.__name__}", flush=True)
                fault()
                self._scenario.wait_for_more(self._random.randint(1, 60))
        self._scenario.wait_until_shown()
        self._scenario.settle()

    def kill(self) -> None:
        """Kill a loop at a point of a claim."""
        loop = self._take()
        self._meet(loop, OneTimeFault(lambda: self._scenario.kill(loop)))

    def stop(self) -> None:
        """Stop a loop at a point of a claim until its lease is over, if it has one."""
        loop = self._random.choice(self._loops)
        self._meet(loop, OneTimeFault(lambda: self._scenario.stop(loop), cuts=False))
        self._scenario.wait_for(lambda: not self._scenario.holds(loop), "a claim taken back")
        self._scenario.go_on(loop)

    def end(self) -> None:
        """Tell a loop to end, whatever it is doing."""
        assert self._take().stop() == 0

    def break_off(self) -> None:
        """Kill a loop, or tell it to end, in the middle of what it shows."""
        loop = self._scenario.stuck_loop(LEASE_SEC)
        if self._random.random() < 0.5:
            self._scenario.kill(loop)
        else:
            loop.process.terminate()
            loop.process.wait()
            loop.go_on.set()

    def lose(self) -> None:
        """Cut the connection of a loop at a point of a claim."""
        self._meet(self._random.choice(self._loops), OneTimeFault())

    def be_moody(self) -> None:
        """Answer calls of a loop with an error that passes."""
        self._disturb(reply_with(self._random.choice(MOODS)), self._random.randint(1, 4))

    def keep_silent(self) -> None:
        """Never answer a call of a loop."""
        self._disturb(swallow, 1)

    def restart(self) -> None:
        """Kill the server and start it again."""
        self._scenario.restart_server()

    def flush_scripts(self) -> None:
        """Let the server forget the scripts."""
        self._scenario.server.client().script_flush()

    def _start(self) -> Loop:
        loop = self._scenario.start(lease_sec=LEASE_SEC, DUETIME_REDIS_REPLY_TIMEOUT_MS="500")
        self._scenario.wait_until_up(loop)  # a server that is away when a loop starts ends it
        return loop

    def _take(self) -> Loop:
        """Return a loop that is about to end, with another one in its place."""
        number = self._random.randrange(LOOPS)
        taken, self._loops[number] = self._loops[number], self._start()
        return taken

    def _meet(self, loop: Loop, fault_once: OneTimeFault) -> None:
        script, fault = self._random.choice(POINTS)
        trap = self._scenario.trap(loop, script, fault(fault_once), last=EVER)
        fault_once.wait()
        self._scenario.proxy.remove(trap)

    def _disturb(self, fault: Fault, calls: int) -> None:
        loop = self._random.choice(self._loops)
        begun_ms, again = clock.wall_ms(), loop.count("Redis answers again")
        trap = self._scenario.trap(loop, self._random.choice(("claim", "ack")), fault, last=calls)
        self._scenario.wait_for(lambda: loop.count("Redis answers again") > again, "answer again")
        self._scenario.proxy.remove(trap)
        # It takes less than a lease, unless the machine is very busy.
        self._scenario.history.interruptions.append(Interruption(UNREACHABLE, begun_ms, clock.wall_ms(), loop.number))


def run_round(seed: int) -> int:
    """Run one round and return how many messages were delivered."""
    random = Random(seed)
    with TemporaryDirectory(prefix="duetime-chaos-") as folder, real_server() as server:
        scenario = DrainScenario(Checkout(Path(folder).resolve()), server, shards=random.randint(1, 3))
        try:
            Round(scenario, random).run()
        finally:
            scenario.close()
        return len(scenario.history.sent)
