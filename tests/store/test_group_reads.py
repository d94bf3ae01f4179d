"""Waiting for the streams of several masters at once."""

import fcntl
import resource
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pipeline.store.group_reads import _StreamWait
from tests.servers import RealServer

BEYOND_SELECT = 1_024  # the first descriptor that select(2) can't wait for


class OneMaster:
    """A cluster client with one master, whose connections have high descriptors, as in a program with many."""

    def __init__(self, client: Any) -> None:
        self.connection_pool = client.connection_pool

        class High(self.connection_pool.connection_class):  # type: ignore[misc]
            def _connect(self) -> socket.socket:
                with super()._connect() as low:
                    high = socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, BEYOND_SELECT))
                    high.settimeout(low.gettimeout())  # else it does not wait, as the one that it was made of
                    return high

        self.connection_pool.connection_class = High

    def of_tag(self, tag: str) -> "OneMaster":
        return self


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(limits[1], 4 * BEYOND_SELECT)), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_wait_takes_descriptors_that_select_does_not(server: RealServer, many_descriptors: None) -> None:
    def read_ids(streams: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(streams, "0")

    with server.client() as writer, server.client() as client:
        writer.xadd("mail", {"message": "first"})
        master = OneMaster(client)
        waits = _StreamWait(master, {"{a}": ["mail"]}, read_ids)  # type: ignore[arg-type]
        waits.wait(10_000)
        assert waits._waiting == {}, "it was not heard"
        connection = master.connection_pool.get_connection()
        assert connection._sock.fileno() >= BEYOND_SELECT
        master.connection_pool.release(connection)
        writer.delete("mail")
