"""What the set-up needs of processes and file locks, beyond the standard library."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.005

# Loaded here: between fork and exec nothing may be imported.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def dies_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` that lets the kernel send the child SIGTERM when this process ends, however it ends.

    Linux only; elsewhere it does nothing. The kernel watches the thread that started the child, so start it from one that stays.
    """
    parent_pid = os.getpid()

    def arrange() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent_pid:  # it ended before we asked
                os.kill(os.getpid(), signal.SIGTERM)

    return arrange


def open_standard_fds() -> None:
    """Open on /dev/null those of stdin, stdout and stderr that were closed, so that no file of ours gets their numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def open_lock(path: str | os.PathLike[str]) -> int:
    """Open a lock file. The descriptor isn't inherited by programs that are started, unless passed on by number."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return True as soon as ``condition`` holds, False if it doesn't within ``timeout_s``.

    For what has nothing to wait on, like a lock with a deadline.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
