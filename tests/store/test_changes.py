"""Rows that cancel and replace: what each does in every state that its key can be in, and that their order does not matter."""

from collections.abc import Sequence
from itertools import permutations

import pytest

from pipeline.config import TopicSettings
from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.errors import StoreUnavailable
from pipeline.core.messages import Cancellation, Change, Message, Replacement
from pipeline.store.base import Changed, Found, Scheduled, State
from pipeline.store.keys import Keys
from pipeline.store.scripts import Scripts
from pipeline.store.topics import Topics
from tests.servers import real_server
from tests.store.builders import keyed, set_topic, transaction
from tests.store.conftest import START_MS, Bench
from tests.store.test_by_id import DUE_MS, KEY, RETENTION_MS, messages, stored

LATER_MS = DUE_MS + BUCKET_WIDTH_MS
CANCEL = Cancellation(KEY)


def replacement(number: int, due_ms: int = LATER_MS, key: str = KEY) -> Message:
    """Return one with a message id that rises with the number."""
    return Message(due_ms, f"replacement {number}", "mail", key, {"n": str(number)}, f"{'R' * 14}{number:08x}")


ONE, TWO = replacement(1), replacement(2)


def store_plain(bench: Bench, token: str = "P" * 14) -> Scheduled | None:
    return bench.store().schedule("s", transaction(identified=((2, DUE_MS, KEY),), member_of=stored, token=token))


def apply(bench: Bench, *changes: Change) -> Changed:
    return messages(bench).apply(changes)


def deliver(bench: Bench, ms: int = LATER_MS) -> list[str]:
    """Return the bodies of what is due by then, in order."""
    bench.now_ms, store, bodies = ms, bench.store(), []
    while claim := store.claim(f"deliver:{len(bodies)}").claim:
        found = [Message.from_member(m.member, m.due_ms) for m in claim.messages]
        assert store.ack(claim, len(found), keyed(claim))
        bodies += [message.body for message in found]
    return bodies


class TestReplacing:
    def test_a_replacement_of_an_unknown_key_is_the_first_with_it(self, bench: Bench) -> None:
        assert messages(bench).replace(ONE) == Found(State.SCHEDULED, ONE)
        assert messages(bench).get(KEY) == Found(State.SCHEDULED, ONE)
        assert bench.stats().counters == {"stored": 1}
        assert deliver(bench) == ["replacement 1"]
        assert bench.names() == {"ids", "counters"}

    def test_it_takes_the_place_of_what_waits(self, bench: Bench) -> None:
        store_plain(bench)
        assert messages(bench).replace(ONE) == Found(State.SCHEDULED, ONE)
        assert bench.stats().counters == {"stored": 1}
        assert deliver(bench) == ["replacement 1"]

    @pytest.mark.parametrize("due_ms", [START_MS, DUE_MS - 1, DUE_MS, DUE_MS + 1, LATER_MS])
    def test_it_comes_at_its_own_time_alone(self, bench: Bench, due_ms: int) -> None:
        store_plain(bench)
        messages(bench).replace(replacement(1, due_ms))
        bench.now_ms = due_ms - 1
        assert bench.store().claim("early").claim is None
        assert deliver(bench, max(due_ms, DUE_MS)) == ["replacement 1"]
        assert "buckets" not in bench.names()

    @pytest.mark.parametrize("order", [(ONE, TWO), (TWO, ONE), (TWO, ONE, TWO), (ONE, TWO, ONE)])
    def test_the_greatest_message_id_stays(self, bench: Bench, order: Sequence[Message]) -> None:
        for message in order:
            found = messages(bench).replace(message)
        assert found.message == TWO
        assert deliver(bench) == ["replacement 2"]

    def test_ids_are_compared_by_their_bytes(self, bench: Bench) -> None:
        """Some locales sort letters otherwise."""
        tokens = [head + "P" * 13 for head in "-09AZ_az"]
        for token in [*tokens[::2], *tokens[1::2]]:
            messages(bench).replace(Message(LATER_MS, token, "mail", KEY, {}, f"{token}00000001"))
        assert deliver(bench) == [tokens[-1]]

    def test_it_replaces_what_is_none_whatever_their_message_ids(self, bench: Bench) -> None:
        store_plain(bench, "z" * 14)
        assert messages(bench).replace(ONE).message == ONE
        assert store_plain(bench, "z" * 13 + "y") == Scheduled(stored=0, duplicates=(0,))
        assert deliver(bench) == ["replacement 1"]

    def test_what_was_moved_stays_a_replacement_and_stays_moved(self, bench: Bench) -> None:
        messages(bench).replace(TWO)
        moved = messages(bench).reschedule(KEY, DUE_MS + 5)
        assert messages(bench).replace(TWO) == messages(bench).replace(ONE) == moved
        messages(bench).replace(replacement(3))
        assert deliver(bench) == ["replacement 3"]

    def test_in_flight_it_is_late_until_the_claim_is_given_back(self, bench: Bench) -> None:
        store_plain(bench)
        bench.now_ms = DUE_MS
        store = bench.store()
        claim = store.claim("loop:0").claim
        assert claim
        assert messages(bench).replace(ONE) == Found(State.IN_FLIGHT)
        store.release(claim, 1)
        assert bench.client.hlen(bench.keys.attempts()) == 1
        assert messages(bench).replace(ONE).message == ONE
        assert bench.client.hlen(bench.keys.attempts()) == 0
        assert deliver(bench) == ["replacement 1"]

    def test_delivered_it_is_late_while_the_key_is_known(self, bench: Bench) -> None:
        store_plain(bench)
        assert deliver(bench, DUE_MS) == ["message 2"]
        assert messages(bench).replace(ONE, lifts_cancellation=True) == Found(State.DELIVERED)
        bench.now_ms += RETENTION_MS
        assert messages(bench).replace(ONE).message == ONE

    def test_a_cancelled_key_is_replaced_only_where_that_is_lifted(self, bench: Bench) -> None:
        store_plain(bench)
        messages(bench).cancel(KEY)
        assert messages(bench).replace(ONE) == Found(State.CANCELLED)
        assert messages(bench).replace(ONE, lifts_cancellation=True) == Found(State.SCHEDULED, ONE)
        assert bench.client.zcard(bench.keys.cancelled()) == 0
        assert messages(bench).replace(TWO).message == TWO
        assert deliver(bench) == ["replacement 2"]

    def test_a_replacement_without_a_key_or_a_message_id_is_an_error(self, bench: Bench) -> None:
        for message in (replacement(1, key=""), Message(DUE_MS, "m", id=KEY)):
            with pytest.raises(ValueError, match=r"idempotency key|message id"):
                messages(bench).replace(message)

    def test_loops_are_woken_by_what_is_due_before_everything_else_now(self, bench: Bench) -> None:
        store_plain(bench)
        bell = bench.client.pubsub(ignore_subscribe_messages=True)
        bell.subscribe(bench.keys.wake())
        bell.get_message(timeout=60)
        messages(bench).replace(replacement(1, DUE_MS + 1, "other"))
        messages(bench).replace(replacement(2, START_MS))
        said = bell.get_message(timeout=60)
        assert said and int(said["data"]) == START_MS
        bell.close()


class TestTopics:
    """On the way through pauses and rate limits."""

    def settle(self, bench: Bench, **settings: float) -> None:
        set_topic(bench.client, bench.keys, "*", TopicSettings(sink="stream", **settings))  # type: ignore[arg-type]
        store = bench.store()
        for number in range(5):
            store.claim(f"settle:{number}")

    def hold(self, bench: Bench) -> None:
        bench.client.hset(bench.keys.pauses(), "mail", START_MS)
        bench.now_ms = LATER_MS
        self.settle(bench)
        assert messages(bench).get(KEY).state is State.HELD

    def test_what_a_pause_holds_is_replaced(self, bench: Bench) -> None:
        store_plain(bench)
        self.hold(bench)
        due = replacement(1, LATER_MS + 5)
        assert messages(bench).replace(due) == messages(bench).get(KEY) == Found(State.SCHEDULED, due)
        assert bench.client.zcard(bench.keys.held("mail")) == 0

    def test_a_replacement_stays_one_when_it_is_held_and_given_back(self, bench: Bench) -> None:
        messages(bench).replace(TWO)
        self.hold(bench)
        held = Found(State.HELD, TWO)
        assert messages(bench).replace(ONE) == messages(bench).replace(TWO) == held
        assert Topics(bench.user, [bench.keys], bench.scripts).resume("mail") == 1
        assert messages(bench).replace(ONE) == held
        set_topic(bench.client, bench.keys, "*", TopicSettings(sink="screen"))
        store = bench.store()
        claim = store.claim("resumed:0").claim
        assert claim and messages(bench).replace(ONE).state is State.IN_FLIGHT
        store.release(claim, 0)
        assert messages(bench).replace(ONE) == Found(State.SCHEDULED, TWO)

    def test_a_replacement_stays_one_while_it_waits_for_its_rate_limit(self, bench: Bench) -> None:
        messages(bench).replace(TWO)
        bench.now_ms = LATER_MS
        bench.client.hset(bench.keys.rate_limits(), "mail", LATER_MS + 500)
        self.settle(bench, max_rate=1)
        assert messages(bench).replace(ONE) == Found(State.HELD, TWO)
        assert messages(bench).replace(replacement(3, LATER_MS + 1)).message == replacement(3, LATER_MS + 1)
        assert bench.stats().scheduled == 1


class TestCancelling:
    def test_an_unknown_key_is_remembered_in_any_case_only(self, bench: Bench) -> None:
        assert messages(bench).cancel(KEY) == Found(State.UNKNOWN)
        assert bench.names() == set()
        assert messages(bench).cancel(KEY, in_any_case=True) == Found(State.UNKNOWN)
        assert messages(bench).cancel(KEY, in_any_case=True) == messages(bench).get(KEY) == Found(State.CANCELLED)
        assert store_plain(bench) == Scheduled(stored=0, duplicates=(0,))
        assert messages(bench).replace(ONE) == Found(State.CANCELLED)
        bench.now_ms += RETENTION_MS
        assert messages(bench).get(KEY) == Found(State.UNKNOWN)
        assert store_plain(bench, "Q" * 14) == Scheduled(stored=1)

    def test_to_cancel_again_is_to_remember_it_for_longer(self, bench: Bench) -> None:
        messages(bench).cancel(KEY, in_any_case=True)
        bench.now_ms += 1_000
        messages(bench).cancel(KEY, in_any_case=True)
        messages(bench, retention_ms=1).cancel(KEY, in_any_case=True)
        assert bench.client.zscore(bench.keys.cancelled(), KEY) == START_MS + 1_000 + RETENTION_MS

    def test_in_flight_it_is_late_and_what_comes_after_it_is_not_stored(self, bench: Bench) -> None:
        store_plain(bench)
        bench.now_ms = DUE_MS
        store = bench.store(id_retention_sec=10)
        claim = store.claim("loop:0").claim
        assert claim
        assert messages(bench).cancel(KEY, in_any_case=True) == Found(State.IN_FLIGHT)
        store.release(claim, 0)
        assert messages(bench).get(KEY).state is State.SCHEDULED
        assert messages(bench).replace(ONE) == Found(State.CANCELLED)
        claim = store.claim("loop:1").claim
        assert claim and store.ack(claim, 1, keyed(claim))
        assert messages(bench).get(KEY) == messages(bench).cancel(KEY, in_any_case=True) == Found(State.DELIVERED)
        bench.now_ms += 10_000
        assert messages(bench).get(KEY) == messages(bench).replace(ONE) == Found(State.CANCELLED)


class TestRows:
    def test_every_order_of_the_rows_of_a_key_ends_in_the_same(self, bench: Bench) -> None:
        """A cancellation stays, else the greatest replacement, else the first of the others."""
        rows = {"plain": None, "one": Replacement(ONE), "two": Replacement(TWO), "cancel": CANCEL}
        left = {}
        for size in range(1, len(rows) + 1):
            for order in permutations(rows, size):
                bench.client.flushall()
                for row in [*order, *order]:
                    change = rows[row]
                    if change:
                        apply(bench, change)
                    else:
                        store_plain(bench)
                left[order] = deliver(bench)
        best = {"cancel": [], "two": ["replacement 2"], "one": ["replacement 1"], "plain": ["message 2"]}
        assert left == {order: next(best[row] for row in best if row in order) for order in left}

    def test_each_row_is_counted_once_by_what_it_did(self, bench: Bench) -> None:
        store_plain(bench)
        assert apply(bench, Replacement(ONE)) == Changed(replaced=1)
        assert apply(bench, Replacement(ONE)) == Changed(replaced=1), "after a lost reply"
        assert apply(bench, Replacement(TWO)) == Changed(replaced=1)
        assert apply(bench, Replacement(ONE)) == Changed(duplicates=1)
        assert apply(bench, CANCEL, Cancellation("never there")) == Changed(cancelled=2)
        assert apply(bench, CANCEL, Replacement(ONE), CANCEL) == Changed(duplicates=3)
        assert bench.stats().counters["cancelled"] == 1, "what was taken out of the schedule"
        assert apply(bench) == Changed()

    def test_rows_of_one_key_count_together(self, bench: Bench) -> None:
        store_plain(bench)
        assert apply(bench, Replacement(ONE), Replacement(TWO), Replacement(ONE)) == Changed(replaced=1, duplicates=2)
        assert apply(bench, Replacement(replacement(3)), CANCEL, CANCEL) == Changed(cancelled=1, duplicates=2)

    def test_rows_of_what_is_in_flight_or_delivered_are_late(self, bench: Bench) -> None:
        store_plain(bench)
        bench.now_ms = DUE_MS
        store = bench.store()
        claim = store.claim("loop:0").claim
        assert claim
        assert apply(bench, Replacement(ONE), CANCEL, Cancellation("other")) == Changed(cancelled=1, late=2)
        assert store.ack(claim, 1, keyed(claim))
        assert apply(bench, Replacement(ONE)) == apply(bench, CANCEL) == Changed(late=1)

    def test_many_are_made_in_few_round_trips(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pipeline.store.changes.CHANGES_MAX", 40)
        changes: list[Change] = [Replacement(replacement(n, LATER_MS + n, f"key-{n % 70}")) for n in range(100)]
        changes += [Cancellation(f"key-{n}") for n in range(50, 90)]
        assert apply(bench, *changes) == Changed(cancelled=40, replaced=50, duplicates=50)
        assert apply(bench, *changes) == Changed(replaced=50, duplicates=90)
        bodies = deliver(bench, LATER_MS + 1_000)
        assert bodies == [*(f"replacement {n}" for n in range(30, 50)), *(f"replacement {n}" for n in range(70, 100))]

    def test_what_moves_between_the_look_and_the_change_is_followed(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store_plain(bench)
        by_id, other = messages(bench), messages(bench)
        moves = iter(
            [lambda: other.reschedule(KEY, LATER_MS + 7), lambda: other.replace(ONE), lambda: other.cancel(KEY)]
        )
        command = bench.scripts.command

        def after_a_move(*call: object) -> tuple[object, ...]:
            monkeypatch.setattr(bench.scripts, "command", command)
            for move in moves:
                move()
                monkeypatch.setattr(bench.scripts, "command", after_a_move)
                break
            return command(*call)  # type: ignore[arg-type]

        monkeypatch.setattr(bench.scripts, "command", after_a_move)
        assert by_id.apply([Replacement(TWO)]) == Changed(duplicates=1), "cancelled in the end"
        assert bench.stats().scheduled == 0


def test_a_server_that_forgot_the_scripts_is_taught_again(bench: Bench) -> None:
    store_plain(bench)
    bench.client.script_flush()
    assert apply(bench, CANCEL, Replacement(replacement(1, key="other"))) == Changed(cancelled=1, replaced=1)
    bench.client.script_flush()
    assert messages(bench).replace(replacement(2, key="other")).message == replacement(2, key="other")


def test_a_full_server_cancels_and_replaces_nothing() -> None:
    with real_server() as server:
        bench = Bench(server.client(), server.client(), Keys("test"), Scripts())
        store_plain(bench)
        messages(bench).replace(replacement(1, key="other"))
        server.client().config_set("maxmemory", "1")
        for message in (ONE, replacement(2, key="other"), replacement(1, key="new")):
            with pytest.raises(StoreUnavailable, match="maxmemory"):
                messages(bench).replace(message)
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            apply(bench, Replacement(ONE), Cancellation("other"))
        assert apply(bench, CANCEL) == Changed(cancelled=1)
        server.client().config_set("maxmemory", "0")
        assert deliver(bench) == []
