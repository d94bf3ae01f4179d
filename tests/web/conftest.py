"""A running API on the server of the worker."""

from collections.abc import Iterator

import pytest

from tests.servers import RealServer
from tests.web.running import Api, running, settings_of


@pytest.fixture
def api(server: RealServer) -> Iterator[Api]:
    with running(settings_of(server.url)) as api:
        yield api
