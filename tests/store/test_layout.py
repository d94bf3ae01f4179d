"""What a namespace is can be read from any shard, so that jobs start while the first one is away."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from pipeline.config import ColdSettings, DrainSettings, RedisSettings, Settings, TopicSettings
from pipeline.core.errors import ConfigError, StoreUnavailable
from pipeline.ingest.cold_opening import open_cold
from pipeline.status import read_status
from pipeline.store.checks import meaning_of_stored
from pipeline.store.connection import server_ms
from pipeline.store.ingest_heartbeat import IngestHeartbeat, Waiting
from pipeline.store.keys import keys_of
from pipeline.store.layout import cold_folder_id, outbox_id
from pipeline.store.namespace import (
    adopt_topic_settings,
    change_topic_settings,
    current_topic_settings,
    open_namespace,
    read_topic_settings,
)
from pipeline.store.shards import first_that_answers, open_shards
from pipeline.store.stats import read_forecast
from tests.servers import RealServer
from tests.store.builders import transaction

SHARDS = 3
DUE_MS = 4_102_444_800_000


class PartlyAway(redis.Redis):
    """A client of several shards, of which some do not answer, or take no writes."""

    away: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        made: Any = super().pipeline(transaction, shard_hint)
        execute = made.execute_command

        def look_first(*arguments: Any, **options: Any) -> Any:
            self._look(arguments[1:2])
            return execute(*arguments, **options)

        made.execute_command = look_first
        return made

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        self._look(arguments[1:2])
        if arguments[0] == "HSET" and self._tags(arguments[1:2]) & self.full:
            raise redis.exceptions.OutOfMemoryError("used memory is more than allowed")
        return super().execute_command(*arguments, **options)

    def transaction(self, func: Any, *watches: Any, **options: Any) -> Any:
        self._look(watches)
        return super().transaction(func, *watches, **options)

    def _look(self, keys: Any) -> None:
        if self._tags(keys) & self.away:
            raise redis.exceptions.ConnectionError("no answer")

    @staticmethod
    def _tags(keys: Any) -> set[str]:
        texts = (key.decode() if isinstance(key, bytes) else str(key) for key in keys)
        return {text[1:].partition("}")[0] for text in texts}


class World:
    def __init__(self, server: RealServer) -> None:
        self.settings = RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}", shards=SHARDS)
        self.keys = keys_of(self.settings)
        self.client = PartlyAway.from_url(server.url)

    def lose(self, *shards: int) -> None:
        self.client.away = frozenset(self.keys[shard].tag for shard in shards)

    def open(self, may_create: bool = True) -> bool:
        return open_namespace(self.client, self.settings, may_create)

    def said(self) -> list[dict[bytes, bytes]]:
        return [self.client.hgetall(keys.meta()) for keys in self.keys]


@pytest.fixture
def world(server: RealServer) -> Iterator[World]:
    made = World(server)
    yield made
    made.client.close()


def test_each_shard_says_what_the_namespace_is(world: World) -> None:
    assert not world.open(may_create=False) and world.said() == [{}] * SHARDS
    assert world.open()
    first, *others = world.said()
    assert others == [first, first] and first[b"shards"] == b"3"


@pytest.mark.parametrize("away", [(0,), (0, 1), (1, 2), (2,)])
@pytest.mark.parametrize("may_create", [True, False])
def test_a_job_starts_while_some_shards_are_away(world: World, away: tuple[int, ...], may_create: bool) -> None:
    assert world.open()
    world.lose(*away)
    assert world.open(may_create)


def test_no_job_starts_when_none_answers_and_none_makes_a_namespace_without_the_first_shard(world: World) -> None:
    world.lose(0)
    with pytest.raises(StoreUnavailable, match=r"no other that answers says what it is.*redis\.shards are right"):
        world.open()
    world.lose()
    assert world.said() == [{}] * SHARDS
    world.open()
    world.lose(0, 1, 2)
    with pytest.raises(StoreUnavailable):
        world.open()


def test_an_older_namespace_of_which_the_first_shard_alone_says_what_it_is_is_opened_and_gets_its_copies(
    world: World,
) -> None:
    world.open()
    for keys in world.keys[1:]:
        world.client.delete(keys.meta())
    assert world.open(may_create=False) and world.said()[1:] == [{}, {}], "who only looks writes nothing"
    world.lose(0)
    with pytest.raises(StoreUnavailable, match="no other that answers says what it is"):
        world.open()
    world.lose(2)
    assert world.open()
    world.lose()
    assert [bool(each) for each in world.said()] == [True, True, False], "one that is away gets its copy later"
    assert world.open() and all(world.said())


def test_a_shard_without_memory_keeps_no_job_from_starting(world: World) -> None:
    world.open()
    world.client.delete(world.keys[1].meta())
    world.client.full = frozenset({world.keys[1].tag})
    assert world.open() and not world.said()[1]


@pytest.mark.parametrize("shards", [1, 2, 4, 6])
def test_another_number_of_shards_is_refused_also_while_the_first_one_is_away(world: World, shards: int) -> None:
    world.open()
    wrong = replace(world.settings, shards=shards)
    world.lose(0)
    with pytest.raises((StoreUnavailable, ConfigError)):
        open_namespace(world.client, wrong, may_create=True)
    world.lose()
    with pytest.raises(ConfigError, match="has 3 shards"):
        open_namespace(world.client, wrong, may_create=True)
    assert world.said()[1] == world.said()[0], "nothing was written"


def test_a_copy_follows_the_first_shard(world: World) -> None:
    world.open()
    world.client.hset(world.keys[1].meta(), "shards", 2)
    assert world.open()
    assert world.said()[1] == world.said()[0]


def test_what_is_said_of_topics_is_read_from_another_shard_while_the_first_is_away(world: World) -> None:
    settings = Settings(redis=world.settings)
    adopt_topic_settings(world.client, settings, complete=True)
    change_topic_settings(world.client, world.settings, "mail", {"max_rate": 5})
    there = read_topic_settings(world.client, world.settings)
    world.lose(0)
    assert read_topic_settings(world.client, world.settings) == there
    assert current_topic_settings(world.client, settings, "mail").max_rate == 5
    adopted = adopt_topic_settings(world.client, settings, complete=True)
    assert adopted.topics == TopicSettings(sink=DrainSettings().sink) and adopted.of_topic("mail").max_rate == 5
    given = replace(settings, given={"mail": {"max_rate": 7}})
    with pytest.raises(ConfigError, match="max_rate of the topic mail is 5 there, not 7"):
        adopt_topic_settings(world.client, given)
    with pytest.raises(StoreUnavailable):
        adopt_topic_settings(world.client, replace(settings, given={"other": {"max_rate": 7}}))


def test_what_another_shard_says_of_topics_is_written_to_no_third_one(world: World) -> None:
    """It may have been away when they were changed."""
    settings = Settings(redis=world.settings)
    adopt_topic_settings(world.client, settings, complete=True)
    texts = [world.client.hgetall(keys.topic_settings()) for keys in world.keys]
    world.client.hset(world.keys[1].topic_settings(), "mail", '{"max_rate": 4}')
    world.lose(0)
    adopt_topic_settings(world.client, settings, complete=True)
    world.lose()
    assert world.client.hgetall(world.keys[2].topic_settings()) == texts[2]
    adopt_topic_settings(world.client, settings, complete=True)
    assert world.client.hgetall(world.keys[1].topic_settings()) == texts[0]


def test_the_id_of_the_outboxes_is_the_same_while_the_first_shard_is_away_and_never_made_by_another(
    world: World,
) -> None:
    world.lose(0)
    with pytest.raises(StoreUnavailable):
        outbox_id(world.client, world.settings)
    world.lose(2)
    made = outbox_id(world.client, world.settings)
    world.lose(0)
    assert outbox_id(world.client, world.settings) == made
    world.lose(0, 1)
    with pytest.raises(StoreUnavailable):
        outbox_id(world.client, world.settings)
    world.lose()
    assert outbox_id(world.client, world.settings) == made
    world.lose(0, 1)
    assert outbox_id(world.client, world.settings) == made


def test_the_cold_folder_is_known_while_the_first_shard_is_away(world: World) -> None:
    assert cold_folder_id(world.client, world.settings) == ""
    assert cold_folder_id(world.client, world.settings, "made") == "made"
    world.lose(0)
    assert cold_folder_id(world.client, world.settings) == "made"


def test_without_a_cold_folder_a_job_starts_while_the_first_shard_is_away(world: World) -> None:
    world.lose(0)
    assert open_cold(world.client, world.settings, ColdSettings()) is None
    with pytest.raises(StoreUnavailable):
        open_cold(world.client, world.settings, ColdSettings(folder="cold"))


def test_the_first_shard_that_answers_is_asked(world: World) -> None:
    asked: list[int] = []
    world.lose(0)

    def ask(keys: Any) -> int:
        asked.append(keys.shard)
        world.client.get(keys.forwarder())
        return int(keys.shard)

    assert first_that_answers(world.keys, ask) == 1 and asked == [0, 1]
    assert "a batch counts as stored" in meaning_of_stored(world.client, world.keys, False)


@pytest.mark.parametrize("away", [0, 1])
def test_what_is_due_is_read_without_the_shards_that_are_away(world: World, away: int) -> None:
    for store in open_shards(world.client, world.settings):
        assert store.schedule("s", transaction((1, DUE_MS), token="T" * 14))
    waiting = Waiting(3, [1], DUE_MS)
    IngestHeartbeat(world.client, world.keys[0], "source").tell_waiting(waiting)
    everything = read_forecast(world.client, world.keys)
    assert sum(everything.buckets.values()) == SHARDS and everything.away == [] and everything.waiting == [waiting]
    world.lose(away)
    seen = read_forecast(world.client, world.keys)
    assert (sum(seen.buckets.values()), seen.away) == (SHARDS - 1, [away])
    assert [*seen.waiting] == ([] if away == 0 else [waiting]), "the first shard has what jobs tell"
    world.lose(0, 1, 2)
    with pytest.raises(StoreUnavailable):
        read_forecast(world.client, world.keys)


def test_files_that_wait_are_a_problem_that_the_status_tells(world: World) -> None:
    heartbeat = IngestHeartbeat(world.client, world.keys[0], "source")
    heartbeat.tell_waiting(Waiting(3, [1, 2], server_ms(world.client) - 240_000))
    status = read_status(world.client, world.keys)
    told = "3 files that were read wait for shards 1, 2 to store the rest, the oldest for 4 min"
    assert status.verdict() == f"PROBLEM: {told}"
    assert status.to_record()["waiting"][0]["files"] == 3
    heartbeat.tell_waiting(Waiting(1, [], server_ms(world.client) - 5_000))
    assert (
        "1 file that was read waits for a shard to store the rest, the oldest for 5."
        in read_status(world.client, world.keys).verdict()
    )
    heartbeat.tell_waiting(None)
    assert read_status(world.client, world.keys).verdict().startswith("OK")
