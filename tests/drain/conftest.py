"""A server for the tests that run the command."""

from collections.abc import Iterator

import pytest

from tests.servers import RealServer, real_server


@pytest.fixture
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running
