"""Cold files in an object store: a server that speaks S3, reached as pyarrow finds it by the variables of AWS."""

import logging
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from pipeline.core.errors import ColdUnavailable
from pipeline.ingest.cold_folder import IDENTITY_NAME
from tests.ingest.cold_world import HOUR_MS, ColdWorld
from tests.ingest.test_cold_merging import merge
from tests.servers import RealServer

URL = "s3a://duetime/cold"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[ThreadedMotoServer]:
    caplog.set_level(logging.ERROR, "werkzeug")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="duetime")
    yield server
    server.stop()


def test_messages_wait_in_a_bucket_and_come_back_each_once(
    bucket: ThreadedMotoServer, server: RealServer, tmp_path: Path
) -> None:
    world = ColdWorld(server, tmp_path, url=URL)
    assert ColdWorld(server, tmp_path, url=URL, namespace=world.redis.namespace).place == world.place
    world.write(*[[world.line(f"{n}", 2 + n % 3, f"k{n}" if n % 4 == 0 else "")] for n in range(40)])
    assert len(world.names()) == 40 and world.waiting() == {}
    assert merge(world) == 40
    found = world.by_id().get("k8").message
    assert found and (found.body, found.due_ms) == ("8", world.now_ms + 4 * HOUR_MS)
    hydrator = world.hydrator(archive_ms=600_000)
    assert hydrator.look()
    assert len(world.waiting()) == 40 and world.cold_hours() == {}
    assert world.names() == [] and len(world.folder.done_minutes()) in (1, 2)
    assert hydrator.bring_back(0) == 41 and hydrator.look() and len(world.waiting()) == 40
    for minute in world.folder.done_minutes():
        world.folder.delete_done(minute)
    assert world.folder.done_minutes() == []
    world.folder.files.delete_file(world.folder.path(IDENTITY_NAME))
    with pytest.raises(ColdUnavailable, match=f"^The cold folder {URL} has no {IDENTITY_NAME}"):
        hydrator.look()
