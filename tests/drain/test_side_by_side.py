"""The loops of several shards beside each other, with a sink that they share."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from pipeline.core.clock import SystemClock
from pipeline.core.errors import SinkClosed, StoreUnavailable
from pipeline.core.messages import Message
from pipeline.drain.loop import DrainLoop
from pipeline.drain.rate_limit import RateLimit
from pipeline.drain.side_by_side import SharedSink, SideBySide
from pipeline.drain.stats import Totals
from pipeline.runtime.process import wait_until
from pipeline.store.base import Ack, Claim, ClaimedMessage, ClaimReply, DrainStore, Exchange
from pipeline.store.keys import Keys

SHARDS = [Keys("test", shard) for shard in range(3)]


def message(text: str) -> ClaimedMessage:
    return ClaimedMessage(1, 1, b"P" * 14 + b"0" * 8 + b"m" + text.encode())


@dataclass
class Shard(DrainStore):
    """What waits in one shard, each a claim of its own; ``before`` may hold a claim up."""

    number: int
    texts: list[str] = field(default_factory=list)
    before: Callable[[], object] = lambda: None
    acknowledged: list[str] = field(default_factory=list)
    claimed: list[str] = field(default_factory=list)

    def claim(self, name: str) -> ClaimReply:
        self.before()
        if not self.texts:
            return ClaimReply(now_ms=5, claim=None, next_due_ms=None, first_lease_ms=None)
        self.claimed = [self.texts.pop(0)]
        claim = Claim(self.number, f"0:{name}", 0, 10_005, [message(text) for text in self.claimed])
        return ClaimReply(now_ms=5, claim=claim, next_due_ms=None, first_lease_ms=None)

    def ack(self, claim: Claim, delivered: int, keyed: Sequence[tuple[str, str]]) -> bool:
        self.acknowledged += self.claimed[:delivered]
        return True

    def begin(self, name: str, ack: Ack | None) -> Exchange:
        raise AssertionError("no loop of these asks ahead")

    def release(self, claim: Claim, delivered: int) -> int:
        self.texts[:0] = self.claimed[delivered:]
        return len(self.claimed) - delivered


@dataclass
class Sink:
    """Keeps what it is given, and how many at most gave it something at once; ``before`` may interfere."""

    seen: list[str] = field(default_factory=list)
    before: Callable[[str], object] = lambda text: None
    inside: int = 0
    most: int = 0

    def deliver(self, messages: Sequence[Message], in_time: Callable[[], bool], may_wait: Callable[[], bool]) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        for each in messages:
            self.before(each.body)
            self.seen.append(each.body)
        self.inside -= 1
        return len(messages)


class Listener:
    """Hears what a test says."""

    def __init__(self) -> None:
        self.channels: set[str] = set()
        self.waits = 0

    def wait(self, timeout_ms: float) -> None:
        self.waits += 1
        threading.Event().wait(min(timeout_ms, 5) / 1000)

    def heard(self) -> set[str]:
        heard, self.channels = self.channels, set()
        return heard


class World:
    def __init__(self, *texts: list[str], until: str | None = "empty", wait_ms_max: float = 60_000) -> None:
        self.sink, self.listener, self.totals = Sink(), Listener(), Totals()
        self.stop = threading.Event()
        self.shards = [Shard(number, each) for number, each in enumerate(texts)]
        self.all = SideBySide(SHARDS, self.listener, self.listener.wait, self.stop.is_set)  # type: ignore[arg-type]
        shared = SharedSink(self.sink)
        self.loops = [
            DrainLoop(
                store=shard,
                sink=shared,
                clock=SystemClock(),
                waiter=self.all.waiter(keys),
                loop_id="loop",
                wait_ms_max=wait_ms_max,
                until=until,
                stopping=self.all.stopping,
                random=lambda: 0.0,
                request_reclaim=lambda: None,
                totals=self.totals,
            )
            for shard, keys in zip(self.shards, SHARDS, strict=True)
        ]

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.all.run, args=(self.loops,), daemon=True)
        thread.start()
        return thread


def test_each_shard_is_delivered_in_its_order_and_all_is_counted() -> None:
    world = World([f"a{n}" for n in range(300)], [f"b{n}" for n in range(300)], [])
    world.all.run(world.loops)
    for letter in "ab":
        assert [text for text in world.sink.seen if text[0] == letter] == [f"{letter}{n}" for n in range(300)]
    assert (world.totals.delivered, world.totals.claimed, world.sink.most) == (600, 600, 1)
    assert [len(shard.acknowledged) for shard in world.shards] == [300, 300, 0]


def test_a_shard_that_does_not_answer_delays_no_other() -> None:
    world = World(["a"], ["b"], ["c"])
    may_answer = threading.Event()
    world.shards[0].before = may_answer.wait
    thread = world.start()
    assert wait_until(lambda: sorted(world.sink.seen) == ["b", "c"], 10)
    may_answer.set()
    thread.join(60)
    assert sorted(world.sink.seen) == ["a", "b", "c"]


def test_a_shard_that_is_away_is_waited_for_alone() -> None:
    world = World(["a"], ["b"], [])
    answers = iter([False] * 3)

    def away() -> None:
        if not next(answers, True):
            raise StoreUnavailable("away")

    world.shards[0].before = away
    world.all.run(world.loops)
    assert (sorted(world.sink.seen), world.totals.errors) == (["a", "b"], {"StoreUnavailable": 3})


def test_a_notification_wakes_the_loop_of_its_shard_alone() -> None:
    world = World([], [], [], until=None)
    thread = world.start()
    claims = [0, 0, 0]

    def count(number: int) -> None:
        claims[number] += 1

    assert wait_until(lambda: world.listener.waits > 3, 10)
    for number, shard in enumerate(world.shards):
        shard.before = lambda number=number: count(number)  # type: ignore[misc]
    world.shards[1].texts.append("new")
    world.listener.channels = {SHARDS[1].wake()}
    assert wait_until(lambda: world.sink.seen == ["new"], 10)
    world.stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert (claims[0], claims[2]) == (0, 0)


@pytest.mark.parametrize(
    "error", [SinkClosed("nobody reads", 0), ZeroDivisionError()], ids=["expected", "not expected"]
)
def test_what_fails_in_one_loop_ends_all_and_is_told(error: Exception) -> None:
    """None goes on without the others: a shard would be left alone in silence."""
    world = World(["bad"], [], [], until=None)

    def fail(text: str) -> None:
        raise error

    world.sink.before = fail
    with pytest.raises(type(error)):
        world.all.run(world.loops)
    assert not [thread for thread in threading.enumerate() if thread.name == "drain"]
    assert world.shards[0].acknowledged == []


def test_a_stop_does_not_wait_for_a_turn_at_a_sink_that_is_blocked() -> None:
    world = World(["a"], ["b"], [], until=None)
    may_go = threading.Event()
    world.sink.before = lambda text: may_go.wait(60)
    thread = world.start()
    assert wait_until(lambda: world.sink.inside == 1 and all(not shard.texts for shard in world.shards), 10)
    world.stop.set()
    waiting = next(shard for shard in world.shards[:2] if shard.claimed[0] not in "".join(world.sink.seen))
    assert wait_until(lambda: any(shard.texts for shard in world.shards[:2]), 10), "what had no turn is given back"
    may_go.set()
    thread.join(60)
    assert not thread.is_alive()
    assert waiting is not None
    given_back = [text for shard in world.shards for text in shard.texts]
    assert sorted([*given_back, *world.sink.seen]) == ["a", "b"]
    assert [text for shard in world.shards for text in shard.acknowledged] == world.sink.seen


class TestRateLimitOfSeveral:
    def test_claims_that_are_not_counted_yet_take_their_share(self) -> None:
        limit = RateLimit(100)  # a burst is two claims of five
        assert limit.pause_ms(0) == limit.pause_ms(0) == 0
        assert limit.pause_ms(0) == 50
        limit.count(5, 0)
        limit.count(0, 0)  # nothing was due there
        assert limit.pause_ms(0) == 0
        assert limit.pause_ms(0) == 50

    def test_a_shard_that_is_away_keeps_no_share_for_ever(self) -> None:
        limit = RateLimit(100)
        assert limit.pause_ms(0) == limit.pause_ms(0) == 0
        assert limit.pause_ms(999) > 0
        assert limit.pause_ms(1_000) == 0
