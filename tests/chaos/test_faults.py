"""Storing is exactly once under every fault of ``faults.CHECKS``."""

from collections.abc import Callable

import pytest

from tests.chaos.faults import CHECKS, Check
from tests.chaos.rig import Rig

# A task that dies leaves the file of its rejects open; there it is closed by the end of its process.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def test_every_request_is_delivered_once(check: Check, shards: int, open_rig: Callable[[int], Rig]) -> None:
    check(open_rig(shards))


@pytest.mark.parametrize("shards", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def test_every_request_is_delivered_once_also_if_it_waits_in_a_cold_file(
    check: Check, shards: int, open_rig: Callable[[int, bool], Rig]
) -> None:
    check(open_rig(shards, True))
