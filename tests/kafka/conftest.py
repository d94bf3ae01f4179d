"""One broker for the worker, ready for transactions. Tests make topics of their own; one that kills a broker starts its own."""

from collections.abc import Iterator

import pytest

from tests.kafka.broker import Broker, real_broker


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    with real_broker(transactions=True) as running:
        yield running
