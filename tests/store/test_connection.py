"""How a connection is opened."""

import socket

from pipeline.config import RedisSettings
from pipeline.store.connection import KEEPALIVE, connect


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
