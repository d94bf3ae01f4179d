"""Start the commands as a user would, and read their screen."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "duetime",
    "pipeline",
    "jobs",
    "conf",
    "spark-submit.sh",
    "requirements.lock",
    "requirements-test.lock",
    "pyproject.toml",
)
START_SEC = 180.0  # a JVM, a session and a first batch, on a machine that is busy with other tests


def kill_tree(pid: int) -> None:
    """End a process and all that it has started, as kill -9 and a power cut do."""
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it ends with those before it
            process.kill()


def can_mount() -> bool:
    """Whether a process of ours may have a view of the file system of its own."""
    found = shutil.which("unshare") and shutil.which("nsenter")
    return found is not None and subprocess.run(["unshare", "-rm", "true"], check=False).returncode == 0


CAN_MOUNT = can_mount()


class Command:
    """A running command; its lines are kept with the epoch ms at which they were read."""

    def __init__(self, argv: list[str], environ: dict[str, str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            argv, env=environ, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.started = time.monotonic()
        self.out: list[tuple[int, str]] = []
        self.err: list[tuple[int, str]] = []
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.out), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.err), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def wait_for(self, seen: Callable[["Command"], bool], what: str, timeout_sec: float = START_SEC) -> None:
        """Wait until ``seen``; fails with everything on the screen."""
        deadline = time.monotonic() + timeout_sec
        with self._changed:
            while not seen(self):
                left = deadline - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not any(r.is_alive() for r in self._readers)):
                    raise AssertionError(f"no {what} within {timeout_sec} s:\n{self.screen()}")
                self._changed.wait(min(left, 0.2))

    def wait_for_line(self, text: str, timeout_sec: float = START_SEC) -> None:
        self.wait_for(lambda c: any(text in line for _, line in [*c.out, *c.err]), repr(text), timeout_sec)

    def stop(self, number: int = signal.SIGTERM, timeout_sec: float = 40) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.end(timeout_sec)

    def end(self, timeout_sec: float = START_SEC) -> int:
        """Wait for the end and return the exit code."""
        try:
            code = self.process.wait(timeout_sec)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end within {timeout_sec} s:\n{self.screen()}") from None
        for reader in self._readers:
            reader.join(5)
        return code

    def lines(self) -> list[str]:
        return [line for _, line in self.out]

    def records(self) -> list[dict[str, Any]]:
        """The JSON lines of standard output."""
        return [json.loads(line) for line in self.lines()]

    def screen(self) -> str:
        return "\n".join(line for _, line in sorted([*self.out, *self.err]))

    def _read(self, stream: Any, lines: list[tuple[int, str]]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    lines.append((time.time_ns() // 1_000_000, line.decode("utf-8", "replace").rstrip("\n")))
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


class Checkout:
    """A copy of the project as git would give it, with the installed environment of this one."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.inbox = folder / "inbox"
        self._drops = 0
        self._running: list[Command] = []
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)
        # The set-up would go through the link, and make anew an environment that others may be using.
        installed = ROOT / ".venv" / "installed" / "requirements.lock"
        assert installed.exists() and installed.read_bytes() == (ROOT / "requirements.lock").read_bytes(), (
            ".venv is not what requirements.lock says: run tests/run.sh --version first"
        )
        (folder / ".venv").symlink_to(ROOT / ".venv")

    def run(self, *arguments: str, environ: dict[str, str] | None = None, within: Sequence[str] = ()) -> Command:
        """Start ``./spark-submit.sh`` with a bare environment, by a command ``within`` which it runs, if one is named."""
        bare = {name: os.environ[name] for name in ("PATH", "JAVA_HOME", "SPARK_SUBMIT_OPTS") if name in os.environ}
        command = Command([*within, "./spark-submit.sh", *arguments], {**bare, **(environ or {})}, self.root)
        self._running.append(command)
        return command

    def drop(self, name: str, *requests: dict[str, Any] | str) -> None:
        """Put a file into the inbox in the way that is documented: write elsewhere, rename in."""
        self.inbox.mkdir(exist_ok=True)
        self._drops += 1
        work = self.root / f"drop-{self._drops}"
        work.write_text(
            "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in requests), encoding="utf-8"
        )
        work.rename(self.inbox / name)

    def status(self, *options: str) -> dict[str, Any]:
        command = self.run("jobs/status.py", "--format", "json", *options)
        assert command.end(30) == 0, command.screen()
        return command.records()[0]

    def rejects(self) -> list[dict[str, Any]]:
        """What is in the rejects folder, by file and line."""
        paths = (self.root / "rejects").glob("*.jsonl")
        records = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
        return sorted(records, key=lambda r: (r["file"], r["line"] or 0))

    def close(self) -> None:
        for command in self._running:
            if command.process.poll() is None:
                command.process.send_signal(signal.SIGTERM)
                try:
                    command.process.wait(30)
                except subprocess.TimeoutExpired:
                    command.process.kill()


def processes_of(folder: Path) -> list[str]:
    """The command lines of processes that run in or name a folder."""
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if process.pid != os.getpid() and (
            str(folder) in " ".join(words) or str(process.info["cwd"] or "").startswith(str(folder))
        ):
            found.append(f"{process.pid}: {' '.join(words)[:200]}")
    return found
