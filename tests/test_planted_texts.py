"""Each planted fault still fits the source it is planted into. Whether it is noticed is what the tests marked ``planted`` show."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.scripts import read_script
from tests.chaos import test_planted as chaos
from tests.chaos import test_planted_drain as drain
from tests.consume import test_planted as consume
from tests.ingest import test_planted_cold as cold
from tests.ingest import test_planted_repair as repair
from tests.ingest import test_planted_tables as tables
from tests.ingest import test_planted_waiting as waiting
from tests.kafka import test_planted_forwarder as forwarder
from tests.kafka import test_planted_writer as writer
from tests.model import planted as model
from tests.planting import replace_once
from tests.simulation import planted as simulation

ROOT = Path(__file__).resolve().parents[1]

Plant = Callable[[], object]


def of_scripts_and_functions() -> Iterator[tuple[str, Plant]]:
    """Faults that the tests of the writers and their like plant by ``tests.chaos.test_planted.plant``."""
    for mutant in (
        *chaos.MUTANTS,
        *(forwarder.mutant_of(*fault) for fault in (forwarder.FAULTS | forwarder.OUTBOX_FAULTS).items()),
        *(
            chaos.Mutant(name, (), {target: ((old, new),)})
            for faults in (consume.FAULTS, cold.FAULTS, repair.FAULTS, tables.FAULTS, tables.OTHERS, waiting.FAULTS)
            for name, (target, old, new, _) in faults.items()
        ),
        *(chaos.Mutant(name, (), {target: ((old, new),)}) for name, (target, _, old, new) in writer.FAULTS.items()),
    ):
        for target, replacements in mutant.changes.items():
            yield mutant.name, partial(plant, target, replacements)


def plant(target: Any, replacements: tuple[tuple[str, str], ...]) -> None:
    source = chaos.faulty_text(target, replacements)
    if not isinstance(target, str):
        compile(source, target[1], "exec")


def of_modules() -> Iterator[tuple[str, Plant]]:
    """Faults of the model, of the simulation, and of a whole checkout."""
    for fault in (*model.PLANTED, *model.PLANTED_IN_STREAMS):
        is_store = fault.where == model.STORE
        yield fault.name, fault.store_type if is_store else partial(fault.over(read_script), fault.where)
    for each in simulation.PLANTED:
        yield each.name, each.loop_type
    for name, (path, old, new, *_) in drain.PLANTED.items():
        yield name, partial(replace_once, (ROOT / path).read_text(encoding="utf-8"), old, new, name)


@pytest.mark.parametrize("faults", [of_scripts_and_functions, of_modules])
def test_every_planted_fault_fits_its_source(faults: Callable[[], Iterator[tuple[str, Plant]]]) -> None:
    unfit = []
    for name, plant_it in faults():
        try:
            plant_it()
        except (AssertionError, AttributeError, OSError, SyntaxError) as error:
            unfit.append(f"{name}: {str(error).partition(chr(10))[0]}")
    assert not unfit, "\n".join(unfit)


def test_no_table_of_planted_faults_is_forgotten_here() -> None:
    planting = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*planted*.py")}
    modules = (chaos, drain, consume, cold, repair, tables, waiting, forwarder, writer, model, simulation)
    assert planting - {"tests/test_planted_texts.py"} == {
        str(Path(str(module.__file__)).relative_to(ROOT)) for module in modules
    }
