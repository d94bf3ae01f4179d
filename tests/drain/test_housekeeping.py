"""What is done beside the deliveries: correct, one thing at a time, and in nobody's way."""

from functools import partial
from math import inf
from typing import Any

from pipeline.config import RedisSettings, TopicSettings
from pipeline.core.errors import StoreUnavailable
from pipeline.drain.housekeeping import (
    FORGET_MS,
    REST_FACTOR,
    REST_MS_MIN,
    ROUND_MS,
    Forgetter,
    Reclaimer,
    Trimmer,
)
from pipeline.drain.stats import Totals
from pipeline.store.connection import connect
from pipeline.store.ids import FORGET_LIMIT, forget_ids
from pipeline.store.keys import Keys
from pipeline.store.scripts import Scripts
from pipeline.store.topics import Topics
from tests.clock import ManualClock
from tests.drain.test_loop import START_MS
from tests.servers import RealServer, real_server

KEYS = Keys("test")
SETTINGS = TopicSettings(sink="stream", retain_messages=100)


def fill(client: Any, topic: str, count: int = 1_000) -> None:
    pipeline = client.pipeline()
    for _ in range(count):
        pipeline.xadd(KEYS.stream(topic), {"message": "m"})
    pipeline.sadd(KEYS.topics(), topic)
    pipeline.execute()


def test_it_looks_after_one_topic_at_a_time_and_sooner_while_there_is_something_to_do(server: RealServer) -> None:
    client, clock = server.client(), ManualClock(now_ms=START_MS)
    fill(client, "a")
    fill(client, "b")
    trimmer = Trimmer(Topics(client, [KEYS]), [KEYS], lambda topic: SETTINGS, clock)

    def lengths() -> list[bool]:
        trimmer.step()
        return [client.xlen(KEYS.stream(topic)) < 300 for topic in "ab"]

    assert lengths() == [True, False]
    assert lengths() == [True, False], "not at once again"
    clock.advance_ms(REST_MS_MIN)
    assert lengths() == [True, True]
    fill(client, "a")
    clock.advance_ms(REST_MS_MIN)
    assert lengths() == [True, True], "the second round found it"
    fill(client, "a")
    clock.advance_ms(REST_MS_MIN)
    assert lengths() == [False, True], "it is the turn of b, which has nothing to drop"
    clock.advance_ms(REST_MS_MIN)
    assert lengths() == [False, True], "so it rests"
    clock.advance_ms(ROUND_MS / 2)
    assert lengths() == [True, True]


def test_a_round_of_many_topics_takes_no_longer_than_one_of_few(server: RealServer) -> None:
    client, clock = server.client(), ManualClock(now_ms=START_MS)
    for number in range(50):
        fill(client, f"topic-{number:02}", 1)
    trimmer = Trimmer(Topics(client, [KEYS]), [KEYS], lambda topic: SETTINGS, clock)
    assert [trimmer.step() for _ in range(2)] == [ROUND_MS / 50] * 2
    client.sadd(KEYS.topics(), *(f"topic-{number}" for number in range(10_000)))
    for _ in range(50):
        clock.advance_ms(ROUND_MS / 50)
        rest_ms = trimmer.step()
    assert rest_ms == REST_MS_MIN, "with more topics it takes longer"


def test_it_works_a_tenth_of_the_time_at_most(server: RealServer) -> None:
    client, clock = server.client(), ManualClock(now_ms=START_MS)
    fill(client, "a")

    def settings_of(topic: str) -> TopicSettings:
        clock.advance_ms(10)
        return SETTINGS

    trimmer = Trimmer(Topics(client, [KEYS]), [KEYS], settings_of, clock)
    began_ms = clock.monotonic_ms()
    assert trimmer.step() == REST_FACTOR * (clock.monotonic_ms() - began_ms) > REST_MS_MIN


def test_it_asks_for_the_settings_of_a_topic_once_whatever_the_number_of_shards(server: RealServer) -> None:
    client, clock = server.client(), ManualClock(now_ms=START_MS)
    shards = [Keys("test", shard) for shard in range(3)]
    fill(client, "a")
    asked: list[str] = []

    def settings_of(topic: str) -> TopicSettings:
        asked.append(topic)
        return SETTINGS

    Trimmer(Topics(client, shards), shards, settings_of, clock).step()
    assert client.xlen(KEYS.stream("a")) < 300, "in several steps"
    assert asked == ["a"]


def test_it_has_loops_look_at_what_is_held_and_leaves_a_pause_alone(server: RealServer) -> None:
    """Also where it is not indexed, as another program has ended the pause, or is for a time that a clock set back made far."""
    client, clock = server.client(), ManualClock(now_ms=START_MS)
    topics = Topics(client, [KEYS])
    for topic in ("far", "forgotten", "paused"):
        client.zadd(KEYS.held(topic), {"m": 1})
        client.sadd(KEYS.topics(), topic)
    client.zadd(KEYS.held_topics(), {"far": START_MS + 3_600_000})
    topics.pause("paused", 1)
    trimmer = Trimmer(topics, [KEYS], lambda topic: SETTINGS, clock)
    for _ in range(3):
        trimmer.step()
        clock.advance_ms(ROUND_MS)
    assert client.zrange(KEYS.held_topics(), 0, -1, withscores=True) == [(b"far", 0), (b"forgotten", 0)]


def test_names_that_are_not_ours_stop_nothing(server: RealServer) -> None:
    client, clock = server.client(), ManualClock(now_ms=START_MS)
    fill(client, "a")
    client.sadd(KEYS.topics(), b"\xff")
    client.xgroup_create(KEYS.stream("a"), b"\xff", "$")
    trimmer = Trimmer(Topics(client, [KEYS]), [KEYS], lambda topic: SETTINGS, clock)
    for _ in range(2):
        trimmer.step()
        clock.advance_ms(ROUND_MS)
    assert client.xlen(KEYS.stream("a")) < 300


def test_a_server_that_is_away_is_no_reason_to_stop() -> None:
    with real_server() as server:
        clock = ManualClock(now_ms=START_MS)
        topics = Topics(connect(RedisSettings(url=server.url)), [KEYS])
        trimmer = Trimmer(topics, [KEYS], lambda topic: SETTINGS, clock)
        server.kill()
        trimmer.step()
        server.start()
        fill(server.client(), "a")
        clock.advance_ms(ROUND_MS)
        trimmer.step()
        assert server.client().xlen(KEYS.stream("a")) < 300


class TestReclaimer:
    def test_it_gives_back_all_that_has_expired_once_it_is_requested(self) -> None:
        left, notified = [500, 16, 0], []
        totals = Totals()
        reclaimer = Reclaimer(lambda: left.pop(0), lambda: notified.append(totals.reclaimed), totals)
        assert (reclaimer.step(), len(left)) == (inf, 3), "nobody has asked for it"
        reclaimer.request()
        assert (reclaimer.step(), left) == (inf, [])
        assert (totals.reclaimed, notified) == (516, [500, 516])
        assert (reclaimer.step(), left) == (inf, []), "once"

    def test_a_server_that_is_away_is_asked_at_the_next_request(self) -> None:
        answers: list[int | None] = [None, 3, 0]
        totals = Totals()

        def reclaim() -> int:
            answer = answers.pop(0)
            if answer is None:
                raise StoreUnavailable("Redis does not answer.")
            return answer

        reclaimer = Reclaimer(reclaim, lambda: None, totals)
        for reclaimed in (0, 3):
            reclaimer.request()
            assert (reclaimer.step(), totals.reclaimed) == (inf, reclaimed)


def test_ids_are_forgotten_after_their_time_though_no_message_with_one_comes(server: RealServer) -> None:
    client, clock = server.client(), ManualClock(now_ms=START_MS)
    for number, key in enumerate((KEYS.ids(), KEYS.cancelled()), start=1):
        over = {f"over-{each}": START_MS - each for each in range(number * FORGET_LIMIT)}
        client.zadd(key, {**over, "known": START_MS + 1_000})
    forgetter = Forgetter([partial(forget_ids, client, KEYS, Scripts(), clock.wall_ms)], clock)

    def left() -> tuple[float, int, int]:
        return forgetter.step(), client.zcard(KEYS.ids()), client.zcard(KEYS.cancelled())

    assert left() == (REST_MS_MIN, 1, 1 + FORGET_LIMIT)
    assert left() == (REST_MS_MIN, 1, 1 + FORGET_LIMIT), "not at once again"
    clock.advance_ms(REST_MS_MIN)
    assert left() == (REST_MS_MIN, 1, 1)
    clock.advance_ms(REST_MS_MIN)
    assert left() == (FORGET_MS, 1, 1)
    assert client.zrange(KEYS.ids(), 0, -1) == client.zrange(KEYS.cancelled(), 0, -1) == [b"known"]
    clock.advance_ms(FORGET_MS)
    assert left() == (FORGET_MS, 0, 0)


def test_a_shard_that_is_away_keeps_no_other_from_forgetting(server: RealServer) -> None:
    client, clock = server.client(), ManualClock(now_ms=START_MS)
    client.zadd(KEYS.ids(), {"over": 1})

    def away() -> bool:
        raise StoreUnavailable("away")

    Forgetter([away, partial(forget_ids, client, KEYS, Scripts())], clock).step()
    assert not client.exists(KEYS.ids())
