"""What Prometheus sees of the ingest job and of the hydrator."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from pipeline import __version__
from pipeline.core.errors import ColdUnavailable
from pipeline.ingest.metrics import HydratorCollector, IngestCollector
from pipeline.ingest.progress import BatchReporter
from pipeline.ingest.summary import Summary
from tests.clock import ManualClock
from tests.ingest.cold_world import ColdWorld
from tests.servers import RealServer

NOW_MS = 1_900_000_000_000


class Scraped:
    def __init__(self, collector: Collector) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(collector)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"duetime_{name}", {"namespace": "here", **labels})


def event(**fields: Any) -> Any:
    return SimpleNamespace(runId="run", progress=SimpleNamespace(runId="run", **fields))


def test_what_an_ingest_job_has_stored_is_served() -> None:
    clock = ManualClock(NOW_MS)
    landing: Any = SimpleNamespace(
        check_batch=lambda *_: None,
        delete_batch=lambda _: None,
        oldest_waiting_ms=lambda: 0,
        backlog=lambda: (3, 4_500),
    )
    reporter = BatchReporter("s", "/in", landing, lambda _: None, clock)
    scraped = Scraped(IngestCollector("here", reporter))
    assert scraped.value("ingest_up", reads="/in") == 0
    assert scraped.value("ingest_lines_total", reads="/in") == 0
    assert scraped.value("ingest_last_success_timestamp_seconds", reads="/in") is None
    reporter.onQueryStarted(event())
    assert scraped.value("ingest_up", reads="/in") == 1
    reporter.report(0, Summary(lines=7, stored=4, duplicates=2, rejected=1), 0.25)
    assert scraped.value("ingest_lines_total", reads="/in") == 0, "Spark may play the batch again"
    reporter.onQueryProgress(event(batchId=0, numInputRows=1, durationMs={}, sources=[]))
    found = {name: scraped.value(f"ingest_{name}_total", reads="/in") for name in ("lines", "stored", "duplicates")}
    assert found == {"lines": 7, "stored": 4, "duplicates": 2}
    assert (
        scraped.value("ingest_rejected_total", reads="/in"),
        scraped.value("ingest_batches_total", reads="/in"),
    ) == (1, 1)
    assert scraped.value("ingest_batch_seconds_sum", reads="/in") == 0.25
    assert scraped.value("ingest_batch_seconds_bucket", reads="/in", le="0.3") == 1
    assert scraped.value("ingest_last_success_timestamp_seconds", reads="/in") == NOW_MS / 1_000
    assert scraped.value("ingest_backlog_files", reads="/in") == 3
    assert scraped.value("ingest_backlog_seconds", reads="/in") == 4.5
    assert scraped.value("build_info", version=__version__) == 1
    reporter.onQueryTerminated(event())
    assert scraped.value("ingest_up", reads="/in") == 0


def test_where_files_are_not_landed_there_is_no_backlog() -> None:
    scraped = Scraped(
        IngestCollector("here", BatchReporter("s", "hdfs://a", None, lambda _: None, ManualClock(NOW_MS)))
    )
    assert scraped.value("ingest_backlog_files", reads="hdfs://a") is None


def test_what_a_hydrator_has_brought_is_served(server: RealServer, tmp_path: Path) -> None:
    world = ColdWorld(server, tmp_path)
    world.write([world.line("a", 1.5), world.line("b", 2.5)])
    hydrator = world.hydrator()
    scraped = Scraped(HydratorCollector("here", hydrator))
    assert (scraped.value("hydrator_up"), scraped.value("hydrator_messages_total")) == (0, 0)
    assert hydrator.look()
    assert (scraped.value("hydrator_up"), scraped.value("hydrator_messages_total")) == (1, 2)
    assert scraped.value("hydrator_files_total") == 1
    success = scraped.value("hydrator_last_success_timestamp_seconds")
    assert success and success * 1_000 >= world.now_ms
    (world.path / "duetime-cold.json").unlink()
    with pytest.raises(ColdUnavailable):
        hydrator.look()
    assert scraped.value("hydrator_up") == 0
    assert scraped.value("hydrator_last_success_timestamp_seconds") == success
    hydrator.leave()
