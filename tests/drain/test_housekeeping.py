"""What a loop does for topics in its spare time."""

from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.config import RedisSettings, TopicSettings
from pipeline.drain.housekeeping import BUSY_MS, PUT_BACKS_MAX, REST_MS, Housekeeping
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.topics import RESUME_LIMIT, Topics
from tests.drain.test_loop import ManualClock
from tests.servers import RealServer, real_server

KEYS = Keys("test")
SETTINGS = TopicSettings(sink="stream", retain_messages=100)


@pytest.fixture
def server() -> Iterator[RealServer]:
    with real_server("--appendonly", "no") as running:
        yield running


def fill(client: Any, topic: str, count: int = 1_000) -> None:
    pipeline = client.pipeline()
    for _ in range(count):
        pipeline.xadd(KEYS.stream(topic), {"message": "m"})
    pipeline.sadd(KEYS.topics(), topic)
    pipeline.execute()


def test_it_looks_after_one_topic_at_a_time_and_sooner_while_there_is_something_to_do(server: RealServer) -> None:
    client, clock = server.client(), ManualClock()
    fill(client, "a")
    fill(client, "b")
    housekeeping = Housekeeping(Topics(client, [KEYS]), [KEYS], lambda topic: SETTINGS, clock)

    def lengths() -> list[bool]:
        housekeeping(0, None)
        return [client.xlen(KEYS.stream(topic)) < 300 for topic in "ab"]

    assert lengths() == [True, False]
    assert lengths() == [True, False], "not at once again"
    clock.advance_ms(BUSY_MS)
    assert lengths() == [True, True]
    fill(client, "a")
    clock.advance_ms(BUSY_MS)
    assert lengths() == [True, True], "the second round found it"
    fill(client, "a")
    clock.advance_ms(BUSY_MS)
    assert lengths() == [False, True], "it is the turn of b, which has nothing to drop"
    clock.advance_ms(BUSY_MS)
    assert lengths() == [False, True], "so it rests"
    clock.advance_ms(REST_MS)
    assert lengths() == [True, True]


def test_it_ends_a_resume_that_was_cut_off_and_leaves_a_pause_alone(server: RealServer) -> None:
    client, clock = server.client(), ManualClock()
    topics = Topics(client, [KEYS])
    for topic in ("cut off", "paused"):
        client.zadd(KEYS.held(topic), {"m": 1})
        client.sadd(KEYS.topics(), topic)
    topics.pause("paused", 1)
    housekeeping = Housekeeping(topics, [KEYS], lambda topic: SETTINGS, clock)
    for _ in range(2):
        housekeeping(0, None)
        clock.advance_ms(REST_MS)
    assert client.zrange(KEYS.bucket(0), 0, -1) == [b"m"]
    assert (topics.look("cut off").held, topics.look("paused").held) == (0, 1)


def test_a_long_resume_holds_up_the_loop_for_a_while_only(server: RealServer) -> None:
    client, clock = server.client(), ManualClock()
    topics = Topics(client, [KEYS])
    held = PUT_BACKS_MAX * RESUME_LIMIT + 1
    client.zadd(KEYS.held("a"), {f"m{number}": 1 for number in range(held)})
    client.sadd(KEYS.topics(), "a")
    housekeeping = Housekeeping(topics, [KEYS], lambda topic: SETTINGS, clock)
    housekeeping(0, None)
    assert topics.look("a").held == 1
    clock.advance_ms(BUSY_MS)
    housekeeping(0, None)
    assert topics.look("a").held == 0


def test_names_that_are_not_ours_stop_nothing(server: RealServer) -> None:
    client, clock = server.client(), ManualClock()
    fill(client, "a")
    client.sadd(KEYS.topics(), b"\xff")
    client.xgroup_create(KEYS.stream("a"), b"\xff", "$")
    housekeeping = Housekeeping(Topics(client, [KEYS]), [KEYS], lambda topic: SETTINGS, clock)
    for _ in range(2):
        housekeeping(0, None)
        clock.advance_ms(REST_MS)
    assert client.xlen(KEYS.stream("a")) < 300


def test_a_server_that_is_away_is_no_reason_to_stop(server: RealServer) -> None:
    clock = ManualClock()
    topics = Topics(connect(RedisSettings(url=server.url)), [KEYS])
    housekeeping = Housekeeping(topics, [KEYS], lambda topic: SETTINGS, clock)
    server.kill()
    housekeeping(0, None)
    server.start()
    fill(server.client(), "a")
    clock.advance_ms(REST_MS)
    housekeeping(0, None)
    assert server.client().xlen(KEYS.stream("a")) < 300
