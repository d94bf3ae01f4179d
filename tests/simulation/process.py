"""One drain process of the simulation: the real loop and the real ``RedisStore`` on ports where faults fall."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import redis

from pipeline.config import DrainSettings
from pipeline.core.errors import SinkClosed
from pipeline.core.messages import Message
from pipeline.drain.housekeeping import Reclaimer
from pipeline.drain.stats import Totals
from pipeline.store.redis_store import RedisStore
from tests.model.reference import MESSAGE_ID_LENGTH, PlainScripts
from tests.simulation.kernel import Actor, Crash
from tests.store.builders import member

if TYPE_CHECKING:
    from tests.simulation.world import World

LEASE_MS = 5_000
WAIT_MS_MAX = 1_000
CLAIM_LIMIT = 4
REPLY_TIMEOUT_MS = 1_000
BLOCK_CHECK_MS = 200
STEP_MS = 1  # between two looks for an answer
DRAIN = DrainSettings(lease_sec=LEASE_MS / 1000, claim_limit=CLAIM_LIMIT, wait_ms_max=WAIT_MS_MAX)


@dataclass(eq=False)
class Answer:
    """What comes of a command that was sent without waiting: a reply, an error, or nothing yet."""

    words: tuple[Any, ...]
    reply: Any = None


class Process:
    """Clock, connection, sink and waiter of one process. Everything that it does passes ``World``, which knows the seed."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.stopping = False
        self.answered = (
            True  # whether the last call to the server was, and all since the sink closed, which are made once
        )
        self._closed = self._gave_up = False
        self.tokens: set[str] = set()  # of the claims that it asked for in time
        self._tokens: dict[tuple[bytes, ...], str] = {}  # of the last claim of such messages that it was told of
        self._token = ""  # of the claim in hand
        self._answers: list[Answer] = []  # of what was sent without waiting
        self._heard_moved = 0
        self._drift = world.random.uniform(0.97, 1.03)
        self._subscribed = False
        self._rung = False
        self._asleep: Actor | None = None

    def run(self) -> None:
        """Run a loop until it ends, and note how."""
        store = RedisStore(self, self.world.keys, DRAIN, PlainScripts())
        totals = Totals()
        reclaimer = Reclaimer(store.reclaim, self.world.ring, totals)
        loop = self.world.loop_type(
            store=store,
            sink=self,
            clock=self,
            waiter=self,
            loop_id=self.name,
            wait_ms_max=WAIT_MS_MAX,
            until=None,
            stopping=lambda: self.stopping,
            random=self.world.random.random,
            request_reclaim=lambda: (reclaimer.request(), reclaimer.step()),
            totals=totals,
            prefetch_from=self.world.random.choice([0, 1, CLAIM_LIMIT]),
        )
        how = "killed"
        try:
            loop.run()
            how = "stopped" if self.stopping else "by itself"
        except SinkClosed:
            how = "closed"
        except Crash:
            pass
        held = self.world.held_by(self)
        told = (totals.delivered - self._heard_moved, totals.late_acks)
        self.world.note(self.name, "ended", how, self.answered, held, *told)

    def stop(self) -> None:
        """What a signal does."""
        self.stopping = True
        self._wake()

    # The clock

    def wall_ms(self) -> int:
        return round(self.world.kernel.now_ms)

    def monotonic_ms(self) -> float:
        return self.world.kernel.now_ms * self._drift

    # The connection: what RedisStore asks of a client

    def execute_command(self, *words: Any) -> Any:
        reply = self._round_trip(lambda timely: self.world.execute(self, words, timely))
        self._note_reply(words, reply)
        return reply

    def _note_reply(self, words: tuple[Any, ...], reply: Any) -> None:
        if words[1:2] == ("claim",):
            self._heard_moved += len(reply[6])
        if words[1:2] == ("claim",) and reply[0] == b"OK":
            self._tokens[tuple(_id_of(each) for each in reply[4][::2])] = words[4]

    def zrange(self, *arguments: Any, **options: Any) -> Any:
        return self._round_trip(lambda timely: self.world.server.zrange(*arguments, **options))

    def time(self) -> tuple[int, int]:
        answer: tuple[int, int] = self._round_trip(lambda timely: self.world.server.time())
        return answer

    def _round_trip(self, request: Callable[[bool], Any]) -> Any:
        world = self.world
        self._wait_for_answer()
        self._suffer()
        world.travel()
        if world.is_down:
            raise redis.exceptions.ConnectionError("refused")
        if world.strikes("lost request", self.name):
            self._time_out()
        if world.strikes("late request", self.name, arrives_ms := world.awkward_ms()):
            world.kernel.at(arrives_ms, lambda: world.arrive_late(request))
            self._time_out()
        reply = request(True)
        self._suffer()
        if world.strikes("lost reply", self.name):
            self._time_out()
        world.travel()
        self.answered = not self._gave_up
        return reply

    # The same without waiting: what begin_scripts asks of a pool and its connection

    @property
    def connection_pool(self) -> "Process":
        return self

    def get_connection(self) -> "Process":
        return self

    def release(self, connection: "Process") -> None:
        assert not self._answers, "somebody else could read what is left"

    def disconnect(self) -> None:
        self._answers = []

    def pack_commands(self, commands: Sequence[tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
        return commands

    def send_packed_command(self, commands: Sequence[tuple[Any, ...]]) -> None:
        """Send them in one packet, which arrives while this process does something else."""
        world, self._answers = self.world, []
        self._suffer()
        if world.is_down:
            raise redis.exceptions.ConnectionError("refused")
        is_lost = world.strikes("lost request", self.name)
        late_ms = world.awkward_ms()
        is_late = not is_lost and world.strikes("late request", self.name, late_ms)
        travels_ms = world.travel_ms()
        for words in commands:
            answer = Answer(words)
            self._answers.append(answer)
            if is_late:
                world.kernel.at(late_ms, partial(world.arrive_late, partial(world.execute, self, words)))
            elif not is_lost:
                world.kernel.at(travels_ms, partial(self._arrive, answer))

    def _arrive(self, answer: "Answer") -> None:
        if self.world.is_down:
            answer.reply = redis.exceptions.ConnectionError("reset")
            return
        try:
            answer.reply = self.world.execute(self, answer.words, True)
        except redis.exceptions.RedisError as exc:
            answer.reply = exc

    def read_response(self) -> Any:
        """Wait for the answer to the first command that has none yet."""
        self._wait_for_answer()
        answer = self._answers.pop(0)
        self._suffer()
        for _ in range(REPLY_TIMEOUT_MS // STEP_MS):
            if answer.reply is not None:
                break
            self.world.kernel.let_pass(STEP_MS)
        if answer.reply is None or self.world.strikes("lost reply", self.name):
            raise redis.exceptions.TimeoutError("no reply")
        if isinstance(answer.reply, Exception):
            raise answer.reply
        self.answered = not self._gave_up
        self._note_reply(answer.words, answer.reply)
        return answer.reply

    def _wait_for_answer(self) -> None:
        self._gave_up = self._gave_up or (self._closed and not self.answered)
        self.answered = False

    def _time_out(self) -> None:
        self.world.kernel.let_pass(REPLY_TIMEOUT_MS)
        raise redis.exceptions.TimeoutError("no reply")

    def _suffer(self) -> None:
        """Here a process may be killed, or stand still."""
        world = self.world
        if world.strikes("crash", self.name):
            raise Crash
        if world.strikes("pause", self.name, pause_ms := world.awkward_ms()):
            world.kernel.let_pass(pause_ms)

    # The sink

    def deliver(self, deliveries: Sequence[Message], in_time: Callable[[], bool], may_wait: Callable[[], bool]) -> int:
        world, delivered = self.world, 0
        self._token = self._tokens[tuple(each.message_id.encode() for each in deliveries)]
        while delivered < len(deliveries) and in_time():
            world.note(self.name, "started", self._token)
            portion = deliveries[delivered : delivered + world.random.randint(1, 3)]
            closed_after = world.random.randint(0, len(portion)) if world.strikes("closed sink", self.name) else None
            for index, delivery in enumerate(portion):
                if index == closed_after:
                    break
                if not self._wait_for_reader(may_wait):
                    return delivered
                self._show(delivery)
                delivered += 1
            if closed_after is not None:
                self._closed = True
                raise SinkClosed("Nobody reads.", delivered)
        return delivered

    def _wait_for_reader(self, may_wait: Callable[[], bool]) -> bool:
        world = self.world
        if world.strikes("blocked sink", self.name, blocked_ms := world.awkward_ms()):
            free_ms = world.kernel.now_ms + blocked_ms
            while world.kernel.now_ms < free_ms:
                world.kernel.let_pass(BLOCK_CHECK_MS)
                if not may_wait():
                    return False
        return True

    def _show(self, delivery: Message) -> None:
        self._suffer()
        self.world.kernel.let_pass(self.world.random.uniform(0, 1))
        message_id = delivery.message_id
        shown = member(int(message_id[14:], 16), token=message_id[:14])
        self.world.note(self.name, "delivered", self._token, shown, delivery.attempt, self.world.server_ms())
        self._suffer()

    # The waiter: what the wake_listener does

    def wait(self, timeout_ms: float) -> None:
        self._suffer()
        if not self._subscribed and not self.world.is_down:
            self._subscribed = True
            self.world.travel()
        elif not self._rung and not self.stopping:
            self._asleep = self.world.kernel.running()
            self.world.kernel.let_pass(timeout_ms)
        self._asleep, self._rung = None, False

    def ring(self) -> None:
        """A message is there that no loop knows of."""
        if not self._subscribed or self.world.misses_a_ring():
            self.world.note(self.name, "unheard ring")
        else:
            self._rung = True
            self._wake()

    def hang_up(self) -> None:
        """The server is gone, and the subscription with it."""
        self._subscribed = False

    def _wake(self) -> None:
        if self._asleep is not None:
            self.world.kernel.wake(self._asleep)
            self._asleep = None


def _id_of(stored: bytes) -> bytes:
    return stored[:MESSAGE_ID_LENGTH]
