"""The drain loop on a store with a clock that a test moves."""

import uuid
from collections.abc import Callable, Sequence

import fakeredis
import pytest

from pipeline.config import DrainSettings
from pipeline.core.errors import SinkClosed, StoreUnavailable
from pipeline.core.messages import Message
from pipeline.drain.housekeeping import Reclaimer
from pipeline.drain.loop import DrainLoop
from pipeline.drain.rate_limit import RateLimit
from pipeline.drain.stats import Totals
from pipeline.store.base import Ack, Claim, ClaimReply, Exchange
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.scripts import Scripts
from pipeline.store.stats import Stats, read_stats
from tests.clock import ManualClock
from tests.store.builders import BUCKET_MS, TOKEN, transaction

START_MS = 1_700_000_000_000
EDGE_MS = START_MS - START_MS % BUCKET_MS + BUCKET_MS
LEASE_MS = 30_000


class RecordingSink:
    """Keeps what it is given; ``on_deliver`` may interfere."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.seen: list[tuple[int, str, int]] = []
        self.blocked = False
        self.on_deliver: Callable[[], None] = lambda: None

    def deliver(self, deliveries: Sequence[Message], in_time: Callable[[], bool], may_wait: Callable[[], bool]) -> int:
        count = 0
        for delivery in deliveries:
            self.on_deliver()
            if not in_time() or (self.blocked and not may_wait()):
                break
            self.seen.append((self.clock.wall_ms(), delivery.body, delivery.attempt))
            count += 1
        return count


class World:
    """A store, a loop and their surroundings."""

    def __init__(self, prefetch_from: int = 0) -> None:
        self.prefetch_from = prefetch_from
        self.clock = ManualClock(now_ms=START_MS)
        self.client = fakeredis.FakeRedis()
        self.keys = Keys(f"test-{uuid.uuid4().hex}")
        self.store = self.new_store()
        self.sink = RecordingSink(self.clock)
        self.waits: list[float] = []
        self.stop = False
        self.on_wait: Callable[[], None] = lambda: None
        self.is_notified = False

    def new_store(self, claim_limit: int = 10) -> RedisStore:
        settings = DrainSettings(lease_sec=LEASE_MS / 1000, claim_limit=claim_limit)
        return RedisStore(self.client, self.keys, settings, Scripts(flags=False), self.clock.wall_ms)

    def stats(self) -> Stats:
        return read_stats(self.client, [self.keys], self.clock.wall_ms())

    def notify(self) -> None:
        self.is_notified = True

    def wait(self, timeout_ms: float) -> None:
        if self.is_notified:
            self.is_notified = False
            return
        self.waits.append(timeout_ms)
        assert len(self.waits) < 1_000, "the loop does not come to an end"
        self.clock.advance_ms(max(timeout_ms, 1))
        self.on_wait()

    def loop(self, until: str | None = "empty", store: object = None, max_rate: int = 0) -> DrainLoop:
        totals = Totals()
        reclaimer = Reclaimer(self.store.reclaim, self.notify, totals)
        return DrainLoop(
            store=store or self.store,  # type: ignore[arg-type]
            sink=self.sink,
            clock=self.clock,
            waiter=self,
            loop_id=uuid.uuid4().hex,
            wait_ms_max=1_000,
            until=until,
            stopping=lambda: self.stop,
            random=lambda: 0.0,
            request_reclaim=lambda: (reclaimer.request(), reclaimer.step()),
            rate_limit=RateLimit(max_rate),
            totals=totals,
            prefetch_from=0 if max_rate else self.prefetch_from,
        )

    def texts(self) -> list[str]:
        return [text for _, text, _ in self.sink.seen]


@pytest.fixture(params=[0, 1], ids=["one at a time", "ahead"])
def world(request: pytest.FixtureRequest) -> World:
    return World(prefetch_from=request.param)


@pytest.fixture
def ahead() -> World:
    """A world in which each claim but the first asks for the next one while it is delivered."""
    return World(prefetch_from=1)


def test_each_message_is_delivered_at_its_millisecond_across_a_bucket_boundary(world: World) -> None:
    dues = [EDGE_MS - 2, EDGE_MS - 1, EDGE_MS, EDGE_MS, EDGE_MS + 1, EDGE_MS + BUCKET_MS]
    world.clock.now_ms = EDGE_MS - 1_500
    world.store.schedule("s", transaction(*enumerate(dues, start=1)))
    totals = world.loop().run()
    assert [(at_ms, text) for at_ms, text, _ in world.sink.seen] == [
        (due_ms, f"message {line}") for line, due_ms in enumerate(dues, start=1)
    ]
    assert totals.delivered == len(dues)


def test_what_is_acknowledged_is_known_by_its_idempotency_key_afterwards(world: World) -> None:
    def member_of(line: int, key: str) -> bytes:
        return Message(START_MS, "m", id=key).to_member(f"{TOKEN}{line:08x}")

    world.store.schedule("s", transaction(identified=((1, START_MS, "order-1"),), member_of=member_of))
    assert world.loop().run().delivered == 1
    assert world.client.zscore(world.keys.ids(), "order-1") is not None, "it is remembered for a while"
    assert world.client.hlen(world.keys.places()) == 0, "it has no place any more"


def test_it_sleeps_to_the_next_due_time_and_never_longer_than_the_cap(world: World) -> None:
    world.store.schedule("s", transaction((1, START_MS + 2_300)))
    world.loop().run()
    assert world.waits == [1_000, 1_000, 300]


def test_it_sleeps_no_longer_than_to_the_end_of_the_first_lease(world: World) -> None:
    world.store.schedule("s", transaction((1, START_MS)))
    assert world.new_store().claim("dead:0").claim is not None
    world.clock.advance_ms(LEASE_MS - 1_300)
    world.loop().run()
    assert world.waits == [1_000, 300]


def test_no_two_passes_ask_under_the_same_name(world: World) -> None:
    world.store.schedule("s", transaction(*((line, START_MS + line) for line in range(1, 31))))
    names = []

    class Named(RedisStore):
        def claim(self, name: str) -> ClaimReply:
            names.append(name)
            return super().claim(name)

    named = world.new_store()
    named.__class__ = Named
    world.loop(store=named).run()
    assert len(set(names)) == len(names) > 3


def test_a_late_arrival_in_an_older_bucket_is_delivered_before_what_waits(world: World) -> None:
    world.clock.now_ms = EDGE_MS + 10
    world.store.schedule("s", transaction((1, EDGE_MS + 500)))
    world.on_wait = lambda: (
        world.store.schedule("s", transaction((1, EDGE_MS - BUCKET_MS), token="Q" * 14)) and None
        if len(world.waits) == 1
        else None
    )
    world.loop().run()
    assert len(world.sink.seen) == 2
    assert world.client.zcard(world.keys.buckets()) == 0


def test_once_delivers_what_a_dead_loop_had_in_flight(world: World) -> None:
    world.store.schedule("s", transaction((1, START_MS)))
    assert world.new_store().claim("dead:0").claim is not None
    world.clock.advance_ms(LEASE_MS)
    world.loop(until="now").run()
    assert [attempt for *_, attempt in world.sink.seen] == [2]


def test_once_is_not_done_while_one_of_two_shards_has_something_due(world: World) -> None:
    replies = [ClaimReply(START_MS, None, START_MS - 1, None), ClaimReply(START_MS, None, None, None)]

    class Shards:
        def claim(self, name: str) -> ClaimReply:
            return replies.pop(0)

    world.loop(until="now", store=Shards()).run()
    assert replies == []


def test_while_claims_are_reclaimed_deliveries_go_on(world: World) -> None:
    world.store.schedule("s", transaction((1, START_MS)))
    assert world.new_store().claim("dead:0").claim is not None
    world.clock.advance_ms(LEASE_MS)
    world.store.schedule("s", transaction((1, START_MS + LEASE_MS + 300), token="Q" * 14))
    loop = world.loop()
    requested = []
    loop.request_reclaim = lambda: requested.append(world.clock.now_ms)  # and nobody does it

    def stop() -> None:
        world.stop = len(world.waits) == 3

    world.on_wait = stop
    loop.run()
    assert world.waits == [300, 1_000, 1_000], "neither does the loop spin meanwhile"
    assert (world.texts(), len(requested)) == (["message 1"], 4)


def test_once_delivers_what_is_due_and_leaves_the_rest(world: World) -> None:
    world.store.schedule("s", transaction(*((line, START_MS) for line in range(1, 26)), (26, START_MS + 1)))
    world.loop(until="now").run()
    assert len(world.sink.seen) == 25
    assert world.stats().scheduled == 1


def test_until_empty_waits_for_the_claims_of_others(world: World) -> None:
    world.store.schedule("s", transaction((1, START_MS)))
    assert world.new_store().claim("dead:0").claim is not None
    world.loop().run()
    assert [(at_ms, attempt) for at_ms, _, attempt in world.sink.seen] == [(START_MS + LEASE_MS, 2)]


def test_a_loop_that_died_between_delivery_and_acknowledgement_is_taken_over(world: World) -> None:
    world.store.schedule("s", transaction((1, START_MS), (2, START_MS)))

    class Dying(RedisStore):
        def ack(self, claim: Claim, delivered: int, keyed: Sequence[tuple[str, str]]) -> bool:
            raise KeyboardInterrupt

        def begin(self, name: str, ack: Ack | None) -> Exchange:
            raise KeyboardInterrupt

    dying = world.new_store()
    dying.__class__ = Dying
    with pytest.raises(KeyboardInterrupt):
        world.loop(store=dying).run()
    world.loop().run()
    assert world.texts() == ["message 1", "message 2"] * 2
    assert [attempt for *_, attempt in world.sink.seen] == [1, 1, 2, 2]


def test_a_stop_finishes_what_is_in_hand(world: World) -> None:
    world.store.schedule("s", transaction(*((line, START_MS) for line in range(1, 26))))

    def stop_at_the_third() -> None:
        world.stop = world.stop or len(world.sink.seen) == 2

    world.sink.on_deliver = stop_at_the_third
    world.loop().run()
    stats = world.stats()
    assert (len(world.sink.seen), stats.scheduled, stats.in_flight) == (10, 15, 0)  # 10 is a claim


def test_a_stop_does_not_wait_for_a_sink_that_is_blocked_and_gives_the_rest_back(world: World) -> None:
    world.store.schedule("s", transaction(*((line, START_MS) for line in range(1, 6))))

    def block_at_the_third() -> None:
        world.stop = world.sink.blocked = len(world.sink.seen) == 2

    world.sink.on_deliver = block_at_the_third
    totals = world.loop().run()
    stats = world.stats()
    assert (world.texts(), stats.scheduled, stats.in_flight) == (["message 1", "message 2"], 3, 0)
    assert [m.attempt for m in world.new_store().claim("other:0").claim.messages] == [1, 1, 1]  # type: ignore[union-attr]
    assert (totals.claimed, totals.delivered, totals.of_all_topics().lateness.total()) == (5, 2, 2)


def test_a_closed_sink_gives_everything_of_the_claim_back(world: World) -> None:
    world.store.schedule("s", transaction((1, START_MS), (2, START_MS)))

    def close() -> None:
        raise SinkClosed("Nobody reads.", 1)

    world.sink.on_deliver = close
    loop = world.loop()
    with pytest.raises(SinkClosed):
        loop.run()
    stats = world.stats()
    assert (stats.scheduled, stats.in_flight) == (2, 0)
    assert loop.totals.errors == {"SinkClosed": 1}


def test_nothing_is_begun_after_the_lease(world: World) -> None:
    world.store.schedule("s", transaction((1, START_MS), (2, START_MS), (3, START_MS)))
    world.sink.on_deliver = lambda: world.clock.advance_ms(20_000) if len(world.sink.seen) < 2 else None
    totals = world.loop().run()
    assert world.texts() == ["message 1", "message 1", "message 2", "message 3"]
    assert (totals.delivered, totals.late_acks, totals.reclaimed) == (3, 1, 3)


def test_a_delivery_that_took_longer_than_the_lease_is_stale(world: World) -> None:
    world.store.schedule("s", transaction((1, START_MS)))
    seen = world.sink.seen

    class Slow(RecordingSink):
        def deliver(
            self, deliveries: Sequence[Message], in_time: Callable[[], bool], may_wait: Callable[[], bool]
        ) -> int:
            count = super().deliver(deliveries, in_time, may_wait)
            if len(self.seen) == 1:
                self.clock.advance_ms(LEASE_MS)
            return count

    world.sink.__class__ = Slow
    totals = world.loop().run()
    assert [(text, attempt) for _, text, attempt in seen] == [("message 1", 1), ("message 1", 2)]
    assert (totals.claimed, totals.delivered, totals.late_acks, totals.reclaimed) == (2, 1, 1, 1)
    assert (totals.redelivered, totals.topics["default"].delivered) == (1, 1)


def test_once_ends_although_more_keeps_coming(world: World) -> None:
    world.store.schedule("s", transaction(*((line, START_MS) for line in range(1, 11))))
    sources = iter(range(1_000))

    def more() -> None:
        world.clock.advance_ms(1)
        token = f"{next(sources):014d}"
        world.store.schedule("s", transaction(*((line, world.clock.wall_ms()) for line in range(1, 11)), token=token))

    world.sink.on_deliver = more
    world.loop(until="now").run()
    assert {text for _, text, _ in world.sink.seen[:10]} == {f"message {line}" for line in range(1, 11)}
    assert len(world.sink.seen) == 20  # what was due, and the claim that showed that no more of it was left


class Flaky:
    """A store whose calls fail by plan: ``before`` it is executed, or ``after``, when only the reply is lost."""

    def __init__(self, store: RedisStore, plan: dict[str, list[str]]) -> None:
        self._store = store
        self._plan = plan

    def claim(self, name: str) -> ClaimReply:
        return self._call("claim", lambda: self._store.claim(name))  # type: ignore[return-value]

    def ack(self, claim: Claim, delivered: int, keyed: Sequence[tuple[str, str]]) -> bool:
        return self._call("ack", lambda: self._store.ack(claim, delivered, keyed))  # type: ignore[return-value]

    def release(self, claim: Claim, delivered: int) -> int:
        return self._call("release", lambda: self._store.release(claim, delivered))  # type: ignore[return-value]

    def begin(self, name: str, ack: Ack | None) -> Exchange:
        fault = self._plan["begin"].pop(0) if self._plan.get("begin") else ""
        if fault == "before":
            raise StoreUnavailable("Redis does not answer.")
        exchange = self._store.begin(name, ack)

        def answered() -> tuple[bool | None, ClaimReply]:
            found = exchange()
            if fault == "after":
                raise StoreUnavailable("Redis does not answer.")
            return found

        return answered

    def _call(self, verb: str, call: Callable[[], object]) -> object:
        fault = self._plan[verb].pop(0) if self._plan.get(verb) else ""
        if fault == "before":
            raise StoreUnavailable("Redis does not answer.")
        result = call()
        if fault == "after":
            raise StoreUnavailable("Redis does not answer.")
        return result


@pytest.mark.parametrize("fault", ["before", "after"])
def test_a_claim_that_failed_costs_no_lease(world: World, fault: str) -> None:
    world.store.schedule("s", transaction((1, START_MS)))
    world.loop(store=Flaky(world.store, {"claim": [fault, fault]})).run()
    assert world.texts() == ["message 1"]
    assert world.clock.now_ms < START_MS + 1_000


@pytest.mark.parametrize("fault", ["before", "after"])
def test_an_acknowledgement_that_failed_is_made_again(world: World, fault: str) -> None:
    world.store.schedule("s", transaction((1, START_MS), (2, START_MS)))
    totals = world.loop(store=Flaky(world.store, {"ack": [fault, fault]})).run()
    assert world.texts() == ["message 1", "message 2"]
    assert (totals.delivered, world.stats().counters["delivered"]) == (2, 2)


def test_what_is_acknowledged_counts_when_a_stop_can_not_give_the_rest_back(world: World) -> None:
    world.store.schedule("s", transaction(*((line, START_MS) for line in range(1, 6))))

    def block_at_the_third() -> None:
        world.stop = world.sink.blocked = len(world.sink.seen) == 2

    world.sink.on_deliver = block_at_the_third
    totals = world.loop(store=Flaky(world.store, {"release": ["before"]})).run()
    assert (totals.claimed, totals.delivered, totals.of_all_topics().lateness.total()) == (5, 2, 2)
    stats = world.stats()
    assert (stats.in_flight, stats.counters["delivered"]) == (3, 2)


@pytest.mark.parametrize("verb", ["claim", "ack"])
def test_calls_that_fail_are_counted_by_what_caused_them(world: World, verb: str) -> None:
    world.store.schedule("s", transaction((1, START_MS)))
    plan = {verb: ["before", "after"], "begin": ["before", "after"] if verb == "ack" else []}
    totals = world.loop(store=Flaky(world.store, plan)).run()
    assert totals.errors == {"StoreUnavailable": 2}
    assert (totals.claimed, totals.delivered, totals.topics["default"].delivered) == (1, 1, 1)


def test_a_flood_comes_at_the_rate_in_small_bursts(world: World) -> None:
    world.store.schedule("s", transaction(*((line, START_MS) for line in range(1, 401))))
    world.loop(max_rate=200).run()  # the store's claims are of 10
    came_ms = [at_ms - START_MS for at_ms, *_ in world.sink.seen]
    assert world.texts() == [f"message {line}" for line in range(1, 401)]
    assert came_ms[:41] == [0] * 20 + [50] * 10 + [100] * 10 + [150]
    assert came_ms[-1] == 1_900  # 400 messages at 200 a second, the first 20 at once


def test_a_wait_for_the_rate_holds_no_claim(world: World) -> None:
    world.store.schedule("s", transaction(*((line, START_MS) for line in range(1, 101))))
    in_flight = []
    world.on_wait = lambda: in_flight.append(world.stats().in_flight)
    world.loop(max_rate=200).run()
    assert in_flight == [0] * 9  # the last before it sees that nothing is left


def test_a_load_below_the_rate_is_not_delayed(world: World) -> None:
    dues = [START_MS + 100 * n + n % 2 for n in range(50) for _ in range(19)]  # 19 at once, 190 a second
    world.store.schedule("s", transaction(*enumerate(dues, start=1)))
    world.loop(max_rate=200).run()
    assert [at_ms for at_ms, *_ in world.sink.seen] == dues


def test_a_slow_sink_is_not_made_slower(world: World) -> None:
    world.store.schedule("s", transaction(*((line, START_MS) for line in range(1, 11))))
    world.sink.on_deliver = lambda: world.clock.advance_ms(300)
    world.loop(max_rate=4, store=world.new_store(claim_limit=RateLimit(4).claim_limit(10))).run()
    assert world.waits == []


def test_a_rate_below_one_burst_goes_message_by_message(world: World) -> None:
    world.store.schedule("s", transaction((1, START_MS), (2, START_MS), (3, START_MS)))
    one_by_one = world.new_store(claim_limit=RateLimit(4).claim_limit(10))
    world.loop(max_rate=4, store=one_by_one).run()
    assert [at_ms - START_MS for at_ms, *_ in world.sink.seen] == [0, 250, 500]


def test_a_ring_does_not_end_the_wait_for_the_rate(world: World) -> None:
    world.store.schedule("s", transaction(*((line, START_MS) for line in range(1, 31))))
    loop = world.loop(max_rate=200)
    waits = []

    class Ringing:
        def wait(self, timeout_ms: float) -> None:
            waits.append(timeout_ms)
            world.clock.advance_ms(min(timeout_ms, 20))

    loop.waiter = Ringing()
    loop.run()
    assert waits == [50, 30, 10] * 2  # after 20 and after 30
    assert len(world.sink.seen) == 30


def test_a_stop_ends_the_wait_for_the_rate(world: World) -> None:
    world.store.schedule("s", transaction(*((line, START_MS) for line in range(1, 101))))

    def stop() -> None:
        world.stop = True

    world.on_wait = stop
    world.loop(max_rate=200).run()
    stats = world.stats()
    assert (len(world.sink.seen), stats.scheduled, stats.in_flight) == (20, 80, 0)


@pytest.mark.parametrize(("max_rate", "limit"), [(0, 500), (1, 1), (39, 1), (40, 2), (1_000, 50), (100_000, 500)])
def test_a_claim_takes_a_twentieth_of_the_rate(max_rate: int, limit: int) -> None:
    assert RateLimit(max_rate).claim_limit(500) == limit


def test_a_member_in_a_foreign_format_is_delivered_as_it_stands(world: World) -> None:
    start_ms = START_MS - START_MS % BUCKET_MS
    world.client.zadd(world.keys.buckets(), {str(start_ms): start_ms})
    world.client.zadd(world.keys.bucket(start_ms), {"by hand": START_MS})
    world.loop().run()
    assert world.texts() == ["by hand"]


class Counting:
    """A store that notes which calls it gets."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self.calls: list[str] = []

    def __getattr__(self, verb: str) -> object:
        self.calls.append(verb)
        return getattr(self._store, verb)


def some(world: World, count: int) -> None:
    world.store.schedule("s", transaction(*((line, START_MS) for line in range(1, count + 1))))


def test_in_a_flood_the_next_claim_goes_with_the_acknowledgement(ahead: World) -> None:
    some(ahead, 45)  # the store's claims are of 10
    store, in_flight = Counting(ahead.store), []
    ahead.sink.on_deliver = lambda: in_flight.append(ahead.stats().in_flight)
    totals = ahead.loop(store=store, until="empty").run()
    assert ahead.texts() == [f"message {line}" for line in range(1, 46)]
    # The last one finds nothing more, but that is not believed, since it is some time ago.
    assert store.calls == ["claim", *["begin"] * 6]
    assert set(in_flight[10:30]) == {20}
    assert (totals.claimed, totals.delivered, totals.of_all_topics().lateness.total()) == (45, 45, 45)


@pytest.mark.parametrize(("prefetch_from", "took_ms", "calls"), [(10, 0, 2), (11, 0, 1), (0, 0, 0), (1, 310, 1)])
def test_only_full_claims_of_a_quick_sink_ask_ahead(prefetch_from: int, took_ms: int, calls: int) -> None:
    """The first of the calls has the acknowledgement of the first claim and asks for the second."""
    world = World(prefetch_from)
    some(world, 20)
    store, begun = Counting(world.store), []

    def on_deliver() -> None:
        begun.append(store.calls.count("begin"))
        world.clock.advance_ms(took_ms)

    world.sink.on_deliver = on_deliver
    world.loop(store=store).run()
    assert (begun[0], begun[10]) == (0, calls)


def test_an_acknowledgement_and_the_next_claim_are_one_round_trip() -> None:
    """Also when nothing more is due: then the answer says when to look again."""
    world = World(prefetch_from=10)
    world.store.schedule("s", transaction((1, START_MS), (2, START_MS + 400)))
    store = Counting(world.store)
    world.loop(store=store, until="empty").run()
    assert store.calls == ["claim", "begin", "claim", "begin"]
    assert world.waits == [400]


@pytest.mark.parametrize("fault", ["before", "after"])
def test_a_claim_ahead_that_failed_costs_no_lease(ahead: World, fault: str) -> None:
    some(ahead, 40)
    totals = ahead.loop(
        store=Flaky(ahead.store, {"begin": ["", fault], "ack": ["", "after"], "claim": ["", "after"]})
    ).run()
    assert ahead.texts() == [f"message {line}" for line in range(1, 41)]
    assert ahead.clock.now_ms < START_MS + LEASE_MS
    assert (totals.delivered, totals.late_acks, ahead.stats().counters["delivered"]) == (40, 0, 40)


def test_a_stop_gives_back_what_was_asked_ahead(ahead: World) -> None:
    some(ahead, 45)

    def stop_at_the_15th() -> None:
        ahead.stop = ahead.sink.blocked = len(ahead.sink.seen) == 14

    ahead.sink.on_deliver = stop_at_the_15th
    totals = ahead.loop().run()
    stats = ahead.stats()
    assert (len(ahead.sink.seen), stats.scheduled, stats.in_flight, stats.counters["delivered"]) == (14, 31, 0, 14)
    assert (totals.delivered, totals.late_acks) == (14, 0)
    rest = ahead.new_store(claim_limit=50).claim("other:0").claim
    assert rest is not None and {m.attempt for m in rest.messages} == {1}


def test_a_sink_that_closes_gives_back_what_was_asked_ahead_and_counts_what_was_delivered(ahead: World) -> None:
    some(ahead, 45)

    def close_at_the_25th() -> None:
        if len(ahead.sink.seen) == 24:
            raise SinkClosed("Nobody reads.", 4)

    ahead.sink.on_deliver = close_at_the_25th
    loop = ahead.loop()
    with pytest.raises(SinkClosed):
        loop.run()
    stats = ahead.stats()
    assert (stats.scheduled, stats.in_flight, stats.counters["delivered"]) == (25, 0, 20)
    assert loop.totals.delivered == 20


def test_the_token_is_what_the_builders_say() -> None:
    assert len(TOKEN) == 14
