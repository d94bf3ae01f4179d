"""A server for all faults."""

from collections.abc import Iterator

import pytest

from tests.servers import RealServer, real_server


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running
