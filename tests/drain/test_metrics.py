"""What Prometheus sees."""

import sys
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from pipeline import __version__
from pipeline.core.errors import ConfigError, StoreUnavailable
from pipeline.drain.metrics import BUCKETS_AHEAD, READ_MS, LoopCollector
from pipeline.drain.stats import Totals
from pipeline.metrics import SWITCH_SEC, serve_metrics
from pipeline.store.heartbeats import LOOP_COUNTERS
from pipeline.store.ingest_heartbeat import Waiting
from pipeline.store.stats import Forecast
from tests.clock import ManualClock
from tests.drain.test_loop import EDGE_MS, START_MS
from tests.drain.test_stats import delivery, moved
from tests.store.builders import BUCKET_MS


class Scraped:
    """A collector, what it reads, and how often."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.clock = ManualClock(now_ms=START_MS)
        self.forecast = Forecast(
            now_ms=EDGE_MS + 5_000,
            buckets={EDGE_MS - 9 * BUCKET_MS: 2, EDGE_MS - BUCKET_MS: 1, EDGE_MS: 7, EDGE_MS + 3 * BUCKET_MS: 4},
            held=0,
            next_due_ms=EDGE_MS + 7_250,
            overdue_ms=1_500,
            outbox=3,
            outbox_ms=2_500,
            lags={"requests of Kafka": 7},
            waiting=[Waiting(3, [1], EDGE_MS), Waiting(2, [1, 4], EDGE_MS + 1_000)],
            away=[1, 4],
        )
        self.reads = 0
        self.is_down = False
        self.collector = LoopCollector("here", self.totals, self.read, self.clock)
        self.registry = CollectorRegistry()
        self.registry.register(self.collector)

    def read(self) -> Forecast:
        self.reads += 1
        if self.is_down:
            raise StoreUnavailable("Redis does not answer.")
        return self.forecast

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"namespace": "here", **labels})


@pytest.fixture
def scraped() -> Iterator[Scraped]:
    interval = sys.getswitchinterval()
    yield Scraped()
    sys.setswitchinterval(interval)


def test_lateness_is_a_histogram_in_seconds_for_each_topic(scraped: Scraped) -> None:
    scraped.totals.count_delivered([delivery("a", 999), delivery("a", 997), delivery("b", 0)], 1_001)
    assert scraped.value("duetime_delivered_total", topic="a") == 2
    buckets = {le: scraped.value("duetime_lateness_seconds_bucket", topic="a", le=le) for le in ("0.001", "0.002")}
    assert buckets == {"0.001": 0, "0.002": 1}
    assert scraped.value("duetime_lateness_seconds_bucket", topic="a", le="86400.0") == 2
    assert scraped.value("duetime_lateness_seconds_bucket", topic="a", le="+Inf") == 2
    assert scraped.value("duetime_lateness_seconds_count", topic="a") == 2
    assert scraped.value("duetime_lateness_seconds_sum", topic="a") == 0.006
    assert scraped.value("duetime_lateness_seconds_sum", topic="b") == 1.001


@pytest.mark.parametrize("name", sorted({*LOOP_COUNTERS} - {"delivered"}))
def test_what_the_loop_counts_is_served(scraped: Scraped, name: str) -> None:
    setattr(scraped.totals, name, 7)
    assert scraped.value(f"duetime_{name}_total") == 7


def test_the_ways_from_and_to_kafka_are_served(scraped: Scraped) -> None:
    scraped.totals.count_forwarded([START_MS, START_MS, START_MS + 3], START_MS + 4)
    scraped.totals.count_refused()
    scraped.totals.stuck_partitions = ["T/0", "T/1"]
    assert scraped.value("duetime_forwarded_total") == 3
    assert scraped.value("duetime_refused_total") == 1
    assert scraped.value("duetime_outbox_seconds_bucket", le="0.001") == 1
    assert scraped.value("duetime_outbox_seconds_sum") == 0.009
    assert scraped.value("duetime_kafka_stuck_partitions") == 2
    assert scraped.value("duetime_ingest_lag_records", reads="requests of Kafka") == 7
    assert scraped.value("duetime_shards_away") == 2
    assert scraped.value("duetime_ingest_waiting_files") == 5
    assert scraped.value("duetime_ingest_waiting_age_seconds") == 5
    assert (scraped.value("duetime_outbox_messages"), scraped.value("duetime_outbox_age_seconds")) == (3, 2.5)


def test_errors_are_served_by_their_cause(scraped: Scraped) -> None:
    scraped.totals.errors = {"TimeoutError": 2, "ReadOnlyError": 1}
    assert scraped.value("duetime_errors_total", kind="TimeoutError") == 2
    assert scraped.value("duetime_errors_total", kind="ReadOnlyError") == 1


def test_what_is_scheduled_is_served_by_ten_minutes(scraped: Scraped) -> None:
    assert scraped.value("duetime_oldest_due_age_seconds") == 1.5
    assert scraped.value("duetime_next_due_timestamp_seconds") == (EDGE_MS + 7_250) / 1_000
    waiting = {m: scraped.value("duetime_scheduled_messages", minutes_ahead=m) for m in ("past", "0", "10", "30")}
    assert waiting == {"past": 3, "0": 7, "10": 0, "30": 4}
    last = str(10 * (BUCKETS_AHEAD - 1))
    assert scraped.value("duetime_scheduled_messages", minutes_ahead=last) == 0
    assert scraped.value("duetime_scheduled_messages", minutes_ahead=str(10 * BUCKETS_AHEAD)) is None


def test_without_anything_waiting_there_is_no_next_due_time(scraped: Scraped) -> None:
    scraped.forecast = Forecast(EDGE_MS, {}, 0, None, 0)
    assert scraped.value("duetime_next_due_timestamp_seconds") is None
    assert scraped.value("duetime_scheduled_messages", minutes_ahead="past") == 0


def test_redis_is_asked_at_most_every_few_seconds(scraped: Scraped) -> None:
    for _ in range(10):
        scraped.value("duetime_redis_up")
    assert scraped.reads == 1
    scraped.clock.advance_ms(READ_MS - 1)
    scraped.value("duetime_redis_up")
    assert scraped.reads == 1
    scraped.clock.advance_ms(1)
    scraped.value("duetime_redis_up")
    assert scraped.reads == 2


def test_a_server_that_is_away_is_reported_and_not_asked_more_often(scraped: Scraped) -> None:
    assert scraped.value("duetime_redis_up") == 1
    scraped.is_down = True
    scraped.clock.advance_ms(READ_MS)
    for _ in range(3):
        assert scraped.value("duetime_redis_up") == 0
        assert scraped.value("duetime_oldest_due_age_seconds") is None  # rather than an old one
        assert scraped.value("duetime_claimed_total") == 0
    assert scraped.reads == 2


@pytest.fixture
def served(scraped: Scraped) -> Iterator[str]:
    server = serve_metrics("127.0.0.1", 0, scraped.collector)
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()


def test_it_is_served_with_the_numbers_of_the_process(served: str, scraped: Scraped) -> None:
    scraped.totals.claimed = 12
    with urllib.request.urlopen(served, timeout=10) as reply:
        text = reply.read().decode()
    assert '\nduetime_claimed_total{namespace="here"} 12.0\n' in text
    assert "\nprocess_resident_memory_bytes " in text
    assert "python_gc" not in text


def test_an_address_that_cannot_be_had_is_reported_in_a_sentence(served: str, scraped: Scraped) -> None:
    port = int(served.split(":")[2].removesuffix("/metrics"))
    with pytest.raises(ConfigError, match=f"127.0.0.1 port {port} .Address already in use.; choose another"):
        serve_metrics("127.0.0.1", port, scraped.collector)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 port"):
        serve_metrics("192.0.2.1", 0, scraped.collector)


def test_a_scrape_lets_the_loop_on_soon(monkeypatch: pytest.MonkeyPatch, scraped: Scraped) -> None:
    intervals: list[float] = []
    monkeypatch.setattr("sys.setswitchinterval", intervals.append)
    server = serve_metrics("127.0.0.1", 0, scraped.collector)
    server.shutdown()
    server.server_close()
    assert intervals == [SWITCH_SEC]


def test_the_version_is_served(scraped: Scraped) -> None:
    assert scraped.value("duetime_build_info", version=__version__) == 1


def test_everything_of_ours_says_which_namespace_it_is_of(scraped: Scraped) -> None:
    scraped.totals.count_delivered([delivery("a")], 1_001)
    scraped.totals.errors = {"TimeoutError": 2}
    samples = [sample for family in scraped.registry.collect() for sample in family.samples]
    assert len(samples) > 60
    assert {sample.labels.get("namespace") for sample in samples} == {"here"}


def test_what_a_pause_holds_is_served(scraped: Scraped) -> None:
    scraped.forecast = Forecast(EDGE_MS, {}, 5, None, 0, throttled=2)
    assert scraped.value("duetime_held_messages") == 5
    assert scraped.value("duetime_throttled_messages") == 2


def test_retries_count_as_delivered_and_not_for_the_lateness(scraped: Scraped) -> None:
    scraped.totals.count_moved(moved(1) + moved(1, 2, group="billing"), 5)
    assert scraped.value("duetime_delivered_total", topic="mail") == 3 == scraped.totals.delivered
    assert scraped.value("duetime_lateness_seconds_count", topic="mail") == 1


def test_what_waits_in_cold_files_is_served(scraped: Scraped) -> None:
    scraped.forecast = Forecast(EDGE_MS, {}, 0, None, 0, cold=7, cold_due_ms=EDGE_MS)
    assert scraped.value("duetime_cold_messages") == 7
    assert scraped.value("duetime_cold_due_timestamp_seconds") == EDGE_MS / 1_000
    scraped.clock.advance_ms(READ_MS)
    scraped.forecast = Forecast(EDGE_MS, {}, 0, None, 0)
    assert scraped.value("duetime_cold_messages") == 0
    assert scraped.value("duetime_cold_due_timestamp_seconds") is None
