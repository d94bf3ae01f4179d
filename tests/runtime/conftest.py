"""What the tests of the set-up share: processes that are started and never left behind, and waits with a deadline."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from pipeline.runtime.process import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def wait_for() -> Callable[[Callable[[], object], str], None]:
    """Wait until something holds, or fail saying what didn't."""

    def wait(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
        assert wait_until(lambda: bool(condition()), timeout_s), f"not within {timeout_s} s: {what}"

    return wait


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a process with its stdout and stderr in files of that name in ``tmp_path``; whatever is left is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str], *, name: str = "", **environ: str) -> subprocess.Popen[bytes]:
        with open(tmp_path / f"{name}stdout", "ab") as stdout, open(tmp_path / f"{name}stderr", "ab") as stderr:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # what it started may outlive it
            os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[[str], list[psutil.Process]]]:
    """Find the living processes whose command line names ``tmp_path`` and a text; whatever is left at the end is killed."""

    def find(text: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = " ".join(process.info["cmdline"] or ())
            if str(tmp_path) in line and text in line and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    yield find
    for process in find(""):
        process.kill()


@pytest.fixture
def python() -> str:
    return sys.executable
