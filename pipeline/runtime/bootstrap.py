"""Bring ``.venv`` up to date with a lock file, then become its Python.

    python bootstrap.py LOCK ARGUMENT...

Runs before anything is installed: standard library only, nothing of ours, on whatever Python spark-submit.sh found.

What holds, also after Ctrl-C or kill -9 at any point:

- ``.venv/installed/LOCK`` is a copy of a lock file, there only while everything in it is installed.
- ``.venv/unfinished`` is there while an installation runs. Whoever finds it left over throws the environment away:
  a package that was cut off half way looks installed to the tools.
- ``.venv/lock`` is locked by whoever installs, and by the tools it runs, so a killed start can't leave a tool behind
  that writes into the next one's environment.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

UV = "uv>=0.13,<1"  # UV_SYSTEM_CERTS is known from here on
PROGRESS_S = 10.0  # without a terminal, how often a long step says that it is alive
# The test requirements are the run-time ones and more. Both files are given, so the tools check that they agree.
LOCKS = {
    "requirements.lock": ("requirements.lock",),
    "requirements-test.lock": ("requirements.lock", "requirements-test.lock"),
}


Command = Sequence[str | Path]


class SetupError(Exception):
    """The environment can't be made; the text is one sentence for the user."""


def say(text: str) -> None:
    """Tell the user on stderr; stdout belongs to what is started afterwards."""
    print(text, file=sys.stderr, flush=True)


class Environment:
    """The virtual environment of one checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.log = self.venv / "setup.log"
        self.lock_fd = -1

    def is_current(self, locks: Sequence[str]) -> bool:
        """Tell whether every lock file is installed exactly as it is now."""
        with contextlib.suppress(OSError):
            installed = self.venv / "installed"
            return self.python.exists() and all(
                (installed / name).read_bytes() == (self.root / name).read_bytes() for name in locks
            )
        return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the installation lock, waiting for another start that has it."""
        self.venv.mkdir(exist_ok=True)
        self.lock_fd = os.open(self.venv / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Another start is setting up this checkout: waiting for it.")
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(self.lock_fd)

    def update(self, locks: Sequence[str]) -> None:
        """Install the lock files unless they are installed.

        Raises:
            SetupError: Python or the tools can't do it.
        """
        with self.locked():
            if self.is_current(locks):  # the start we waited for has done it
                return
            started_s = time.monotonic()
            unfinished = self.venv / "unfinished"
            if unfinished.exists() or not self.works():
                say("Setting up in .venv, once: about 600 MB are downloaded, 900 MB of disk are used.")
                self.clear()
            else:
                say("Bringing .venv up to date.")
            unfinished.touch()
            shutil.rmtree(self.venv / "installed", ignore_errors=True)
            self.log.write_bytes(b"")
            if not self.python.exists():
                self.create()
            self.install(locks)
            self.stamp(locks)
            unfinished.unlink()
            say(f"Set up in {time.monotonic() - started_s:.0f} s.")

    def works(self) -> bool:
        """Tell whether the environment's Python runs and is new enough; a system upgrade may have removed it."""
        check = "import sys; sys.exit(sys.version_info < (3, 11))"
        with contextlib.suppress(OSError):
            return subprocess.run([self.python, "-c", check], capture_output=True, check=False).returncode == 0
        return False

    def clear(self) -> None:
        """Empty ``.venv``; the lock stays, or two starts could each hold "the" lock."""
        for path in self.venv.iterdir():
            if path.name == "lock":
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def create(self) -> None:
        """Make the environment, without pip where the system's Python lacks ensurepip (Debian's does)."""
        venv: Command = [sys.executable, "-m", "venv"]
        if self.run("creating .venv", [*venv, self.venv]):
            return
        shutil.rmtree(self.venv / "bin", ignore_errors=True)
        if not self.run("creating .venv without pip", [*venv, "--without-pip", self.venv]):
            raise SetupError(
                f"{sys.executable} can't make virtual environments: install its venv module"
                f" (Debian, Ubuntu: apt install python3-venv), then start again; {self.log} has the details."
            )

    def install(self, locks: Sequence[str]) -> None:
        """Install the lock files with uv, or with pip where uv can't be had or fails."""
        files = [word for name in locks for word in ("-r", str(self.root / name))]
        pip = self.find_pip()
        uv = self.find_uv(pip)
        # uv draws its own progress bars if it can see the terminal.
        if uv and self.run("installing packages", [uv, "pip", "install", "--python", self.python, *files], show=True):
            return
        if pip and self.run("installing packages with pip, as uv could not", [*pip, "install", *files]):
            return
        if not (pip or uv):
            raise SetupError(
                f"{sys.executable} has neither pip nor ensurepip: install them"
                " (Debian, Ubuntu: apt install python3-venv), then start again."
            )
        for line in self.log.read_text(errors="replace").splitlines()[-3:]:
            say(f"    {line[:200]}")
        raise SetupError(f"The packages could not be installed: put right what {self.log} says, then start again.")

    def find_pip(self) -> Command | None:
        """Return a command that installs into the environment: its own pip, else the system's; None if there is none."""
        candidates: tuple[Command, ...] = (
            [self.python, "-m", "pip"],
            [sys.executable, "-m", "pip", "--python", self.python],
        )
        for pip in candidates:
            if self.run("", [*pip, "--version"]):
                return pip
        return None

    def find_uv(self, pip: Command | None) -> str | None:
        """Return uv's path: in the environment, installed there now, else on PATH; None if there is none."""
        uv = self.venv / "bin" / "uv"
        if uv.exists() or (pip and self.run("installing uv", [*pip, "install", "--quiet", UV]) and uv.exists()):
            return str(uv)
        return shutil.which("uv")

    def stamp(self, locks: Sequence[str]) -> None:
        """Record what is installed; the directory appears whole or not at all."""
        fresh = self.venv / "installed.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        for name in locks:
            shutil.copyfile(self.root / name, fresh / name)
        fresh.rename(self.venv / "installed")

    def run(self, phase: str, command: Command, *, show: bool = False) -> bool:
        """Run a tool to its end and tell whether it succeeded; it is never left running.

        Its output goes to the log, or with ``show`` to the terminal if there is one. An empty phase is not announced.
        """
        environ = dict(os.environ, UV_SYSTEM_CERTS="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_USER="0")
        environ.pop("PYTHONPATH", None)
        started_s = time.monotonic()
        if phase:
            say(f"  {phase}")
        with open(self.log, "ab") as log:
            log.write(f"$ {' '.join(map(str, command))}\n".encode())
            log.flush()
            output = sys.stderr if show and sys.stderr.isatty() else log
            child = subprocess.Popen(
                command, cwd=self.root, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=(self.lock_fd,),
            )  # fmt: skip
            try:
                while True:
                    try:
                        return child.wait(PROGRESS_S) == 0
                    except subprocess.TimeoutExpired:
                        if output is log:
                            say(f"  {phase}: {time.monotonic() - started_s:.0f} s")
            except BaseException:
                child.terminate()
                child.wait()
                raise


def main() -> None:
    lock, *arguments = sys.argv[1:]
    environment = Environment(Path(__file__).resolve().parents[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        environment.update(LOCKS[lock])
    except KeyboardInterrupt:
        say("Stopped; the next start sets up again.")
        sys.exit(128 + signal.SIGINT)
    except SetupError as error:
        say(str(error))
        sys.exit(1)
    except OSError as error:
        say(f"Setting up failed, as {error}: put that right, then start again.")
        sys.exit(1)
    os.execv(environment.python, [str(environment.python), "-P", *arguments])


if __name__ == "__main__":
    main()
