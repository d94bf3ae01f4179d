"""How a connection is opened."""

import socket
from typing import Any

import fakeredis
import pytest
from redis._parsers.base import BaseParser

from pipeline.config import RedisSettings
from pipeline.core.errors import ConfigError, StoreProtocolError, StoreUnavailable
from pipeline.store.connection import KEEPALIVE, connect, translated_errors
from pipeline.store.keys import Keys
from pipeline.store.wakeup import WakeListener
from tests.ports import free_port
from tests.servers import real_server
from tests.store.conftest import ends
from tests.waiting import wait_until

KEY = "{duetime:0}:key"


def test_a_connection_that_only_listens_is_found_dead_within_a_minute_or_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = connect(RedisSettings(url=f"redis://127.0.0.1:{listener.getsockname()[1]}"))
        opened = client.connection_pool.make_connection()._connect()
        with opened:
            assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            asked = {name: opened.getsockopt(socket.IPPROTO_TCP, name) for name in KEEPALIVE}
    assert asked == KEEPALIVE
    if hasattr(socket, "TCP_KEEPIDLE"):
        assert asked[socket.TCP_KEEPIDLE] + asked[socket.TCP_KEEPINTVL] * asked[socket.TCP_KEEPCNT] <= 60


def test_a_replica_is_named_as_one() -> None:
    with (
        real_server("--replicaof", "127.0.0.1", "1") as server,
        pytest.raises(StoreUnavailable) as caught,
        translated_errors(),
    ):
        connect(RedisSettings(url=server.url)).set(KEY, 1)
    assert str(caught.value).startswith("This server is a replica; name its primary (")


def test_a_node_of_a_cluster_is_named_as_one() -> None:
    ports = [free_port(), free_port()]
    options = [("--cluster-enabled", "yes", "--port", str(port), "--cluster-port", str(free_port())) for port in ports]
    with real_server(*options[0]) as one, real_server(*options[1]) as other:
        client, admin = connect(RedisSettings(url=one.url)), one.client()
        admin.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[1], options[1][-1])
        other.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"cluster_state:ok" in admin.execute_command("CLUSTER", "INFO"), "the cluster is up")
        for call in (lambda: client.set(KEY, 1), lambda: client.pipeline().set(KEY, 1).execute()):
            with pytest.raises(ConfigError, match="part of a Redis Cluster; name it"), translated_errors():
                call()


@pytest.mark.parametrize(
    "reply", ["LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "OOM", "BUSY", "MISCONF", "NOREPLICAS"]
)
def test_a_reply_that_passes_by_itself_is_worth_another_try(reply: str) -> None:
    with pytest.raises(StoreUnavailable), translated_errors():
        raise BaseParser.parse_error(f"{reply} for a while.")


def test_a_call_that_the_client_refuses_is_not_taken_for_a_server_that_does_not_answer() -> None:
    with pytest.raises(StoreProtocolError, match="can't make this call"), translated_errors():
        fakeredis.FakeRedis().set("key", object())  # type: ignore[arg-type]


def test_a_wait_ends_though_notifications_come_faster_than_it_takes_them() -> None:
    class Flood:
        """A client, and its subscription, to whom somebody always says something."""

        def pubsub(self) -> "Flood":
            return self

        def subscribe(self, *channels: str) -> None:
            pass

        def get_message(self, timeout: float) -> dict[str, Any]:
            return {"type": "message", "channel": b"{test:0}:wake"}

    assert ends(lambda: WakeListener(Flood(), [Keys("test")]).wait(60_000))


def test_a_file_of_tls_that_is_missing_is_no_server_that_is_away() -> None:
    url = "rediss://u:hidden@127.0.0.1:1/0?ssl_ca_certs=/nowhere/ca.crt&ssl_password=hidden"
    with pytest.raises(
        ConfigError, match=r"file /nowhere/ca\.crt, which the Redis URL names as ssl_ca_certs"
    ) as caught:
        connect(RedisSettings(url=url))
    assert "hidden" not in str(caught.value)
