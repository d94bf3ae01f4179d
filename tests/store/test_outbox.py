"""The outbox of a shard: one at a time has it, what is in Kafka leaves it, and whatever stands there can be read."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config import TopicSettings
from pipeline.core.errors import StoreProtocolError, StoreUnavailable
from pipeline.core.messages import Message
from pipeline.runtime.process import wait_until
from pipeline.store import outbox as outbox_module
from pipeline.store.base import NO_MARKER, MarkerMove, Transaction
from pipeline.store.entries import entry_id_of
from pipeline.store.outbox import Outbox, OutboxEntry
from tests.store.builders import TOKEN, in_keyed_rows, in_rows, set_topic
from tests.store.conftest import START_MS, Bench, ends

LEASE_MS = 60_000
WAIT_MS = 9_000  # less than the client waits for a reply
IN_THE_WAY = "x"


def outbox_of(bench: Bench, name: str = "loop", lease_ms: int = LEASE_MS) -> Outbox:
    return Outbox(bench.user, bench.keys, name, lease_ms, bench.scripts)


def put(bench: Bench, *texts: str, topic: str = "t", entry_id: str = "*") -> list[str]:
    """Let messages come due, as ``claim.lua`` writes them; returns their entry ids."""
    fields: dict[Any, Any]
    found = []
    for text in texts:
        fields = {"id": f"id-{text}", "message": text, "topic": topic, "due_ms": 7, "attempt": 1}
        found.append(bench.client.xadd(bench.keys.outbox(), fields, id=entry_id).decode())
    return found


def taken(bench: Bench, name: str = "loop") -> Outbox:
    outbox = outbox_of(bench, name)
    assert outbox.acquire()
    return outbox


def texts_of(entries: list[OutboxEntry] | None) -> list[str]:
    assert entries is not None
    return [entry.body.decode() for entry in entries]


def end_lease(bench: Bench) -> None:
    bench.client.delete(bench.keys.forwarder())


def dead_letters(bench: Bench, topic: str = "t") -> list[dict[bytes, bytes]]:
    return [fields for _, fields in bench.client.xrange(bench.keys.dead(topic))]


class TestLease:
    def test_an_outbox_is_there_once_anything_went_into_it(self, bench: Bench) -> None:
        outbox = outbox_of(bench)
        assert not outbox.exists()
        outbox.wait("", 1)
        assert bench.names() == set()
        [entry_id] = put(bench, "a")
        outbox.wait("", 60_000)
        bench.client.xdel(bench.keys.outbox(), entry_id)
        assert outbox.exists()

    def test_an_outbox_that_is_empty_again_has_one(self, bench: Bench) -> None:
        [entry_id] = put(bench, "a")
        bench.client.xdel(bench.keys.outbox(), entry_id)
        assert outbox_of(bench).acquire()

    def test_one_at_a_time_has_it_until_it_leaves(self, bench: Bench) -> None:
        put(bench, "a")
        first, second = taken(bench, "first"), outbox_of(bench, "second")
        assert not second.acquire()
        assert second.read("", "", 10) is None and not second.keep()
        second.leave()
        assert first.keep(), "whoever does not have it can't end it"
        first.leave()
        assert second.acquire()
        assert first.read("", "", 10) is None and not first.keep()

    def test_it_ends_by_itself(self, bench: Bench) -> None:
        put(bench, "a")
        first, second = outbox_of(bench, "first", lease_ms=1), outbox_of(bench, "second")
        assert first.acquire()
        wait_until(second.acquire, 5)
        assert first.read("", "", 10) is None and not first.keep()
        assert 0 < bench.client.pttl(bench.keys.forwarder()) <= LEASE_MS

    @pytest.mark.parametrize("renew", [lambda outbox: outbox.keep(), lambda outbox: outbox.read("", "", 1)])
    def test_keeping_it_and_reading_renew_it(self, bench: Bench, renew: Callable[[Outbox], object]) -> None:
        put(bench, "a")
        outbox = taken(bench)
        bench.client.pexpire(bench.keys.forwarder(), 5_000)
        assert renew(outbox)
        assert bench.client.pttl(bench.keys.forwarder()) > 5_000

    def test_each_is_a_new_one_also_of_the_same_loop(self, bench: Bench) -> None:
        put(bench, "a")
        outbox = taken(bench)
        old = bench.client.get(bench.keys.forwarder())
        assert not outbox.acquire(), "the old one stands in the way of its own loop, too"
        assert outbox.read("", "", 1) is None
        end_lease(bench)
        assert outbox.acquire()
        assert bench.client.get(bench.keys.forwarder()) not in (None, old)

    def test_what_an_earlier_one_began_can_do_nothing_under_a_later_one(self, bench: Bench) -> None:
        put(bench, "a")
        earlier = taken(bench)
        [entry] = earlier.read("", "", 10) or []
        end_lease(bench)
        taken(bench, "another")
        assert not earlier.keep()
        assert earlier.read(entry.entry_id, "", 10) is None
        with pytest.raises(StoreUnavailable, match="lease of the outbox is over"):
            earlier.refuse(entry, "too_large", "")
        assert outbox_of(bench).length() == 1 and dead_letters(bench) == []


class TestReading:
    def test_entries_come_in_order_as_they_were_written(self, bench: Bench) -> None:
        [first] = put(bench, "ä")
        headers = {"a": "b", "c": "é"}
        bench.client.xadd(bench.keys.outbox(), {"id": "i", "message": b"\xff", "headers": json.dumps(headers)})
        found = taken(bench).read("", "", 10)
        assert found is not None
        assert found[0] == OutboxEntry(first, "t", "id-ä", 7, "ä".encode(), {})
        assert (found[1].body, found[1].headers) == (b"\xff", headers)

    def test_messages_that_went_in_as_they_were_scheduled_are_read_so(self, bench: Bench) -> None:
        plain, full, odd = (f"tokenoftwelve_{number:08x}" for number in range(3))
        members = [
            f"{plain}mä".encode(),
            Message(7, "m", "t", headers={"a": "é"}).to_member(full),
            b"\xff by hand",
            odd.encode() + b"m\xff",
        ]
        ids = [bench.client.xadd(bench.keys.outbox(), {b"7": member}).decode() for member in members]
        early = bench.client.xadd(bench.keys.outbox(), {b"-9007199254740992": members[0]}).decode()
        *found, last = taken(bench).read("", "", 10) or []
        assert last == OutboxEntry(early, "default", plain, -9007199254740992, "ä".encode(), {})
        assert found == [
            OutboxEntry(ids[0], "default", plain, 7, "ä".encode(), {}),
            OutboxEntry(ids[1], "t", full, 7, b"m", {"a": "é"}),
            OutboxEntry(ids[2], "default", "\ufffd by hand", 7, members[2], {}),
            OutboxEntry(ids[3], "default", odd, 7, b"\xff", {}),
        ]

    def test_what_is_in_kafka_is_dropped_and_nothing_behind_it(self, bench: Bench) -> None:
        ids = put(bench, *"abcd")
        outbox = taken(bench)
        assert texts_of(outbox.read("", "", 10)) == [*"abcd"]
        assert outbox.length() == 4
        assert texts_of(outbox.read(ids[1], "", 10)) == [*"cd"]
        assert outbox.length() == 2
        assert texts_of(outbox.read(ids[1], "", 10)) == [*"cd"], "once more changes nothing"
        assert texts_of(outbox.read(ids[3], "", 10)) == []
        assert outbox.length() == 0

    def test_a_position_between_two_entries_is_one(self, bench: Bench) -> None:
        for number in (1, 2, 4):
            put(bench, str(number), entry_id=f"5-{number}")
        assert texts_of(taken(bench).read("5-3", "", 10)) == ["4"]

    def test_without_the_lease_nothing_is_dropped(self, bench: Bench) -> None:
        [entry_id] = put(bench, "a")
        assert outbox_of(bench).read(entry_id, "", 10) is None
        assert outbox_of(bench).length() == 1

    def test_it_begins_behind_an_entry_and_ends_at_the_limit(self, bench: Bench) -> None:
        ids = put(bench, *(str(number) for number in range(250)))
        outbox = taken(bench)
        assert texts_of(outbox.read("", ids[9], 205)) == [str(number) for number in range(10, 215)]
        assert texts_of(outbox.read(ids[2], ids[9], 1)) == ["10"]
        assert outbox.length() == 247
        assert texts_of(outbox.read("", ids[-1], 10)) == []
        assert texts_of(outbox.read("", "", 3)) == ["3", "4", "5"]

    def test_many_large_messages_are_no_reply_of_any_size(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        put(bench, *("x" * 3_000 for _ in range(250)))
        outbox = taken(bench)
        monkeypatch.setattr(outbox_module, "BYTES_MAX", 1)
        assert len(outbox.read("", "", 250) or []) == 100
        monkeypatch.setattr(outbox_module, "BYTES_MAX", 1_000_000)
        assert len(outbox.read("", "", 250) or []) == 200

    def test_only_small_messages_are_read_many_at_a_time(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        put(bench, *(str(number) for number in range(700)), *("x" * 3_000 for _ in range(700)))
        outbox, asked = taken(bench), []
        read = bench.user.xrange

        def note(*arguments: Any, count: int) -> Any:
            asked.append(count)
            return read(*arguments, count=count)

        monkeypatch.setattr(bench.user, "xrange", note)
        found = outbox.read("", "", 1_400) or []
        assert len(found) == 1_400
        assert asked[:3] == [100, 500, 500]  # the third has the first large ones
        assert set(asked[3:]) == {100}

    def test_what_other_programs_wrote_is_read_as_messages(self, bench: Bench) -> None:
        written: list[dict[Any, Any]] = [
            {b"message": b"alone"},
            {b"other": b"\xff"},
            {b"topic": b"\xfft", b"id": b"\xff", b"due_ms": b"soon", b"message": b"\xfe", b"headers": b"\xff"},
            {b"headers": b"{", b"due_ms": b""},
            {b"headers": b"[1]", b"due_ms": b"9" * 5000},
            {b"headers": b'{"a": 1, "b": "\\ud800"}'},
            {b"headers": b"[" * 100_000},
        ]
        ids = [bench.client.xadd(bench.keys.outbox(), fields).decode() for fields in written]
        found = taken(bench).read("", "", 10)
        assert found is not None
        assert [entry.entry_id for entry in found] == ids
        came_ms = [entry_id_of(entry_id)[0] for entry_id in ids]
        assert found[0] == OutboxEntry(ids[0], "default", ids[0], came_ms[0], b"alone", {})
        assert found[1] == OutboxEntry(ids[1], "default", ids[1], came_ms[1], b"", {})
        assert found[2] == OutboxEntry(ids[2], "\ufffdt", "\ufffd", came_ms[2], b"\xfe", {})
        assert [(entry.due_ms, entry.headers) for entry in found[3:5]] == [(came_ms[3], {}), (came_ms[4], {})]
        assert found[5].headers == {"a": "1", "b": "?"}
        assert found[6].headers == {}


class TestWaiting:
    def test_a_wait_ends_with_a_new_entry(self, bench: Bench) -> None:
        [entry_id] = put(bench, "a")
        outbox = outbox_of(bench)
        came = threading.Timer(0.05, lambda: put(bench, "b"))
        came.start()
        assert ends(lambda: outbox.wait(entry_id, WAIT_MS))
        came.join()

    def test_it_does_not_begin_with_an_entry_behind_the_position(self, bench: Bench) -> None:
        put(bench, "a", entry_id="5-1")
        assert ends(lambda: outbox_of(bench).wait("", WAIT_MS))
        assert ends(lambda: outbox_of(bench).wait("5-0", WAIT_MS))

    def test_it_ends_after_its_time(self, bench: Bench) -> None:
        [entry_id] = put(bench, "a")
        assert ends(lambda: outbox_of(bench).wait(entry_id, 1))


class TestRefusing:
    def test_a_message_becomes_a_dead_letter_once(self, bench: Bench) -> None:
        put(bench, *"ab")
        outbox = taken(bench)
        a, b = outbox.read("", "", 10) or []
        assert outbox.refuse(a, "too_large", "said so")
        assert not outbox.refuse(a, "too_large", "said so")
        [dead] = dead_letters(bench)
        assert abs(int(dead.pop(b"died_ms")) - entry_id_of(a.entry_id)[0]) < 60_000
        why = {b"reason": b"too_large", b"detail": b"said so", b"group": b""}
        assert dead == {b"id": b"id-a", b"message": b"a", b"topic": b"t", b"due_ms": b"7", b"attempt": b"1", **why}
        assert outbox.read("", "", 10) == [b]
        assert bench.client.smembers(bench.keys.topics()) == {b"t"}
        assert bench.client.smembers(bench.keys.dead_topics()) == {b"t"}
        assert bench.client.hgetall(bench.keys.counters()) == {b"dead": b"1"}

    def test_one_that_went_in_as_it_was_scheduled_becomes_one_like_any_other(self, bench: Bench) -> None:
        message_id = "tokenoftwelve_0000000a"
        message = Message(7, "m", "t", headers={"a": "b"})
        for member in (message.to_member(message_id), b"by hand"):
            bench.client.xadd(bench.keys.outbox(), {b"7": member})
        outbox = taken(bench)
        for entry in outbox.read("", "", 10) or []:
            assert outbox.refuse(entry, "too_large", "")
        [dead], [odd] = dead_letters(bench), dead_letters(bench, "default")
        same = {b"due_ms": b"7", b"attempt": b"1", b"reason": b"too_large", b"detail": b"", b"group": b""}
        died = {b"died_ms": dead[b"died_ms"]}
        full = {b"id": message_id.encode(), b"message": b"m", b"topic": b"t", b"headers": b'{"a":"b"}'}
        assert dead == {**full, **same, **died}
        assert odd == {
            b"id": b"by hand",
            b"message": b"by hand",
            b"topic": b"default",
            **same,
            b"died_ms": odd[b"died_ms"],
        }

    def test_one_of_another_program_keeps_what_it_has(self, bench: Bench) -> None:
        bench.client.xadd(bench.keys.outbox(), {b"message": b"alone"})
        outbox = taken(bench)
        [entry] = outbox.read("", "", 10) or []
        assert outbox.refuse(entry, "invalid", "")
        [dead] = dead_letters(bench, "default")
        assert {*dead} == {b"message", b"reason", b"detail", b"group", b"died_ms"} and dead[b"message"] == b"alone"

    def test_what_was_dropped_is_none(self, bench: Bench) -> None:
        put(bench, "a")
        outbox = taken(bench)
        [entry] = outbox.read("", "", 10) or []
        outbox.read(entry.entry_id, "", 0)
        assert not outbox.refuse(entry, "too_large", "")
        assert dead_letters(bench) == []

    @pytest.mark.parametrize("name", ["dead", "topics", "dead_topics", "counters"])
    def test_a_key_in_the_way_leaves_nothing_half_done(self, bench: Bench, name: str) -> None:
        put(bench, "a")
        outbox = taken(bench)
        [entry] = outbox.read("", "", 10) or []
        key = bench.keys.dead("t") if name == "dead" else getattr(bench.keys, name)()
        bench.client.set(key, IN_THE_WAY)
        for _ in range(2):
            with pytest.raises(StoreProtocolError, match="WRONGTYPE"):
                outbox.refuse(entry, "too_large", "")
        bench.client.delete(key)
        assert outbox.refuse(entry, "too_large", "")
        assert len(dead_letters(bench)) == 1 and outbox.length() == 0


class TestLostWrites:
    """The server was set back: Kafka has entries that it does not know of."""

    def test_all_that_is_there_and_what_comes_next_is_beyond_the_position(self, bench: Bench) -> None:
        put(bench, "a", entry_id="99999999999999-1")
        put(bench, "b", entry_id="99999999999999-2")
        outbox = taken(bench)
        again = outbox.read("99999999999999-5", "", 10)
        assert texts_of(again) == ["a", "b"]
        [new] = put(bench, "c")
        assert texts_of(outbox.read("99999999999999-5", "", 10)) == ["a", "b", "c"]
        assert entry_id_of(new) > entry_id_of((again or [])[-1].entry_id) > entry_id_of("99999999999999-5")
        assert texts_of(outbox.read((again or [])[0].entry_id, "", 10)) == ["b", "c"]

    def test_what_comes_next_is_beyond_the_position_also_if_nothing_is_there(self, bench: Bench) -> None:
        put(bench, "a", entry_id="99999999999999-1")
        outbox = taken(bench)
        assert outbox.read("99999999999999-1", "", 10) == []
        assert outbox.read("99999999999999-5", "", 10) == []
        [new] = put(bench, "b")
        assert entry_id_of(new) > entry_id_of("99999999999999-5")

    @pytest.mark.parametrize("position", ["99999999999999-4", "99999999999998-9", "5-6"])
    def test_a_position_that_was_passed_changes_nothing(self, bench: Bench, position: str) -> None:
        put(bench, "a", entry_id="99999999999999-5")
        [entry] = taken(bench).read(position, "", 10) or []
        assert entry.entry_id == "99999999999999-5"


class TestClaim:
    """Where all goes to Kafka, a message goes into the outbox as it was scheduled, unless something has to be looked up for it."""

    ID = "tokenoftwelve_0000000a"

    def entries(self, bench: Bench, member: bytes, **own: TopicSettings) -> list[dict[bytes, bytes]]:
        for topic, settings in {"*": TopicSettings(sink="kafka"), **own}.items():
            set_topic(bench.client, bench.keys, topic, settings)
        rows = in_rows([(START_MS, member), (START_MS - 2, TOKEN.encode() + b"00000001mfirst")])
        store = bench.store()
        assert store.schedule("s", Transaction([MarkerMove("o", NO_MARKER, "all")], rows, in_keyed_rows([]), 0))
        while store.claim("c").moved:
            pass
        assert store.claim("c").claim is None and bench.client.exists(bench.keys.bucket(START_MS)) == 0
        return [fields for _, fields in bench.client.xrange(bench.keys.outbox())]

    @pytest.mark.parametrize(
        "member",
        [
            Message(0, "m").to_member(ID),
            Message(0, 'm"topic":"x"', "t").to_member(ID),
            Message(0, "m", "t", headers={"a": "b"}).to_member(ID),
        ],
        ids=["plain", "topic", "headers"],
    )
    def test_nothing_has_to_be_looked_up(self, bench: Bench, member: bytes) -> None:
        first, found = self.entries(bench, member)
        assert first == {b"%d" % (START_MS - 2): TOKEN.encode() + b"00000001mfirst"}
        assert found == {b"%d" % START_MS: member}

    @pytest.mark.parametrize("key", ["", ',"id":"k"'])
    def test_what_was_rescheduled_says_when_it_was_due(self, bench: Bench, key: str) -> None:
        [_, found] = self.entries(bench, f'{self.ID}r{{"message":"m","due_ms":"9"{key}}}'.encode())
        assert found[b"due_ms"] == b"9" and found[b"message"] == b"m"

    def test_an_idempotency_key_is_known_from_now_on(self, bench: Bench) -> None:
        bench.client.hset(bench.keys.places(), "k", f"{self.ID}{START_MS}")
        [_, found] = self.entries(bench, Message(0, "m", id="k").to_member(self.ID))
        assert found[b"id"] == b"k"
        assert not bench.client.exists(bench.keys.places())
        assert bench.client.zscore(bench.keys.ids(), "k") > START_MS

    def test_its_attempts_are_told_and_forgotten(self, bench: Bench) -> None:
        bench.client.hset(bench.keys.attempts(), self.ID, 2)
        [_, found] = self.entries(bench, Message(0, "m").to_member(self.ID))
        assert found[b"attempt"] == b"3"
        assert not bench.client.exists(bench.keys.attempts())

    def test_a_topic_may_have_settings_of_its_own(self, bench: Bench) -> None:
        own = TopicSettings(sink="stream")
        assert len(self.entries(bench, Message(0, "m", "t").to_member(self.ID), t=own)) == 1
        assert bench.client.xlen(bench.keys.stream("t")) == 1

    def test_a_paused_topic_is_held(self, bench: Bench) -> None:
        bench.client.hset(bench.keys.pauses(), "t", 1)
        assert len(self.entries(bench, Message(0, "m", "t").to_member(self.ID))) == 1
        assert bench.client.zcard(bench.keys.held("t")) == 1

    def test_a_score_by_hand_may_be_any(self, bench: Bench) -> None:
        set_topic(bench.client, bench.keys, "*", TopicSettings(sink="kafka"))
        for score, start in ((-5, -600_000), (1.5, 0)):
            bench.client.zadd(bench.keys.bucket(start), {TOKEN.encode() + b"00000001mby hand": score})
            bench.client.zadd(bench.keys.buckets(), {str(start): start})
            assert bench.store().claim(f"c{start}").moved
        assert [(entry.due_ms, entry.body) for entry in taken(bench).read("", "", 10) or []] == [
            (-5, b"by hand"),
            (2, b"by hand"),
        ]

    def test_what_moved_is_told_with_its_topic_and_due_time(self, bench: Bench) -> None:
        set_topic(bench.client, bench.keys, "*", TopicSettings(sink="kafka"))
        members = [Message(0, "m", "t").to_member(self.ID), Message(0, "m", headers={"a": "b"}).to_member(self.ID)]
        rows = in_rows([(START_MS, members[0]), (START_MS - 2, members[1])])
        store = bench.store()
        assert store.schedule("s", Transaction([MarkerMove("o", NO_MARKER, "all")], rows, in_keyed_rows([]), 0))
        moved = store.claim("c").moved
        assert [(each.topic, each.dues_ms) for each in moved] == [("default", [START_MS - 2]), ("t", [START_MS])]
