"""``duetime`` in a checkout: one set of modules with two names."""

import os
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import duetime
import pipeline.client
from pipeline.config import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

USERS_PROGRAM = """
import duetime
from duetime.spark import schedule
duetime.Duetime().schedule(3)
schedule(4, "name")
"""


def test_the_package_has_what_programs_import() -> None:
    assert duetime.__all__ == pipeline.client.__all__
    for name in (*duetime.__all__, "__version__"):
        assert getattr(duetime, name) is getattr(pipeline if name == "__version__" else pipeline.client, name)


@pytest.mark.parametrize("name", ["core.errors", "client", "consume.handling", "store", "ingest.transforms", "spark"])
def test_a_module_is_the_same_under_both_names(name: str) -> None:
    by_wheel, by_checkout = import_module(f"duetime.{name}"), import_module(f"pipeline.{name}")
    assert by_wheel is by_checkout is sys.modules[f"duetime.{name}"]
    assert (by_wheel.__name__, by_wheel.__spec__ and by_wheel.__spec__.name) == (f"pipeline.{name}",) * 2
    assert import_module("duetime.jobs.status") is import_module("jobs.status")


def test_an_exception_raised_under_one_name_is_caught_under_the_other() -> None:
    from duetime.core.errors import RequestRefused

    assert RequestRefused is duetime.RequestRefused is pipeline.client.RequestRefused
    assert pickle.loads(pickle.dumps(duetime.State.HELD)) is pipeline.client.State.HELD


def test_a_module_that_is_not_there_is_named_as_it_was_asked_for() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'duetime\.nonsense'$"):
        import_module("duetime.nonsense")


def test_modules_run_as_programs(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "duetime.jobs.status", "--help"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert "jobs/status.py" in done.stdout


def test_sparks_workers_know_the_name(spark: "SparkSession") -> None:
    refused = duetime.RequestRefused

    def import_there(number: int) -> tuple[bool, str]:
        from duetime.core.errors import RequestRefused

        import duetime.spark

        return RequestRefused is refused, duetime.spark.__name__

    assert spark.sparkContext.parallelize([1], 1).map(import_there).collect() == [(True, "pipeline.spark")]


@pytest.mark.slow
def test_type_checkers_know_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(USERS_PROGRAM)
    check = [sys.executable, "-m", "mypy", "--strict", "program.py"]
    environ = os.environ | {"MYPYPATH": str(ROOT)}
    typed = subprocess.run(check, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    found = [line for line in typed.stdout.splitlines() if line.startswith("program.py")]
    assert 'Argument 1 to "schedule" of "Duetime" has incompatible type "int"; expected "str"' in found[0], typed.stdout
    assert 'Argument 1 to "schedule" has incompatible type "int"; expected' in found[1], typed.stdout
    assert len(found) == 2, typed.stdout
