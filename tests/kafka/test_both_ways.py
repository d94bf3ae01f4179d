"""From Kafka through Redis into Kafka: the story of a delay box, and the campaign against it."""

import pytest

from tests.e2e.commands import Checkout
from tests.e2e.conftest import checkout as checkout
from tests.kafka.broker import Broker
from tests.kafka.campaign import ALL_FAULTS, run_campaign
from tests.kafka.outflow import texts
from tests.servers import real_server

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("kafka")]


def test_a_service_gets_its_record_back_in_its_topic_after_the_countdown(checkout: Checkout, broker: Broker) -> None:
    with real_server() as server:
        broker.make_topic("box", partitions=3)
        broker.make_topic("T", partitions=3)
        kafka = ("--kafka-servers", broker.bootstrap)
        ingest = checkout.run(
            "jobs/ingest.py", "--source", "kafka", *kafka, "--kafka-topics", "box", environ={"REDIS_URL": server.url}
        )
        drain = checkout.run("jobs/drain.py", "--sink", "kafka", *kafka, environ={"REDIS_URL": server.url})
        ingest.wait_for_line("ingest is up")
        request = b'{"topic": "T", "message": "your order", "countdown": 2}'
        sent = broker.produce("box", request, key=b"order-1", headers=[("CALLER_SERVICE", b"shop")])
        assert sent.timestamp_ms is not None
        [record] = broker.read_all("T", count=1, timeout_sec=60)
        headers = dict(record.headers)
        assert (record.value, record.key, headers["CALLER_SERVICE"]) == (b"your order", b"order-1", b"shop")
        assert headers["duetime-due-ms"] == b"%d" % (sent.timestamp_ms + 2_000)
        assert set(headers) == {"CALLER_SERVICE", "duetime-id", "duetime-due-ms"}
        assert (record.timestamp_ms or 0) >= sent.timestamp_ms + 2_000
        assert ingest.stop() == 0 and drain.stop() == 0, ingest.screen() + drain.screen()
        assert texts(broker.read_all("T")) == ["your order"]
        assert "1 written to Kafka, 0 refused" in drain.screen()
        assert "Traceback" not in ingest.screen() + drain.screen()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("exactly_once", "records", "faults"),
    [(True, 1_000, len(ALL_FAULTS)), (False, 500, 3)],
    ids=["exactly once", "at least once"],
)
def test_whatever_dies_on_the_way_each_record_comes_out(
    checkout: Checkout, exactly_once: bool, records: int, faults: int
) -> None:
    """For a reader of what is committed it does so once; without transactions there may be copies, which have the same id."""
    found = run_campaign(checkout, 1, records, faults, exactly_once)
    assert len(found) == records
    if exactly_once:
        assert set(found.values()) == {1}
