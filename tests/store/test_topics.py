"""Where messages go by their topic: streams, pauses, rate_limits, expiry; and what streams keep."""

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from pipeline.config import DrainSettings, RedisSettings, TopicSettings
from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.errors import StoreProtocolError
from pipeline.core.messages import Message
from pipeline.store.base import ClaimReply, State
from pipeline.store.by_id import MessagesById
from pipeline.store.connection import connect
from pipeline.store.dead_letters import DeadLetters
from pipeline.store.groups import GroupStore
from pipeline.store.keys import Keys
from pipeline.store.namespace import change_topic_settings
from pipeline.store.redis_store import RedisStore
from pipeline.store.stats import Stats, read_stats
from pipeline.store.topics import GROUPS_A_TURN, TRIM_LIMIT, Topics
from tests.store.builders import keyed, set_topic
from tests.store.conftest import START_MS

STREAM = TopicSettings(sink="stream")


@dataclass
class World:
    """A namespace on the real server whose topics have settings, all into streams unless told otherwise."""

    client: Any
    user: Any
    keys: Keys
    now_ms: int = START_MS
    claims: int = 0
    sent: int = 0

    def set(self, topic: str, settings: TopicSettings) -> None:
        set_topic(self.client, self.keys, topic, settings)

    def store(self, shards: int = 1, **drain: Any) -> RedisStore:
        return RedisStore(self.user, self.keys, DrainSettings(**drain), now_ms=lambda: self.now_ms, shards=shards)

    def stats(self) -> Stats:
        return read_stats(self.user, [self.keys], self.now_ms)

    def send(self, text: str, topic: str = "mail", due_ms: int = START_MS, **fields: Any) -> bytes:
        self.sent += 1
        member = Message(due_ms, text, topic, **fields).to_member(f"Psent000000000{self.sent:08x}")
        self.put(member, due_ms)
        return member

    def send_many(self, count: int) -> list[str]:
        """Let so many come due, and return their texts."""
        texts = [f"{number:05}" for number in range(count)]
        rows = {Message(0, text, "mail").to_member(f"Pmany000000000{text:0>8}"): START_MS for text in texts}
        start = bucket_start_ms(START_MS)
        self.client.zadd(self.keys.bucket(start), rows)
        self.client.zadd(self.keys.buckets(), {str(start): start})
        return texts

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
        return Topics(self.user, [self.keys])

    def change(self, topic: str, **changes: Any) -> None:
        change_topic_settings(self.user, RedisSettings(namespace=self.keys.namespace), topic, changes)

    def drain(self, store: RedisStore, until_ms: int = 0) -> list[int]:
        """Let a loop run, on the given clock, to a time or for a moment; returns when each message moved or was claimed."""
        until_ms, moved_at = max(until_ms, self.now_ms), []
        while True:
            reply = self.claim(store)
            moved_at += [self.now_ms] * sum(len(each.dues_ms) for each in reply.moved)
            if reply.claim:
                moved_at += [self.now_ms] * len(reply.claim.messages)
                assert store.ack(reply.claim, len(reply.claim.messages), keyed(reply.claim))
            elif reply.next_due_ms is None or reply.next_due_ms > until_ms:
                self.now_ms = until_ms
                return moved_at
            else:
                self.now_ms = max(self.now_ms, reply.next_due_ms)


@pytest.fixture
def world(server: Any) -> Any:
    client, user = server.client(), connect(RedisSettings(url=server.url))
    keys = Keys("test-topics")
    world = World(client, user, keys)
    world.set("*", STREAM)
    yield world
    user.close()
    client.close()


def test_a_message_moves_with_all_its_fields_and_its_schedule_ends(world: World) -> None:
    world.send("hello", headers={"a/b": 'ä"\n'}, id="order-1")
    world.client.zadd(world.keys.ids(), {"order-1": "+inf"})
    reply = world.claim()
    assert (reply.claim, reply.moved, reply.next_due_ms) == (None, [("mail", "", "Psent00", [START_MS])], START_MS)
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
    odd = [
        b"\xff\xfe",
        b"short",
        b"P" * 14 + b"0" * 8 + b"j{not json",
        b"P" * 14 + b"0" * 8 + b'j{"message":1}',
        b"P" * 14 + b"0" * 8 + b"x?",
    ]
    odd += [b"Q" * 14 + b"0" * 8 + b'j{"message":"m","topic":"a{b}"}', b"Q" * 14 + b"0" * 8 + b'r{"message":"m"}']
    odd += [
        b"S" * 14 + b"0" * 8 + b'j{"message":"m","headers":{"a":1e999}}',
        b"S" * 14 + b"0" * 8 + b'j{"message":"m","headers":["a"]}',
    ]
    odd += [
        b"T" * 14 + b"0" * 8 + b'r{"message":"m","due_ms":"nan"}',
        b"T" * 14 + b"0" * 8 + b'r{"message":"m","due_ms":"1","attempt":"nan"}',
    ]
    odd += [
        b"R" * 14 + b"0" * 8 + b'j{"message":"m","headers":null}',
        b"R" * 14 + b"0" * 8 + b'r{"message":"m","due_ms":"1","group":"a:b"}',
    ]
    odd += [b"Please, remind the team tomorrow", b"." * 14 + b"00000001mdots", b"P" * 14 + b"0000000Gmno hex"]
    for member in odd:
        world.put(member)
    world.send("plain", topic="default")
    assert sum(len(each.dues_ms) for each in world.claim().moved) == len(odd) + 1
    moved = [fields[b"message"] for _, fields in world.client.xrange(world.keys.stream("default"))]
    assert sorted(moved) == sorted([*odd, b"plain"])


def test_a_message_that_was_tried_on_the_screen_goes_on_counting(world: World) -> None:
    member = world.send("tried")
    world.client.hset(world.keys.attempts(), member[:22], 2)
    world.claim()
    assert world.stream(world.keys.stream("mail"))[0]["attempt"] == "3"
    assert not world.client.exists(world.keys.attempts())


def test_topics_of_both_sinks_share_buckets(world: World) -> None:
    world.set("bell", TopicSettings(sink="screen"))
    world.send("1", due_ms=START_MS - 3)
    world.send("2", "bell", due_ms=START_MS - 2)
    world.send("3", due_ms=START_MS - 1)
    store = world.store()
    moved, shown = [], []
    for _ in range(4):
        reply = world.claim(store)
        moved += [due_ms for each in reply.moved for due_ms in each.dues_ms]
        if reply.claim:
            shown += [Message.from_member(m.member, m.due_ms).body for m in reply.claim.messages]
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
    again = Message(7, "m", "mail", "order-1", {"a": "b"}, "0" * 22, 3, "billing").to_member(is_rescheduled=True)
    world.client.xgroup_create(world.keys.retry("mail", "billing"), "billing", "0", mkstream=True)
    world.put(again)
    world.client.delete(world.keys.topic_settings())
    assert world.claim().moved == [("mail", "billing", "0" * 7, [7])]
    [fields] = world.stream(world.keys.retry("mail", "billing"))
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


@pytest.mark.parametrize("name", ["topics", "ids"])
def test_an_index_that_holds_something_else_stops_a_claim_before_it_adds_to_a_stream(world: World, name: str) -> None:
    key = getattr(world.keys, name)()
    world.client.set(key, "in the way")
    world.send("once")
    with pytest.raises(StoreProtocolError, match="WRONGTYPE"):
        for _ in range(5):
            world.claim()
    assert not world.client.exists(world.keys.stream("mail"))
    world.client.delete(key)
    world.claim()
    assert world.texts() == ["once"]


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
        assert world.stats().scheduled == world.stats().held == 2
        assert world.stats().overdue_ms == 0, "a pause is meant, so it makes nothing late"
        world.topics().look_again(world.keys, "mail")
        assert world.claim(store).next_due_ms is None, "still paused"
        assert world.topics().resume("mail") == 2
        while world.claim(store).next_due_ms is not None:
            pass
        assert world.texts() == ["late", "now"]
        assert world.topics().look("mail").paused_ms is None

    def test_a_pause_counts_also_where_all_topics_go_to_the_screen(self, world: World) -> None:
        world.client.delete(world.keys.topic_settings())
        plain = world.store()
        world.topics().pause("mail", START_MS)
        world.send("held")
        world.send("shown", "default")
        shown = []
        for _ in range(4):
            reply = world.claim(plain)
            shown += [
                Message.from_member(m.member, m.due_ms).body for m in (reply.claim.messages if reply.claim else ())
            ]
        assert shown == ["shown"]
        assert world.topics().look("mail").held == 1

    def test_pausing_twice_keeps_the_first_time(self, world: World) -> None:
        world.topics().pause("mail", 1)
        world.topics().pause("mail", 2)
        assert world.topics().look("mail").paused_ms == 1


class TestExpiry:
    def test_what_is_later_than_allowed_is_a_dead_letter(self, world: World) -> None:
        world.set("mail", replace(STREAM, expire_after_sec=10))
        world.send("in time", due_ms=START_MS - 10_000)
        world.send("too late", due_ms=START_MS - 10_001, headers={"a": "b"})
        store = world.store()
        world.claim(store)
        assert world.texts() == ["in time"]
        [letter] = DeadLetters(world.user, [world.keys]).of_topic("mail")
        assert (letter.body, letter.reason, letter.group, letter.died_ms) == ("too late", "expired", "", START_MS)
        assert letter.headers == {"a": "b"}
        assert world.stats().dead == 1

    def test_a_letter_that_is_scheduled_again_does_not_expire_again(self, world: World) -> None:
        world.set("mail", replace(STREAM, expire_after_sec=10))
        world.send("late", due_ms=START_MS - 60_000)
        store = world.store()
        world.claim(store)
        letters = DeadLetters(world.user, [world.keys])
        [letter] = letters.of_topic("mail")
        bell = world.client.pubsub()
        bell.subscribe(world.keys.wake())
        assert bell.get_message(timeout=60)["type"] == "subscribe"
        assert letters.redrive(letter, START_MS)
        assert bell.get_message(timeout=60)["data"] == str(START_MS).encode(), "loops that sleep hear of it"
        bell.close()
        assert not letters.redrive(letter, START_MS), "it is gone"
        world.claim(store)
        assert world.texts() == ["late"]
        assert world.stats().dead == 0

    def test_letters_that_come_while_others_are_walked_do_not_prolong_the_walk(self, world: World) -> None:
        dead = world.keys.dead("mail")
        world.client.sadd(world.keys.dead_topics(), "mail")
        for number in range(250):
            world.client.xadd(dead, {"message": f"{number}"})
        walked = []
        for letter in DeadLetters(world.user, [world.keys]).of_topic("mail"):
            walked.append(letter.body)
            assert len(walked) <= 250, "it goes on for ever"
            world.client.xadd(dead, {"message": "retry"})
        assert walked == [f"{number}" for number in range(250)]

    def test_also_messages_for_the_screen_expire(self, world: World) -> None:
        world.set("mail", TopicSettings(sink="screen", expire_after_sec=10))
        world.send("late", due_ms=START_MS - 60_000)
        assert world.claim().claim is None
        assert [letter.body for letter in DeadLetters(world.user, [world.keys]).of_topic("mail")] == ["late"]


class TestPaces:
    def test_a_flood_goes_at_its_rate_in_order_and_keeps_its_due_times(self, world: World) -> None:
        world.set("mail", replace(STREAM, max_rate=20))
        for number in range(50):
            world.send(f"{number:02}")
        store = world.store()
        moved_at: list[int] = []
        while (reply := world.claim(store)).next_due_ms is not None:
            moved_at += [world.now_ms] * sum(len(each.dues_ms) for each in reply.moved)
            world.now_ms = max(world.now_ms, reply.next_due_ms)
        assert world.texts() == [f"{number:02}" for number in range(50)]
        assert {fields["due_ms"] for fields in world.stream(world.keys.stream("mail"))} == {str(START_MS)}
        for first in range(50):
            within = [at_ms for at_ms in moved_at if moved_at[first] <= at_ms < moved_at[first] + 1_000]
            assert len(within) <= 20 + 3, "a second's worth, and a tenth of it at once"
        assert START_MS + 2_300 <= moved_at[-1] <= START_MS + 2_500

    def test_what_comes_while_another_waits_does_not_overtake_it(self, world: World) -> None:
        world.set("mail", replace(STREAM, max_rate=100))
        for number in range(12):
            world.send(f"{number:02}")
        for number in range(12, 20):
            world.send(f"{number:02}", due_ms=START_MS + 20 + number)
        store = world.store()
        while (reply := world.claim(store)).next_due_ms is not None:
            world.now_ms = max(world.now_ms, reply.next_due_ms)
        assert world.texts() == [f"{number:02}" for number in range(20)]

    def test_each_shard_has_its_share(self, world: World) -> None:
        world.set("*", replace(STREAM, max_rate=20))
        for number in range(10):
            world.send(f"{number}")
        store = world.store(shards=4)
        while (reply := world.claim(store)).next_due_ms is not None:
            world.now_ms = max(world.now_ms, reply.next_due_ms)
        assert START_MS + 1_600 <= world.now_ms <= START_MS + 1_800, "five a second"

    def test_other_topics_are_on_time_while_many_wait(self, world: World) -> None:
        world.set("mail", replace(STREAM, max_rate=1))
        world.send_many(10_000)
        store = world.store()
        assert len(world.drain(store)) == 1
        assert (world.stats().held, world.stats().throttled, world.stats().late) == (9_999, 9_999, 0)
        for number in range(1, 6):
            world.send(f"{number}", "news", due_ms=START_MS + 700 * number)
        claims, moved_at = world.claims, []
        for _ in range(100):
            reply = world.claim(store)
            moved_at += [(world.now_ms, due) for each in reply.moved if each.topic == "news" for due in each.dues_ms]
            assert reply.next_due_ms is not None
            world.now_ms = max(world.now_ms, reply.next_due_ms)
            if len(moved_at) == 5:
                break
        assert [(at, due) for at, due in moved_at if at != due] == [] and len(moved_at) == 5
        assert world.claims - claims < 25, "it sleeps until something may go"
        assert len(world.texts()) == 4

    def test_a_limit_that_is_raised_counts_at_once(self, world: World) -> None:
        world.change("mail", max_rate=1)
        texts = world.send_many(2_000)
        store = world.store()
        assert len(world.drain(store)) == 1
        world.change("mail", max_rate=1_000)
        world.drain(store, START_MS + 1_000)
        assert 1_000 <= len(world.texts()) <= 1_102
        world.drain(store, START_MS + 2_010)
        assert world.texts() == texts

    def test_a_limit_for_a_long_time_that_is_raised_counts_at_once(self, world: World) -> None:
        world.change("mail", max_rate=1)
        world.send("first")
        world.send("second")
        store = world.store(shards=3_600)
        world.drain(store)
        world.change("*", max_rate=3_600)
        world.change("mail", max_rate=3_600)
        world.drain(store, START_MS + 1_000)
        assert world.texts() == ["first", "second"]

    def test_a_limit_that_is_lowered_counts_at_once(self, world: World) -> None:
        world.change("mail", max_rate=1_000)
        world.send_many(2_000)
        store = world.store()
        assert len(world.drain(store, START_MS + 500)) <= 602
        world.change("mail", max_rate=1)
        assert len(world.drain(store, START_MS + 10_500)) in (10, 11)

    def test_without_a_limit_all_go_at_once_and_nothing_overtakes_them(self, world: World) -> None:
        world.change("mail", max_rate=1)
        texts = world.send_many(1_500)
        store = world.store()
        world.drain(store)
        world.change("mail", max_rate=None)
        world.now_ms += 10
        world.send("new", due_ms=world.now_ms)
        world.send("newer", due_ms=world.now_ms)
        world.drain(store)
        assert world.texts() == [*texts, "new", "newer"]
        assert not world.client.exists(world.keys.held("mail"), world.keys.held_topics())

    def test_others_do_not_wait_for_what_goes_at_once(self, world: World) -> None:
        world.topics().pause("mail", START_MS)
        world.send_many(2_000)
        store = world.store()
        world.drain(store)
        world.topics().resume("mail")
        world.send("quick", "news", due_ms=START_MS + 1)
        world.now_ms += 1
        for _ in range(3):
            world.claim(store)
        assert world.texts("news") == ["quick"]
        assert 0 < len(world.texts()) < 2_000

    def test_others_do_not_wait_for_what_goes_at_once_one_by_one(self, world: World) -> None:
        """Of one message the half is none."""
        world.topics().pause("mail", START_MS)
        world.send_many(20)
        store = world.store(claim_limit=1)
        world.drain(store)
        world.topics().resume("mail")
        world.send("quick", "news", due_ms=START_MS + 1)
        world.now_ms += 1
        for _ in range(4):
            world.claim(store)
        assert world.texts("news") == ["quick"]
        assert 0 < len(world.texts()) < 20

    def test_a_bucket_of_messages_that_are_not_of_it_is_seen_to_all_the_same(self, world: World) -> None:
        world.topics().pause("mail", START_MS)
        world.send_many(2_000)
        store = world.store()
        world.drain(store)
        early_ms = bucket_start_ms(START_MS) - BUCKET_WIDTH_MS
        later = Message(0, "later", "news").to_member(f"Pearly00000000{1:08x}")
        world.client.zadd(world.keys.bucket(early_ms), {later: START_MS + 10_000_000})
        world.client.zadd(world.keys.buckets(), {str(early_ms): early_ms})
        world.send("quick", "news")
        world.topics().resume("mail")
        for _ in range(4):
            world.claim(store)
        assert world.texts("news") == ["quick"]
        assert len(world.texts()) < 2_000

    @pytest.mark.parametrize("is_paused", [True, False])
    @pytest.mark.parametrize("max_rate", [1, 10, 250])
    def test_a_time_in_which_nothing_goes_earns_a_second_at_most(
        self, world: World, max_rate: int, is_paused: bool
    ) -> None:
        world.set("mail", replace(STREAM, max_rate=max_rate))
        world.send_many(10 * max_rate)
        store = world.store()
        world.drain(store, START_MS + 1_000)
        if is_paused:
            world.topics().pause("mail", world.now_ms)
            assert world.drain(store, START_MS + 3_600_000) == []
            world.topics().resume("mail")
        else:
            world.now_ms = START_MS + 3_600_000
        assert len(world.drain(store)) == max_rate, "a second's worth"
        assert max_rate - 1 <= len(world.drain(store, world.now_ms + 1_000)) <= max_rate + 1

    def test_a_loop_that_looks_too_seldom_loses_nothing_of_the_rate(self, world: World) -> None:
        world.set("mail", replace(STREAM, max_rate=30))
        world.send_many(400)
        store = world.store()
        for _ in range(20):
            world.now_ms += 487
            world.drain(store)
        assert len(world.texts()) == 4 + 19 * 487 * 30 // 1_000

    def test_less_than_one_a_second(self, world: World) -> None:
        """Half of it, as two shards share one."""
        world.set("mail", replace(STREAM, max_rate=1))
        for number in range(5):
            world.send(f"{number}")
        moved_at = world.drain(world.store(shards=2), START_MS + 60_000)
        assert moved_at == [START_MS, *(START_MS + 2_000 * n - 100 for n in range(1, 5))]

    def test_two_shards_keep_the_rate_together(self, world: World) -> None:
        shards = [World(world.client, world.user, Keys(world.keys.namespace, shard)) for shard in range(2)]
        moved_at = []
        for each in shards:
            each.set("mail", replace(STREAM, max_rate=20))
            each.send_many(30)
            moved_at += each.drain(each.store(shards=2), START_MS + 2_000)
        assert 40 <= len(moved_at) <= 44
        assert max(sum(at <= each < at + 1_000 for each in moved_at) for at in moved_at) <= 24

    def test_a_clock_that_is_set_back_stops_nothing_for_long(self, world: World) -> None:
        world.set("mail", replace(STREAM, max_rate=1))
        for number in range(5):
            world.send(f"{number}", due_ms=START_MS - 10_000_000)
        store = world.store()
        world.drain(store)
        world.now_ms -= 3_600_000
        world.topics().look_again(world.keys, "mail")  # as each drain loop does by the way
        assert len(world.drain(store, world.now_ms + 3_000)) == 3

    def test_what_is_too_late_uses_up_nothing_of_the_limit(self, world: World) -> None:
        world.set("mail", replace(STREAM, max_rate=1, expire_after_sec=10))
        for number in range(5):
            world.send(f"early {number}")
        for number in range(5):
            world.send(f"{number}", due_ms=START_MS + 9_000)
        store = world.store()
        world.drain(store)
        world.now_ms += 10_500
        world.drain(store)
        assert world.texts() == ["early 0", "0"]
        assert [letter.body for letter in DeadLetters(world.user, [world.keys]).of_topic("mail")] == [
            f"early {number}" for number in range(1, 5)
        ]

    def test_a_retry_does_not_wait_for_the_limit(self, world: World) -> None:
        GroupStore(world.client, [world.keys], "mail", "billing", "c").register("0-0")
        world.set("mail", replace(STREAM, max_rate=1))
        for number in range(3):
            world.send(f"{number}")
        store = world.store()
        world.drain(store)
        again = Message(START_MS - 1, "again", "mail", group="billing", message_id="R" * 14 + "00000001")
        world.put(again.to_member(is_rescheduled=True))
        world.drain(store)
        assert [fields["message"] for fields in world.stream(world.keys.retry("mail", "billing"))] == ["again"]
        assert world.texts() == ["0"]

    def test_a_pause_holds_retries_too_and_they_use_up_nothing(self, world: World) -> None:
        GroupStore(world.client, [world.keys], "mail", "billing", "c").register("0-0")
        world.set("mail", replace(STREAM, max_rate=1))
        world.topics().pause("mail", START_MS)
        for number in range(3):
            again = Message(START_MS - 1, f"{number}", "mail", group="billing", message_id=f"{'R' * 14}0000000{number}")
            world.put(again.to_member(is_rescheduled=True), START_MS - 1)
        world.send("first")
        world.send("second")
        store = world.store()
        world.drain(store)
        assert world.topics().look("mail").held == 5
        world.topics().resume("mail")
        world.drain(store)
        assert [fields["message"] for fields in world.stream(world.keys.retry("mail", "billing"))] == ["0", "1", "2"]
        assert world.texts() == ["first"]

    def test_a_change_wakes_the_loops_if_something_waits(self, world: World) -> None:
        world.change("mail", max_rate=1)
        bell = world.client.pubsub()
        bell.subscribe(world.keys.wake())
        assert bell.get_message(timeout=5)["type"] == "subscribe"
        world.change("mail", max_rate=2)
        for number in range(2):
            world.send(f"{number}")
        world.drain(world.store())
        world.client.publish(world.keys.wake(), "nothing before")
        world.change("*", sink="stream")
        assert [bell.get_message(timeout=5)["data"] for _ in range(2)] == [b"nothing before", b"0"]
        assert world.client.zscore(world.keys.held_topics(), "mail") == 0
        bell.close()

    def test_what_is_given_back_comes_before_what_is_held(self, world: World) -> None:
        """From another bucket than the oldest, and its id leads to it."""
        world.set("mail", TopicSettings(sink="screen", max_rate=1))
        for number in range(4):
            world.send(f"{number}", due_ms=START_MS - BUCKET_WIDTH_MS + number, id=f"id-{number}")
        for number in range(1, 4):
            world.client.hset(
                world.keys.places(),
                f"id-{number}",
                f"Psent000000000{number + 1:08x}{START_MS - BUCKET_WIDTH_MS + number}",
            )
        world.send("much later", due_ms=START_MS + 50 * BUCKET_WIDTH_MS)
        store, texts = world.store(), []
        assert len(world.drain(store)) == 1
        by_id = MessagesById(world.user, [world.keys], 1_000, now_ms=lambda: world.now_ms)
        assert [by_id.get(f"id-{number}").state for number in (1, 2)] == [State.HELD, State.HELD]
        world.now_ms += 1_000
        claim = world.claim(store).claim
        assert claim and len(claim.messages) == 1
        assert by_id.get("id-1").state is State.IN_FLIGHT
        assert store.release(claim, 1) == 1
        assert by_id.get("id-1").state is State.SCHEDULED
        while len(texts) < 3:
            reply = world.claim(store)
            if reply.claim:
                texts += [(m.attempt, Message.from_member(m.member, m.due_ms).body) for m in reply.claim.messages]
                store.ack(reply.claim, len(reply.claim.messages), keyed(reply.claim))
            world.now_ms = max(world.now_ms, reply.next_due_ms or 0)
        assert texts == [(2, "1"), (1, "2"), (1, "3")]

    def test_a_message_that_waited_is_shown_with_its_own_due_time_and_id(self, world: World) -> None:
        world.set("mail", TopicSettings(sink="screen", max_rate=5))
        world.send("1", id="one")
        world.send("2", id="two", headers={"a": "b"})
        store = world.store()
        claim = world.claim(store).claim
        assert claim is not None and len(claim.messages) == 1
        assert world.drain(store, START_MS + 99) == [], "the second one waits"
        assert world.claim(store).next_due_ms == START_MS + 100
        world.now_ms += 1
        claim = world.claim(store).claim
        assert claim is not None
        message = Message.from_member(claim.messages[0].member, claim.messages[0].due_ms)
        assert (message.body, message.id, message.due_ms) == ("2", "two", START_MS)
        assert message.headers == {"a": "b"}

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        interval_ms=st.sampled_from([2, 10, 50, 200, 500, 1_000]),
        steps=st.lists(
            st.tuples(st.integers(0, 20), st.sampled_from([0, 10, 17, 50, 99, 100, 101, 200, 999, 1_000, 5_000])),
            max_size=12,
        ),
    )
    def test_it_takes_what_a_token_bucket_allows(
        self, world: World, interval_ms: int, steps: list[tuple[int, int]]
    ) -> None:
        """Some messages come at a time, and a loop looks then, whenever that is."""
        world.client.flushall()
        world.now_ms = START_MS
        world.set("mail", replace(STREAM, max_rate=1_000 // interval_ms))
        store, waiting, tokens_ms = world.store(), 0, 100  # in the time that it takes to earn them, beside one
        for count, pause_ms in steps:
            reserve_ms = max(100, 1_000 - interval_ms) if waiting else 100
            tokens_ms = min(tokens_ms, reserve_ms)
            for _ in range(count):
                world.send("m")
            waiting += count
            taken = min(waiting, tokens_ms // interval_ms + 1)
            assert len(world.drain(store)) == taken
            waiting, tokens_ms = waiting - taken, tokens_ms - taken * interval_ms + pause_ms
            world.now_ms += pause_ms


class TestRetention:
    def fill(self, world: World, count: int) -> None:
        pipeline = world.client.pipeline(transaction=False)
        for number in range(count):
            pipeline.xadd(world.keys.stream("mail"), {"message": f"{number}"}, id=f"{1_000 + number}-0")
        pipeline.execute()

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

    def test_of_what_is_too_old_nothing_is_kept(self, world: World) -> None:
        self.fill(world, 150)
        self.trim(world, now_ms=10_000, retain_sec=1)
        assert self.left(world) == 0

    def test_a_step_drops_no_more_than_its_limit_and_reads_nothing(self, world: World) -> None:
        stream = world.keys.stream("mail")
        for _ in range(130):
            world.client.xadd(stream, {"message": "x" * 100_000})
        world.client.config_resetstat()
        dropped = world.topics().trim(world.keys, "mail", replace(STREAM, retain_messages=1, retain_sec=0), 0)
        assert 0 < dropped <= TRIM_LIMIT
        assert world.client.info("stats")["total_net_output_bytes"] < 100_000
        assert "cmdstat_xrange" not in world.client.info("commandstats")

    @pytest.mark.parametrize("limits", [{"retain_sec": 1}, {"retain_messages": 500}])
    def test_a_step_keeps_its_limit_also_where_the_nodes_of_streams_are_large(
        self, world: World, limits: dict[str, int]
    ) -> None:
        world.client.config_set("stream-node-max-entries", 1_000)
        world.client.config_set("stream-node-max-bytes", 0)
        try:
            self.fill(world, 5_000)
        finally:
            world.client.config_set("stream-node-max-entries", 100)
            world.client.config_set("stream-node-max-bytes", 4_096)
        settings = replace(STREAM, **{"retain_messages": 0, "retain_sec": 0, **limits})
        steps = [world.topics().trim(world.keys, "mail", settings, 10**6) for _ in range(60)]
        assert max(steps) <= TRIM_LIMIT
        assert self.left(world) <= 600

    def test_a_group_that_was_destroyed_by_hand_is_forgotten_with_its_topic(self, world: World) -> None:
        GroupStore(world.client, [world.keys], "mail", "billing", "c").register("0-0", ordered=True)
        self.trim(world)
        assert world.client.hgetall(world.keys.groups("mail")) == {b"billing": b"ordered"}
        world.client.set(world.keys.active("mail", "billing"), "c", px=60_000)
        world.client.xgroup_destroy(world.keys.stream("mail"), "billing")
        self.trim(world)
        assert world.topics().names() == []
        assert not world.client.exists(world.keys.groups("mail"))
        assert not world.client.exists(world.keys.retry("mail", "billing"), world.keys.active("mail", "billing"))

    def test_a_topic_of_which_nothing_is_left_is_forgotten(self, world: World) -> None:
        world.set("*", replace(STREAM, max_rate=1_000, retain_sec=1))
        for name in ("mail", "kept"):
            world.send("m", name)
        world.claim()
        world.claim()
        world.client.xgroup_create(world.keys.stream("kept"), "g", "$")
        assert world.topics().names() == ["kept", "mail"]
        later_ms = world.topics().now_ms() + 10_000
        limits = replace(STREAM, retain_messages=0, retain_sec=1)
        for name in ("mail", "kept"):
            for _ in range(3):
                world.topics().trim(world.keys, name, limits, later_ms)
        assert world.topics().names() == ["kept"], "a group waits for its next message"
        assert not world.client.exists(world.keys.stream("mail"), world.keys.rate_limits())

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
        again = world.keys.retry("mail", "g")
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
    assert (info.name, info.lag, info.pending, info.oldest_pending_ms, info.ordered) == (
        "billing",
        2,
        1,
        first_ms,
        False,
    )
    assert [(each.name, each.pending) for each in info.consumers] == [("c", 1)] and info.consumers[0].idle_ms < 60_000


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


def test_a_group_that_is_dropped_leaves_nothing_and_what_is_due_for_it_later_is_a_dead_letter(world: World) -> None:
    for number in range(3):
        world.send(f"{number}")
    world.claim()
    group = GroupStore(world.client, [world.keys], "mail", "billing", "c")
    assert group.register("0-0", ordered=True)
    assert group.acquire_active(60_000) and len(group.read(1, 1)) == 1
    world.put(Message(7, "m", "mail", "order-1", {"a": "b"}, "0" * 22, 3, "billing").to_member(is_rescheduled=True))
    assert world.topics().drop_group("mail", "billing")
    assert not world.topics().drop_group("mail", "billing")
    assert world.topics().groups("mail") == []
    left = (world.keys.retry("mail", "billing"), world.keys.active("mail", "billing"), world.keys.groups("mail"))
    assert not world.client.exists(*left)
    while world.claim().next_due_ms is not None:
        pass
    [letter] = DeadLetters(world.client, [world.keys]).of_topic("mail")
    assert (letter.reason, letter.group, letter.body, letter.attempt) == ("dropped", "billing", "m", 3)
    assert not world.client.exists(*left)
    assert group.register("0-0", ordered=False), "it can be registered anew, as another kind"
    assert world.topics().drop_group("mail", "billing")


class TestManyGroups:
    """What a look at a topic costs grows with its groups, not with their square."""

    GROUPS = 250

    def fill(self, world: World) -> list[str]:
        names = [f"group-{number:03}" for number in range(self.GROUPS)]
        stream = world.keys.stream("mail")
        for number in range(3):
            world.client.xadd(stream, {"message": f"{number}"}, id=f"{1_000 + number}-0")
        world.client.sadd(world.keys.topics(), "mail")
        for name in names:
            for key in (stream, world.keys.retry("mail", name)):
                world.client.xgroup_create(key, name, "0-0", mkstream=True)
        return names

    def calls(self, world: World, command: str) -> int:
        found = world.client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})
        return int(found["calls"])

    def test_each_stream_is_asked_for_its_groups_once(self, world: World) -> None:
        names = self.fill(world)
        again = world.keys.retry("mail", names[7])
        world.client.xadd(again, {"message": "again"}, id="2000-0")
        world.client.xreadgroup(names[7], "c", {world.keys.stream("mail"): ">"}, count=2)
        world.client.xreadgroup(names[7], "c", {again: ">"})
        world.client.config_resetstat()
        found = world.topics().groups("mail")
        assert self.calls(world, "xinfo|groups") == 1 + self.GROUPS
        assert self.calls(world, "xpending") == self.calls(world, "xinfo|consumers") == 2
        assert [each.name for each in found] == names
        info = found[7]
        assert (info.lag, info.pending, info.oldest_pending_ms) == (1, 3, 1_000)
        assert [(each.name, each.pending) for each in info.consumers] == [("c", 3)]
        assert {(each.lag, each.pending, each.oldest_pending_ms) for each in found if each is not info} == {
            (3, 0, None)
        }

    def test_the_retries_of_so_many_groups_are_trimmed_at_a_time_and_in_the_end_of_all(self, world: World) -> None:
        names, topics = self.fill(world), world.topics()
        retries = [world.keys.retry("mail", name) for name in names]
        for retry in retries:
            world.client.xadd(retry, {"message": "again"}, id="2000-0")
        world.client.config_resetstat()
        limits = replace(STREAM, retain_messages=0, retain_sec=1, trim_unread=True)
        turns = []
        for _ in range(3):
            topics.trim(world.keys, "mail", limits, 10_000)
            turns.append(sum(world.client.xlen(retry) == 0 for retry in retries))
        assert turns == [GROUPS_A_TURN, 2 * GROUPS_A_TURN, self.GROUPS]
        assert self.calls(world, "xinfo|groups") == 3, "and trim_unread asks none"


class TestManyTopics:
    TOPICS = 3_000

    @pytest.fixture
    def many(self, world: World) -> World:
        """Some thousand topics that have a stream; of two something is held, of one more a message has died."""
        names = [f"topic-{number}" for number in range(self.TOPICS)]
        world.client.sadd(world.keys.topics(), *names)
        world.set("slow", replace(STREAM, max_rate=1))
        world.set("old", replace(STREAM, expire_after_sec=1))
        world.topics().pause("paused", START_MS)
        for topic in ("slow", "slow", "slow", "paused"):
            world.send("m", topic)
        world.send("m", "old", START_MS - 2_000)
        while world.claim().next_due_ms == START_MS:
            pass
        world.client.config_resetstat()
        return world

    def calls(self, world: World) -> int:
        found = world.client.info("commandstats")
        return sum(int(row["calls"]) for name, row in found.items() if "config" not in name and "client" not in name)

    def test_a_status_looks_only_at_those_that_have_something(self, many: World) -> None:
        stats = many.stats()
        assert (stats.held, stats.throttled, stats.dead) == (3, 2, 1)
        assert self.calls(many) < 50

    def test_dead_letters_are_looked_for_only_where_they_are(self, many: World) -> None:
        letters = DeadLetters(many.user, [many.keys])
        [letter] = letters.of_topics(letters.topics())
        assert letter.topic == "old"
        assert self.calls(many) < 20
        assert letters.purge(letter) and not letters.purge(letter)
        assert letters.topics() == [] and many.stats().dead == 0

    def test_all_are_listed_in_pages(self, many: World) -> None:
        assert {*many.topics().names()} == {"slow", "paused", "old", *(f"topic-{n}" for n in range(self.TOPICS))}
        assert many.client.info("commandstats")["cmdstat_sscan"]["calls"] > 1
        assert "cmdstat_smembers" not in many.client.info("commandstats")


class TestTopicsWithDeadLetters:
    @pytest.fixture
    def letters(self, world: World) -> DeadLetters:
        world.set("mail", replace(STREAM, expire_after_sec=1))
        for text in ("a", "b"):
            world.send(text, due_ms=START_MS - 2_000)
        world.claim()
        letters = DeadLetters(world.user, [world.keys])
        assert letters.topics() == ["mail"]
        return letters

    @pytest.mark.parametrize("verb", ["redrive", "purge"])
    def test_who_takes_the_last_letter_takes_the_topic_out(self, world: World, letters: DeadLetters, verb: str) -> None:
        first, last = letters.of_topic("mail")
        for letter, topics in ((first, ["mail"]), (last, [])):
            assert letters.redrive(letter, START_MS) if verb == "redrive" else letters.purge(letter)
            assert letters.topics() == topics

    def test_letters_that_were_removed_by_hand_are_noticed(self, world: World, letters: DeadLetters) -> None:
        world.client.delete(world.keys.dead("mail"))
        world.topics().trim(world.keys, "mail", STREAM, START_MS)
        assert letters.topics() == []
        assert world.topics().names() == []

    def test_a_topic_whose_last_letter_went_can_have_others(self, world: World, letters: DeadLetters) -> None:
        for letter in letters.of_topic("mail"):
            letters.purge(letter)
        world.send("c", due_ms=START_MS - 2_000)
        world.claim()
        assert letters.topics() == ["mail"]
