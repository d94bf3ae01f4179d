"""A checkout to play user in."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.commands import Checkout


@pytest.fixture
def checkout() -> Iterator[Checkout]:
    with TemporaryDirectory(prefix="duetime-e2e-") as folder:
        made = Checkout(Path(folder).resolve())
        yield made
        made.close()
