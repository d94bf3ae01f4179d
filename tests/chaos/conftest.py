"""A server for all faults, and a rig for each."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pipeline.ingest import parsing, shard_writer
from tests.chaos.drain_scenario import DrainScenario
from tests.chaos.rig import PART_BYTES, Rig
from tests.e2e.commands import Checkout
from tests.servers import RealServer, real_server


@pytest.fixture
def checkout() -> Iterator[Checkout]:
    with TemporaryDirectory(prefix="duetime-chaos-") as folder:
        made = Checkout(Path(folder).resolve())
        yield made
        made.close()


@pytest.fixture
def scenario(checkout: Checkout, request: pytest.FixtureRequest) -> Iterator[DrainScenario]:
    """A scenario of drain loops, of one shard if the test asks for no more."""
    with real_server() as server:
        told = DrainScenario(checkout, server, shards=getattr(request, "param", 1))
        yield told
        told.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running


@pytest.fixture
def open_rig(server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Open a rig when the test is ready for it; a mutant has to be planted first."""
    monkeypatch.setattr(parsing, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(shard_writer, "SORTED_MESSAGES", shard_writer.SORTED_MESSAGES)  # which the rig changes
    with ExitStack() as stack:
        stack.callback(server.client().config_set, "maxmemory", 0)

        def open_one(shards: int = 1, has_cold: bool = False) -> Rig:
            return stack.enter_context(closing(Rig(server, tmp_path, shards, has_cold)))

        yield open_one
    gc.collect()  # what a planted fault leaves open is told here, and not to the next test
