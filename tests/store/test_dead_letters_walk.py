"""Walking the dead letters of many topics: the same as one topic after the other."""

import random

import pytest

from pipeline.config import RedisSettings
from pipeline.store import dead_letters
from pipeline.store.dead_letters import DeadLetters
from pipeline.store.keys import keys_of
from tests.store.conftest import Bench


@pytest.mark.parametrize("seed", range(4))
def test_all_topics_are_walked_in_order_from_any_letter(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for name, value in (("PAGE", 3), ("STREAMS_AHEAD", 4), ("LETTERS_AHEAD", 2)):
        monkeypatch.setattr(dead_letters, name, value)
    chance = random.Random(seed)
    shards = keys_of(RedisSettings(shards=3))
    topics = [f"t{number:02}" for number in range(11)]
    for topic in topics:
        for keys in shards:
            for number in range(chance.choice((0, 0, 1, 2, 3, 7))):
                bench.client.xadd(keys.dead(topic), {"message": str(number), "topic": topic})
                bench.client.sadd(keys.dead_topics(), topic)
    letters = DeadLetters(bench.client, shards)
    expected = [letter.name for topic in topics for letter in letters.of_topic(topic)]
    assert [letter.name for letter in letters.of_topics(topics)] == expected
    assert len(set(expected)) == len(expected) > 20
    for place, letter in enumerate(letters.of_topics(topics)):
        after = (letter.topic, letter.shard, letter.entry_id)
        assert [found.name for found in letters.of_topics(topics, after)] == expected[place + 1 :]
    assert [found.name for found in letters.of_topics(topics, ("t05x", 0, "0-0"))] == [
        name for name in expected if name > "t06"
    ]
