"""What a namespace holds: all of it for the status, and a bounded part of it for the metrics."""

from dataclasses import replace

import pytest

from pipeline.store import stats
from pipeline.store.heartbeats import write_ingest
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.stats import LATE_MS, read_forecast, read_stats
from pipeline.store.topics import Topics
from tests.ingest.test_progress import progress
from tests.store.builders import BUCKET_MS, transaction
from tests.store.conftest import START_MS, Bench

FIRST_MS = START_MS - START_MS % BUCKET_MS


def hold(bench: Bench, due_ms: int) -> None:
    """Let a message come due while its topic is paused."""
    Topics(bench.client, [bench.keys]).pause("default", START_MS)
    bench.store().schedule("s", transaction((1, due_ms)))
    while bench.store().claim("a:0").next_due_ms is not None:
        pass


def test_an_empty_namespace_has_no_forecast(bench: Bench) -> None:
    seen = read_forecast(bench.client, [bench.keys])
    assert (seen.buckets, seen.held, seen.next_due_ms, seen.overdue_ms) == ({}, 0, None, 0)


def test_a_forecast_counts_by_bucket_in_all_shards(bench: Bench) -> None:
    second = Keys(bench.keys.namespace, 1)
    bench.store().schedule("s", transaction((1, FIRST_MS + 5), (2, FIRST_MS + 6), (3, FIRST_MS + BUCKET_MS)))
    RedisStore(bench.client, second, None, bench.scripts).schedule("s", transaction((4, FIRST_MS), (5, FIRST_MS + 9)))
    seen = read_forecast(bench.client, [bench.keys, second])
    assert seen.buckets == {FIRST_MS: 4, FIRST_MS + BUCKET_MS: 1}
    assert (seen.next_due_ms, seen.overdue_ms) == (FIRST_MS, seen.now_ms - FIRST_MS)
    both = read_stats(bench.client, [bench.keys, second])
    assert (both.scheduled, both.next_due_ms, both.overdue_ms) == (5, FIRST_MS, both.now_ms - FIRST_MS)
    assert both.counters == {"stored": 5}


def test_what_is_in_flight_is_late_until_it_is_acknowledged(bench: Bench) -> None:
    bench.store().schedule("s", transaction((1, FIRST_MS + 5), (2, FIRST_MS + BUCKET_MS)))
    claim = bench.store().claim("a:0").claim or bench.store().claim("a:0").claim
    assert claim is not None
    for _ in range(2):
        seen, all_of_it = read_forecast(bench.client, [bench.keys]), read_stats(bench.client, [bench.keys], START_MS)
        oldest_ms = FIRST_MS + 5 if all_of_it.in_flight else FIRST_MS + BUCKET_MS
        assert (seen.next_due_ms, seen.overdue_ms) == (FIRST_MS + BUCKET_MS, seen.now_ms - oldest_ms)
        assert (all_of_it.next_due_ms, all_of_it.overdue_ms) == (FIRST_MS + BUCKET_MS, max(0, START_MS - oldest_ms))
        bench.store().ack(claim, 1, [])


def test_what_is_due_later_is_not_late(bench: Bench) -> None:
    due_ms = 4_000_000_200_000
    bench.store().schedule("s", transaction((1, due_ms)))
    seen = read_forecast(bench.client, [bench.keys])
    assert (seen.next_due_ms, seen.overdue_ms) == (due_ms, 0)


def test_so_many_were_due_a_while_ago(bench: Bench) -> None:
    store = bench.store(claim_limit=1)
    dues = [START_MS - LATE_MS - 2, START_MS - LATE_MS - 1, START_MS - LATE_MS, START_MS, START_MS + BUCKET_MS]
    store.schedule("s", transaction((1, START_MS - BUCKET_MS), *enumerate(dues, start=2)))
    assert read_stats(bench.client, [bench.keys], START_MS).late == 3
    assert store.claim("a:0").claim is not None
    assert read_stats(bench.client, [bench.keys], START_MS).late == 3, "in flight or not"


def test_what_a_pause_holds_is_shown_as_held_and_never_as_late(bench: Bench) -> None:
    hold(bench, FIRST_MS - BUCKET_MS)
    seen, all_of_it = read_forecast(bench.client, [bench.keys]), read_stats(bench.client, [bench.keys])
    assert (seen.held, seen.overdue_ms, seen.next_due_ms) == (1, 0, None)
    assert (all_of_it.held, all_of_it.scheduled, all_of_it.overdue_ms, all_of_it.next_due_ms) == (1, 1, 0, None)


def test_what_waits_for_kafka_is_counted_in_all_shards_with_the_time_of_the_oldest(bench: Bench) -> None:
    second = Keys(bench.keys.namespace, 1)
    for keys, ids in ((bench.keys, (START_MS - 5, START_MS - 3)), (second, (START_MS - 9,))):
        for ms in ids:
            bench.client.xadd(keys.outbox(), {"message": "m"}, id=f"{ms}-1")
    seen = read_stats(bench.client, [bench.keys, second], START_MS)
    assert (seen.outbox, seen.outbox_ms, seen.scheduled, seen.in_flight) == (3, 9, 0, 0)
    ahead = read_forecast(bench.client, [bench.keys, second])
    assert (ahead.outbox, ahead.outbox_ms) == (3, ahead.now_ms - START_MS + 9)
    bench.client.delete(second.outbox())
    bench.client.xtrim(bench.keys.outbox(), maxlen=0, approximate=False)
    empty = read_stats(bench.client, [bench.keys, second], START_MS)
    assert (empty.outbox, empty.outbox_ms) == (0, 0)


def test_a_forecast_has_the_lag_of_the_jobs_that_read_kafka(bench: Bench) -> None:
    write_ingest(bench.client, bench.keys, replace(progress("kafka", START_MS), reads="requests", last_lag=7))
    write_ingest(bench.client, bench.keys, progress("files", START_MS))
    assert read_forecast(bench.client, [bench.keys]).lags == {"requests": 7}


def test_a_forecast_looks_at_so_many_buckets_claims_and_topics(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(bench, FIRST_MS - BUCKET_MS)
    bench.client.delete(bench.keys.pauses())
    for name, most in (("BUCKETS_MAX", 3), ("CLAIMS_MAX", 2), ("HELD_MAX", 1)):
        monkeypatch.setattr(stats, name, most)
    bench.store().schedule(
        "t", transaction(*((line, FIRST_MS + line * BUCKET_MS) for line in range(1, 9)), token="Q" * 14)
    )
    bench.now_ms = FIRST_MS + 9 * BUCKET_MS
    store = bench.store(claim_limit=1)
    for name in "abcd":
        assert store.claim(f"{name}:0").claim is not None
    bench.client.hset(bench.keys.pauses(), mapping={"another": 1, "default": 1})
    bench.client.zadd(bench.keys.held_topics(), {"another": 1, "default": 2})
    seen = read_forecast(bench.client, [bench.keys])
    assert (seen.buckets, seen.held) == ({FIRST_MS + line * BUCKET_MS: 1 for line in (5, 6, 7)}, 0)
    bench.client.zadd(bench.keys.held_topics(), {"default": 0})
    seen = read_forecast(bench.client, [bench.keys])
    assert (seen.held, seen.throttled) == (0, 0), "it is paused"
    bench.client.delete(bench.keys.pauses())
    seen = read_forecast(bench.client, [bench.keys])
    assert (seen.held, seen.throttled) == (1, 1)


@pytest.mark.leaves_rubbish
@pytest.mark.parametrize("score", ["inf", "-inf", "1e300"])
def test_a_score_that_is_no_time_stops_no_look(bench: Bench, score: str) -> None:
    bench.client.zadd(bench.keys.buckets(), {str(FIRST_MS): FIRST_MS, "by hand": 1})
    bench.client.execute_command("ZADD", bench.keys.bucket(FIRST_MS), score, "by hand")
    due_ms = (-1 if score == "-inf" else 1) * 2**53
    assert read_stats(bench.client, [bench.keys]).next_due_ms == due_ms
    assert read_forecast(bench.client, [bench.keys]).next_due_ms == due_ms
    bench.client.zrem(bench.keys.buckets(), "by hand")


def test_what_waits_in_cold_files_is_scheduled_and_counts_for_the_ten_minutes_of_its_hour(bench: Bench) -> None:
    second = Keys(bench.keys.namespace, 1)
    hour = START_MS // 3_600_000 + 5
    bench.store().schedule("s", transaction((1, hour * 3_600_000 + BUCKET_MS)))
    bench.client.hset(bench.keys.cold(), mapping={str(hour): 8, str(hour + 1): 1})
    bench.client.hset(second.cold(), str(hour), 5)
    shards = [bench.keys, second]
    everything, forecast = read_stats(bench.client, shards, START_MS), read_forecast(bench.client, shards)
    assert everything.scheduled == 15
    for seen in (everything, forecast):
        assert (seen.cold, seen.cold_due_ms) == (14, hour * 3_600_000)
        counts = [seen.buckets.get(hour * 3_600_000 + part * BUCKET_MS, 0) for part in range(8)]
        assert counts == [3, 2 + 1, 2, 2, 2, 2, 1, 0]
    bench.client.delete(bench.keys.cold(), second.cold())
    assert (read_forecast(bench.client, shards).cold, read_forecast(bench.client, shards).cold_due_ms) == (0, None)
