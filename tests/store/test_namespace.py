"""The settings of topics belong to the namespace: who writes them, who goes by them, and who is refused."""

import json
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis

from pipeline.config import ALL_TOPICS, Settings, TopicSettings, load_settings
from pipeline.core.errors import ConfigError
from pipeline.core.messages import Message
from pipeline.store import namespace
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.namespace import (
    adopt_topic_settings,
    change_topic_settings,
    current_topic_settings,
    read_topic_settings,
)
from pipeline.store.scripts import Scripts
from pipeline.store.shards import open_shards
from tests.servers import RealServer
from tests.store.conftest import START_MS

NOTHING_SAID = "[redis]\nshards = 2\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pipeline.toml"


@pytest.fixture(params=["fake", "real"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "fake":
        monkeypatch.setattr(namespace, "Scripts", partial(Scripts, flags=False))
        yield fakeredis.FakeRedis()
        return
    client = request.getfixturevalue("server").client()
    client.flushall()
    yield client
    client.close()


def settings_of(file: Path, text: str = NOTHING_SAID, **flags: str) -> Settings:
    file.write_text(text)
    return load_settings({"drain": flags}, {}, file)


def test_the_first_drain_job_writes_its_settings_into_all_shards_and_the_others_go_by_them(
    client: Any, file: Path
) -> None:
    text = NOTHING_SAID + "[topics]\nmax_rate = 7\n[topic.mail]\nsink = 'screen'\n"
    first = adopt_topic_settings(client, settings_of(file, text, sink="stream"), complete=True)
    assert (first.of_topic("news").sink, first.of_topic("mail").sink, first.of_topic("mail").max_rate) == (
        "stream",
        "screen",
        7,
    )
    each = [client.hgetall(keys.topic_settings()) for keys in keys_of(first.redis)]
    assert each[0] == each[1]
    assert json.loads(each[0][b"*"]).items() >= {"sink": "stream", "max_rate": 7, "attempts_max": 5}.items()
    assert json.loads(each[0][b"mail"]) == {"sink": "screen"}
    other = adopt_topic_settings(client, settings_of(file), complete=True)
    assert (other.topics, other.topic) == (first.topics, first.topic)


def test_what_a_job_is_given_and_the_namespace_has_otherwise_is_refused_with_both_values_and_the_command(
    client: Any, file: Path
) -> None:
    adopt_topic_settings(client, settings_of(file, sink="stream"), complete=True)
    with pytest.raises(ConfigError) as refused:
        adopt_topic_settings(client, settings_of(file, sink="screen"), complete=True)
    assert str(refused.value) == (
        "The namespace duetime has other settings of topics than this job was given: sink is stream there, not screen "
        "(./spark-submit.sh jobs/topics.py set sink=screen changes it)."
    )
    text = NOTHING_SAID + "[topics]\nretain_sec = 60\ntrim_unread = true\n[topic.mail]\nmax_rate = 5\n"
    with pytest.raises(ConfigError, match=r"retain_sec is 604800 there, not 60 .* set trim_unread=true changes it"):
        adopt_topic_settings(client, settings_of(file, text))
    change_topic_settings(client, settings_of(file).redis, "mail", {"max_rate": 9})
    text = NOTHING_SAID + "[topic.mail]\nmax_rate = 5\n"
    with pytest.raises(ConfigError, match=r"max_rate of the topic mail is 9 there, not 5 .* set mail max_rate=5"):
        adopt_topic_settings(client, settings_of(file, text))


def test_a_topic_with_a_webhook_is_the_same_for_a_job_that_was_given_another_sink(client: Any, file: Path) -> None:
    text = NOTHING_SAID + "[topics]\nwebhook = 'http://h/'\n[topic.mail]\nsink = 'screen'\n"
    for _ in range(2):
        adopted = adopt_topic_settings(client, settings_of(file, text, sink="screen"), complete=True)
        assert [adopted.of_topic(topic).sink for topic in ("mail", "news")] == ["stream", "stream"]


def test_the_committed_configuration_gives_nothing(client: Any) -> None:
    given = load_settings({}, {}, None)
    assert given.given == {}
    environ = {"DUETIME_TOPICS_SINK": "screen", "DUETIME_DRAIN_FORMAT": "json"}
    assert load_settings({}, environ, None).given == {"*": {"sink": "screen"}}


def test_a_consumer_that_is_first_says_only_what_it_was_given(client: Any, file: Path) -> None:
    text = NOTHING_SAID + "[topics]\nattempts_max = 3\n"
    assert adopt_topic_settings(client, settings_of(file, text)).of_topic("mail").attempts_max == 3
    assert read_topic_settings(client, settings_of(file).redis) == {"*": {"attempts_max": 3}}
    loop = adopt_topic_settings(client, settings_of(file, sink="stream"), complete=True)
    assert (loop.of_topic("mail").sink, loop.of_topic("mail").attempts_max) == ("stream", 3)


def test_settings_are_changed_and_taken_back_in_all_shards(client: Any, file: Path) -> None:
    redis_settings = settings_of(file).redis
    adopt_topic_settings(client, settings_of(file), complete=True)
    change_topic_settings(client, redis_settings, "mail", {"sink": "stream", "max_rate": 5})
    change_topic_settings(client, redis_settings, ALL_TOPICS, {"max_rate": 7})
    settings = adopt_topic_settings(client, settings_of(file))
    assert (settings.of_topic("mail").max_rate, settings.of_topic("news").max_rate) == (5, 7)
    change_topic_settings(client, redis_settings, "mail", {"max_rate": None})
    assert adopt_topic_settings(client, settings_of(file)).of_topic("mail").max_rate == 7
    change_topic_settings(client, redis_settings, "mail", {"sink": None})
    each = [client.hgetall(keys.topic_settings()) for keys in keys_of(redis_settings)]
    assert each[0] == each[1]
    assert list(each[0]) == [b"*"]


def test_of_two_changes_at_once_the_later_one_stays_in_all_shards(
    client: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one comes to the other shards last, as does a job that has read it before."""
    redis_settings = settings_of(file).redis
    write_to_all = namespace._write_to_all

    def overtaken(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(namespace, "_write_to_all", write_to_all)
        change_topic_settings(client, redis_settings, "mail", {"max_rate": 2})
        write_to_all(*arguments, **options)

    monkeypatch.setattr(namespace, "_write_to_all", overtaken)
    change_topic_settings(client, redis_settings, "mail", {"max_rate": 1})
    each = [client.hgetall(keys.topic_settings()) for keys in keys_of(redis_settings)]
    assert each == [{b"mail": b'{"max_rate": 2}'}] * 2


@pytest.mark.parametrize("is_changed", [True, False])
def test_all_shards_say_what_the_first_one_does_also_if_it_has_lost_changes(
    client: Any, file: Path, is_changed: bool
) -> None:
    """A server that was restored from a backup, or whose replica took over, has an earlier revision than the others."""
    settings = settings_of(file).redis
    first, second = keys_of(settings)
    change_topic_settings(client, settings, "mail", {"max_rate": 1})
    backup = client.dump(first.topic_settings()), client.dump(first.meta())
    for rate in (2, 3, 4):
        change_topic_settings(client, settings, "mail", {"max_rate": rate})
    for key, dump in zip((first.topic_settings(), first.meta()), backup, strict=True):
        client.restore(key, 0, dump, replace=True)
    if is_changed:
        change_topic_settings(client, settings, "mail", {"max_rate": 5})
    else:
        assert adopt_topic_settings(client, settings_of(file)).of_topic("mail").max_rate == 1
    each = [client.hgetall(keys.topic_settings()) for keys in (first, second)]
    assert each == [{b"mail": b'{"max_rate": 5}' if is_changed else b'{"max_rate": 1}'}] * 2


def test_a_shard_that_says_something_else_says_what_the_first_one_does_when_a_job_starts(
    client: Any, file: Path
) -> None:
    settings = settings_of(file)
    change_topic_settings(client, settings.redis, "mail", {"max_rate": 1})
    client.delete(keys_of(settings.redis)[1].topic_settings())
    adopt_topic_settings(client, settings)
    assert client.hgetall(keys_of(settings.redis)[1].topic_settings()) == {b"mail": b'{"max_rate": 1}'}


def test_a_loop_can_be_the_first_one_on_a_server_that_is_full(server: RealServer, file: Path) -> None:
    client = server.client()
    settings = settings_of(file, sink="stream")
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("more", "")
        adopted = adopt_topic_settings(client, settings, complete=True)
    finally:
        client.config_set("maxmemory", 0)
    assert adopted.of_topic("mail").sink == "stream"
    assert read_topic_settings(client, settings.redis)[ALL_TOPICS]["sink"] == "stream"


def test_what_counts_for_a_topic_now_is_read_without_the_settings_of_all_others(server: RealServer, file: Path) -> None:
    client, settings = server.client(), settings_of(file)
    change_topic_settings(client, settings.redis, "mail", {"max_rate": 5})
    assert current_topic_settings(client, settings, "mail") == TopicSettings(sink="screen", max_rate=5)
    change_topic_settings(client, settings.redis, ALL_TOPICS, {"sink": "stream", "max_rate": 7})
    client.config_resetstat()
    assert current_topic_settings(client, settings, "mail") == TopicSettings(sink="stream", max_rate=5)
    assert current_topic_settings(client, settings, "news") == TopicSettings(sink="stream", max_rate=7)
    called = client.info("commandstats")
    assert (called["cmdstat_hmget"]["calls"], "cmdstat_hgetall" in called) == (2, False)


def test_a_running_loop_notices_a_change_at_its_next_claim(server: RealServer, file: Path) -> None:
    client = connect(settings_of(file).redis.__class__(url=server.url))
    name = f"test-{uuid.uuid4().hex}"
    settings = settings_of(file, f"[redis]\nshards = 2\nnamespace = '{name}'\n")
    settings = adopt_topic_settings(client, settings, complete=True)
    stores = open_shards(client, settings.redis)

    def send(number: int) -> None:
        for keys in keys_of(settings.redis):
            member = Message(0, "m", "mail").to_member(f"Psent{keys.shard}00000000{number:08x}")
            client.zadd(keys.bucket(0), {member: START_MS % 1_000})
            client.zadd(keys.buckets(), {"0": 0})

    send(1)
    claims = [store.claim("one:1").claim for store in stores]
    assert all(claims)
    change_topic_settings(client, settings.redis, ALL_TOPICS, {"sink": "stream"})
    send(2)
    replies = [store.claim("two:1") for store in stores]
    assert [(reply.claim, [each.topic for each in reply.moved]) for reply in replies] == [(None, ["mail"])] * 2
    client.close()
