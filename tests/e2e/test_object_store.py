"""Input and checkpoint in an object store: a server that speaks S3, and the jars with which Spark does (``s3_jars.sha256``).

The jars are those that hadoop-aws uses of the AWS SDK, 12 MB. Its users have the bundle of all of them, 690 MB.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.e2e.commands import Checkout, Command
from tests.kafka import jars
from tests.servers import RealServer

LIST = Path(__file__).with_name("s3_jars.sha256")
BUCKET = "duetime"


@pytest.fixture(scope="module")
def s3_jars() -> str:
    """The jars, as Spark's option names them."""
    listed = jars.read_list(LIST)
    try:
        folder = jars.install(jars.ROOT / ".duetime" / "s3", listed)
    except jars.Unavailable as error:
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"Spark can't speak S3 here: {error}")
    return ",".join(str(folder / name) for name in listed)


class Store:
    """A server that speaks S3, with one bucket."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client: Any = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="id", aws_secret_access_key="key"
        )
        self._client.create_bucket(Bucket=BUCKET)

    def put(self, key: str, *lines: str) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body="".join(f"{line}\n" for line in lines).encode())

    def keys(self, prefix: str) -> list[str]:
        listing = self._client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [found["Key"] for found in listing.get("Contents", [])]


@pytest.fixture
def store() -> Iterator[Store]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield Store(f"http://{host}:{port}")
    finally:
        server.stop()


@pytest.mark.slow
def test_input_and_checkpoint_in_an_object_store(
    checkout: Checkout, server: RealServer, store: Store, s3_jars: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "werkzeug")

    def start(*arguments: str, **environ: str) -> Command:
        options = {"endpoint": store.url, "endpoint.region": "us-east-1", "path.style.access": "true"}
        words = [word for name, value in options.items() for word in ("--conf", f"spark.hadoop.fs.s3a.{name}={value}")]
        command = ("--jars", s3_jars, *words, "jobs/ingest.py", "--once", *arguments)
        return checkout.run(*command, environ={"REDIS_URL": server.url, **environ})

    def ingest() -> str:
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
        job = start("--input", f"s3a://{BUCKET}/in", "--checkpoint", f"s3a://{BUCKET}/checkpoint", **keys)
        assert job.end() == 0, job.screen()
        return job.screen()

    store.put("in/one.jsonl", *['{"message": "m", "delay_sec": 3600}'] * 3, "no JSON")
    assert "4 lines, 3 stored, 0 duplicates, 1 rejected" in ingest()
    assert len(checkout.rejects()) == 1
    assert {"checkpoint/offsets/0", "checkpoint/commits/0", "checkpoint/metadata"} <= set(store.keys("checkpoint/"))
    # Each file of the checkpoint is written at once, not copied into place.
    assert "PUT /duetime/checkpoint/commits/0" in caplog.text
    assert ".tmp" not in caplog.text

    store.put("in/two.jsonl", '{"message": "m", "delay_sec": 3600}')
    assert "1 line, 1 stored, 0 duplicates" in ingest()
    assert checkout.status("--redis", server.url)["scheduled"] == 4

    # Who asks the service of a cloud machine for credentials waits for it.
    here = {"AWS_EC2_METADATA_DISABLED": "true"}
    job = start("--input", f"s3a://{BUCKET}/in", **here)
    assert job.end() == 2, job.screen()
    assert f"ingest: Spark has no credentials for the input s3a://{BUCKET}/in: set AWS_ACCESS_KEY_ID" in job.screen()
