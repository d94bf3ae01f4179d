"""Several shards of a namespace behind one face."""

import uuid

import fakeredis
import pytest

from pipeline.config import DrainSettings, RedisSettings
from pipeline.core.errors import ConfigError, StoreUnavailable
from pipeline.store.base import Claim, ClaimReply
from pipeline.store.connection import connect
from pipeline.store.keys import Keys, keys_of
from pipeline.store.namespace import FORMAT_VERSION, open_namespace
from pipeline.store.redis_store import RedisStore
from pipeline.store.scripts import Scripts
from pipeline.store.shards import ShardedStore, open_shards, shard_of
from pipeline.store.stats import Stats, read_stats
from pipeline.store.wakeup import WakeListener
from tests.servers import RealServer
from tests.store.builders import BUCKET_MS, transaction
from tests.store.conftest import START_MS, ends

SHARDS = 3


class World:
    """Three shards on one server, and the clock of their scripts."""

    def __init__(self) -> None:
        self.now_ms = START_MS
        self.client = fakeredis.FakeRedis()
        self.settings = RedisSettings(namespace=f"test-{uuid.uuid4().hex}", shards=SHARDS)
        drain = DrainSettings(lease_sec=30, claim_limit=2)
        self.shards = [
            RedisStore(self.client, keys, drain, Scripts(flags=False), lambda: self.now_ms)
            for keys in keys_of(self.settings)
        ]
        self.store = ShardedStore(self.shards)

    def schedule(self, shard: int, *due_ms: int) -> None:
        """Store messages in one shard."""
        token = "PQR"[shard] * 14
        assert self.shards[shard].schedule("s", transaction(*enumerate(due_ms, start=1), token=token))

    def stats(self) -> Stats:
        """Count what all shards hold."""
        return read_stats(self.client, keys_of(self.settings), self.now_ms)

    def claims(self) -> list[Claim]:
        """Claim until nothing is due."""
        found = []
        for number in range(100):
            claim = self.store.claim(f"all:{number}").claim
            if claim is None:
                return found
            found.append(claim)
        raise AssertionError("there is no end to the claims")


@pytest.fixture
def world() -> World:
    return World()


def test_a_name_has_its_shard_for_ever() -> None:
    assert [shard_of(name, 4) for name in ("a", "order-17", "é", "")] == [3, 0, 2, 0]
    assert shard_of("a", 1) == 0


def test_all_shards_are_claimed_from_in_turn(world: World) -> None:
    world.schedule(0, *[START_MS] * 4)
    world.schedule(1, *[START_MS - BUCKET_MS] * 3)
    world.schedule(2, START_MS, START_MS + 1)
    claims = world.claims()
    assert [(claim.shard, len(claim.messages)) for claim in claims] == [(0, 2), (1, 2), (2, 1), (0, 2), (1, 1)]
    for claim in claims:
        assert world.store.ack(claim, len(claim.messages), [])
    stats = world.stats()
    assert (stats.scheduled, stats.in_flight, stats.counters) == (1, 0, {"stored": 9, "delivered": 8})


def test_with_nothing_due_the_first_of_all_shards_counts(world: World) -> None:
    assert world.store.claim("loop:0").next_due_ms is None
    world.schedule(0, START_MS + 7)
    world.schedule(2, START_MS + 5)
    reply = world.store.claim("loop:1")
    assert (reply.claim, reply.next_due_ms, world.stats().next_due_ms) == (None, START_MS + 5, START_MS + 5)


def test_what_comes_due_while_the_other_shards_are_asked_is_due_at_once(world: World) -> None:
    """A loop that ends when nothing is due would end too soon."""

    class Slow(RedisStore):
        def claim(self, name: str) -> ClaimReply:
            world.now_ms += 2
            return super().claim(name)

    last = Slow(world.client, keys_of(world.settings)[2], DrainSettings(), Scripts(flags=False), lambda: world.now_ms)
    store = ShardedStore([*world.shards[:2], last])
    world.schedule(0, START_MS + 1)
    reply = store.claim("loop:0")
    assert (reply.claim, reply.next_due_ms, reply.now_ms) == (None, START_MS + 2, START_MS + 2)
    assert store.claim("loop:1").claim is not None


def test_an_expired_lease_of_any_shard_shows_and_is_given_back(world: World) -> None:
    world.schedule(1, START_MS)
    assert world.store.claim("loop:0").claim
    world.now_ms += 30_000
    world.schedule(2, START_MS)
    reply = world.store.claim("loop:1")  # of shard 2; shard 1 comes after that
    assert reply.claim is not None
    world.schedule(0, START_MS)
    other = ShardedStore(world.shards).claim("loop:2")  # of shard 0 at once
    assert other.claim is not None
    assert world.store.claim("loop:3").first_lease_ms == START_MS + 30_000
    assert world.store.reclaim() == 1
    assert [claim.shard for claim in world.claims()] == [1]


def test_an_expired_lease_shows_though_another_shard_has_something_due(world: World) -> None:
    world.schedule(0, START_MS)
    assert world.store.claim("loop:0").claim
    world.now_ms += 30_000
    world.schedule(1, START_MS)
    reply = ShardedStore(world.shards).claim("loop:1")
    assert reply.claim is not None
    assert reply.first_lease_ms == START_MS + 30_000


class Forgetful(RedisStore):
    """A shard that does what it is told, and whose reply gets lost."""

    lost = 0

    def claim(self, name: str) -> ClaimReply:
        reply = super().claim(name)
        if self.lost:
            self.lost -= 1
            raise StoreUnavailable("the reply was lost")
        return reply


def test_a_claim_whose_reply_was_lost_is_found_again_though_another_shard_has_something_due_by_then(
    world: World,
) -> None:
    middle = Forgetful(
        world.client, keys_of(world.settings)[1], DrainSettings(), Scripts(flags=False), lambda: world.now_ms
    )
    middle.lost = 2
    store = ShardedStore([world.shards[0], middle, world.shards[2]])
    world.schedule(1, START_MS)
    with pytest.raises(StoreUnavailable):
        store.claim("loop:0")
    world.schedule(0, START_MS)
    world.schedule(2, START_MS)
    with pytest.raises(StoreUnavailable):
        store.claim("loop:0")
    claim = store.claim("loop:0").claim
    assert claim is not None
    assert (claim.shard, claim.lease_token.partition(":")[2]) == (1, "loop:0")
    assert store.release(claim, 0) == 1


def test_the_first_job_that_works_makes_the_namespace_and_every_other_compares(world: World) -> None:
    assert not open_namespace(world.client, world.settings, may_create=False)
    for may_create in (True, False):
        assert open_namespace(world.client, world.settings, may_create)
        with pytest.raises(ConfigError, match=r"has 3 shards, not 1; set redis\.shards = 3"):
            open_namespace(world.client, RedisSettings(namespace=world.settings.namespace), may_create)


def test_a_namespace_of_another_version_is_refused(world: World) -> None:
    open_namespace(world.client, world.settings, may_create=True)
    world.client.hset(Keys(world.settings.namespace).meta(), "format_version", FORMAT_VERSION + 1)
    with pytest.raises(
        ConfigError, match="has version 2 of the wire format, and this program version 1; use a release"
    ):
        open_namespace(world.client, world.settings, may_create=True)


def test_markers_are_those_of_each_files_own_shard_and_forgotten_in_all(world: World) -> None:
    tokens = [letter * 14 for letter in "ABCDEFGH"]
    for token in tokens:
        world.shards[shard_of(token, SHARDS)].schedule("s", transaction((1, START_MS), token=token, after=token))
    others = ShardedStore(world.shards)
    assert others.markers("s", [*tokens, "Z" * 14]) == [*tokens, ""]
    world.shards[(shard_of(tokens[0], SHARDS) + 1) % SHARDS].schedule("s", transaction(token=tokens[0]))
    assert sorted(part_id for part_id, _ in others.marked_parts("s")) == sorted([*tokens, tokens[0]])
    others.forget_markers("s", tokens)
    assert list(others.marked_parts("s")) == []


def test_the_wake_listener_rings_for_every_shard(server: RealServer) -> None:
    settings = RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}", shards=SHARDS)
    client = connect(settings)
    wake_listener = WakeListener(client, keys_of(settings))
    assert ends(lambda: wake_listener.wait(60_000)), "the first wait subscribes, and returns to look again"
    for shard, store in enumerate(open_shards(connect(settings), settings)):
        store.schedule("s", transaction((1, START_MS), token="PQR"[shard] * 14))
        assert ends(lambda: wake_listener.wait(60_000)), f"shard {shard} is not heard"
    wake_listener.close()
    client.close()
