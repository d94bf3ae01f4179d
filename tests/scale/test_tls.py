"""TLS with an authority and certificates of one's own: to one server, a cluster, and servers behind Sentinels."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.client import Duetime
from pipeline.config import RedisSettings, Settings
from pipeline.core.errors import StoreUnavailable
from pipeline.store.connection import connect, translated_errors
from pipeline.store.namespace import open_namespace
from tests.cluster import real_cluster
from tests.e2e.commands import Checkout
from tests.e2e.conftest import checkout as checkout
from tests.ports import free_port
from tests.scale.test_cluster import Jobs, bodies
from tests.scale.test_sentinel import Watched
from tests.servers import DURABLE, USER, real_server
from tests.tls import KEY_PASSWORD, Certificates, debians_server, needs_tls

pytestmark = [needs_tls, pytest.mark.process, pytest.mark.xdist_group("cluster")]


@pytest.fixture
def certificates(tmp_path: Path) -> Iterator[Certificates]:
    with debians_server():
        yield Certificates(tmp_path)


def works(url: str, checkout: Checkout) -> None:
    """Schedule by a program and deliver by a loop; and without a certificate, or with another authority, nobody is let in."""
    settings = RedisSettings(url=url, namespace="test", shards=2)
    with connect(settings) as client:
        open_namespace(client, settings, may_create=True)
        with Duetime.over(client, Settings(redis=settings)) as duetime:
            assert duetime.schedule("tea", delay=0, id="tea").state
    drain = Jobs(checkout, settings).run("jobs/drain.py", "--until-empty", "--format", "json")
    assert drain.end(30) == 0, drain.screen()
    assert bodies(drain) == {"tea": 1}
    base, _, query = url.partition("?")
    words = query.split("&")
    for left_out, told in (
        (("ssl_ca_certs",), "certificate verify failed|No master found"),
        (
            ("ssl_certfile", "ssl_keyfile", "ssl_password"),
            "certificate required|No master|closed|reset|violation of protocol",
        ),
    ):
        settings = RedisSettings(url=f"{base}?{'&'.join(word for word in words if not word.startswith(left_out))}")
        with pytest.raises(StoreUnavailable, match=told) as caught, translated_errors():
            connect(settings).ping()
        assert KEY_PASSWORD not in str(caught.value)


def test_one_server(checkout: Checkout, certificates: Certificates) -> None:
    port = free_port()
    with real_server("--tls-port", str(port), "--bind", "127.0.0.1", *certificates.of_server(), *DURABLE):
        works(f"rediss://{USER}:{USER}@localhost:{port}/0?{certificates.of_client()}", checkout)


def test_a_cluster(checkout: Checkout, certificates: Certificates) -> None:
    with real_cluster(2, tls=certificates.of_server()) as cluster:
        ports = [node.tls_port for node in cluster.masters]
        assert not {node.port for node in cluster.masters} & {*ports}
        hosts = ",".join(f"localhost:{port}" for port in ports)
        works(f"rediss+cluster://{USER}:{USER}@{hosts}?{certificates.of_client()}", checkout)


def test_servers_behind_sentinels(checkout: Checkout, certificates: Certificates, tmp_path: Path) -> None:
    with ExitStack() as stack:
        watched = Watched(tmp_path, stack, tls=certificates)
        works(f"{watched.url.replace('redis+', 'rediss+')}&{certificates.of_client()}", checkout)
