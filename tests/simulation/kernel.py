"""Virtual time, and actors of which exactly one runs: the order of everything follows from the seed.

An actor is a thread, since the drain loop is plain sequential code; but it runs only while it holds the baton, and hands it on
whenever it lets time pass. So no two threads run at the same time, and the operating system has no say in their order.
"""

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

ACTOR_WAIT_SEC = 60  # real time; only a fault of the kernel itself can keep the baton that long


class Crash(BaseException):
    """The actor's process is killed: nothing of it runs on."""


@dataclass(eq=False)
class Actor:
    """A thread of the simulation. ``turn`` numbers its waits, so that one that was cut short is not ended a second time."""

    name: str
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    turn: int = 0


class Kernel:
    """Runs what is due next, at virtual milliseconds that begin at 0."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._events = 0
        self._events_max = 0
        self._due: list[tuple[float, int, Actor | None, int, Callable[[], None] | None]] = []
        self._main = Actor("main")
        self._running = self._main
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._over = False

    def at(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do something later, between the steps of the actors."""
        self._push(delay_ms, None, 0, action)

    def spawn(self, name: str, body: Callable[[], None]) -> None:
        """Start an actor at the present time."""
        actor = Actor(name)

        def run() -> None:
            actor.baton.acquire()
            try:
                if not self._over:
                    body()
            except Crash:
                pass
            except BaseException as exc:
                self._failure = self._failure or exc
                self._over = True
            self._hand_on(self._next())

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        self._push(0, actor, actor.turn, None)

    def let_pass(self, ms: float) -> None:
        """Let the running actor do nothing for so long, and everybody else what is due meanwhile."""
        actor = self._running
        self._push(ms, actor, actor.turn, None)
        self._give_way(actor)

    def running(self) -> Actor:
        """Return who calls."""
        return self._running

    def wake(self, actor: Actor) -> None:
        """End the wait of an actor now."""
        self._push(0, actor, actor.turn, None)

    def run(self, events_max: int) -> None:
        """Run until nothing is due any more.

        Raises:
            AssertionError: more than ``events_max`` events: somebody spins. Other exceptions are those of actors and actions.
        """
        self._events_max = events_max
        self._give_way(self._main)
        for thread in self._threads:
            thread.join(ACTOR_WAIT_SEC)
        if self._failure:
            raise self._failure

    def _push(self, delay_ms: float, actor: Actor | None, turn: int, action: Callable[[], None] | None) -> None:
        self._events += 1
        heapq.heappush(self._due, (self.now_ms + delay_ms, self._events, actor, turn, action))

    def _next(self) -> Actor:
        """Do what is due until it is an actor's turn; the main thread's when nothing is left."""
        while self._due:
            at_ms, _, actor, turn, action = heapq.heappop(self._due)
            if self._over:
                if actor is not None and actor.turn == turn:
                    actor.turn += 1
                    return actor
                continue
            if actor is not None and actor.turn != turn:
                continue
            self.now_ms = at_ms
            if self._events > self._events_max:
                self._failure, self._over = AssertionError(f"more than {self._events_max} events: a loop spins"), True
            if actor is not None:
                actor.turn += 1
                return actor
            self._act(action)
        return self._main

    def _act(self, action: Callable[[], None] | None) -> None:
        try:
            if action is not None and not self._over:
                action()
        except Exception as exc:
            self._failure, self._over = exc, True

    def _give_way(self, actor: Actor) -> None:
        following = self._next()
        if following is not actor:
            self._hand_on(following)
            assert actor.baton.acquire(timeout=ACTOR_WAIT_SEC), "the baton is lost"
        if self._over and actor is not self._main:
            raise Crash

    def _hand_on(self, following: Actor) -> None:
        self._running = following
        following.baton.release()
