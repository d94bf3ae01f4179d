"""Which tests ``tests/run.sh`` runs for which arguments."""

import pytest

from pipeline.runtime.run_tests import ALL, DEFAULTS, EVERYDAY, pytest_arguments


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], [*EVERYDAY]),
        (["-x", "--maxfail=3"], [*EVERYDAY, "-x", "--maxfail=3"]),
        (["--all"], [*ALL]),
        (["--all", "-n", "0"], [*ALL, "-n", "0"]),
        (["tests/store"], ["tests/store"]),
        ([f"{__file__}::test_that_is_named"], [f"{__file__}::test_that_is_named"]),
        (["-k", "lease"], ["-k", "lease"]),
        (["-m", "not nightly"], ["-m", "not nightly"]),
    ],
)
def test_what_is_named_is_run_and_else_what_belongs_to_every_day(given: list[str], wanted: list[str]) -> None:
    assert pytest_arguments(given) == [*DEFAULTS, *wanted]
