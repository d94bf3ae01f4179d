"""Terminals of a user who types what a page shows, in a checkout of their own."""

import re
import subprocess
from pathlib import Path

from tests.e2e.commands import Checkout, Command

# What spark-submit.sh becomes once it has seen to it that .venv is up to date, which all these tests share.
STAND_IN = """#!/bin/sh
export PYTHONPATH="$PWD"
exec .venv/bin/python -P -m pipeline.runtime.submit "$@"
"""
WAIT_SEC = 60.0
_VARYING = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ|\d[\d.,]*(?: (?:ms|s|min|h|d)\b)?|-\d+")


class Terminals:
    """Runs the commands of pages in a checkout.

    Args:
        checkout: its spark-submit.sh is replaced by ``STAND_IN``.

        environ: for every command; may be added to.
    """

    def __init__(self, checkout: Checkout, environ: dict[str, str]) -> None:
        self.root = checkout.root
        self.environ = environ
        self._started: list[Command] = []
        Path(self.root, "spark-submit.sh").write_text(STAND_IN)

    def type(self, command: str) -> str:
        """Run a command to its end and return what it printed."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.root,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=WAIT_SEC,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, command: str) -> Command:
        """Start a command that goes on until it is stopped."""
        started = Command(["bash", "-c", f"exec env {command}"], self.environ, self.root)
        self._started.append(started)
        return started

    def close(self) -> None:
        """End what was started and still runs."""
        for each in self._started:
            if each.process.poll() is None:
                each.stop()


def looks_like(printed: str, written: str) -> bool:
    """Say whether a page shows what was printed, but for times and numbers; ``...`` stands for anything."""
    pattern = "".join(
        ".*" if part == "..." else re.escape(part) for part in re.split(r"(\.\.\.)", _VARYING.sub("N", written.strip()))
    )
    return bool(re.fullmatch(pattern, _VARYING.sub("N", printed.strip()), re.S))
