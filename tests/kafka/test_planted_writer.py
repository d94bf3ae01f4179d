"""The tests of what stores records of Kafka notice what they are there for: each protection, taken out, is missed by one."""

import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import PipelineError, SourceError
from pipeline.ingest.kafka_writer import RangeStorer, _RangeReader
from tests.chaos.test_planted import Mutant, plant
from tests.kafka import test_attacks as attacks
from tests.kafka import test_ingest as ingest
from tests.kafka.broker import Broker
from tests.kafka.intake import Intake, line
from tests.servers import RealServer

pytestmark = [pytest.mark.planted, pytest.mark.xdist_group("kafka")]

STORE, SHARE, TRY = (RangeStorer, "_store"), (RangeStorer, "_store_share"), (_RangeReader, "_try")
ANEW = ingest.test_what_was_planned_of_a_topic_is_not_read_of_another_under_its_name


def overtaken_by_one_that_dies(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer stores a part of a transaction before, and nothing after."""
    intake.make_topic()
    intake.send(*(line(f"{n}") for n in range(10)))
    one = attacks.storer(intake, 0, 10, 10)
    store_share = one._store_share

    def late(shard: int, share: Any, behind: int) -> None:
        if behind and intake.bodies().total() == 0:
            other = attacks.storer(intake, 0, 10, 3)
            records, until = other._reader.read(0, False, 3)
            other._store(records, 0, until)
        store_share(shard, share, behind)

    monkeypatch.setattr(one, "_store_share", late)
    assert one.store().lost == 0  # else the batch is stored again
    assert intake.bodies() == Counter(f"{n}" for n in range(10))


def read_behind_a_hole(intake: Intake) -> None:
    intake.make_topic()
    intake.send(*(line(f"{n}") for n in range(10)))
    intake.store(0, 2)
    intake.delete_before(5)
    with pytest.raises(SourceError, match="2 to 4"):
        intake.store(0, 10)


Fault = tuple[tuple[Any, str], Callable[..., None], str, str]

FAULTS: dict[str, Fault] = {
    "who was overtaken counts as stored": (
        SHARE,
        overtaken_by_one_that_dies,
        "self._markers[shard] = self._marker(store)\n",
        "self._markers[shard] = str(behind)\n",
    ),
    "it is not asked what topic was read": (
        TRY,
        ANEW,
        "self._cluster.check(partition)\n    return found",
        "return found",
    ),
    "a hole is passed over": (
        (_RangeReader, "_behind_hole"),
        read_behind_a_hole,
        "if is_known and not self._accept_loss:",
        "if False:",
    ),
    "a shard that is ahead gets all of it": (
        STORE,
        attacks.test_what_one_shard_has_done_is_not_done_again_when_another_catches_up,
        "if place < at < behind:",
        "if False:",
    ),
    "rejects have the name of their partition alone": (
        (RangeStorer, "_write_rejects"),
        attacks.test_a_writer_with_smaller_transactions_replaces_no_rejects,
        'f"{partition.part_id}.{place:014d}-{behind:014d}"',
        "partition.part_id",
    ),
    "a shard without messages has no beginning": (
        (RangeStorer, "store"),
        attacks.test_a_shard_that_has_nothing_yet_knows_where_it_began,
        "if marker == NO_MARKER:",
        "if False:",
    ),
}


@pytest.fixture
def intake(broker: Broker, server: RealServer, tmp_path: Path) -> Intake:
    return Intake(broker, server, None, tmp_path)  # type: ignore[arg-type]  # without Spark


@pytest.mark.parametrize("check", [overtaken_by_one_that_dies, read_behind_a_hole])
def test_without_a_fault_these_pass(
    check: Callable[..., None], intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(check, intake, monkeypatch)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str, intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    target, check, old, new = FAULTS[name]
    plant(Mutant(name, (), {target: ((old, new),)}), monkeypatch)
    with pytest.raises((AssertionError, PipelineError, pytest.fail.Exception)):
        run(check, intake, monkeypatch)


def run(check: Callable[..., None], intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a test with what it asks for."""
    there = {"intake": intake, "monkeypatch": monkeypatch}
    check(**{name: there[name] for name in inspect.signature(check).parameters})
