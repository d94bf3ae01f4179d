"""The peers that ours is compared with: how they are installed, and their programs of bench/peers/, which schedule and work.

They are in a folder of their own, ``.duetime/peers`` or ``BENCH_PEERS``: an environment for each of Python's, as some want
versions of redis-py that others refuse, the modules of Node, and a program of Go. What is not there is left out.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT, WORK, say
from bench.loops import Portion, Reader, split_lines
from bench.server import Server

PROGRAMS = ROOT / "bench" / "peers"
OUR_PROGRAM = (sys.executable, str(PROGRAMS / "duetime_jobs.py"))
INSTALL_SEC_MAX, SCHEDULE_SEC_MAX, VERBS_SEC_MAX, STOP_SEC_MAX = 600, 300, 600, 5.0
_HANDLED = re.compile(rb"(\d{16}) reminder (\d{9}) for a customer")
_numbers = itertools.count()

Handled = list[tuple[int, float]]  # number of the job, epoch ms at which it was handled


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that jobs can be scheduled with.

    Args:
        kind: what its program is written in: python, node or go.

        key: of its files in bench/peers/ and of what is installed.
    """

    kind: str
    key: str

    def pins(self) -> Path:
        """Return the file that names the versions of what it is made of."""
        return PROGRAMS / {"python": f"{self.key}.txt", "node": "package.json", "go": f"{self.key}/go.mod"}[self.kind]

    def version(self) -> str:
        """Return the version that is named there."""
        library = {"docket": "pydocket"}.get(self.key, self.key)
        found = re.search(rf'\b{library}"?(?:==|: "| v)([\w.]+)', self.pins().read_text(encoding="utf-8"))
        assert found, self.key
        return found[1]

    def stamp(self) -> Path:
        """Return the file that holds what ``pins`` held when it was installed."""
        return peers_folder() / f"{self.key}.installed"

    def is_installed(self) -> bool:
        """Whether it is there, in the version that is named."""
        return self.stamp().is_file() and self.stamp().read_bytes() == self.pins().read_bytes()

    def command(self) -> list[str]:
        """Return the words that start its program, but for the verb and what comes after it."""
        folder = peers_folder()
        if self.kind == "go":
            return [str(folder / self.key / "program")]
        program = str(folder / self.key / "bin" / "python") if self.kind == "python" else "node"
        return [program, str(PROGRAMS / f"{self.key}_jobs.{'py' if self.kind == 'python' else 'mjs'}")]

    def install_commands(self) -> list[list[str]]:
        """Return the commands that install it, in their order; all run in the folder of the peers."""
        folder = peers_folder() / self.key
        if self.kind == "node":
            return [["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]]
        if self.kind == "go":
            return [
                ["go", "build", "-C", str(PROGRAMS / self.key), "-buildvcs=false", "-o", str(folder / "program"), "."]
            ]
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        venv = [sys.executable, "-m", "venv", "--clear", str(folder)]
        install = [*pip, "install", "--quiet", "--no-deps", "-r", str(self.pins())]
        return [venv, install, [*pip, "check"]]  # which fails if this Python needs more than the pins name


PEERS = {
    "BullMQ": Peer("node", "bullmq"),
    "asynq": Peer("go", "asynq"),
    "docket": Peer("python", "docket"),
    "huey": Peer("python", "huey"),
    "dramatiq": Peer("python", "dramatiq"),
    "Celery": Peer("python", "celery"),
    "arq": Peer("python", "arq"),
    "rq": Peer("python", "rq"),
}


def peers_folder() -> Path:
    """Return where peers are installed."""
    return Path(os.environ.get("BENCH_PEERS", ROOT / ".duetime" / "peers")).absolute()


def find_peers() -> dict[str, Peer]:
    """Return those that are installed."""
    return {name: peer for name, peer in PEERS.items() if peer.is_installed()}


def install_peers() -> None:
    """Install what is not there yet; what can't be had is said, and left out."""
    folder = peers_folder()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(PROGRAMS / "package.json", folder)
    for name, peer in PEERS.items():
        if peer.is_installed():
            continue
        say(f"Installing {name} {peer.version()} into {folder} ...")
        try:
            for command in peer.install_commands():
                subprocess.run(
                    command, cwd=folder, check=True, timeout=INSTALL_SEC_MAX, stdin=subprocess.DEVNULL, stdout=sys.stderr
                )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            say(f"{name} can't be had here: {error}")
        else:
            shutil.copy(peer.pins(), peer.stamp())


def schedule_jobs(command: Sequence[str], server: Server, due_ms: Sequence[int]) -> float:
    """Let a program schedule job 0, 1, 2, ... for these times; returns the seconds that it took, by its own clock."""
    [seconds] = _ask([*command, "schedule", server.socket], json.dumps(list(due_ms)), SCHEDULE_SEC_MAX).values()
    return seconds


def measure_verbs(peer: Peer, server: Server, count: int) -> dict[str, float]:
    """Let a program measure single calls; returns calls a second of each."""
    seconds = _ask([*peer.command(), "verbs", server.socket, str(count)], "", VERBS_SEC_MAX)
    return {verb: round(count / took, 1) for verb, took in seconds.items()}


def _ask(command: list[str], given: str, sec_max: float) -> dict[str, float]:
    done = subprocess.run(
        command, cwd=_start_folder(), env=_environ(), input=given, stdout=subprocess.PIPE, stderr=sys.stderr,
        check=True, timeout=sec_max, text=True,
    )  # fmt: skip
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def _start_folder() -> Path:
    """Return where programs are started: Node looks for its modules there."""
    return peers_folder() if peers_folder().is_dir() else ROOT


def _environ() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


class Worker:
    """A program that works, with all that it starts; what its handler wrote is read. Use it as a context."""

    def __init__(self, command: Sequence[str], server: Server, verb: str = "work") -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        self._errors = WORK / f"worker-{next(_numbers)}"
        with open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(
                [*command, verb, server.socket], cwd=_start_folder(), env=_environ(), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        assert self._process.stdout is not None
        self.reader = Reader(self._process.stdout)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._end(signal.SIGKILL)

    def handled(self) -> Handled:
        """Stop it as its users do, and return which jobs were handled when, in the order of the handling.

        Raises:
            RuntimeError: its output is not that of a handler.
        """
        self._process.terminate()
        try:
            self._process.wait(STOP_SEC_MAX)
        except subprocess.TimeoutExpired:
            say(f"{self._process.args!r} did not stop when asked to, and is killed.")
        self._end(signal.SIGKILL)
        return read_handled(self.reader.portions)

    def said(self) -> str:
        """Return what it wrote to stderr."""
        return self._errors.read_text(errors="replace")

    def _end(self, how: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, how)  # it leads a group of its own
        except ProcessLookupError:
            pass
        self._process.wait()
        self.reader.join()


def read_handled(portions: Sequence[Portion]) -> Handled:
    """Parse what handlers wrote: a line a job, when it was handled and its text.

    Raises:
        RuntimeError: there is a line that is something else.
    """
    handled = []
    for _, line in split_lines(portions):
        found = _HANDLED.fullmatch(line)
        if not found:
            raise RuntimeError(f"A worker wrote {line[:200]!r}.")
        handled.append((int(found[2]), int(found[1]) / 1000))
    return handled
