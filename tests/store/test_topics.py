"""Where messages go by their topic: streams, pauses, paces, expiry; and what streams keep."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from pipeline.config import DrainSettings, TopicSettings
from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.errors import StoreProtocolError
from pipeline.core.messages import decode_member, encode_again, encode_member
from pipeline.store.base import ClaimReply
from pipeline.store.dead_letters import DeadLetters
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.routes import TopicRules
from pipeline.store.topics import Topics
from tests.store.conftest import START_MS

STREAM = TopicSettings(sink="stream")


@dataclass
class World:
    """A namespace on the real server whose topics have settings, all into streams unless told otherwise."""

    client: Any
    keys: Keys
    settings: dict[str, TopicSettings]
    now_ms: int = START_MS
    claims: int = 0
    sent: int = 0

    def store(self, **drain: Any) -> RedisStore:
        rules = TopicRules(lambda topic: self.settings.get(topic, STREAM), all_to_screen=False)
        return RedisStore(self.client, self.keys, DrainSettings(**drain), now_ms=lambda: self.now_ms, rules=rules)

    def send(self, text: str, topic: str = "mail", due_ms: int = START_MS, **fields: Any) -> bytes:
        self.sent += 1
        member = encode_member(f"Psent000000000{self.sent:08x}", text, topic, **fields)
        self.put(member, due_ms)
        return member

    def put(self, member: bytes, due_ms: int = START_MS) -> None:
        start = bucket_start_ms(due_ms)
        self.client.zadd(self.keys.bucket(start), {member: due_ms})
        self.client.zadd(self.keys.buckets(), {str(start): start})

    def claim(self, store: RedisStore | None = None) -> ClaimReply:
        self.claims += 1
        return (store or self.store()).claim(f"claim:{self.claims}")

    def stream(self, key: str) -> list[dict[str, str]]:
        return [
            {name.decode(): value.decode() for name, value in fields.items()} for _, fields in self.client.xrange(key)
        ]

    def texts(self, topic: str = "mail") -> list[str]:
        return [fields["message"] for fields in self.stream(self.keys.stream(topic))]

    def topics(self) -> Topics:
        return Topics(self.client, [self.keys])


@pytest.fixture
def world(server: Any) -> Any:
    client = server.client()
    keys = Keys("test-topics")
    yield World(client, keys, {})
    client.delete(*client.keys("{test-topics:*"), "nothing")
    client.close()


def test_a_message_moves_with_all_its_fields_and_its_schedule_ends(world: World) -> None:
    world.send("hello", headers={"a/b": 'ä"\n'}, caller_id="order-1")
    world.client.zadd(world.keys.ids(), {"order-1": "+inf"})
    reply = world.claim()
    assert (reply.claim, reply.moved, reply.next_due_ms) == (None, {"mail": [START_MS]}, START_MS)
    [fields] = world.stream(world.keys.stream("mail"))
    assert fields == {
        "id": "order-1",
        "message": "hello",
        "topic": "mail",
        "due_ms": str(START_MS),
        "attempt": "1",
        "headers": '{"a\\/b":"ä\\"\\n"}',
    }
    assert world.claim().next_due_ms is None
    assert world.client.zscore(world.keys.ids(), "order-1") == START_MS + 86_400_000
    assert world.client.hgetall(world.keys.counters()) == {b"delivered": b"1"}
    assert world.client.smembers(world.keys.topics()) == {b"mail"}


def test_plain_and_foreign_members_go_to_the_default_topic_as_they_stand(world: World) -> None:
    odd = [b"\xff\xfe", b"short", b"P" * 22 + b"j{not json", b"P" * 22 + b'j{"message":1}', b"P" * 22 + b"x?"]
    odd += [b"Q" * 22 + b'j{"message":"m","topic":"a{b}"}', b"Q" * 22 + b'r{"message":"m"}']
    odd += [b"S" * 22 + b'j{"message":"m","headers":{"a":1e999}}', b"S" * 22 + b'j{"message":"m","headers":["a"]}']
    odd += [
        b"T" * 22 + b'r{"message":"m","due_ms":"nan"}',
        b"T" * 22 + b'r{"message":"m","due_ms":"1","attempt":"nan"}',
    ]
    odd += [b"R" * 22 + b'j{"message":"m","headers":null}', b"R" * 22 + b'r{"message":"m","due_ms":"1","group":"a:b"}']
    for member in odd:
        world.put(member)
    world.send("plain", topic="default")
    assert sum(len(dues) for dues in world.claim().moved.values()) == len(odd) + 1
    moved = [fields[b"message"] for _, fields in world.client.xrange(world.keys.stream("default"))]
    assert sorted(moved) == sorted([*odd, b"plain"])


def test_a_message_that_was_tried_on_the_screen_goes_on_counting(world: World) -> None:
    member = world.send("tried")
    world.client.hset(world.keys.attempts(), member[:22], 2)
    world.claim()
    assert world.stream(world.keys.stream("mail"))[0]["attempt"] == "3"
    assert not world.client.exists(world.keys.attempts())


def test_topics_of_both_sinks_share_buckets(world: World) -> None:
    world.settings["bell"] = TopicSettings(sink="screen")
    world.send("1", due_ms=START_MS - 3)
    world.send("2", "bell", due_ms=START_MS - 2)
    world.send("3", due_ms=START_MS - 1)
    store = world.store()
    moved, shown = [], []
    for _ in range(4):
        reply = world.claim(store)
        moved += [due_ms for dues in reply.moved.values() for due_ms in dues]
        if reply.claim:
            shown += [decode_member(m.member).message for m in reply.claim.messages]
            assert store.ack(reply.claim, len(reply.claim.messages), [])
    assert (sorted(moved), shown) == ([START_MS - 3, START_MS - 1], ["2"])
    assert world.texts() == ["1", "3"]
    assert world.client.hget(world.keys.counters(), "delivered") == b"3"
    assert not world.client.exists(world.keys.buckets(), world.keys.claims())


def test_a_thousand_topics_that_nobody_knew_before_all_move(world: World) -> None:
    topics = [f"topic-{number}" for number in range(1_000)]
    for topic in topics:
        world.send("x", topic)
    store = world.store()
    for _ in range(3_000):
        if world.claim(store).next_due_ms is None:
            break
    assert all(world.texts(topic) == ["x"] for topic in topics)


def test_what_comes_again_for_a_group_goes_to_that_group_alone_even_where_all_topics_go_to_the_screen(
    world: World,
) -> None:
    again = encode_again("0" * 22, "m", "mail", "order-1", {"a": "b"}, due_ms=7, group="billing", attempt=3)
    world.put(again)
    plain = RedisStore(world.client, world.keys, now_ms=lambda: world.now_ms)
    assert world.claim(plain).moved == {"mail:billing": [7]}
    [fields] = world.stream(world.keys.again("mail", "billing"))
    assert (fields["attempt"], fields["due_ms"], fields["id"], fields["headers"]) == ("3", "7", "order-1", '{"a":"b"}')
    assert not world.client.exists(world.keys.stream("mail"))


def test_nothing_is_written_when_one_of_the_keys_holds_something_else(world: World) -> None:
    world.send("first")
    world.send("second", "broken")
    world.client.set(world.keys.stream("broken"), "in the way")
    store = world.store()
    with pytest.raises(StoreProtocolError, match="WRONGTYPE"):
        for _ in range(5):
            world.claim(store)
    world.client.delete(world.keys.stream("broken"))
    for _ in range(3):
        world.claim(store)
    assert (world.texts(), world.texts("broken")) == (["first"], ["second"])


class TestPauses:
    def test_what_comes_due_is_held_and_comes_in_order_when_the_pause_ends(self, world: World) -> None:
        world.topics().pause("mail", START_MS)
        world.send("late", due_ms=START_MS - BUCKET_WIDTH_MS)
        world.send("now")
        world.send("other", "news")
        store = world.store()
        while world.claim(store).next_due_ms is not None:
            pass
        assert (world.texts(), world.texts("news")) == ([], ["other"])
        assert world.topics().look("mail").held == 2
        assert store.stats().scheduled == store.stats().held == 2
        assert store.stats().overdue_ms == BUCKET_WIDTH_MS
        assert list(world.topics().put_back(world.keys, "mail")) == [], "still paused"
        assert sum(world.topics().resume("mail")) == 2
        while world.claim(store).next_due_ms is not None:
            pass
        assert world.texts() == ["late", "now"]
        assert world.topics().look("mail").paused_ms is None

    def test_a_pause_counts_also_where_all_topics_go_to_the_screen(self, world: World) -> None:
        plain = RedisStore(world.client, world.keys, now_ms=lambda: world.now_ms)
        world.topics().pause("mail", START_MS)
        world.send("held")
        world.send("shown", "default")
        shown = []
        for _ in range(4):
            reply = world.claim(plain)
            shown += [decode_member(m.member).message for m in (reply.claim.messages if reply.claim else ())]
        assert shown == ["shown"]
        assert world.topics().look("mail").held == 1

    def test_pausing_twice_keeps_the_first_time(self, world: World) -> None:
        world.topics().pause("mail", 1)
        world.topics().pause("mail", 2)
        assert world.topics().look("mail").paused_ms == 1


class TestExpiry:
    def test_what_is_later_than_allowed_is_a_dead_letter(self, world: World) -> None:
        world.settings["mail"] = replace(STREAM, expire_after_sec=10)
        world.send("in time", due_ms=START_MS - 10_000)
        world.send("too late", due_ms=START_MS - 10_001, headers={"a": "b"})
        store = world.store()
        world.claim(store)
        assert world.texts() == ["in time"]
        [letter] = DeadLetters(world.client, [world.keys]).of_topic("mail")
        assert (letter.message, letter.reason, letter.group, letter.died_ms) == ("too late", "expired", "", START_MS)
        assert letter.headers == {"a": "b"}
        assert store.stats().dead == 1

    def test_a_letter_that_is_scheduled_again_does_not_expire_again(self, world: World) -> None:
        world.settings["mail"] = replace(STREAM, expire_after_sec=10)
        world.send("late", due_ms=START_MS - 60_000)
        store = world.store()
        world.claim(store)
        letters = DeadLetters(world.client, [world.keys])
        [letter] = letters.of_topic("mail")
        bell = world.client.pubsub()
        bell.subscribe(world.keys.wake())
        assert bell.get_message(timeout=5)["type"] == "subscribe"
        assert letters.redrive(letter, START_MS)
        assert bell.get_message(timeout=5)["data"] == str(START_MS).encode(), "loops that sleep hear of it"
        bell.close()
        assert not letters.redrive(letter, START_MS), "it is gone"
        world.claim(store)
        assert world.texts() == ["late"]
        assert store.stats().dead == 0

    def test_letters_that_come_while_others_are_walked_do_not_prolong_the_walk(self, world: World) -> None:
        dead = world.keys.dead("mail")
        for number in range(250):
            world.client.xadd(dead, {"message": f"{number}"})
        walked = []
        for letter in DeadLetters(world.client, [world.keys]).of_topic("mail"):
            walked.append(letter.message)
            assert len(walked) <= 250, "it goes on for ever"
            world.client.xadd(dead, {"message": "again"})
        assert walked == [f"{number}" for number in range(250)]

    def test_also_messages_for_the_screen_expire(self, world: World) -> None:
        world.settings["mail"] = TopicSettings(sink="screen", expire_after_sec=10)
        world.send("late", due_ms=START_MS - 60_000)
        assert world.claim().claim is None
        assert [letter.message for letter in DeadLetters(world.client, [world.keys]).of_topic("mail")] == ["late"]


class TestPaces:
    def test_a_flood_goes_at_its_rate_in_order_and_keeps_its_due_times(self, world: World) -> None:
        world.settings["mail"] = replace(STREAM, max_rate=20)
        for number in range(50):
            world.send(f"{number:02}")
        store = world.store()
        moved_at: list[int] = []
        while (reply := world.claim(store)).next_due_ms is not None:
            moved_at += [world.now_ms] * sum(map(len, reply.moved.values()))
            world.now_ms = max(world.now_ms, reply.next_due_ms)
        assert world.texts() == [f"{number:02}" for number in range(50)]
        assert {fields["due_ms"] for fields in world.stream(world.keys.stream("mail"))} == {str(START_MS)}
        for first in range(50):
            within = [at_ms for at_ms in moved_at if moved_at[first] <= at_ms < moved_at[first] + 1_000]
            assert len(within) <= 20 + 3, "a second's worth, and a tenth of it at once"
        assert START_MS + 2_300 <= moved_at[-1] <= START_MS + 2_500

    def test_what_comes_while_another_waits_does_not_overtake_it(self, world: World) -> None:
        world.settings["mail"] = replace(STREAM, max_rate=100)
        for number in range(12):
            world.send(f"{number:02}")
        for number in range(12, 20):
            world.send(f"{number:02}", due_ms=START_MS + 20 + number)
        store = world.store()
        while (reply := world.claim(store)).next_due_ms is not None:
            world.now_ms = max(world.now_ms, reply.next_due_ms)
        assert world.texts() == [f"{number:02}" for number in range(20)]

    def test_each_shard_has_its_share(self, world: World) -> None:
        rules = TopicRules(lambda topic: replace(STREAM, max_rate=20), all_to_screen=False, shards=4)
        for number in range(10):
            world.send(f"{number}")
        store = RedisStore(world.client, world.keys, now_ms=lambda: world.now_ms, rules=rules)
        while (reply := world.claim(store)).next_due_ms is not None:
            world.now_ms = max(world.now_ms, reply.next_due_ms)
        assert START_MS + 1_600 <= world.now_ms <= START_MS + 1_800, "five a second"

    def test_other_topics_do_not_wait(self, world: World) -> None:
        world.settings["mail"] = replace(STREAM, max_rate=1)
        for number in range(20):
            world.send(f"{number}")
        world.send("quick", "news")
        store = world.store()
        while world.claim(store).next_due_ms == world.now_ms:
            pass
        assert world.texts("news") == ["quick"]
        assert len(world.texts()) == 1

    def test_a_message_that_waited_is_shown_with_its_own_due_time_and_id(self, world: World) -> None:
        world.settings["mail"] = TopicSettings(sink="screen", max_rate=5)
        world.send("1", caller_id="one")
        world.send("2", caller_id="two", headers={"a": "b"})
        store = world.store()
        claim = world.claim(store).claim
        assert claim is not None and len(claim.messages) == 1
        assert world.claim(store).claim is None, "the second one waits"
        world.now_ms += 200
        claim = world.claim(store).claim
        assert claim is not None
        message = decode_member(claim.messages[0].member)
        assert (message.message, message.id, message.due_ms) == ("2", "two", START_MS)
        assert message.headers == {"a": "b"}


class TestRetention:
    def fill(self, world: World, count: int) -> None:
        for number in range(count):
            world.client.xadd(world.keys.stream("mail"), {"message": f"{number}"}, id=f"{1_000 + number}-0")

    def trim(self, world: World, now_ms: int = 0, **settings: Any) -> int:
        whole = 0
        limits = replace(STREAM, **{"retain_messages": 0, "retain_sec": 0, **settings})
        for _ in range(100):
            dropped = world.topics().trim(world.keys, "mail", limits, now_ms)
            if dropped == 0:
                break
            whole += dropped
        return whole

    def left(self, world: World) -> int:
        return int(world.client.xlen(world.keys.stream("mail")))

    def test_without_limits_all_stays(self, world: World) -> None:
        self.fill(world, 5_000)
        assert self.trim(world, now_ms=10**12) == 0

    def test_the_oldest_beyond_the_length_go(self, world: World) -> None:
        self.fill(world, 5_000)
        assert self.trim(world, retain_messages=1_000) > 3_800
        assert 1_000 <= self.left(world) < 1_200, "whole nodes go, so some more may stay"
        assert world.client.xrange(world.keys.stream("mail"), count=1)[0][0] >= b"4800-0"

    def test_what_is_too_old_goes(self, world: World) -> None:
        self.fill(world, 5_000)
        self.trim(world, now_ms=1_000 + 4_000 + 2_000, retain_sec=2)
        assert 1_000 <= self.left(world) < 1_200

    def test_what_a_group_has_not_read_stays_unless_told_otherwise(self, world: World) -> None:
        self.fill(world, 5_000)
        world.client.xgroup_create(world.keys.stream("mail"), "g", "1999-0")
        self.trim(world, retain_messages=1)
        assert 4_000 <= self.left(world) < 4_200
        self.trim(world, retain_messages=1, trim_unread=True)
        assert self.left(world) < 200

    def test_what_a_group_was_set_back_to_stays_though_something_later_is_pending(self, world: World) -> None:
        self.fill(world, 5_000)
        stream = world.keys.stream("mail")
        world.client.xgroup_create(stream, "g", "4000-0")
        world.client.xreadgroup("g", "c", {stream: ">"}, count=10)
        world.client.xgroup_setid(stream, "g", "1999-0")
        self.trim(world, retain_messages=1)
        assert world.client.xrange(stream, "2000-0", "2000-0")
        assert 4_000 <= self.left(world) < 4_200

    def test_what_came_again_for_a_group_goes_when_it_is_acknowledged(self, world: World) -> None:
        self.fill(world, 1)
        again = world.keys.again("mail", "g")
        for stream in (world.keys.stream("mail"), again):
            world.client.xgroup_create(stream, "g", "0-0", mkstream=True)
        for number in range(1_000):
            world.client.xadd(again, {"message": f"{number}"})
        entries = world.client.xreadgroup("g", "c", {again: ">"}, count=1_000)[0][1]
        world.client.xack(again, "g", *(entry_id for entry_id, _ in entries[:-300]))
        self.trim(world, retain_messages=10)
        assert 300 <= world.client.xlen(again) < 500
        assert world.client.xrange(again, entries[-300][0], entries[-300][0])

    def test_what_is_handed_out_and_not_acknowledged_stays(self, world: World) -> None:
        self.fill(world, 5_000)
        stream = world.keys.stream("mail")
        world.client.xgroup_create(stream, "g", "0-0")
        world.client.xreadgroup("g", "c", {stream: ">"}, count=4_000)
        world.client.xack(stream, "g", *(f"{1_000 + number}-0" for number in range(4_000) if number != 2_500))
        self.trim(world, retain_messages=1)
        assert world.client.xrange(stream, "3500-0", "3500-0")
        assert 2_500 <= self.left(world) < 2_700


def test_groups_tell_how_far_they_are(world: World) -> None:
    for number in range(3):
        world.send(f"{number}")
    world.claim()
    stream = world.keys.stream("mail")
    world.client.xgroup_create(stream, "billing", "0-0")
    world.client.xreadgroup("billing", "c", {stream: ">"}, count=1)
    [info] = world.topics().groups("mail")
    first_ms = int(world.client.xrange(stream, count=1)[0][0].partition(b"-")[0])
    assert (info.name, info.lag, info.pending, info.oldest_pending_ms, info.consumers) == ("billing", 2, 1, first_ms, 1)


def test_how_far_a_group_is_that_was_set_back_into_the_middle_nobody_knows(world: World) -> None:
    for number in range(3):
        world.send(f"{number}")
    world.claim()
    stream = world.keys.stream("mail")
    world.client.xgroup_create(stream, b"\xff", "0-0")
    second = world.client.xrange(stream)[1][0]
    world.client.xgroup_setid(stream, b"\xff", second)
    [info] = world.topics().groups("mail")
    assert (info.lag, info.pending) == (None, 0)
    world.client.xreadgroup(b"\xff", "c", {stream: ">"})
    [info] = world.topics().groups("mail")
    assert (info.lag, info.pending) == (0, 1)
