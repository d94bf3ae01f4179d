"""What ``tests/run.sh`` runs: pytest in an environment where Spark starts, with the tests that its arguments ask for.

No tests named: those of every day, within some minutes. ``--all``: all there are. Paths, ``-k`` or ``-m`` given: what they
select, the nightly ones only if ``-m`` says so. CONTRIBUTING.md has the tiers.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.core.errors import ConfigError
from pipeline.runtime.class_archive import ARCHIVE, make_archive
from pipeline.runtime.submit import ROOT, spark_environ

# Of the examples of property tests a quarter; with all tests others than the time before (tests/examples.py).
EVERYDAY = ("-m", "not process and not planted and not slow and not nightly", "--hypothesis-profile", "everyday")
ALL = ("-m", "", "--hypothesis-profile", "nightly")
# Three workers for two cores: one mostly waits for a lease, a minute of real time or a broker. Tests of one group, such as those
# that share a Spark session, stay in one of them.
DEFAULTS = ("-n", "3", "--dist", "loadgroup", "--timeout", "300")


def pytest_arguments(given: Sequence[str]) -> list[str]:
    """Return the arguments of pytest for those of ``tests/run.sh``; what is given beats the defaults, as the later counts."""
    rest = [argument for argument in given if argument != "--all"]
    if len(rest) < len(given):
        return [*DEFAULTS, *ALL, *rest]
    selects = any(argument.startswith(("-m", "-k", "--last-failed", "--lf")) for argument in rest)
    names = any(Path(argument.partition("::")[0]).exists() for argument in rest)
    return [*DEFAULTS, *([] if selects or names else EVERYDAY), *rest]


if __name__ == "__main__":
    try:
        environ = os.environ | spark_environ(os.environ)
    except ConfigError as error:
        sys.exit(str(error))
    environ |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if "--version" not in sys.argv and not Path(environ.get(ARCHIVE, os.curdir)).exists():
        print(
            "Making an archive of Spark's classes, so that each test that starts a Spark takes less: once, half a minute."
        )
        make_archive(environ, ROOT)
    os.execve(sys.executable, [sys.executable, "-P", "-m", "pytest", *pytest_arguments(sys.argv[1:])], environ)
