"""A consumer and its group: sharing, taking over, retries, dead letters, and what a late word can't do."""

import pytest
import redis

from pipeline.consume.consumer import Consumer
from pipeline.consume.retries import Outcome
from pipeline.core.errors import ConfigError, StoreUnavailable
from pipeline.store.entries import Entry
from pipeline.store.groups import NEW, PAGE, GroupStore
from pipeline.store.keys import Keys
from tests.consume.conftest import GROUP, TOPIC, Stage

LEASE_MS = 100_000


def texts(entries: list[Entry]) -> list[str]:
    return [entry.body for entry in entries]


def take_all(consumer: Consumer) -> list[Entry]:
    found = consumer.take()
    while more := consumer.take():
        found += more
    return found


def test_a_message_comes_with_all_that_was_said_about_it(stage: Stage) -> None:
    consumer = stage.open()
    stage.send("hello", due_ms=1_234, id="order-1", headers={"a": "b/ä\n", "c": ""})
    [entry] = consumer.take()
    assert (entry.body, entry.id, entry.topic, entry.due_ms) == ("hello", "order-1", TOPIC, 1_234)
    assert (entry.attempt, entry.headers) == (1, {"a": "b/ä\n", "c": ""})


def test_a_group_gets_what_came_while_nobody_was_there_and_every_group_gets_all(stage: Stage) -> None:
    stage.open().close()
    stage.open(group="audit").close()
    stage.send("a", "b")
    assert texts(stage.open().take()) == ["a", "b"]
    assert texts(stage.open(group="audit").take()) == ["a", "b"]


def test_a_new_group_begins_where_it_is_told(stage: Stage) -> None:
    stage.send("before")
    consumer = stage.open(group="late", start=NEW)
    stage.send("after")
    assert texts(consumer.take()) == ["after"]
    assert texts(stage.open(group="all").take()) == ["before", "after"]


@pytest.mark.parametrize(
    "fields",
    [
        {"headers": "[" * 100_000},
        {"headers": '{"a":"\\ud800"}'},
        {"headers": "[]"},
        {"attempt": "-" + "9" * 400},
        {"attempt": "-5"},
        {"attempt": "one"},
        {"due_ms": "9" * 400},
        {"id": b"\xff"},
        {b"\xff": b"\xff"},
    ],
    ids=lambda fields: str(next(iter(fields.items())))[:30],
)
def test_an_entry_that_another_program_wrote_is_handed_out_retried_and_buried_as_any(
    stage: Stage, fields: dict[str, str]
) -> None:
    consumer = stage.open(settings={"attempts_max": 2})
    stage.client.xadd(stage.keys.stream(TOPIC), {"message": "m", **fields})  # type: ignore[arg-type]
    [entry] = consumer.take()
    assert (entry.body, entry.attempt) == ("m", 1)
    assert consumer.nack(entry) is Outcome.RETRY
    stage.move_when_due()
    [entry] = consumer.take()
    assert consumer.nack(entry, "\udcff") is Outcome.DEAD
    assert (stage.dead()[0]["message"], stage.dead()[0]["detail"]) == ("m", "\\udcff")


def test_instances_share_and_an_acknowledged_message_never_comes_again(stage: Stage) -> None:
    one, other = stage.open(limit=2), stage.open(limit=2)
    stage.send("a", "b", "c", "d")
    first, second = one.take(), other.take()
    assert (texts(first), texts(second)) == (["a", "b"], ["c", "d"])
    assert one.ack(*first)
    assert other.ack(*second)
    stage.silence_ms(2 * LEASE_MS)
    assert one.take() == other.take() == []
    assert stage.pending() == 0


def test_messages_come_in_order_of_due_time_and_then_of_arrival(stage: Stage) -> None:
    consumer = stage.open()
    stage.send("third", due_ms=3_000)
    stage.send("retry", due_ms=3_000)
    assert texts(consumer.take()) == ["third", "retry"]


def test_what_a_silent_instance_has_is_taken_over_after_its_lease_and_not_before(stage: Stage) -> None:
    silent, living = stage.open(), stage.open()
    stage.send("a", "b")
    had = silent.take()
    stage.clock.advance_ms(2_000)
    assert living.take() == []
    stage.silence_ms(LEASE_MS + 1)
    stage.clock.advance_ms(2_000)
    taken = living.take()
    assert texts(taken) == ["a", "b"]
    assert [entry.attempt for entry in taken] == [2, 2]
    assert not silent.ack(*had), "its word counts no more"
    assert silent.late_acks == 2
    assert stage.pending() == 2
    assert living.ack(*taken)
    assert stage.pending() == 0


def test_what_was_abandoned_too_often_does_not_hide_what_else_there_is(stage: Stage) -> None:
    stage.send("poison")
    for _ in range(2):
        assert texts(stage.open().take()) == ["poison"]
        stage.silence_ms(LEASE_MS + 1)
    stage.send("a")
    assert texts(stage.open().take()) == ["a"]


def test_a_late_word_cannot_touch_what_the_same_instance_got_again(stage: Stage) -> None:
    consumer = stage.open("c")
    stage.send("a")
    [first] = consumer.take()
    reborn = stage.open("c")
    [second] = reborn.take()
    assert (second.body, second.attempt) == ("a", 2)
    assert not consumer.ack(first)
    assert consumer.nack(first) is Outcome.LEASE_LOST
    assert not consumer.extend(first)
    assert reborn.ack(second)


def test_extending_keeps_a_message(stage: Stage) -> None:
    busy, other = stage.open(), stage.open()
    stage.send("a")
    [entry] = busy.take()
    stage.silence_ms(LEASE_MS - 10_000)
    assert busy.extend(entry)
    stage.clock.advance_ms(2_000)
    assert other.take() == []
    assert busy.ack(entry)


def test_iterating_keeps_what_waits_in_hand(stage: Stage) -> None:
    busy, other = stage.open(), stage.open()
    stage.send("a", "b", "c")
    seen = []
    for entry in busy:
        seen.append(entry.body)
        stage.silence_ms(LEASE_MS - 10_000)  # the handler takes its time
        stage.clock.advance_ms(2_000)
        assert other.take() == []
        assert busy.extend(entry)
        assert busy.ack(entry)
        if len(seen) == 3:
            break
    assert seen == ["a", "b", "c"]


def test_iterating_does_not_give_out_what_was_taken_over_meanwhile(stage: Stage) -> None:
    slow, other = stage.open(), stage.open()
    stage.send("a", "b")
    messages = iter(slow)
    assert next(messages).body == "a"
    stage.silence_ms(LEASE_MS + 1)
    stage.clock.advance_ms(2_000)
    assert texts(other.take()) == ["a", "b"]
    stage.send("c")
    assert next(messages).body == "c"


def test_a_message_that_was_given_out_and_forgotten_comes_again_after_its_lease(stage: Stage) -> None:
    consumer = stage.open()
    stage.send("a", "b")
    messages = iter(consumer)
    forgotten, other = next(messages), next(messages)
    assert (forgotten.body, other.body) == ("a", "b")
    assert consumer.ack(other)
    stage.silence_ms(LEASE_MS + 1)
    again = next(messages)
    assert (again.body, again.attempt) == ("a", 2)
    assert not consumer.ack(forgotten)
    assert consumer.ack(again)


def test_what_was_given_out_is_not_kept_by_what_comes_after_it(stage: Stage) -> None:
    consumer, other = stage.open(), stage.open()
    stage.send("a", "b", "c")
    messages = iter(consumer)
    next(messages)
    stage.silence_ms(LEASE_MS / 2)
    assert next(messages).body == "b"
    stage.silence_ms(LEASE_MS + 1)
    stage.clock.advance_ms(2_000)
    assert "a" in texts(other.take())


def test_closing_gives_back_at_once_what_was_not_handled(stage: Stage) -> None:
    leaving, staying = stage.open(), stage.open()
    stage.send("a", "b")
    for entry in leaving:
        assert entry.body == "a"
        break
    leaving.close()
    taken = take_all(staying)
    assert texts(taken) == ["a", "b"]
    assert [entry.attempt for entry in taken] == [2, 1], "only a was given out"
    leaving.close()


def test_an_instance_that_leaves_is_forgotten(stage: Stage) -> None:
    with stage.open("leaver") as consumer:
        stage.send("a")
        assert consumer.ack(*consumer.take())
    consumers = stage.client.xinfo_consumers(stage.keys.stream(TOPIC), GROUP)
    assert consumers == []


def test_an_instance_that_was_killed_is_forgotten_when_it_has_nothing_any_more(stage: Stage) -> None:
    for name in ("killed", "holding", "living"):
        stage.open(name).take()
    stage.send("a")
    stage.open("holding").take()
    stage.open().store.sweep(min_idle_ms=-1)
    stream = stage.client.xinfo_consumers(stage.keys.stream(TOPIC), GROUP)
    assert [consumer["name"] for consumer in stream] == [b"holding"]


def test_a_message_that_fails_comes_again_to_its_group_alone_and_ends_as_a_dead_letter(stage: Stage) -> None:
    consumer, audit = stage.open(), stage.open(group="audit")
    stage.send("bad", due_ms=1_234, id="order-1", headers={"a": "b"})
    assert texts(audit.take()) == ["bad"]
    for attempt in (1, 2):
        [entry] = consumer.take()
        assert (entry.attempt, entry.id, entry.due_ms, entry.headers) == (attempt, "order-1", 1_234, {"a": "b"})
        assert consumer.nack(entry, "no") is Outcome.RETRY
        assert consumer.take() == []
        stage.move_when_due()
    [entry] = consumer.take()
    assert consumer.nack(entry, "ValueError: no") is Outcome.DEAD
    [dead] = stage.dead()
    assert {name: dead[name] for name in ("id", "message", "topic", "due_ms", "attempt", "headers")} == {
        "id": "order-1",
        "message": "bad",
        "topic": TOPIC,
        "due_ms": "1234",
        "attempt": "3",
        "headers": '{"a": "b"}',
    }
    assert (dead["reason"], dead["detail"], dead["group"]) == ("failed", "ValueError: no", GROUP)
    assert int(dead["died_ms"]) > 1_700_000_000_000
    assert stage.pending() == 0
    assert audit.take() == [], "no business of another group"
    assert int(stage.client.hget(stage.keys.counters(), "dead")) == 1


def test_what_kills_its_consumer_every_time_is_tried_by_itself_and_then_dead_and_takes_no_other_with_it(
    stage: Stage,
) -> None:
    stage.open().close()
    stage.send("good 1", "poison", "good 2", "good 3")
    handled: list[str] = []
    deaths = 0
    for _ in range(20):
        victim = stage.open()
        messages = iter(victim)
        for _ in range(10):
            if stage.pending() == 0 and not stage.client.zcard(stage.keys.buckets()) and stage.dead():
                break
            stage.move()
            if not (entry := next_of(stage, victim, messages)):
                break
            if entry.body == "poison":
                deaths += 1
                break  # killed: nothing is given back
            assert victim.ack(entry)
            handled.append(entry.body)
        stage.silence_ms(LEASE_MS + 1)
        stage.clock.advance_ms(2_000)
    assert sorted(handled) == ["good 1", "good 2", "good 3"]
    assert [letter["message"] for letter in stage.dead()] == ["poison"]
    assert stage.dead()[0]["reason"] == "abandoned"
    assert deaths <= stage.settings.attempts_max + 1


def test_what_was_only_read_beside_a_poison_message_is_never_given_up_untried(stage: Stage) -> None:
    dying = stage.open(settings={"attempts_max": 1})
    stage.send("poison", "good")
    assert next(iter(dying)).body == "poison"
    stage.silence_ms(LEASE_MS + 1)
    stage.clock.advance_ms(2_000)
    living = stage.open(settings={"attempts_max": 1})
    assert "good" in texts(living.take())
    assert stage.dead() == []


def test_a_full_server_still_lets_a_consumer_say_that_it_failed(stage: Stage) -> None:
    consumer = stage.open()
    stage.send("a")
    [entry] = consumer.take()
    stage.client.config_set("maxmemory", 1)
    try:
        assert consumer.nack(entry) is Outcome.RETRY
    finally:
        stage.client.config_set("maxmemory", 0)
    assert stage.pending() == 0


def next_of(stage: Stage, consumer: Consumer, messages: object) -> Entry | None:
    """The next message, or None if there is none now."""
    consumer.stopping = lambda: consumer.clock.monotonic_ms() >= end_ms
    end_ms = consumer.clock.monotonic_ms() + 1_500
    real_read = consumer.store.read

    def read(limit: int, block_ms: int) -> list[Entry]:
        stage.clock.advance_ms(100)
        return real_read(limit, block_ms)

    consumer.store.read = read  # type: ignore[method-assign]
    try:
        return next(messages)  # type: ignore[call-overload, no-any-return]
    except StopIteration:
        return None
    finally:
        consumer.store.read = real_read  # type: ignore[method-assign]


def test_what_was_handed_out_in_a_lost_reply_is_found_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = stage.open()
    stage.send("a", "b")
    read = stage.user.xreadgroup

    def lose_reply(*arguments: object, **options: object) -> None:
        read(*arguments, **options)
        monkeypatch.setattr(stage.user, "xreadgroup", read)
        raise redis.exceptions.ConnectionError("cut")

    monkeypatch.setattr(stage.user, "xreadgroup", lose_reply)
    entries = consumer.take()
    assert texts(entries) == ["a", "b"]
    assert consumer.ack(*entries)
    assert stage.pending() == 0


def test_what_was_found_before_a_call_failed_is_not_forgotten(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.send("retry", "a")
    dying = stage.open("c")
    failed, _ = dying.take()
    dying.nack(failed)
    stage.move_when_due()
    dying.take()
    reborn = stage.open("c")
    reclaim = reborn.store.reclaim
    calls = 0

    def reclaim_once(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise StoreUnavailable("cut")
        return reclaim(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(GroupStore, "reclaim", lambda self, *arguments, **options: reclaim_once(*arguments, **options))
    assert sorted(texts(take_all(reborn))) == ["a", "retry"]
    assert calls > 2


def test_what_was_taken_over_in_a_lost_reply_is_found_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, living = stage.open(), stage.open()
    stage.send("a")
    silent.take()
    stage.silence_ms(LEASE_MS + 1)
    reclaim = living.store.reclaim

    def lose_reply(stream: str, cursor: str, limit: int, min_idle_ms: int | None = None) -> object:
        page = reclaim(stream, cursor, limit, min_idle_ms)
        if page.entries:
            monkeypatch.setattr(living.store, "reclaim", reclaim)
            raise StoreUnavailable("cut")
        return page

    monkeypatch.setattr(living.store, "reclaim", lose_reply)
    assert texts(living.take()) == ["a"]


def test_all_of_an_earlier_life_is_found_also_beyond_a_page(stage: Stage) -> None:
    sent = [f"{number}" for number in range(PAGE * 2 + 1)]
    stage.open("c")
    stage.send(*sent)
    assert len(stage.open("c").take(len(sent))) == len(sent)
    reborn, found = stage.open("c"), []
    while some := reborn.take():
        assert len(reborn._in_flight) <= PAGE, "there may be too many for the memory, or for one call"
        found += texts(some)
        assert reborn.ack(*some)
    assert found == sent


def test_a_consumer_that_closes_gives_back_what_it_does_not_know(stage: Stage) -> None:
    sent = [f"{number}" for number in range(PAGE * 2 + 1)]
    stage.open("c")
    stage.send(*sent)
    stage.open("c").take(len(sent))
    stage.open("c").close()
    assert len(stage.open("d").take()) == PAGE, "they are to be had at once"


def test_the_next_consumer_of_an_ordered_group_has_all_in_order_page_by_page(stage: Stage) -> None:
    first = stage.open("first", ordered=True)
    sent = [f"{number:03}" for number in range(PAGE * 2 + 1)]
    stage.send(*sent)
    assert len(first.take(len(sent))) == len(sent)
    stage.client.delete(stage.keys.active(TOPIC, GROUP))  # its lease is over
    stage.send("new")
    second, found = stage.open("second", ordered=True), []
    while some := second.take():
        assert len(second._in_flight) <= PAGE
        found += texts(some)
        assert second.ack(*some)
    assert found == [*sent, "new"]


def test_all_that_a_dead_consumer_left_is_taken_over_without_a_pause_and_told_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    count = PAGE * 3 + 5
    dead, living = stage.open(), stage.open()
    stage.send(*(f"{number}" for number in range(count)))
    assert len(dead.take(count)) == count
    stage.silence_ms(LEASE_MS + 1)
    before_ms, found = stage.clock.now_ms, 0
    while some := living.take():
        found += len(some)
        assert living.ack(*some)
    assert (found, stage.clock.now_ms) == (count, before_ms)
    told = [record.getMessage() for record in caplog.records if "took over" in record.getMessage()]
    assert told == [f"took over {count} messages not acknowledged in time"]


def test_what_was_trimmed_away_while_it_was_pending_is_pending_no_more(stage: Stage) -> None:
    stage.open("c")
    stage.send("a", "b")
    stage.open("c").take()
    stage.client.xtrim(stage.keys.stream(TOPIC), maxlen=1, approximate=False)
    assert texts(stage.open("c").take()) == ["b"]
    assert stage.pending() == 1


def test_a_message_that_comes_again_rings_and_a_dead_letter_makes_its_topic_known(stage: Stage) -> None:
    consumer = stage.open(settings={"attempts_max": 2})
    stage.send("a")
    with stage.client.pubsub() as bell:
        bell.subscribe(stage.keys.wake())
        assert bell.get_message(timeout=60)["type"] == "subscribe"
        consumer.nack(*consumer.take())
        assert bell.get_message(timeout=60)["type"] == "message"
    stage.move_when_due()
    stage.client.delete(stage.keys.topics())
    assert consumer.nack(*consumer.take()) is Outcome.DEAD
    assert stage.client.smembers(stage.keys.topics()) == {TOPIC.encode()}
    assert stage.client.smembers(stage.keys.dead_topics()) == {TOPIC.encode()}


def test_what_is_read_from_several_streams_at_once_comes_in_one_order(stage: Stage) -> None:
    consumer = stage.open()
    stage.send("second", due_ms=2_000)
    consumer.nack(*consumer.take())
    stage.move_when_due()
    stage.send("first", due_ms=1_000)
    assert texts(consumer.take()) == ["first", "second"]


def test_an_acknowledgement_whose_reply_was_lost_counts(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = stage.open()
    stage.send("a", "b")
    first, second = consumer.take()
    execute = stage.user.execute_command

    def lose_reply(*words: object) -> None:
        execute(*words)
        monkeypatch.setattr(stage.user, "execute_command", execute)
        raise redis.exceptions.ConnectionError("cut")

    monkeypatch.setattr(stage.user, "execute_command", lose_reply)
    assert consumer.ack(first)
    assert stage.pending() == 1
    stage.user.time()
    now_ms = consumer.store.now_ms()
    monkeypatch.setattr(consumer.store, "now_ms", lambda: now_ms)
    monkeypatch.setattr(stage.user, "execute_command", lose_reply)
    assert consumer.nack(second) is Outcome.RETRY
    assert stage.client.zcard(stage.keys.buckets()) == 1
    assert stage.pending() == 0


def test_replay_gives_again_what_is_retained(stage: Stage) -> None:
    consumer = stage.open()
    stage.send("a", "b")
    assert consumer.ack(*consumer.take())
    consumer.store.replay("0-0")
    assert texts(consumer.take()) == ["a", "b"]


def test_a_group_that_was_removed_is_told(stage: Stage) -> None:
    consumer = stage.open()
    stage.client.xgroup_destroy(stage.keys.stream(TOPIC), GROUP)
    with pytest.raises(ConfigError, match="is not there any more"):
        consumer.take()


class TestOrdered:
    def test_one_has_the_turn_and_the_others_stand_by(self, stage: Stage) -> None:
        first, second = stage.open(ordered=True), stage.open(ordered=True)
        stage.send("a", "b", "c")
        assert texts(first.take(1)) == ["a"]
        assert second.take() == []
        assert texts(first.take()) == ["b", "c"]

    def test_who_comes_next_begins_with_what_was_left(self, stage: Stage) -> None:
        first, second = stage.open(ordered=True), stage.open(ordered=True)
        stage.send("a", "b")
        had = first.take()
        assert first.ack(had[0])
        stage.client.delete(stage.keys.active(TOPIC, GROUP))  # its lease is over
        stage.send("c")
        assert texts(take_all(second)) == ["b", "c"]
        assert not first.ack(had[1]), "the turn is another's"
        assert first.take() == []

    def test_an_acknowledgement_without_the_turn_is_refused_even_if_nobody_took_the_message(self, stage: Stage) -> None:
        first = stage.open(ordered=True)
        stage.send("a")
        entries = first.take()
        stage.client.set(stage.keys.active(TOPIC, GROUP), "another", ex=60)
        assert not first.ack(*entries)
        assert stage.pending() == 1

    def test_without_the_turn_nothing_is_read_taken_over_or_scheduled_again(self, stage: Stage) -> None:
        first = stage.open(ordered=True)
        stage.send("a")
        [entry] = first.take()
        stage.client.set(stage.keys.active(TOPIC, GROUP), "another", ex=60)
        stage.send("b")
        store, stream = first.store, stage.keys.stream(TOPIC)
        assert store.read(10, 1) == []
        assert store.reclaim(stream, "0-0", 10, 0).entries == store.reclaim(stream, "0-0", 10).entries == []
        assert first.nack(entry) is Outcome.LEASE_LOST
        assert (stage.pending(), stage.client.exists(stage.keys.buckets())) == (1, 0)

    def test_who_lost_the_turn_without_knowing_begins_with_what_the_other_left(self, stage: Stage) -> None:
        first, second = stage.open(ordered=True), stage.open(ordered=True)
        stage.send("a")
        assert first.ack(*first.take())
        stage.clock.advance_ms(LEASE_MS)  # the first is paused
        stage.client.delete(stage.keys.active(TOPIC, GROUP))
        stage.send("b", "c")
        assert texts(second.take()) == ["b", "c"]
        stage.client.delete(stage.keys.active(TOPIC, GROUP))  # the second is killed
        stage.send("d")
        assert texts(first.take()) == ["b", "c"]

    def test_a_call_that_fails_while_it_takes_the_turn_skips_nothing(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = stage.open(ordered=True), stage.open(ordered=True)
        stage.send("a")
        assert texts(first.take()) == ["a"]
        stage.client.delete(stage.keys.active(TOPIC, GROUP))  # the first is killed
        stage.send("b")
        reclaim = second.store.reclaim

        def cut(*arguments: object) -> None:
            monkeypatch.setattr(second.store, "reclaim", reclaim)
            raise StoreUnavailable("cut")

        monkeypatch.setattr(second.store, "reclaim", cut)
        assert texts(second.take()) == ["a"]

    def test_who_does_not_get_the_turn_of_one_shard_takes_that_of_no_other(self, stage: Stage) -> None:
        shards = [stage.keys, Keys(stage.keys.namespace, 1)]
        first, second = (GroupStore(stage.user, shards, TOPIC, GROUP, name) for name in ("1", "2"))
        stage.client.set(stage.keys.active(TOPIC, GROUP), "1", ex=60)  # half of its way
        assert not second.acquire_active(LEASE_MS)
        assert first.acquire_active(LEASE_MS)
        first.acquire_active(0)
        assert second.acquire_active(LEASE_MS)
        second.acquire_active(0)

    def test_who_leaves_gives_the_turn_to_the_next(self, stage: Stage) -> None:
        first, second = stage.open(ordered=True), stage.open(ordered=True)
        stage.send("a")
        assert texts(first.take()) == ["a"]
        first.close()
        assert texts(take_all(second)) == ["a"]

    def test_what_was_left_is_taken_even_if_the_first_try_fails(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = stage.open(ordered=True), stage.open(ordered=True)
        stage.send("a")
        assert texts(first.take()) == ["a"]
        stage.client.delete(stage.keys.active(TOPIC, GROUP))  # its lease is over
        reclaim, calls = GroupStore.reclaim, 0

        def fail_once(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise StoreUnavailable("cut")
            return reclaim(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(GroupStore, "reclaim", fail_once)
        assert texts(take_all(second)) == ["a"]

    def test_a_group_of_another_program_with_any_name_is_no_trouble(self, stage: Stage) -> None:
        consumer = stage.open(ordered=True)
        stage.client.xgroup_create(stage.keys.stream(TOPIC), b"\x01\xff", "0")
        assert consumer.take() == []
        stage.send("a")
        assert texts(take_all(consumer)) == ["a"]

    def test_a_group_that_was_removed_is_told(self, stage: Stage) -> None:
        consumer = stage.open(ordered=True)
        stage.client.xgroup_destroy(stage.keys.stream(TOPIC), GROUP)
        stage.client.xgroup_destroy(stage.keys.retry(TOPIC, GROUP), GROUP)
        consumer.store.wait(1)
        with pytest.raises(ConfigError, match="is not there any more"):
            consumer.take()

    def test_a_consumer_that_says_otherwise_is_refused(self, stage: Stage) -> None:
        stage.open(ordered=True)
        with pytest.raises(ConfigError, match=r"is ordered, not shared: .* drop-group mail billing"):
            stage.open(ordered=False)
        stage.open(group="audit")
        with pytest.raises(ConfigError, match="is shared, not ordered"):
            stage.open(group="audit", ordered=True)

    def test_a_consumer_that_says_nothing_joins_the_group_as_it_is(self, stage: Stage) -> None:
        active, other = stage.open(ordered=True), stage.open()
        stage.send("a", "b")
        assert texts(active.take(1)) == ["a"]
        assert other.store.ordered and other.take() == []

    def test_what_the_group_is_counts_and_not_what_a_consumer_believes(self, stage: Stage) -> None:
        active, other = stage.open(ordered=True), stage.open()
        stage.send("a")
        [entry] = active.take()
        other.store.ordered = False
        assert other.store.reclaim(entry.stream, "0-0", 10, 0).entries == []
        stage.client.set(stage.keys.active(TOPIC, GROUP), "another", ex=60)
        active.store.ordered = False
        assert not active.ack(entry)
        assert active.nack(entry) is Outcome.LEASE_LOST
