"""Whatever happens to forwarders, readers of committed records see each message once, in order, or it is one dead letter.

The server is real, but writes nothing to disk. Kafka is ``tests.kafka.model``, and the sender on top of it the real one.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from pipeline.config import KafkaSettings, RedisSettings, TopicSettings
from pipeline.drain.stats import Totals
from pipeline.kafka import forwarding
from pipeline.kafka.forwarding import IN_USE_MS, STUCK_MS, Forwarding
from pipeline.store.connection import connect
from tests.clock import ManualClock
from tests.kafka.forwarding_world import ENDLESS, HUGE, LARGE, SMALL, World
from tests.kafka.model import Cluster, Crashed
from tests.servers import RealServer, real_server

SEEDS = 10
ACTIONS = 60
FAULT_SHARES = (0.0, 0.02, 0.1)

OpenWorld = Callable[..., World]


@pytest.fixture(scope="session")
def quick_server() -> Iterator[RealServer]:
    with real_server("--appendonly", "no") as running:
        yield running


@pytest.fixture
def open_world(quick_server: RealServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenWorld]:
    """Opens worlds by seed, with or without transactions."""
    user = connect(RedisSettings(url=quick_server.url))
    with quick_server.client() as admin:
        yield lambda seed=0, exactly_once=True: World(admin, user, seed, exactly_once, monkeypatch)
    user.close()


def live(world: World, share: float) -> None:
    """Let a world have its random course, and see how it ends."""
    world.faults.share = share
    for _ in range(ACTIONS):
        world.act()
    world.finish()


def live_all(open_world: OpenWorld, share: float, exactly_once: bool) -> None:
    """Let many worlds have their course. In every second one all messages are small, so that all have an order."""
    for seed in range(SEEDS):
        world = open_world(seed, exactly_once)
        if seed % 2:
            world.kinds = (SMALL,)
        try:
            live(world, share)
        except BaseException as exc:
            exc.add_note(f"seed {seed}, share {share}")
            raise


def crash(_: World) -> bool:
    """The loop ends."""
    raise Crashed


def fail(_: World) -> bool:
    """There is an error."""
    return True


def replace_it(world: World) -> bool:
    """The loop stands still while another one takes over and does all that is there; then it goes on."""
    world.kafka.topics.add("late")
    world.take_over()
    return False


def replace_by_one_that_crashes(world: World) -> bool:
    """The same, but the other one ends between a commit and the next read, and nobody has the lease any more."""
    world.kafka.topics.add("late")
    world.end_lease()
    other = world.start(batch=100)
    world.step(other)
    world.processes.remove(other)
    world.end_lease()
    return False


STRIKES = (crash, fail, replace_it, replace_by_one_that_crashes)


def run_course(world: World) -> None:
    """Take the messages of each kind through one loop."""
    for body, topic in ((SMALL, "a"), (SMALL, "late"), (LARGE, "b"), (LARGE, "b"), (HUGE, "b"), (SMALL, "b")):
        world.add(topic, body)
    for body, topic in ((SMALL, "a"), (ENDLESS, "a"), (SMALL, "b"), (SMALL, "a")):
        world.add(topic, body)
    first = world.start(batch=6)
    for _ in range(4):
        if first in world.processes:
            world.step(first)


def strike_everywhere(open_world: OpenWorld, strike: Callable[[World], bool], exactly_once: bool) -> int:
    """Let something happen at each point of a course in turn; returns how many there are."""
    passed = ["begin"]
    at = 0
    while at < len(passed):
        world = open_world(0, exactly_once)
        world.faults.strike_at, world.faults.strike = at, lambda world=world: strike(world)
        try:
            run_course(world)
            passed = world.faults.passed
            world.finish()
        except BaseException as exc:
            exc.add_note(f"struck at {at}, {passed[at : at + 1]}")
            raise
        at += 1
    return at


@pytest.mark.parametrize("share", FAULT_SHARES)
def test_each_message_is_written_once_or_is_one_dead_letter(open_world: OpenWorld, share: float) -> None:
    live_all(open_world, share, exactly_once=True)


@pytest.mark.parametrize("share", FAULT_SHARES)
def test_without_transactions_no_message_is_lost_and_the_order_is_kept_but_for_repeats(
    open_world: OpenWorld, share: float
) -> None:
    live_all(open_world, share, exactly_once=False)


@pytest.mark.parametrize("strike", [crash, *(pytest.param(strike, marks=pytest.mark.slow) for strike in STRIKES[1:])])
def test_struck_at_any_point_all_goes_on(open_world: OpenWorld, strike: Callable[[World], bool]) -> None:
    assert strike_everywhere(open_world, strike, exactly_once=True) > 50


@pytest.mark.parametrize("strike", [crash, replace_it])
def test_struck_at_any_point_without_transactions_nothing_is_lost(
    open_world: OpenWorld, strike: Callable[[World], bool]
) -> None:
    assert strike_everywhere(open_world, strike, exactly_once=False) > 40


@pytest.mark.parametrize("exactly_once", [True, False], ids=["atomic", "plain"])
def test_without_a_fault_nothing_is_repeated_and_all_is_counted(open_world: OpenWorld, exactly_once: bool) -> None:
    world = open_world(0, exactly_once)
    run_course(world)
    assert {*Counter(name for _, name in world.kafka.log).values()} == {1}
    assert (world.tally.forwarded, world.tally.refused) == (7, 3) == (len(world.kafka.log), world.dead().total())
    assert [*world.processes] == [world.processes[0]] and world.processes[0].forwarder.is_done()
    world.finish()


def test_a_server_that_lost_its_last_writes_takes_no_new_message_for_one_that_is_written(open_world: OpenWorld) -> None:
    world = open_world()
    for _ in range(3):
        world.add("a", SMALL)
    snapshot = world.note()
    for _ in range(3):
        world.add("a", SMALL)
    world.take_over()
    world.set_back(snapshot)
    for _ in range(5):
        world.add("a", SMALL)
    world.finish()
    assert len(world.kafka.log) == 11 + 3  # those that Redis had again come twice


def test_nothing_is_left_of_an_old_sender_when_its_loop_begins_again(open_world: OpenWorld) -> None:
    world = open_world()
    for _ in range(6):
        world.add("a", SMALL)
    loop = world.start(batch=2)
    world.step(loop)  # two are written, two are read ahead
    world.faults.strike_at, world.faults.strike = "commit", lambda: True
    assert world.step(loop) is None
    world.take_over()
    world.end_lease()
    world.add("a", SMALL)
    world.step(loop)
    world.finish()


def test_a_loop_that_was_replaced_in_a_refusal_makes_no_dead_letter_of_what_is_written(open_world: OpenWorld) -> None:
    world = open_world()
    world.add("late", SMALL)
    loop = world.start()
    world.faults.strike_at, world.faults.strike = "topics done", lambda: replace_by_one_that_crashes(world)
    assert world.step(loop) is None
    assert len(world.kafka.log) == 1 and not world.dead()
    world.finish()


@pytest.mark.parametrize("point", ["init", "init done", "position", "position done"])
def test_what_is_committed_while_another_loop_takes_over_is_not_written_again(
    open_world: OpenWorld, point: str
) -> None:
    world = open_world()
    for _ in range(4):
        world.add("a", SMALL)
    old = world.start(batch=2)
    world.step(old)
    world.end_lease()
    world.faults.strike_at, world.faults.strike = point, lambda: world.step(old) is None and False
    new = world.start()
    world.step(new)
    world.finish()
    assert sorted(name for _, name in world.kafka.log) == sorted(sent.name for sent in world.sent)


def test_a_loop_with_nothing_to_do_waits_no_longer_than_for_a_reply(
    open_world: OpenWorld, quick_server: RealServer
) -> None:
    world = open_world()
    settings = RedisSettings(url=quick_server.url, reply_timeout_ms=450, namespace=world.keys.namespace)
    world.add("a", SMALL)
    client = connect(settings)
    kafka = KafkaSettings(servers="model")
    forwards = Forwarding(client, settings, kafka, lambda _: TopicSettings(), world.tally, "loop", ManualClock())
    [forwarder] = forwards._forwarders
    for _ in range(3):
        forwarder.step()
    assert len(world.kafka.log) == 1 and forwards.is_done()
    client.close()
    world.finish()


@pytest.mark.parametrize("topic", ["", "a\0b", "a" * 250, "ä", "a/b"])
def test_a_name_that_no_topic_can_have_holds_nothing_up(
    open_world: OpenWorld, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    """The client would end with errors of its own for some, so it is not asked."""
    world = open_world()
    world.add("a", SMALL)
    world.admin.xadd(world.keys.outbox(), {"topic": topic, "id": "i", "message": "m"})
    world.add("a", SMALL)
    asked: list[str] = []
    monkeypatch.setattr(Cluster, "refused_topics", lambda _, names: asked.extend(names) or {})
    world.step(world.start(batch=3))
    assert asked == ["a"] and len(world.kafka.log) == 2
    [(_, dead)] = world.admin.xrange(world.keys.dead(topic))
    assert (dead[b"id"], dead[b"reason"]) == (b"i", b"unknown_topic")
    world.finish()


def test_the_kafka_topic_of_a_topic_is_asked_for_once_a_second() -> None:
    clock, named = ManualClock(), ["first", "second"]
    names = forwarding.TopicNames(lambda _: TopicSettings(kafka_topic=named[0]), clock)
    assert names.kafka_topic("mail") == "first"
    del named[0]
    clock.advance_ms(forwarding.TOPICS_MS - 1)
    assert names.kafka_topic("mail") == "first"
    clock.advance_ms(1)
    assert names.kafka_topic("mail") == "second"


def test_what_hangs_is_told_until_it_is_over_or_nobody_writes_there_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counts, found = ManualClock(), Totals(), {"T/0": 7}
    monkeypatch.setattr(Cluster, "stuck_partitions", lambda *_: dict(found), raising=False)
    monkeypatch.setattr(forwarding, "Cluster", lambda _: Cluster.__new__(Cluster))
    names = forwarding.TopicNames(lambda _: TopicSettings(), clock)
    watch = forwarding._StuckWatch({}, names, clock, counts)
    seen = []
    for has_moved in (False, False, True, False):
        names.kafka_topic("T")
        found["T/0"] += has_moved
        watch.step()
        seen.append(list(counts.stuck_partitions))
        clock.advance_ms(STUCK_MS)
    assert seen == [[], ["T/0"], [], ["T/0"]]
    clock.advance_ms(IN_USE_MS)
    watch.step()
    assert counts.stuck_partitions == []
