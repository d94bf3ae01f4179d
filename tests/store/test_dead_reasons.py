"""The reasons of dead letters: one list, which all who write, choose or explain them have."""

import pytest

from jobs.dead_letters import parse_arguments
from pipeline.config import ROOT
from pipeline.core.dead import DeadReason
from pipeline.store.scripts import read_script
from pipeline.web.openapi import contract


@pytest.mark.parametrize("reason", [*DeadReason])
def test_each_can_be_chosen_and_is_explained(reason: DeadReason) -> None:
    given, _ = parse_arguments(["list", "--reason", reason])
    assert given.reason == reason
    assert f"`{reason}`" in (ROOT / "docs" / "wire-format.md").read_text()
    page = (ROOT / "docs" / "topics.md").read_text() + (ROOT / "docs" / "kafka.md").read_text()
    assert f"| `{reason}` |" in page
    assert ", ".join(DeadReason) in str(contract(is_read_only=False, takes_tokens=False))


def test_the_words_of_the_script_are_among_them() -> None:
    assert all(f"'{reason}'" in read_script("claim") for reason in (DeadReason.EXPIRED, DeadReason.DROPPED))
