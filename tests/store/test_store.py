"""The verbs, on fakeredis and on a real server."""

from dataclasses import replace

import pytest

from pipeline.core.errors import StoreProtocolError
from pipeline.store.base import Claim, DrainStore, Scheduled
from pipeline.store.redis_store import RedisStore
from tests.store.builders import BUCKET_MS, TOKEN, member, transaction
from tests.store.conftest import START_MS, Bench

EDGE_MS = START_MS - START_MS % BUCKET_MS + BUCKET_MS  # where the next bucket begins


def claim_all(store: DrainStore, name: str = "loop:0") -> list[tuple[int, bytes]]:
    claim = store.claim(name).claim
    return [(m.due_ms, m.member) for m in claim.messages] if claim else []


def must_claim(store: DrainStore, name: str) -> Claim:
    claim = store.claim(name).claim
    assert claim is not None
    return claim


def pairs(token: str, *idempotency_keys: str) -> list[tuple[str, str]]:
    """The ids and the idempotency keys of messages that are acknowledged, the last ones of their file."""
    return [(f"{token}{line:08x}", key) for line, key in enumerate(idempotency_keys, 1)]


class TestSchedule:
    def test_a_message_is_scored_with_its_due_time_in_its_bucket(self, bench: Bench) -> None:
        assert bench.store().schedule("s", transaction((1, START_MS + 5))) == Scheduled(stored=1)
        start = START_MS - START_MS % BUCKET_MS
        assert bench.client.zrange(bench.keys.bucket(start), 0, -1, withscores=True) == [(member(1), START_MS + 5)]
        assert bench.client.zrange(bench.keys.buckets(), 0, -1, withscores=True) == [(str(start).encode(), start)]

    def test_the_same_transaction_again_stores_nothing(self, bench: Bench) -> None:
        bench.store().schedule("s", transaction((1, START_MS), (2, START_MS)))
        assert bench.store().schedule("s", transaction((1, START_MS), (2, START_MS))) is None
        assert bench.stats().scheduled == 2

    def test_a_replay_after_delivery_stores_nothing(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS)))
        assert store.ack(must_claim(store, "loop:0"), 1, [])
        assert store.schedule("s", transaction((1, START_MS))) is None
        assert claim_all(store, "loop:1") == []

    def test_a_transaction_moves_its_marker_and_the_next_goes_on_from_there(self, bench: Bench) -> None:
        store = bench.store()
        assert store.markers("s", [TOKEN]) == [""]
        assert store.schedule("s", transaction((1, START_MS), after="5 1"))
        assert store.markers("s", [TOKEN, "Q" * 14]) == ["5 1", ""]
        assert store.schedule("s", transaction((2, START_MS), before="5 1", after="all"))
        assert store.markers("s", [TOKEN]) == ["all"]
        assert bench.stats().scheduled == 2

    @pytest.mark.parametrize("before", ["", "5 1", "all"])
    def test_a_marker_that_is_elsewhere_refuses_the_whole_transaction(self, bench: Bench, before: str) -> None:
        store = bench.store()
        store.schedule("s", transaction(after="4 1"))
        refused = transaction((1, START_MS), identified=((2, START_MS, "a"),), before=before, rejected=1)
        assert store.schedule("s", refused) is None
        assert (bench.stats().scheduled, bench.stats().counters, store.markers("s", [TOKEN])) == (0, {}, ["4 1"])

    def test_one_marker_of_several_that_is_elsewhere_refuses_all(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction(token="Q" * 14))
        one, other = transaction((1, START_MS)), transaction(token="Q" * 14)
        assert store.schedule("s", replace(one, moves=[*one.moves, *other.moves])) is None
        assert store.markers("s", [TOKEN]) == [""]

    def test_rejected_lines_are_counted_with_the_marker(self, bench: Bench) -> None:
        store = bench.store()
        for _ in range(2):
            store.schedule("s", transaction(rejected=7))
        assert bench.stats().counters == {"rejected": 7}

    def test_markers_are_walked_and_forgotten(self, bench: Bench) -> None:
        store = bench.store()
        tokens = [f"{number:014d}" for number in range(3)]
        for token in tokens:
            store.schedule("s", transaction((1, START_MS), token=token))
        assert sorted(store.marked_parts("s")) == [(token, START_MS) for token in tokens]
        store.forget_markers("s", tokens[:2])
        assert list(store.marked_parts("s")) == [(token, START_MS) for token in tokens[2:]]
        assert store.markers("s", tokens) == ["", "", "all"]

    def test_two_lines_with_the_same_text_are_two_messages(self, bench: Bench) -> None:
        bench.store().schedule("s", transaction((1, START_MS), (2, START_MS)))
        assert bench.stats().scheduled == 2

    def test_files_and_sources_have_markers_of_their_own(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS)))
        store.schedule("s", transaction((1, START_MS), token="Q" * 14))
        store.schedule("other", transaction((1, START_MS + 1), token="R" * 14))
        assert bench.stats().scheduled == 3

    def test_an_idempotency_key_is_stored_once_wherever_it_comes_again(self, bench: Bench) -> None:
        store = bench.store()
        first = transaction(identified=((1, START_MS, "order-1"), (2, START_MS, "order-1"), (3, START_MS, "order-2")))
        assert store.schedule("s", first) == Scheduled(stored=2, duplicates=(1,))
        other = transaction(identified=((1, START_MS, "order-2"),), token="Q" * 14)
        assert store.schedule("s", other) == Scheduled(stored=0, duplicates=(0,))

    def test_an_id_is_known_until_its_time_after_delivery_is_over(self, bench: Bench) -> None:
        store = bench.store(id_retention_sec=10)
        store.schedule("s", transaction(identified=((1, START_MS, "order-1"), (2, START_MS, "order-2"))))
        assert store.ack(must_claim(store, "loop:0"), 2, pairs(TOKEN, "order-1", "order-2"))
        bench.now_ms += 9_999
        again = transaction(identified=((1, START_MS, "order-3"), (2, START_MS, "order-1")), token="Q" * 14)
        assert store.schedule("s", again) == Scheduled(stored=1, duplicates=(1,))
        bench.now_ms += 1  # whether or not anything has cleaned up since
        again = transaction(identified=((1, START_MS, "order-1"),), token="R" * 14)
        assert store.schedule("s", again) == Scheduled(stored=1)
        assert store.ack(must_claim(store, "loop:1"), 2, [*pairs("Q" * 14, "order-3"), *pairs("R" * 14, "order-1")])
        again = transaction(identified=((1, START_MS, "order-1"),), token="S" * 14)
        assert store.schedule("s", again) == Scheduled(stored=0, duplicates=(0,))

    def test_messages_with_and_without_an_id_go_together(self, bench: Bench) -> None:
        both = transaction((1, START_MS), identified=((2, START_MS, "a"), (3, EDGE_MS, "b"), (4, EDGE_MS, "a")))
        assert bench.store().schedule("s", both) == Scheduled(stored=3, duplicates=(2,))
        assert bench.stats().counters == {"stored": 3, "duplicates": 1}
        assert bench.client.zcard(bench.keys.buckets()) == 2

    def test_many_ids_of_one_transaction_are_each_stored_once(self, bench: Bench) -> None:
        lines = range(1, 2_501)  # more than two commands take
        due = {line: START_MS + line % 7 * BUCKET_MS + line for line in lines}
        name = {line: f"id-{line % 2_003}" for line in lines}
        rows = tuple((line, due[line], name[line]) for line in lines)
        bench.client.hset(bench.keys.places(), "id-5", "somewhere")
        bench.client.zadd(bench.keys.ids(), {"id-1500": 2**52})
        bench.client.zadd(bench.keys.cancelled(), {"id-1600": 2**52, "id-1700": 1})
        known = {line - 1 for line in lines if line > 2_003 or line in (5, 1_500, 1_600)}
        done = bench.store().schedule("s", transaction(identified=rows))
        assert done == Scheduled(stored=2_500 - len(known), duplicates=tuple(sorted(known)))
        stored = [line for line in lines if line - 1 not in known]
        found = {}
        for start in bench.client.zrange(bench.keys.buckets(), 0, -1):
            found |= dict(bench.client.zrange(bench.keys.bucket(int(start)), 0, -1, withscores=True))
        assert found == {member(line): due[line] for line in stored}
        places = bench.client.hgetall(bench.keys.places())
        assert places.pop(b"id-5") == b"somewhere" and bench.client.hdel(bench.keys.places(), "id-5")
        assert places == {name[line].encode(): member(line)[:22] + b"%d" % due[line] for line in stored}

    def test_a_bucket_that_only_known_ids_were_for_is_not_indexed(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction(identified=((1, START_MS, "a"),)))
        store.schedule("s", transaction(identified=((1, EDGE_MS, "a"),), token="Q" * 14))
        assert bench.client.zcard(bench.keys.buckets()) == 1

    @pytest.mark.leaves_rubbish
    def test_a_key_that_holds_something_else_stops_before_the_marker_moves(self, bench: Bench) -> None:
        bench.client.set(bench.keys.bucket(EDGE_MS), "not ours")
        with pytest.raises(StoreProtocolError):
            bench.store().schedule("s", transaction((1, START_MS), (2, EDGE_MS)))
        assert bench.store().markers("s", [TOKEN]) == [""]

    def test_an_idempotency_key_is_not_known_before_its_message_is_there(self, bench: Bench) -> None:
        bench.client.set(bench.keys.bucket(EDGE_MS), "not ours")
        sent = transaction(identified=((1, EDGE_MS, "a"),))
        with pytest.raises(StoreProtocolError):
            bench.store().schedule("s", sent)
        bench.client.delete(bench.keys.bucket(EDGE_MS))
        assert bench.store().schedule("s", sent) == Scheduled(stored=1)

    @pytest.mark.leaves_rubbish
    def test_a_transaction_with_idempotency_keys_stores_nothing_beside_a_key_that_holds_something_else(
        self, bench: Bench
    ) -> None:
        bench.store().schedule("s", transaction((1, START_MS), identified=((2, START_MS, "a"),), token="Q" * 14))
        bench.client.set(bench.keys.bucket(EDGE_MS), "not ours")
        before = {key: bench.client.dump(key) for key in bench.client.scan_iter()}
        with pytest.raises(StoreProtocolError, match="WRONGTYPE"):
            bench.store().schedule("s", transaction((1, START_MS), identified=((2, START_MS, "b"), (3, EDGE_MS, "c"))))
        assert {key: bench.client.dump(key) for key in bench.client.scan_iter()} == before

    def test_a_thousand_buckets_in_one_transaction(self, bench: Bench) -> None:
        rows = [(line, START_MS + line * BUCKET_MS) for line in range(1, 1001)]
        assert bench.store().schedule("s", transaction(*rows)) == Scheduled(stored=1000)
        assert bench.stats().scheduled == 1000

    def test_ten_thousand_messages_in_one_bucket(self, bench: Bench) -> None:
        rows = [(line, EDGE_MS) for line in range(1, 10_001)]
        assert bench.store().schedule("s", transaction(*rows)) == Scheduled(stored=10_000)


class TestWake:
    @pytest.mark.parametrize(
        ("due_ms", "rings"),
        [
            (EDGE_MS + 1_000, False),
            (EDGE_MS + 999, True),
            (EDGE_MS - 1, True),
            (EDGE_MS + BUCKET_MS, False),
        ],
        ids=["as late as the head", "before the head", "in an older bucket", "in a later bucket"],
    )
    def test_only_a_newcomer_due_before_everything_rings(self, bench: Bench, due_ms: int, rings: bool) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, EDGE_MS + 1_000)))
        heard = self.hear(bench, lambda: store.schedule("s", transaction((1, due_ms), token="Q" * 14)))
        assert heard == ([str(due_ms).encode()] if rings else [])

    def test_the_first_message_of_all_rings(self, bench: Bench) -> None:
        assert self.hear(bench, lambda: bench.store().schedule("s", transaction((1, EDGE_MS)))) == [
            str(EDGE_MS).encode()
        ]

    def test_a_message_with_an_id_rings_too(self, bench: Bench) -> None:
        identified = transaction(identified=((1, EDGE_MS, "order-1"),))
        assert self.hear(bench, lambda: bench.store().schedule("s", identified)) == [str(EDGE_MS).encode()]

    @staticmethod
    def hear(bench: Bench, act) -> list[bytes]:  # type: ignore[no-untyped-def]
        with bench.client.pubsub(ignore_subscribe_messages=True) as pubsub:
            pubsub.subscribe(bench.keys.wake())
            pubsub.get_message(timeout=60)
            act()
            pubsub.ping()  # which the server answers after everything that it had to say before
            heard = []
            while (said := pubsub.get_message(timeout=60))["type"] != "pong":
                heard.append(said["data"])
            return heard


class TestClaim:
    def test_nothing_scheduled(self, bench: Bench) -> None:
        reply = bench.store().claim("loop:0")
        assert (reply.claim, reply.next_due_ms, reply.first_lease_ms) == (None, None, None)

    @pytest.mark.parametrize("due_ms", [START_MS + 1, EDGE_MS, EDGE_MS + 1])
    def test_nothing_is_claimed_early_and_the_next_due_time_is_told(self, bench: Bench, due_ms: int) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, due_ms)))
        bench.now_ms = due_ms - 1
        reply = store.claim("loop:0")
        assert (reply.claim, reply.next_due_ms, reply.now_ms) == (None, due_ms, due_ms - 1)
        bench.now_ms = due_ms
        assert claim_all(store, "loop:1") == [(due_ms, member(1))]

    def test_messages_come_by_due_time_then_by_arrival(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS), (2, START_MS - 2), (3, START_MS - 2), (4, START_MS - 1)))
        assert [m for _, m in claim_all(store)] == [member(line) for line in (2, 3, 4, 1)]

    def test_the_oldest_bucket_comes_first_and_a_late_arrival_in_an_older_one_before_it(self, bench: Bench) -> None:
        store = bench.store(claim_limit=1)
        bench.now_ms = EDGE_MS + 5
        store.schedule("s", transaction((1, EDGE_MS), (2, EDGE_MS + 1)))
        assert claim_all(store, "loop:0") == [(EDGE_MS, member(1))]
        store.schedule("s", transaction((1, EDGE_MS - 1), token="Q" * 14))
        assert claim_all(store, "loop:1") == [(EDGE_MS - 1, member(1, token="Q" * 14))]
        assert claim_all(store, "loop:2") == [(EDGE_MS + 1, member(2))]

    def test_the_limit_holds_and_the_rest_stays(self, bench: Bench) -> None:
        store = bench.store(claim_limit=250)
        store.schedule("s", transaction(*((line, START_MS) for line in range(1, 601))))
        assert [len(claim_all(store, f"loop:{n}")) for n in range(4)] == [250, 250, 100, 0]

    def test_a_claim_is_bounded_in_bytes(self, bench: Bench) -> None:
        store = bench.store(claim_bytes_max=1)
        store.schedule("s", transaction(*((line, START_MS) for line in range(1, 301))))
        assert len(claim_all(store)) == 100

    def test_the_same_name_again_gives_the_same_messages(self, bench: Bench) -> None:
        store = bench.store(claim_limit=2)
        store.schedule("s", transaction(*((line, START_MS) for line in range(1, 5))))
        assert claim_all(store, "loop:0") == claim_all(store, "loop:0")
        assert bench.stats().in_flight == 2

    def test_a_claimed_message_is_not_claimed_by_another(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS)))
        assert len(claim_all(store, "one:0")) == 1
        assert claim_all(bench.store(), "two:0") == []

    def test_an_empty_bucket_leaves_the_index(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS)))
        store.ack(must_claim(store, "loop:0"), 1, [])
        assert bench.names() == {"counters", "markers:s", f"marker:s:{TOKEN}"}

    def test_a_bucket_in_the_index_that_holds_nothing_is_passed(self, bench: Bench) -> None:
        store = bench.store()
        bench.client.zadd(bench.keys.buckets(), {"0": 0, str(BUCKET_MS): BUCKET_MS})
        store.schedule("s", transaction((1, START_MS)))
        assert len(claim_all(store)) == 1


class TestAck:
    def test_what_is_acknowledged_is_gone_and_counted(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS), (2, START_MS)))
        claim = must_claim(store, "loop:0")
        assert store.ack(claim, 1, [])
        assert (bench.stats().in_flight, bench.stats().counters["delivered"]) == (1, 1)
        assert store.ack(claim, 2, [])
        assert (bench.stats().in_flight, bench.stats().counters["delivered"]) == (0, 2)

    def test_saying_it_twice_counts_once(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS), (2, START_MS)))
        claim = must_claim(store, "loop:0")
        for _ in range(2):
            assert store.ack(claim, 1, [])
        assert bench.stats().counters["delivered"] == 1

    @pytest.mark.parametrize("late_ms", [0, 1])
    def test_after_the_lease_it_is_refused_and_counted(self, bench: Bench, late_ms: int) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS)))
        claim = must_claim(store, "loop:0")
        bench.now_ms += 30_000 + late_ms
        assert not store.ack(claim, 1, [])
        assert bench.stats().counters["late_acks"] == 1
        assert bench.stats().in_flight == 1

    def test_it_can_not_remove_the_claim_of_another_loop(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS)))
        late = must_claim(store, "late:0")
        bench.now_ms += 30_000
        assert store.reclaim() == 1
        other = must_claim(store, "other:0")
        assert not store.ack(late, 1, [])
        assert store.ack(other, 1, [])

    def test_it_can_not_remove_what_a_late_request_claimed_under_the_same_name(self, bench: Bench) -> None:
        store = bench.store(claim_limit=2)
        store.schedule("s", transaction(*((line, START_MS) for line in range(1, 5))))
        claim = must_claim(store, "loop:0")
        assert store.ack(claim, 2, [])
        bench.now_ms += 1
        must_claim(store, "loop:0")  # sent before, given up, and slow
        assert not store.ack(claim, 2, [])
        assert store.release(claim, 2) == 0
        assert (bench.stats().in_flight, bench.stats().counters["delivered"]) == (2, 2)


class TestGivingBack:
    def test_a_holder_gives_back_what_it_did_not_deliver(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS), (2, START_MS), (3, START_MS)))
        claim = must_claim(store, "loop:0")
        assert store.ack(claim, 1, [])
        assert store.release(claim, 1) == 2
        again = must_claim(store, "loop:1")
        assert [(m.member, m.attempt) for m in again.messages] == [(member(2), 1), (member(3), 1)]

    def test_an_attempt_that_may_have_reached_the_sink_counts(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS), (2, START_MS)))
        store.release(must_claim(store, "loop:0"), 1)
        again = must_claim(store, "loop:1")
        assert [m.attempt for m in again.messages] == [2, 1]
        assert store.ack(again, 2, [])
        assert bench.names() == {"counters", "markers:s", f"marker:s:{TOKEN}"}

    def test_an_expired_lease_is_claimed_by_another_loop(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS), (2, EDGE_MS)))
        must_claim(store, "dead:0")
        bench.now_ms += 29_999
        assert store.reclaim() == 0
        bench.now_ms += 1
        assert store.claim("other:0").first_lease_ms == bench.now_ms
        assert store.reclaim() == 1
        assert [(m.member, m.attempt) for m in must_claim(store, "other:1").messages] == [(member(1), 2)]
        assert bench.stats().counters["reclaimed"] == 1

    def test_what_was_given_back_keeps_its_due_time_and_place(self, bench: Bench) -> None:
        store = bench.store(claim_limit=1)
        store.schedule("s", transaction((1, START_MS - 2), (2, START_MS - 1)))
        store.release(must_claim(store, "loop:0"), 0)
        assert claim_all(store, "loop:1") == [(START_MS - 2, member(1))]

    def test_a_claim_that_is_gone_gives_nothing_back(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS)))
        claim = must_claim(store, "loop:0")
        store.ack(claim, 1, [])
        assert store.release(claim, 1) == 0


class TestStats:
    def test_an_empty_namespace(self, bench: Bench) -> None:
        stats = bench.stats()
        assert (stats.scheduled, stats.in_flight, stats.next_due_ms, stats.overdue_ms) == (0, 0, None, 0)

    def test_the_oldest_undelivered_message_counts_in_flight_or_not(self, bench: Bench) -> None:
        store = bench.store(claim_limit=1)
        store.schedule("s", transaction((1, START_MS - 500), (2, START_MS + 300), (3, EDGE_MS)))
        assert (bench.stats().next_due_ms, bench.stats().overdue_ms) == (START_MS - 500, 500)
        must_claim(store, "loop:0")
        stats = bench.stats()
        assert (stats.scheduled, stats.in_flight, stats.next_due_ms, stats.overdue_ms) == (2, 1, START_MS + 300, 500)

    @pytest.mark.leaves_rubbish
    def test_an_emptied_bucket_in_the_index_hides_nothing(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS + 300)))
        bench.client.zadd(bench.keys.buckets(), {"0": 0})
        assert (bench.stats().scheduled, bench.stats().next_due_ms) == (1, START_MS + 300)


class TestOddScores:
    @pytest.mark.parametrize("score", ["-1e17", "-inf"])
    def test_a_score_that_is_no_time_is_delivered_all_the_same(self, bench: Bench, score: str) -> None:
        start = START_MS - START_MS % BUCKET_MS
        bench.client.zadd(bench.keys.buckets(), {str(start): start})
        bench.client.execute_command("ZADD", bench.keys.bucket(start), score, "by hand")
        [(due_ms, text)] = claim_all(bench.store())
        assert (due_ms, text) == (-(2**53), b"by hand")


class TestMarkers:
    def test_they_are_forgotten_by_name(self, bench: Bench) -> None:
        store = bench.store()
        store.schedule("s", transaction((1, START_MS)))
        store.schedule("s", transaction((1, START_MS), token="Q" * 14))
        assert {part_id for part_id, _ in store.marked_parts("s")} == {"P" * 14, "Q" * 14}
        store.forget_markers("s", ["P" * 14])
        assert {part_id for part_id, _ in store.marked_parts("s")} == {"Q" * 14}


class TestForeignWriters:
    """Any client may write the schedule; one that makes a mistake keeps nobody else's messages back."""

    def put(self, bench: Bench, bucket: str, due_ms: float, stored: bytes, index_score: float | None = None) -> None:
        bench.client.zadd(bench.keys.bucket(int(bucket)), {stored: due_ms})
        bench.client.zadd(bench.keys.buckets(), {bucket: float(bucket) if index_score is None else index_score})

    def claimed(self, store: RedisStore, name: str) -> list[bytes]:
        claim = store.claim(name).claim
        return [message.member for message in claim.messages] if claim else []

    def test_a_message_in_an_older_bucket_delays_nobody_and_comes_when_it_is_due(self, bench: Bench) -> None:
        start = START_MS - START_MS % BUCKET_MS
        in_two_days = START_MS + 2 * 86_400_000
        for line in range(250):
            self.put(bench, str(start - 2 * BUCKET_MS), in_two_days + line, member(line))
        self.put(bench, str(start), START_MS - 1_000, member(1_000))
        store = bench.store()
        assert self.claimed(store, "one") == [member(1_000)]
        assert bench.stats().counters["misfiled"] == 250
        reply = store.claim("two")
        assert (reply.claim, reply.next_due_ms) == (None, in_two_days)
        bench.now_ms = in_two_days + 300
        assert self.claimed(store, "three") == [member(line) for line in range(250)]

    def test_a_message_in_a_later_bucket_is_delivered_when_that_is_the_oldest(self, bench: Bench) -> None:
        self.put(bench, str(START_MS - START_MS % BUCKET_MS + BUCKET_MS), START_MS - 5, member(1))
        store = bench.store()
        assert self.claimed(store, "one") == [member(1)]
        assert "misfiled" not in bench.stats().counters

    @pytest.mark.parametrize("due_ms", [float("inf"), 1e300, 2.0**53 + 2])
    def test_a_message_that_is_never_due_delays_nobody(self, bench: Bench, due_ms: float) -> None:
        start = START_MS - START_MS % BUCKET_MS
        self.put(bench, str(start - BUCKET_MS), due_ms, member(1))
        self.put(bench, str(start), START_MS, member(2))
        store = bench.store()
        assert self.claimed(store, "one") == [member(2)]
        for name in ("two", "three", "four"):
            assert store.claim(name).next_due_ms == 2**53
        assert bench.stats().counters["misfiled"] == 1

    @pytest.mark.parametrize("name", ["bucket:1", "", "1.5", "1e3", "007", "-0", "inf", "nan", "99999999999999999"])
    def test_an_entry_of_the_index_that_is_no_number_is_taken_out(self, bench: Bench, name: str) -> None:
        self.put(bench, str(START_MS - START_MS % BUCKET_MS), START_MS, member(1))
        bench.client.zadd(bench.keys.buckets(), {name: 0})
        store = bench.store()
        assert self.claimed(store, "one") == [member(1)]
        assert bench.client.hget(bench.keys.counters(), "misfiled") == b"1"
        assert not bench.client.exists(bench.keys.buckets())

    def test_many_such_entries_are_taken_out_in_the_end(self, bench: Bench) -> None:
        self.put(bench, str(START_MS - START_MS % BUCKET_MS), START_MS, member(1))
        bench.client.zadd(bench.keys.buckets(), {f"junk {number}": 0 for number in range(5_000)})
        store = bench.store()
        found = [stored for number in range(100) for stored in self.claimed(store, f"try {number}")]
        assert found == [member(1)]
        assert not bench.client.exists(bench.keys.buckets())

    def test_a_bucket_at_the_wrong_place_of_the_index_is_put_right(self, bench: Bench) -> None:
        start = START_MS - START_MS % BUCKET_MS
        self.put(bench, str(start + BUCKET_MS), start + BUCKET_MS, member(1), index_score=0)
        self.put(bench, str(start), START_MS, member(2))
        store = bench.store()
        assert self.claimed(store, "one") == [member(2)]
        assert bench.client.zscore(bench.keys.buckets(), str(start + BUCKET_MS)) == start + BUCKET_MS
