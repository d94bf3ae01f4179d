"""Spark's daemon of Python workers, which keeps quiet about a worker whose Java is gone.

Spark closes the connection of a worker that it needs no longer: one that idled for a minute, or all at a stop. The worker then
answers into nothing. Over TCP the kernel takes that answer; over a unix socket it is a ``BrokenPipeError`` at once, which the
daemon prints as a trace on the screen of a job that does what it should. All other errors are printed as before. Those of the
code that a worker runs don't come here: they are sent to Java, which reports them.

Spark starts this module by its name, ``spark.python.daemon.module``.
"""

import sys
import traceback
from typing import Any

from pyspark import daemon

_GONE = (BrokenPipeError, ConnectionResetError)


class _Traces:
    """What the daemon has of ``traceback``: it prints with this what a worker ended with, and nothing else."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self) -> None:
        """Print the error that is being handled, unless it only says that Java is gone."""
        if not isinstance(sys.exception(), _GONE):
            traceback.print_exc()


def main() -> None:
    """Run the daemon until Java ends it."""
    vars(daemon)["traceback"] = _Traces()
    daemon.manager()


if __name__ == "__main__":
    main()
