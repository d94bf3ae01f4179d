"""The command without arguments: ingest, drain, with a cold folder hydrate, and the dashboard, side by side on this machine.

Each child is in a session of its own, so a terminal's Ctrl-C reaches the supervisor alone, which then stops them in order.
If the supervisor is killed, the kernel sends them SIGTERM (Linux), and the private server stays until they have ended, as
each holds a share in it.

A child writes a line to the descriptor named by ``DUETIME_READY_FD`` when it is so far: ``open`` when it has its input for
itself, ``up`` when it works. Drain is started when ingest is ``open``: a second copy, whose input is taken, takes no messages.

The dashboard is started when ingest is ``up``, with a higher niceness, so that no message waits for it; messages go on without it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline import __version__
from pipeline.config import RedisSettings, Settings
from pipeline.core.errors import ConfigError
from pipeline.core.text import redact_url
from pipeline.runtime.class_archive import MAKE
from pipeline.runtime.dashboard import Dashboard
from pipeline.runtime.process import dies_with_parent, wait_until
from pipeline.runtime.server import PrivateServer, call_server
from pipeline.runtime.submit import Program, plan_program
from pipeline.store.keys import keys_of

STOP_TIMEOUT_S = 30.0
REST_TIMEOUT_S = 5.0
NICENESS = 10  # of the dashboard
REPORT_S = 5.0  # how often a start that takes long is reported
POLL_S = 0.02
READY_FD = "DUETIME_READY_FD"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def say(text: str, *, stays: bool = True) -> None:
    """Print to stderr; a stderr that is gone is no reason to stop. On a terminal a line that does not stay is written over."""
    with contextlib.suppress(OSError):
        is_terminal = sys.stderr.isatty()
        clear = "\x1b[K" if is_terminal else ""
        print(f"{clear}{text}", end="\n" if stays or not is_terminal else "\r", file=sys.stderr, flush=True)


def progress_line(seconds: float) -> str:
    """Return the line that does not stay, no longer than the time before a message: the drain loop may print over it."""
    return f"Spark starts ... {seconds:.0f} s"


@dataclass(slots=True)
class Child:
    """One of the jobs. ``ready_fd`` is our end of its pipe, ``reached`` what it has written there."""

    name: str
    process: subprocess.Popen[bytes]
    ready_fd: int
    started_s: float = field(default_factory=time.monotonic)
    reached: bytes = b""

    @classmethod
    def start(
        cls, name: str, program: Program, *, stdout: int | None, share_fds: Sequence[int], niceness: int = 0
    ) -> "Child":
        """Start ``program``; it inherits ``share_fds`` and its end of the pipe, and no other descriptor."""
        bind_to_us = dies_with_parent()

        def arrange() -> None:
            os.nice(niceness)
            bind_to_us()

        ready_fd, child_fd = os.pipe()
        os.set_blocking(ready_fd, False)
        try:
            process = subprocess.Popen(
                program.argv,
                env={**program.environ, READY_FD: str(child_fd)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                pass_fds=(child_fd, *share_fds),
                start_new_session=True,
                preexec_fn=arrange,  # noqa: PLW1509 (there are no threads)
            )
        finally:
            os.close(child_fd)
        return cls(name, process, ready_fd)

    def has_reached(self, stage: bytes) -> bool:
        """Return whether it has written ``stage``, or a later one."""
        with contextlib.suppress(BlockingIOError):
            self.reached += os.read(self.ready_fd, 64)
        return stage in self.reached or b"up" in self.reached

    def seconds(self) -> float:
        """Return for how long it has been running."""
        return time.monotonic() - self.started_s

    def is_gone(self) -> bool:
        """Return whether it and all that it has started have ended: Spark's JVM takes a moment longer."""
        if self.process.poll() is None:
            return False
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # macOS says this of what is about to go
        return False

    def kill(self) -> None:
        """End it and all that it has started, now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def supervise(root: Path, settings: Settings) -> int:
    """Run everything until SIGINT or SIGTERM, or until a child ends by itself. Returns the exit code.

    Raises:
        ConfigError: There is no Java or no server program.
        StoreError: The private server didn't start.
    """
    state_dir = Path(settings.local.state)
    with contextlib.ExitStack() as stack:
        server = None if settings.redis.url else PrivateServer(state_dir)
        if server:
            stack.callback(server.release)
            server.acquire()
        stops = _note_stop_signals()
        environ = os.environ | {MAKE: "1"} | ({"REDIS_URL": server.url} if server else {})
        programs = {
            name: plan_program([str(root / "jobs" / f"{name}.py")], environ, root=root, state_dir=state_dir)
            for name in ("ingest", "drain", *(["hydrate"] if settings.cold.folder else []))
        }
        os.umask(0o077)  # what anybody makes from here on may hold messages: inbox, rejects, checkpoints, scratch files
        dashboard = Dashboard(state_dir, settings.api.port)
        inbox = _find_inbox(settings)
        sample = root / "conf" / "sample.jsonl" if server and wants_sample(server, settings.redis) else None
        say(f"Duetime {__version__} is starting: some 15 seconds, up to a minute on a busy machine. Ctrl-C stops it.")
        say(f"  redis  {f'private, kept in {server.directory}' if server else redact_url(settings.redis.url)}")
        say(f"  input  {f'{inbox}: drop .json, .jsonl and .csv files there' if inbox else 'as configured'}")
        children: list[Child] = []

        def start(name: str) -> Child:
            # stdout is for messages alone: drain has it, and what ingest prints goes to stderr.
            stdout = None if name == "drain" else sys.stderr.fileno()
            share_fds = [server.users_fd] if server else []
            program, niceness = programs.get(name), 0
            if program is None:
                own = {**environ, **dashboard.open()}
                program = plan_program([str(root / "jobs" / "serve.py")], own, root=root, state_dir=state_dir)
                niceness = NICENESS
            children.append(Child.start(name, program, stdout=stdout, share_fds=share_fds, niceness=niceness))
            return children[-1]

        try:
            exit_code = _watch(start, list(programs)[1:], children, stops, dashboard, sample, inbox)
        finally:
            _stop_children(children, stops)
    say("Stopped.")
    return exit_code


def _note_stop_signals() -> list[int]:
    """Return a list to which stop signals are added from now on, instead of ending or interrupting anything."""
    received: list[int] = []
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup means what it says
            signal.signal(number, lambda number, _: received.append(number))
    return received


def wants_sample(server: PrivateServer, settings: RedisSettings) -> bool:
    """Return whether the namespace has never held a message, and nobody has switched the sample off."""
    names = " ".join(key for keys in keys_of(settings) for key in (keys.buckets(), keys.counters()))
    is_empty = call_server(server.socket, f"EXISTS {names}".encode()) == b":0\r\n"
    return is_empty and os.environ.get("DUETIME_SAMPLE") != "0"


def _find_inbox(settings: Settings) -> Path | None:
    """Return the folder that takes files on this machine; None if requests come another way."""
    is_folder = settings.ingest.source == "files" and "://" not in settings.ingest.input
    return Path(settings.ingest.input) if is_folder else None


def _watch(
    start: Callable[[str], Child],
    others: Sequence[str],
    children: list[Child],
    stops: list[int],
    dashboard: Dashboard,
    sample: Path | None,
    inbox: Path | None,
) -> int:
    """Start ingest, then the ``others``, then the dashboard, and watch them until the end. Returns the exit code."""
    ingest = start("ingest")
    up: list[Child] = []
    next_report_s = REPORT_S
    showing = _Showing(start, dashboard)
    while not stops:
        if len(children) == 1 and ingest.has_reached(b"open"):
            for name in others:
                start(name)
        showing.step(ingest in up)
        for child in children:
            if child is showing.child:
                continue
            if child not in up and child.has_reached(b"up"):
                up.append(child)
                say(f"{child.name} is up ({child.seconds():.1f} s).")
                if child is ingest and sample and inbox:
                    drop_sample(sample, inbox)
            if (code := child.process.poll()) is not None:
                say(f"{child.name} ended by itself, {_how(code)}: stopping the rest; what it printed above says why.")
                return 2 if code == 2 else 1
        if ingest not in up and ingest.seconds() >= next_report_s:
            say(progress_line(next_report_s), stays=False)
            next_report_s += REPORT_S
        time.sleep(POLL_S)
    return 0


@dataclass(slots=True)
class _Showing:
    """Starts the dashboard when it is time and says where it is, or that it has ended: nothing of that is a reason to stop."""

    start: Callable[[str], Child]
    dashboard: Dashboard
    child: Child | None = None
    is_given_up: bool = False

    def step(self, is_time: bool) -> None:
        """Do what is to be done now."""
        if self.is_given_up or (self.child is None and not is_time):
            return
        if self.child is None:
            try:
                self.child = self.start("serve")
            except (OSError, ConfigError) as error:
                self._give_up(str(error).rstrip("."))
        elif b"up" not in self.child.reached and self.child.has_reached(b"up"):
            say(f"Dashboard: {self.dashboard.address()}")
        elif (code := self.child.process.poll()) is not None:
            self._give_up(f"it ended {_how(code)}, and what it printed above says why")

    def _give_up(self, why: str) -> None:
        self.is_given_up = True
        say(f"There is no dashboard: {why}. Messages go on without it.")


def _how(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by signal {-code} ({signal.strsignal(-code)})"


def _stop_children(children: list[Child], stops: list[int]) -> None:
    """Stop the children and wait for them; after the deadline, or at a second Ctrl-C, kill them."""
    stops_before = len(stops)
    running = [child for child in children if child.process.poll() is None]
    if running:
        say("Stopping after the current batch and claim. Press Ctrl-C again to stop now.")
    for child in running:  # ingest first, so that nothing is stored once drain has stopped
        child.process.terminate()

    def have_ended() -> bool:
        return all(child.process.poll() is not None for child in running)

    wait_until(lambda: have_ended() or len(stops) > stops_before, STOP_TIMEOUT_S)
    if not have_ended():
        say(
            "Killing what still runs: nothing accepted is lost, and claimed messages are redelivered after their lease."
        )
    for child in running:
        if child.process.poll() is None:
            child.kill()
            child.process.wait()
    wait_until(lambda: all(child.is_gone() for child in children), REST_TIMEOUT_S)


def drop_sample(sample: Path, inbox: Path) -> None:
    """Copy ``sample`` into ``inbox``, written now, so that its delays count from now. A file of that name is never replaced."""
    try:
        content = sample.read_bytes()
        with open(inbox / sample.name, "xb") as file:  # left alone by ingest while it is open
            file.write(content)
    except OSError as error:
        say(f"The sample could not be dropped into {inbox} ({error.strerror}); everything else goes on.")
        return
    say(f"Dropped {sample.name} into {inbox.name}/: its messages are due in 1 to 4 seconds.")
