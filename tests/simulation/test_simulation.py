"""Hundreds of seeds keep every promise; the same seed is the same run; and each planted fault is found by one of them."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.planted import PLANTED, Planted
from tests.simulation.world import KINDS, Result, simulate

SEEDS = range(1_004)  # the last one is the first whose loop claims a token again
SEEDS_EVERY_DAY = range(100)
ROOT = Path(__file__).resolve().parents[2]

# What must have happened somewhere in the runs, apart from the faults themselves, lest they prove nothing.
OUTCOMES = {
    "late_acks",
    "reclaimed",
    "gave back",
    "moved",
    "misfiled",
    "cancelled",
    "rescheduled",
    "replaced",
    "a duplicate",
    "a claim ahead",
    "a late arrival",
    "a claim told again",
    "a token claimed again",
}


def test_some_seeds_keep_every_promise() -> None:
    for seed in SEEDS_EVERY_DAY:
        assert_kept(simulate(seed), seed)


@pytest.mark.slow
def test_every_seed_keeps_every_promise() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        result = simulate(seed)
        assert_kept(result, seed)
        seen += result.seen
    missing = ({*KINDS} | OUTCOMES) - seen.keys()
    assert not missing, "never landed, so the run proves nothing about them"


def assert_kept(result: Result, seed: int) -> None:
    assert not result.violations, f"{result}\n\nTo repeat it: python -m tests.simulation --from {seed} --seeds 1"


def test_the_same_seed_is_the_same_run() -> None:
    for seed in range(20):
        assert simulate(seed).events == simulate(seed).events


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_in_another_process() -> None:
    """Where sets of texts, for one, have another order."""
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "40", "--trace"]
    first, second = (
        subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": hashes}, capture_output=True, check=True, timeout=60
        ).stdout
        for hashes in ("1", "2")
    )
    assert first.count(b"\nseed ") == 39
    assert first == second


def test_another_seed_is_another_run() -> None:
    assert simulate(1).events != simulate(2).events


@pytest.mark.planted
@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Planted) -> None:
    loop_type = fault.loop_type()
    assert any(simulate(seed, loop_type).violations for seed in SEEDS)
