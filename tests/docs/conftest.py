"""Terminals in a checkout."""

import os
from collections.abc import Iterator

import pytest

from tests.docs.terminal import Terminals
from tests.e2e.conftest import checkout as checkout

KEPT = ("PATH", "JAVA_HOME", "HOME")


@pytest.fixture
def terminals(checkout) -> Iterator[Terminals]:  # type: ignore[no-untyped-def]
    """Terminals in a fresh checkout, which has a private server of its own."""
    made = Terminals(checkout, {name: os.environ[name] for name in KEPT if name in os.environ})
    yield made
    made.close()
