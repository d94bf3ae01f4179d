"""Drain loops as processes: ours as users start it, and the ones that it is compared with. What they write is kept."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from bench.common import ROOT, WORK
from bench.server import Server

START_SEC_MAX, STOP_SEC_MAX = 60.0, 60.0
READ_BYTES = 1 << 16
NULL, PIPE = "/dev/null", "a pipe"  # where a loop writes to

_numbers = itertools.count()

Portion = tuple[int, bytes]  # epoch ns at which it was read


class Loop:
    """A running loop. It is up once ``wait_until_ready`` returns; a rival then waits for ``go``."""

    def __init__(self, command: Sequence[str], output: str, environ: dict[str, str]) -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        self._errors = WORK / f"loop-{next(_numbers)}"
        self._ready, told = os.pipe()
        with open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | environ | {"DUETIME_READY_FD": str(told)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if output == PIPE else subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(told,),
            )
        os.close(told)
        self._about = psutil.Process(self._process.pid)
        self.reader = Reader(self._process.stdout) if self._process.stdout else None

    def wait_until_ready(self) -> None:
        """Wait until the loop is connected and about to begin.

        Raises:
            RuntimeError: it has ended instead, or takes too long.
        """
        watchdog = threading.Timer(START_SEC_MAX, self._process.kill)
        watchdog.start()
        with open(self._ready, "rb") as answer:
            is_up = b"up\n" in answer
        watchdog.cancel()
        if not is_up:
            raise RuntimeError(f"A loop did not start:\n{self._said()}")

    def go(self) -> None:
        """Let a rival begin; ours doesn't wait for it, and begins when it is rung."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"A loop has ended:\n{self._said()}") from None

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def cpu_s(self) -> float:
        """Return the CPU seconds that it has used so far."""
        times = self._about.cpu_times()
        return float(times.user + times.system)

    def rss_bytes(self) -> int:
        """Return the memory that it holds now."""
        return int(self._about.memory_info().rss)

    def peak_rss_bytes(self) -> int:
        """Return the most memory that it ever held; where the kernel doesn't tell, what it holds now."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        except OSError:
            return self.rss_bytes()
        [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def stop(self) -> None:
        """End it as Ctrl-C does, and wait until it is gone and all that it wrote is read.

        Raises:
            RuntimeError: it ended in another way.
        """
        self._process.terminate()
        self._await_end()

    def finish(self) -> None:
        """End its input, and wait for it as ``stop`` does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._await_end()

    def _await_end(self) -> None:
        try:
            code = self._process.wait(STOP_SEC_MAX)
        finally:
            self.kill()
        if code != 0:
            raise RuntimeError(f"A loop ended with exit code {code}:\n{self._said()}")

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        if self.reader:
            self.reader.join()

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")


class Reader:
    """Reads a pipe to its end in a thread, as portions with the time at which each was there."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.portions: list[Portion] = []
        self._pipe = pipe
        self._lines = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while portion := os.read(self._pipe.fileno(), READ_BYTES):
            read_ns = time.time_ns()
            self.portions.append((read_ns, portion))
            with self._changed:
                self._lines += portion.count(b"\n")
                self._changed.notify_all()

    def wait_for_lines(self, count: int, sec_max: float) -> None:
        """Wait until so many lines are read.

        Raises:
            RuntimeError: they do not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._lines >= count, sec_max):
                raise RuntimeError(f"{self._lines} of {count} lines came within {sec_max:.0f} s.")

    def join(self) -> None:
        """Wait for the end of the pipe."""
        self._thread.join()
        self._pipe.close()


def split_lines(portions: Iterable[Portion], ended_early: bool = False) -> Iterator[Portion]:
    """Yield lines without their end, each with the time at which its last byte was read.

    Args:
        ended_early: the loop may have been ended within a line, which is left out.
    """
    rest = b""
    for read_ns, portion in portions:
        *lines, rest = (rest + portion).split(b"\n")
        for line in lines:
            yield read_ns, line
    if rest and not ended_early:
        raise RuntimeError(f"The output ends within a line: {rest[:100]!r}.")


def start_ours(server: Server, output: str, *options: str) -> Loop:
    """Start the drain job as users do, with default settings."""
    return Loop(["./spark-submit.sh", "jobs/drain.py", *options], output, {"REDIS_URL": server.url})


def start_job(server: Server, output: str, *words: str, **environ: str) -> Loop:
    """Start a job by ``words``, which ``./spark-submit.sh`` takes: as it does once it has seen that .venv is up to date."""
    command = [sys.executable, "-P", "-m", "pipeline.runtime.submit", *words]
    return Loop(command, output, {"PYTHONPATH": str(ROOT), "REDIS_URL": server.url, **environ})


def start_rival(server: Server, name: str, output: str) -> Loop:
    """Start a loop of ``bench.rivals``."""
    return Loop([sys.executable, "-P", "-m", "bench.rivals", name, server.url], output, {"PYTHONPATH": str(ROOT)})


def start_pinger(server: Server) -> Loop:
    """Start a client that pings; what it found comes after ``finish``."""
    return Loop([sys.executable, "-P", "-m", "bench.pinger", server.socket], PIPE, {"PYTHONPATH": str(ROOT)})


@contextmanager
def running(loops: Sequence[Loop]) -> Iterator[Sequence[Loop]]:
    """Wait until all are ready; when the block ends with an error, none is left."""
    try:
        for loop in loops:
            loop.wait_until_ready()
        yield loops
    finally:
        for loop in loops:
            loop.kill()
