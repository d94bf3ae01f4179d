"""``jobs/drain.py`` on a terminal: the line at rest comes and goes, and no file or pipe ever gets it."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config import ROOT
from tests.drain.screen import Screen
from tests.drain.test_command import schedule
from tests.servers import RealServer

# What a terminal program does for a shell: the terminal becomes the one of its session.
ON_A_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


class OnTerminal:
    """A command on a terminal of its own, and everything that came out there."""

    def __init__(self, server: RealServer, *options: str, redirect: str = "", before: str = "true") -> None:
        self.seen = b""
        self._changed = threading.Condition()
        self._controller, terminal = os.openpty()
        drain = [sys.executable, "-P", str(ROOT / "jobs" / "drain.py"), "--redis", server.url, *options]
        command = ["bash", "-c", f'{before}; "$@" {redirect}; echo ended', "bash", *drain] if redirect else drain
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, *command],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm", "LC_ALL": "C.UTF-8"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._controller, 65_536)
            except OSError:  # nobody has the terminal any more
                return
            with self._changed:
                self.seen += data
                self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text.encode() in self.seen, 30), self.seen

    def press_ctrl_c(self) -> None:
        os.write(self._controller, b"\x03")

    def rows_at_the_end(self) -> list[str]:
        self.process.wait(30)
        self._reader.join(30)
        screen = Screen()
        screen.show(self.seen.decode())
        return screen.rows

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(30)
        os.close(self._controller)


@contextmanager
def on_terminal(server: RealServer, *options: str, redirect: str = "", before: str = "true") -> Iterator[OnTerminal]:
    drain = OnTerminal(server, *options, redirect=redirect, before=before)
    try:
        yield drain
    finally:
        drain.close()


def server_ms(server: RealServer) -> int:
    with server.client() as client:
        seconds, microseconds = client.time()
    return int(seconds) * 1_000 + int(microseconds) // 1_000


def said(rows: list[str]) -> list[str]:
    """Rows without their times and the numbers that differ from run to run."""
    return [row.partition(": ")[2].partition(",")[0] or row for row in rows]


def test_the_line_comes_and_goes_and_leaves_nothing_behind(server: RealServer) -> None:
    schedule(server, *[server_ms(server) + 4_000] * 2, server_ms(server) + 3_600_000)
    with on_terminal(server) as drain:
        drain.wait_for("waiting 3 · next due in ")
        drain.wait_for("message 2")
        drain.wait_for("waiting 1 · next due in 59 min ")
        drain.press_ctrl_c()
        rows = drain.rows_at_the_end()
        assert drain.process.returncode == 0
    assert said(rows) == ["message 1", "message 2", "delivered 2 messages", ""]
    assert rows[2].endswith("; 0 stale, 0 reclaimed")
    assert re.search(rb"\x1b\[J[-0-9]+ [:0-9]+ drain: delivered 2 messages", drain.seen), "a log line needs room, too"


def test_errors_in_a_file(server: RealServer, tmp_path: Path) -> None:
    schedule(server, server_ms(server) + 2_500)
    with on_terminal(server, "--until-empty", redirect=f"2> {tmp_path}/errors") as drain:
        assert said(drain.rows_at_the_end()) == ["message 1", "ended", ""]
        assert b"\x1b" not in drain.seen
    assert said((tmp_path / "errors").read_text().splitlines()) == ["delivered 1 message"]


def test_output_in_a_pipe_whose_reader_may_print_to_the_same_terminal(server: RealServer) -> None:
    schedule(server, server_ms(server) + 2_500)
    with on_terminal(server, "--until-empty", redirect="| cat") as drain:
        assert sorted(said(drain.rows_at_the_end())) == ["", "delivered 1 message", "ended", "message 1"]
        assert b"\x1b" not in drain.seen


def test_output_in_a_file_leaves_the_line_on_the_terminal(server: RealServer, tmp_path: Path) -> None:
    schedule(server, server_ms(server) + 2_500)
    with on_terminal(server, "--until-empty", redirect=f"> {tmp_path}/output") as drain:
        drain.wait_for("waiting 1 · next due in ")
        assert said(drain.rows_at_the_end()) == ["delivered 1 message", "ended", ""]
    assert said((tmp_path / "output").read_text().splitlines()) == ["message 1"]


def test_in_the_background_the_terminal_is_somebody_elses(server: RealServer) -> None:
    schedule(server, server_ms(server) + 2_500)
    with on_terminal(server, "--until-empty", redirect="& wait", before="set -m") as drain:
        assert {"message 1", "delivered 1 message", "ended"} < set(said(drain.rows_at_the_end()))
        assert b"\x1b" not in drain.seen
