"""The command without arguments: ingest and drain, side by side on this machine, as long as somebody watches.

Each child is in a session of its own, so a terminal's Ctrl-C reaches the supervisor alone, which then stops them in order.
If the supervisor is killed, the kernel sends them SIGTERM (Linux), and the private server stays until they have ended, as
each holds a share in it.

A child writes ``1\\n`` to the descriptor named by ``DUETIME_READY_FD`` when it is up.
"""

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pipeline import __version__
from pipeline.config import Settings
from pipeline.core.errors import ConfigError
from pipeline.runtime.process import dies_with_parent, wait_until
from pipeline.runtime.server import PrivateServer
from pipeline.runtime.submit import Program, plan_program

STOP_TIMEOUT_S = 30.0
REST_TIMEOUT_S = 5.0
SAMPLE_NAMES_MAX = 100
READY_FD = "DUETIME_READY_FD"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def say(text: str) -> None:
    """Tell the user on stderr; a stderr that is gone is no reason to stop."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@dataclass(slots=True)
class Child:
    """One of the two jobs. ``ready_fd`` is our end of its pipe, -1 once it is closed."""

    name: str
    process: subprocess.Popen[bytes]
    ready_fd: int
    started_s: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, name: str, program: Program, *, stdout: int | None, share_fds: Sequence[int]) -> "Child":
        """Start ``program``; it inherits ``share_fds`` and its end of the pipe, and no other descriptor."""
        ready_fd, child_fd = os.pipe()
        try:
            process = subprocess.Popen(
                program.argv,
                env={**program.environ, READY_FD: str(child_fd)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                pass_fds=(child_fd, *share_fds),
                start_new_session=True,
                preexec_fn=dies_with_parent(),  # noqa: PLW1509 (there are no threads)
            )
        finally:
            os.close(child_fd)
        return cls(name, process, ready_fd)

    def is_gone(self) -> bool:
        """Tell whether it and all that it has started have ended: Spark's JVM takes a moment longer."""
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


class Watch:
    """Waits for signals, for children that end and for children that are up, all in one place."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup_fd, self._signal_fd = os.pipe()
        for fd in (self._wakeup_fd, self._signal_fd):
            os.set_blocking(fd, False)
        self._selector.register(self._wakeup_fd, selectors.EVENT_READ)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Let signals wake ``wait`` instead of interrupting whatever runs."""
        before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
        for number, handler in before.items():
            if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup means what it says
                signal.signal(number, lambda *_: None)
        fd_before = signal.set_wakeup_fd(self._signal_fd, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd_before)
            for number, handler in before.items():
                signal.signal(number, handler)

    def add(self, child: Child) -> None:
        self._selector.register(child.ready_fd, selectors.EVENT_READ, child)

    def wait(self, timeout_s: float | None = None) -> tuple[list[Child], bool]:
        """Wait for anything to happen. Returns the children that are up now, and whether a stop signal came."""
        ready: list[Child] = []
        stop = False
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                stop = stop or any(number in STOP_SIGNALS for number in os.read(self._wakeup_fd, 4096))
                continue
            if os.read(key.data.ready_fd, 16):
                ready.append(key.data)
            self._selector.unregister(key.fd)
            os.close(key.fd)
            key.data.ready_fd = -1
        return ready, stop


def supervise(root: Path, settings: Settings) -> int:
    """Run everything until SIGINT or SIGTERM, or until a child ends by itself. Returns the exit code.

    Raises:
        ConfigError: There is no Java or no server program.
        StoreError: The private server didn't start.
    """
    watch = Watch()
    state_dir = Path(settings.local.state)
    with _choose_redis(settings.redis.url, state_dir) as (environ, share_fds), watch.signals():
        programs = {
            name: plan_program([str(root / "jobs" / f"{name}.py")], environ, root=root, state_dir=state_dir)
            for name in ("ingest", "drain")
        }
        inbox = _find_inbox(settings)
        say(f"Duetime {__version__} is starting on this machine, which takes some seconds. Ctrl-C stops it.")
        say(f"  redis  {_without_secrets(settings.redis.url) or f'private, kept in {state_dir}/server'}")
        say(f"  input  {f'{inbox}: drop .json, .jsonl and .csv files there' if inbox else 'as configured'}")
        children: list[Child] = []
        try:
            for name, program in programs.items():
                # stdout is for messages alone: drain has it, and what ingest prints goes to stderr.
                stdout = None if name == "drain" else sys.stderr.fileno()
                children.append(Child.start(name, program, stdout=stdout, share_fds=share_fds))
                watch.add(children[-1])
            exit_code = _watch_children(children, watch, lambda: drop_sample(root / "conf" / "sample.jsonl", inbox))
        finally:
            _stop_children(children, watch)
    say("Stopped.")
    return exit_code


@contextlib.contextmanager
def _choose_redis(url: str, state_dir: Path) -> Iterator[tuple[Mapping[str, str], tuple[int, ...]]]:
    """Yield the children's environment and the descriptors that hold a share in the private server; none with a ``url``."""
    if url:
        yield os.environ, ()
        return
    server = PrivateServer(state_dir)
    try:
        server.acquire()
        yield {**os.environ, "REDIS_URL": server.url}, (server.users_fd,)
    finally:
        server.release()


def _find_inbox(settings: Settings) -> Path | None:
    """Return the folder that takes files on this machine, made if need be; None if requests come another way."""
    if settings.ingest.source != "files" or "://" in settings.ingest.input:
        return None
    inbox = Path(settings.ingest.input)
    try:
        inbox.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The folder {inbox} can't be made ({error.strerror}): configure another ingest.input."
        ) from error
    return inbox


def _without_secrets(url: str) -> str:
    """Return ``url`` without user, password and options, as any of them may be secret."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _watch_children(children: list[Child], watch: Watch, drop: Callable[[], None]) -> int:
    """Watch until the end, announcing what is up; ``drop`` is called when ingest is. Returns the exit code."""
    while True:
        ready, stop = watch.wait()
        for child in ready:
            say(f"{child.name} is up ({time.monotonic() - child.started_s:.1f} s).")
            if child.name == "ingest":
                drop()
        if stop:
            return 0
        for child in children:
            if (code := child.process.poll()) is not None:
                how = f"with exit code {code}" if code >= 0 else f"by signal {-code} ({signal.strsignal(-code)})"
                say(f"{child.name} ended by itself, {how}: stopping the rest; what it printed above says why.")
                return 2 if code == 2 else 1


def _stop_children(children: list[Child], watch: Watch) -> None:
    """Stop the children and wait for them; after the deadline, or at a second Ctrl-C, without their consent."""
    if any(child.process.poll() is None for child in children):
        say("Stopping: what is in hand is finished first; Ctrl-C again doesn't wait for that.")
    for child in children:  # ingest first, so that nothing comes in behind drain's back
        if child.process.poll() is None:
            child.process.terminate()
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while any(child.process.poll() is None for child in children):
        _, stop = watch.wait(max(0.0, deadline_s - time.monotonic()))
        if stop or time.monotonic() >= deadline_s:
            say("Killing what still runs; nothing accepted is lost, and drain's leases run out by themselves.")
            for child in children:
                if child.process.poll() is None:
                    child.kill()
                    child.process.wait()
    wait_until(lambda: all(child.is_gone() for child in children), REST_TIMEOUT_S)


def drop_sample(sample: Path, inbox: Path | None) -> None:
    """Put a copy of ``sample`` into ``inbox`` in one step, written now, so that its delays count from now.

    Nothing is ever replaced: a file of the user may have its name. If it can't be done, that is told, and no more.
    """
    if inbox is None or os.environ.get("DUETIME_SAMPLE") == "0":
        return
    try:
        name = _put_in_place(sample, inbox)
    except OSError as error:
        say(f"The sample could not be dropped into {inbox} ({error.strerror}); everything else goes on.")
        return
    say(f"Dropped {name} into {inbox.name}/: its messages are due in 1 to 4 seconds.")


def _put_in_place(sample: Path, inbox: Path) -> str:
    """Copy ``sample`` into ``inbox`` under the first name that is free, and return that."""
    content = sample.read_bytes()
    work = inbox / f".{sample.name}.{os.getpid()}"
    try:
        work.unlink(missing_ok=True)  # left by a process that had our id
        work.write_bytes(content)
        for number in range(1, SAMPLE_NAMES_MAX + 1):
            target = inbox / (f"{sample.stem}-{number}{sample.suffix}" if number > 1 else sample.name)
            try:
                try:
                    os.link(work, target)
                except FileExistsError:
                    raise
                except OSError:  # a file system without hard links
                    _write_new(target, content)
            except FileExistsError:
                continue
            return target.name
    finally:
        with contextlib.suppress(OSError):
            work.unlink(missing_ok=True)
    raise FileExistsError(errno.EEXIST, f"{SAMPLE_NAMES_MAX} files like {sample.name} are still there")


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that isn't there yet. It is seen half written; ingest leaves it alone while it is open."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        while content:
            content = content[os.write(fd, content) :]
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
