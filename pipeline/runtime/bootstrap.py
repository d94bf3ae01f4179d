"""Bring ``.venv`` up to date with a lock file, then become its Python.

    python bootstrap.py LOCK ARGUMENT...

Runs before anything is installed: standard library only, nothing of ours, on whatever Python spark-submit.sh found.

``.venv/installed/`` holds a copy of each lock file that is installed. It is removed before anything else is changed, so an
environment without it is one whose installation was interrupted at some point, and is made anew.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

# The test requirements contain those of the jobs.
CONTAINED = {"requirements-test.lock": ("requirements.lock",)}
ERROR_LINES = 5  # of the log, shown when a step fails


class SetupError(Exception):
    """The environment can't be made; the text is one sentence for the user."""


def say(text: str) -> None:
    """Print to stderr; stdout belongs to what is started afterwards."""
    print(text, file=sys.stderr, flush=True)


def update(root: Path, lock: str) -> None:
    """Install ``lock`` into ``.venv`` unless it is installed. Of several starts at once, one does it and the others wait.

    Raises:
        SetupError: Python or pip can't do it.
    """
    venv, log = root / ".venv", root / ".duetime" / "setup.log"
    python, installed = venv / "bin" / "python", venv / "installed"
    log.parent.mkdir(mode=0o700, exist_ok=True)  # messages will be in there
    with open(log.with_name("setup.lock"), "wb") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another start is setting up this checkout: waiting for it.")
            fcntl.flock(guard, fcntl.LOCK_EX)
        stamp, wanted = installed / lock, (root / lock).read_bytes()
        if python.exists() and stamp.exists() and stamp.read_bytes() == wanted:
            return
        started_s = time.monotonic()
        log.write_bytes(b"")
        if python.exists() and installed.is_dir():
            say(f"Bringing .venv up to date; {log} shows how far it is.")
            shutil.rmtree(installed)
        else:
            say(
                f"Setting up in .venv, once: 600 MB to download, 900 MB on disk, a minute or two; {log} shows how far it is."
            )
            shutil.rmtree(installed, ignore_errors=True)
            run_step(
                [sys.executable, "-m", "venv", "--clear", str(venv)], root, log, guard.fileno(),
                f"{sys.executable} can't make virtual environments: install its venv module"
                " (Debian, Ubuntu: apt install python3-venv), then start again.",
            )  # fmt: skip
        run_step(
            [str(python), "-m", "pip", "install", "-r", str(root / lock)], root, log, guard.fileno(),
            f"The packages could not be installed: put right what {log} says, then start again.",
        )  # fmt: skip
        for packages in venv.glob("lib/python*/site-packages"):
            # Programs that .venv/bin/python runs import duetime, too. Relative, so that a checkout can be moved or copied.
            (packages / "duetime-checkout.pth").write_text("../../../..\n")
        installed.mkdir()
        for name in (lock, *CONTAINED.get(lock, ())):
            shutil.copyfile(root / name, installed / name)
        say(f"Set up in {time.monotonic() - started_s:.0f} s.")


def run_step(command: list[str], root: Path, log: Path, guard_fd: int, failure: str) -> None:
    """Run a tool with its output in ``log``.

    It inherits the lock, so that a tool which outlives a killed start can't write into the environment of the next one.

    Raises:
        SetupError: the tool failed; the text is ``failure``.
    """
    environ = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_USER="0")
    environ.pop("PYTHONPATH", None)
    with open(log, "ab") as output:
        code = subprocess.call(
            command, cwd=root, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(guard_fd,)
        )
    if code != 0:
        for line in log.read_text(errors="replace").splitlines()[-ERROR_LINES:]:
            say(f"    {line[:200]}")
        raise SetupError(failure)


def main() -> None:
    lock, *arguments = sys.argv[1:]
    root = Path(__file__).resolve().parents[2]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        update(root, lock)
    except KeyboardInterrupt:
        say("Stopped; the next start sets up again.")
        sys.exit(128 + signal.SIGINT)
    except SetupError as error:
        say(str(error))
        sys.exit(1)
    except OSError as error:
        say(f"Setting up failed ({error}): put that right, then start again.")
        sys.exit(1)
    python = root / ".venv" / "bin" / "python"
    os.execv(python, [str(python), "-P", *arguments])


if __name__ == "__main__":
    main()
