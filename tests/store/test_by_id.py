"""One message by its idempotency key or its handle: wherever it is, and whatever moves it meanwhile."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pipeline.config import TopicSettings
from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.errors import VersionDiffers
from pipeline.core.messages import Message
from pipeline.store import by_id
from pipeline.store.base import Found, Scheduled, State
from pipeline.store.by_id import MessagesById
from pipeline.store.keys import Keys
from pipeline.store.places import handle_of
from pipeline.store.scripts import run_script
from pipeline.store.stats import read_stats
from pipeline.store.topics import Topics
from tests.store.builders import keyed, set_topic, transaction
from tests.store.conftest import START_MS, Bench

DUE_MS = START_MS + 60_000
RETENTION_MS = 86_400_000
KEY = "order-1"


def stored(line: int, key: str) -> bytes:
    return Message(0, f"message {line}", "mail", key).to_member(f"{'P' * 14}{line:08x}")


def messages(bench: Bench, retention_ms: int = RETENTION_MS) -> MessagesById:
    return MessagesById(bench.user, [bench.keys], retention_ms, bench.scripts, lambda: bench.now_ms)


@pytest.fixture
def scheduled(bench: Bench) -> Bench:
    """One message with an idempotency key, between two others of the same millisecond."""
    rows = ((1, DUE_MS), (3, DUE_MS))
    bench.store().schedule("s", transaction(*rows, identified=((2, DUE_MS, KEY),), member_of=stored))
    return bench


def test_what_is_scheduled_is_found_with_all_its_fields(scheduled: Bench) -> None:
    found = messages(scheduled).get(KEY)
    message = Message(DUE_MS, "message 2", "mail", KEY, {}, "P" * 14 + "00000002")
    assert found == Found(State.SCHEDULED, message)
    assert handle_of(message) == KEY


def test_what_was_never_scheduled_is_unknown_and_nothing_is_left_of_the_question(bench: Bench) -> None:
    before = bench.names()
    assert [messages(bench).get(name).state for name in ("nobody", f"~{'P' * 22}~{DUE_MS}")] == [State.UNKNOWN] * 2
    assert messages(bench).cancel("nobody") == messages(bench).reschedule("nobody", DUE_MS) == Found(State.UNKNOWN)
    assert bench.names() == before


def test_a_cancelled_message_never_comes_and_its_key_stays_known(scheduled: Bench) -> None:
    assert messages(scheduled).cancel(KEY).state is State.CANCELLED
    assert messages(scheduled).cancel(KEY) == messages(scheduled).get(KEY) == Found(State.CANCELLED)
    again = transaction(identified=((1, DUE_MS, KEY),), token="Q" * 14)
    assert scheduled.store().schedule("s", again) == Scheduled(stored=0, duplicates=(0,))
    scheduled.now_ms = DUE_MS
    claim = scheduled.store().claim("loop:0").claim
    assert claim and [m.member for m in claim.messages] == [stored(1, ""), stored(3, "")]


def test_it_is_forgotten_after_its_time(scheduled: Bench) -> None:
    messages(scheduled, retention_ms=10_000).cancel(KEY)
    scheduled.now_ms += 10_000
    assert messages(scheduled).get(KEY).state is State.UNKNOWN
    again = transaction(identified=((1, DUE_MS, KEY),), token="Q" * 14)
    assert scheduled.store().schedule("s", again) == Scheduled(stored=1)
    assert messages(scheduled).get(KEY).state is State.SCHEDULED
    handle = f"~{'P' * 14}00000001~{DUE_MS}"
    assert messages(scheduled).cancel(handle).state is State.CANCELLED
    assert scheduled.client.zrange(scheduled.keys.cancelled(), 0, -1) == [handle.encode()], "the next one cleans up"


def test_a_version_is_another_one_whatever_changes(scheduled: Bench) -> None:
    by_id = messages(scheduled)
    versions = [by_id.get(KEY).version, by_id.reschedule(KEY, DUE_MS + 1).version]
    assert by_id.get(KEY).version == versions[-1]
    versions.append(by_id.replace(Message(DUE_MS + 1, "new", "mail", KEY, {}, "Q" * 14 + "00000001")).version)
    Topics(scheduled.user, [scheduled.keys], scheduled.scripts).pause("mail", START_MS)
    scheduled.now_ms = DUE_MS + 1
    scheduled.store().claim("loop:0")
    held = by_id.get(KEY)
    versions.append(held.version)
    versions.append(by_id.reschedule(KEY, DUE_MS + 1).version)
    assert held.state is State.HELD
    assert versions[-1] == versions[2], "the same message at the same time"
    assert len({*versions}) == 4 and all(versions)
    assert by_id.cancel(KEY).version == by_id.get(KEY).version == ""


@pytest.mark.parametrize("name", [KEY, f"~{'P' * 14}00000001~{DUE_MS}"])
def test_what_is_not_the_version_named_is_left_alone(scheduled: Bench, name: str) -> None:
    by_id = messages(scheduled)
    found = by_id.get(name)
    for versions in ({f"{'P' * 22}-{DUE_MS}"}, {found.version + "1"}, {f'"{found.version}"'}, {""}):
        for change in (by_id.cancel, partial(by_id.reschedule, due_ms=DUE_MS + 5)):
            with pytest.raises(VersionDiffers):
                change(name, if_versions=versions)
    assert by_id.get(name) == found
    moved = by_id.reschedule(name, DUE_MS + 5, if_versions={"x", found.version})
    assert moved.message and moved.state is State.SCHEDULED
    assert by_id.cancel(handle_of(moved.message), if_versions={"*"}).state is State.CANCELLED
    for after in (moved.version, "*"):
        assert by_id.cancel(handle_of(moved.message), if_versions={after}).state is State.CANCELLED, (
            "as without versions"
        )


def test_a_change_that_is_made_again_finds_its_own_version(scheduled: Bench) -> None:
    """A client calls again when the reply was lost."""
    by_id = messages(scheduled)
    before = by_id.get(KEY).version
    moved = by_id.reschedule(KEY, DUE_MS + 5, if_versions={before})
    assert by_id.reschedule(KEY, DUE_MS + 5, if_versions={before}).version == moved.version
    with pytest.raises(VersionDiffers):
        by_id.reschedule(KEY, DUE_MS + 6, if_versions={before})
    new = Message(DUE_MS, "new", "mail", KEY, {}, "Q" * 14 + "00000001")
    replaced = by_id.replace(new, if_versions={moved.version})
    assert by_id.replace(new, if_versions={moved.version}) == replaced
    with pytest.raises(VersionDiffers):
        by_id.replace(Message(DUE_MS, "newer", "mail", KEY, {}, "R" * 14 + "00000001"), if_versions={moved.version})


def test_a_version_that_moves_between_two_tries_is_left_alone(
    scheduled: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_id = messages(scheduled)
    before = by_id.get(KEY).version
    hget = scheduled.user.hget

    def move_behind(*arguments: Any) -> Any:
        place = hget(*arguments)
        monkeypatch.undo()
        messages(scheduled).reschedule(KEY, DUE_MS + 7)
        return place

    monkeypatch.setattr(scheduled.user, "hget", move_behind)
    with pytest.raises(VersionDiffers):
        by_id.cancel(KEY, if_versions={before})
    found = by_id.get(KEY).message
    assert found and found.due_ms == DUE_MS + 7


def test_where_nothing_waits_a_version_replaces_nothing(bench: Bench) -> None:
    new = Message(DUE_MS, "new", "mail", KEY, {}, "Q" * 14 + "00000001")
    for versions in ({"*"}, {f"{'Q' * 14}00000001-{DUE_MS}"}):
        with pytest.raises(VersionDiffers):
            messages(bench).replace(new, if_versions=versions)
        assert messages(bench).cancel(KEY, if_versions=versions).state is State.UNKNOWN
    assert messages(bench).replace(new).is_new
    assert not messages(bench).replace(new).is_new
    assert not messages(bench).replace(new, if_versions={"*"}).is_new


def test_the_last_message_of_a_bucket_takes_the_bucket_with_it(bench: Bench) -> None:
    bench.store().schedule("s", transaction(identified=((1, DUE_MS, KEY),)))
    messages(bench).cancel(KEY)
    assert bench.names() == {"counters", "cancelled", "markers:s", f"marker:s:{'P' * 14}"}
    assert read_stats(bench.client, [bench.keys], bench.now_ms).counters["cancelled"] == 1


@pytest.mark.parametrize("due_ms", [DUE_MS, DUE_MS + 1, DUE_MS + BUCKET_WIDTH_MS, START_MS - BUCKET_WIDTH_MS, 0])
def test_a_rescheduled_message_comes_at_its_new_time_and_only_then(scheduled: Bench, due_ms: int) -> None:
    found = messages(scheduled).reschedule(KEY, due_ms)
    assert found.message and (found.state, found.message.due_ms, found.message.body) == (
        State.SCHEDULED,
        due_ms,
        "message 2",
    )
    assert messages(scheduled).get(KEY) == found
    scheduled.now_ms = max(due_ms, DUE_MS)
    store, came = scheduled.store(), []
    for number in range(4):
        claim = store.claim(f"loop:{number}").claim
        if claim:
            came += [(m.due_ms, m.member) for m in claim.messages]
            assert store.ack(claim, len(claim.messages), keyed(claim))
    assert sorted(came) == sorted([(DUE_MS, stored(1, "")), (due_ms, stored(2, KEY)), (DUE_MS, stored(3, ""))])
    assert messages(scheduled).get(KEY).state is State.DELIVERED


def test_loops_are_woken_by_what_is_due_before_everything_else_now(scheduled: Bench) -> None:
    bell = scheduled.client.pubsub(ignore_subscribe_messages=True)
    bell.subscribe(scheduled.keys.wake())
    bell.get_message(timeout=60)
    messages(scheduled).reschedule(KEY, DUE_MS + 5)
    messages(scheduled).reschedule(KEY, START_MS)
    said = bell.get_message(timeout=60)
    assert said and int(said["data"]) == START_MS
    bell.close()


def test_in_flight_it_is_too_late_until_it_is_given_back(scheduled: Bench) -> None:
    scheduled.now_ms = DUE_MS
    store = scheduled.store()
    claim = store.claim("loop:0").claim
    assert claim
    too_late = Found(State.IN_FLIGHT)
    by_id = messages(scheduled)
    assert by_id.get(KEY) == by_id.cancel(KEY) == by_id.reschedule(KEY, DUE_MS) == too_late
    store.release(claim, 0)
    assert by_id.cancel(KEY).state is State.CANCELLED


def test_delivered_it_is_too_late_while_its_key_is_known(scheduled: Bench) -> None:
    scheduled.now_ms = DUE_MS
    store = scheduled.store(id_retention_sec=10)
    claim = store.claim("loop:0").claim
    assert claim and store.ack(claim, 3, keyed(claim))
    assert messages(scheduled).cancel(KEY) == messages(scheduled).reschedule(KEY, 0) == Found(State.DELIVERED)
    scheduled.now_ms += 10_000
    assert messages(scheduled).get(KEY).state is State.UNKNOWN


def test_a_key_that_an_earlier_release_stored_is_known_and_ends(bench: Bench) -> None:
    """It kept the keys of what waits in ``ids``, with no time to forget them."""
    bench.client.zadd(bench.keys.ids(), {KEY: "+inf"})
    member = stored(1, KEY)
    bench.client.zadd(bench.keys.bucket(DUE_MS - DUE_MS % BUCKET_WIDTH_MS), {member: DUE_MS})
    bench.client.zadd(bench.keys.buckets(), {str(DUE_MS - DUE_MS % BUCKET_WIDTH_MS): DUE_MS - DUE_MS % BUCKET_WIDTH_MS})
    again = transaction(identified=((1, DUE_MS, KEY),), token="Q" * 14)
    assert bench.store().schedule("s", again) == Scheduled(stored=0, duplicates=(0,))
    bench.now_ms = DUE_MS
    store = bench.store(id_retention_sec=10)
    claim = store.claim("loop:0").claim
    assert claim and store.ack(claim, 1, keyed(claim))
    assert bench.client.zscore(bench.keys.ids(), KEY) == DUE_MS + 10_000


class TestHandles:
    @pytest.mark.parametrize("line", [1, 3])
    def test_a_message_without_a_key_is_found_by_its_handle(self, scheduled: Bench, line: int) -> None:
        handle = f"~{'P' * 14}{line:08x}~{DUE_MS}"
        found = messages(scheduled).get(handle)
        assert found.message and (found.message.body, handle_of(found.message)) == (f"message {line}", handle)
        moved = messages(scheduled).reschedule(handle, DUE_MS + 7)
        assert moved.message and handle_of(moved.message) == f"~{'P' * 14}{line:08x}~{DUE_MS + 7}"
        assert messages(scheduled).get(handle).state is State.UNKNOWN
        assert messages(scheduled).cancel(handle_of(moved.message)).state is State.CANCELLED
        assert messages(scheduled).cancel(handle_of(moved.message)) == Found(State.CANCELLED), "a retry is no surprise"

    def test_a_message_with_a_key_has_no_handle(self, scheduled: Bench) -> None:
        """Or the key would lead to nothing."""
        handle = f"~{'P' * 14}00000002~{DUE_MS}"
        assert messages(scheduled).cancel(handle).state is State.UNKNOWN
        assert messages(scheduled).get(KEY).state is State.SCHEDULED


class TestTopics:
    """On the way through pauses, rate limits and streams."""

    @pytest.fixture
    def due(self, scheduled: Bench) -> Bench:
        scheduled.now_ms = DUE_MS
        return scheduled

    def settle(self, bench: Bench, **settings: Any) -> None:
        set_topic(bench.client, bench.keys, "*", replace(TopicSettings(sink="stream"), **settings))
        store = bench.store()
        for number in range(5):
            store.claim(f"settle:{number}")

    def test_what_a_pause_holds_is_found_and_cancelled(self, due: Bench) -> None:
        due.client.hset(due.keys.pauses(), "mail", START_MS)
        self.settle(due)
        found = messages(due).get(KEY)
        assert (found.state, found.message and found.message.body) == (State.HELD, "message 2")
        assert messages(due).cancel(KEY).state is State.CANCELLED
        assert due.client.zcard(due.keys.held("mail")) == 2

    def test_what_a_pause_holds_can_be_rescheduled(self, due: Bench) -> None:
        due.client.hset(due.keys.pauses(), "mail", START_MS)
        self.settle(due)
        assert messages(due).reschedule(KEY, DUE_MS + 1).state is State.SCHEDULED
        assert messages(due).get(KEY).state is State.SCHEDULED
        assert due.client.zcard(due.keys.held("mail")) == 2

    def test_after_the_pause_it_is_found_until_it_goes(self, due: Bench) -> None:
        due.client.hset(due.keys.pauses(), "mail", START_MS)
        self.settle(due)
        Topics(due.user, [due.keys], due.scripts).resume("mail")
        assert messages(due).get(KEY).state is State.HELD
        assert messages(due).cancel(KEY).state is State.CANCELLED

    def test_what_waits_for_its_rate_limit_is_found_and_can_be_cancelled(self, due: Bench) -> None:
        self.settle(due, max_rate=1)
        before = due.client.zcard(due.keys.held("mail"))
        assert messages(due).cancel(KEY).state is State.CANCELLED
        assert due.client.zcard(due.keys.held("mail")) == before - 1
        due.now_ms += 10_000
        self.settle(due, max_rate=1)
        assert due.client.xlen(due.keys.stream("mail")) == 2

    def test_what_waits_for_its_rate_limit_is_found_and_can_be_rescheduled(self, due: Bench) -> None:
        self.settle(due, max_rate=1)
        found = messages(due).get(KEY)
        assert found.message and (found.state, found.message.due_ms) == (State.HELD, DUE_MS)
        moved = messages(due).reschedule(KEY, DUE_MS + 5_000)
        assert moved.message and (moved.message.due_ms, moved.message.body) == (DUE_MS + 5_000, "message 2")
        assert messages(due).get(KEY) == moved
        assert messages(due).cancel(KEY).state is State.CANCELLED

    def test_in_its_stream_it_is_delivered(self, due: Bench) -> None:
        self.settle(due)
        assert messages(due).cancel(KEY) == Found(State.DELIVERED)
        assert due.client.xlen(due.keys.stream("mail")) == 3
        assert due.client.hlen(due.keys.places()) == 0


HANDLE = f"~{'P' * 14}00000003~{DUE_MS}"
HELD_VERSION = f"{'P' * 14}00000003-{DUE_MS}-held"


@pytest.mark.parametrize("why", ["pause", "rate"])
class TestHandlesOfWhatIsHeld:
    @pytest.fixture
    def held(self, scheduled: Bench, why: str) -> Bench:
        """The message of HANDLE is held of one topic among others."""
        Topics(scheduled.user, [scheduled.keys], scheduled.scripts).pause("another", START_MS)
        if why == "pause":
            Topics(scheduled.user, [scheduled.keys], scheduled.scripts).pause("mail", START_MS)
        settings = TopicSettings(sink="screen", max_rate=0 if why == "pause" else 1)
        set_topic(scheduled.client, scheduled.keys, "mail", settings)
        scheduled.now_ms = DUE_MS
        for number in range(5):
            scheduled.store().claim(f"hold:{number}")
        assert scheduled.client.zscore(scheduled.keys.held("mail"), stored(3, "")) == DUE_MS
        return scheduled

    def test_they_are_found_as_by_an_id(self, held: Bench) -> None:
        found = messages(held).get(HANDLE)
        assert (found.state, found.version) == (State.HELD, HELD_VERSION)
        assert found.message and (found.message.body, handle_of(found.message)) == ("message 3", HANDLE)
        assert messages(held).get_many([HANDLE, KEY, HANDLE]) == [found, messages(held).get(KEY), found]

    def test_they_are_cancelled(self, held: Bench) -> None:
        cancelled = messages(held).cancel(HANDLE)
        assert cancelled.state is State.CANCELLED and cancelled.message and cancelled.message.body == "message 3"
        assert held.client.zscore(held.keys.held("mail"), stored(3, "")) is None
        assert messages(held).cancel(HANDLE) == Found(State.CANCELLED)

    def test_they_are_rescheduled(self, held: Bench) -> None:
        moved = messages(held).reschedule(HANDLE, DUE_MS + 60_000)
        assert moved.state is State.SCHEDULED and moved.message
        assert messages(held).get(HANDLE).state is State.UNKNOWN
        assert messages(held).get(handle_of(moved.message)) == moved
        assert held.client.zscore(held.keys.held("mail"), stored(3, "")) is None

    def test_their_version_is_another_one_while_they_are_held(self, held: Bench) -> None:
        for change in (messages(held).cancel, partial(messages(held).reschedule, due_ms=DUE_MS + 5)):
            with pytest.raises(VersionDiffers):
                change(HANDLE, if_versions={HELD_VERSION.removesuffix("-held")})
        assert messages(held).get(HANDLE).state is State.HELD
        assert messages(held).cancel(HANDLE, if_versions={HELD_VERSION}).message

    def test_they_lead_to_nothing_that_has_an_id(self, held: Bench) -> None:
        for name in (f"~{'P' * 14}00000002~{DUE_MS}", f"~{'P' * 14}00000003~{DUE_MS + 1}"):
            assert messages(held).cancel(name) == Found(State.UNKNOWN)
        assert messages(held).get(KEY).state is State.HELD

    def test_they_are_found_in_the_shard_that_their_token_does_not_lead_to(self, held: Bench) -> None:
        shards = [Keys(held.keys.namespace, number) for number in range(3)]
        for order in ([held.keys, *shards[1:]], [shards[1], held.keys, shards[2]], [*shards[1:], held.keys]):
            by_id = MessagesById(held.user, order, RETENTION_MS, held.scripts, lambda: held.now_ms)
            assert by_id.get(HANDLE).state is by_id.get_many([HANDLE])[0].state is State.HELD
            with pytest.raises(VersionDiffers):
                by_id.reschedule(HANDLE, DUE_MS + 1, if_versions={"another"})
            with pytest.raises(VersionDiffers):
                by_id.reschedule(HANDLE, DUE_MS + 1, if_versions={HELD_VERSION.removesuffix("-held")})
        assert by_id.cancel(HANDLE, if_versions={HELD_VERSION}).message

    def test_one_that_is_given_back_meanwhile_is_followed(self, held: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        replies = []

        def give_back_after_the_first_call(*arguments: Any) -> Any:
            replies.append(run_script(*arguments))
            if len(replies) == 1:
                Topics(held.user, [held.keys], held.scripts).resume("mail")
                claims = []
                for number in range(5):
                    held.now_ms += 2_000
                    claims.append(held.store().claim(f"again:{number}").claim)
                [claim] = [each for each in claims if each and stored(3, "") in [m.member for m in each.messages]]
                held.store().release(claim, 0)
            return replies[-1]

        monkeypatch.setattr(by_id, "run_script", give_back_after_the_first_call)
        found = messages(held).get(HANDLE)
        assert [reply[0] for reply in replies] == [b"MOVED", b"MOVED", b"OK"]
        assert found.state is State.SCHEDULED and found.message


def test_each_of_many_at_one_millisecond_is_found(bench: Bench) -> None:
    """Also where ids differ in the case of a letter, which some locales sort otherwise than bytes."""
    tokens = [head + "P" * 13 for head in "-09AZ_az"]
    for number, token in enumerate(tokens):
        rows = tuple((line, DUE_MS, f"{number}:{line}") for line in range(1, 60))
        bench.store().schedule("s", transaction(identified=rows, token=token))
    for number in range(len(tokens)):
        for line in range(1, 60, 7):
            assert messages(bench).cancel(f"{number}:{line}").state is State.CANCELLED
    assert read_stats(bench.client, [bench.keys], bench.now_ms).counters["cancelled"] == len(tokens) * 9


def test_a_handle_with_more_digits_than_a_time_has_leads_nowhere(scheduled: Bench) -> None:
    assert messages(scheduled).get(f"~{'P' * 22}~{'9' * 5_000}") == Found(State.UNKNOWN)


def test_messages_that_are_moved_again_and_again_are_not_followed_for_ever(
    scheduled: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def moved(client: Any, scripts: Any, calls: Any) -> list[Any]:
        asked.append(len(calls))
        return [[b"MOVED", f"{'P' * 22}{len(asked)}".encode(), b""] for _ in calls]

    monkeypatch.setattr(by_id, "run_scripts", moved)
    assert messages(scheduled).get_many([KEY, "other"]) == [Found(State.IN_FLIGHT)] * 2
    assert asked == [2] * by_id.MOVES_MAX
