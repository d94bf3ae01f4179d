"""Several shards of a namespace: their names, their keys and what is said once for all of them."""

import uuid
from collections import Counter

import fakeredis
import pytest
from redis.crc import key_slot

from pipeline.config import RedisSettings
from pipeline.core.errors import ConfigError
from pipeline.store.connection import connect
from pipeline.store.keys import SLOTS, Keys, keys_of
from pipeline.store.layout import FORMAT_VERSION
from pipeline.store.namespace import open_namespace
from pipeline.store.redis_store import RedisStore
from pipeline.store.scripts import Scripts
from pipeline.store.shards import ShardedMarkers, open_shards, shard_of
from pipeline.store.wakeup import WakeListener
from tests.servers import RealServer
from tests.store.builders import transaction
from tests.store.conftest import START_MS, ends

SHARDS = 3


class World:
    """Three shards on one server, and the clock of their scripts."""

    def __init__(self) -> None:
        self.now_ms = START_MS
        self.client = fakeredis.FakeRedis()
        self.settings = RedisSettings(namespace=f"test-{uuid.uuid4().hex}", shards=SHARDS)
        self.shards = [
            RedisStore(self.client, keys, None, Scripts(flags=False), lambda: self.now_ms)
            for keys in keys_of(self.settings)
        ]


@pytest.fixture
def world() -> World:
    return World()


def test_a_name_has_its_shard_for_ever() -> None:
    assert [shard_of(name, 4) for name in ("a", "order-17", "é", "")] == [3, 0, 2, 0]
    assert shard_of("a", 1) == 0


def test_the_first_job_that_works_makes_the_namespace_and_every_other_compares(world: World) -> None:
    assert not open_namespace(world.client, world.settings, may_create=False)
    for may_create in (True, False):
        assert open_namespace(world.client, world.settings, may_create)
        with pytest.raises(ConfigError, match=r"has 3 shards, not 1; set redis\.shards = 3"):
            open_namespace(world.client, RedisSettings(namespace=world.settings.namespace), may_create)


@pytest.mark.parametrize("shards", [1, 2, 3, 6, 12, 64])
@pytest.mark.parametrize("namespace", ["duetime", "x", "a-long-name.of_some-kind"])
def test_masters_with_equal_shares_of_the_slots_have_equal_shares_of_the_shards(namespace: str, shards: int) -> None:
    all_keys = keys_of(RedisSettings(namespace=namespace, shards=shards))
    assert [keys.shard for keys in all_keys] == [*range(shards)]
    assert all_keys[0] == Keys(namespace), "what says how many shards there are must be found without knowing it"
    for masters in range(1, shards + 1):
        of_masters = Counter(keys.slot * masters // SLOTS for keys in all_keys)
        share, off = (
            shards / masters,
            2 if shards % masters else 0.5,
        )  # a range of slots may lie on either side of a border
        assert all(abs(of_masters[master] - share) < off for master in range(masters)), of_masters
    for keys in all_keys:
        assert key_slot(keys.bucket(0).encode()) == key_slot(keys.wake().encode()) == keys.slot


def test_the_tags_of_the_shards_are_in_the_namespace_for_other_programs_and_others_are_refused(world: World) -> None:
    open_namespace(world.client, world.settings, may_create=True)
    meta = Keys(world.settings.namespace).meta()
    said = world.client.hget(meta, "hash_tags").decode().split()
    assert [f"{{{tag}}}:buckets" for tag in said] == [keys.buckets() for keys in keys_of(world.settings)]
    world.client.hdel(meta, "hash_tags")
    with pytest.raises(
        ConfigError, match=r"have other keys than this version gives them: they are of a version before 1\.0"
    ):
        open_namespace(world.client, world.settings, may_create=True)


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
    others = ShardedMarkers(world.shards)
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
