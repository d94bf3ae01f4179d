"""Is a file complete, or is somebody still writing it?

The kernel knows best: a read lease is refused with EAGAIN while any process has the file open for writing, so no event has
to be seen, and a file that lay there before the job started is judged as well as a new one. There is no lease on a file of
another user (EACCES without CAP_LEASE), outside Linux, or on a file system that other machines write to, where this kernel
doesn't know all the writers. There a file is complete when inotify has reported its close; without that, when its size and
times have not changed for a quiet period, a longer one if inotify saw it created (``inspection.OPEN_QUIET_PERIOD_MS``).

A lease that somebody's ``open`` breaks sends SIGIO, which kills a process that doesn't expect it, and a break can come
in the microseconds between taking the lease and dropping it. So the signal is changed to SIGURG first, which everybody
ignores unless they asked for it. No process-wide signal handler is touched.
"""

import errno
import fcntl
import math
import os
import signal
from enum import Enum

# File systems whose files no other kernel can write. Others may grant a lease that says nothing about remote writers.
_LOCAL_FILE_SYSTEMS = {
    "ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs",
}  # fmt: skip


class Writers(Enum):
    """Who has a file open for writing."""

    NONE = "none"
    SOME = "some"
    UNKNOWN = "unknown"


def writers_of(descriptor: int) -> Writers:
    """Ask the kernel whether anybody has the file open for writing.

    Args:
        descriptor: opened read-only by the caller; a descriptor open for writing would count as a writer itself.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return Writers.UNKNOWN
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as exc:
        return Writers.SOME if exc.errno == errno.EAGAIN else Writers.UNKNOWN
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return Writers.NONE


def leases_are_reliable(path: str | os.PathLike[str], mounts: str = "/proc/self/mountinfo") -> bool:
    """Return whether the file system of ``path`` is written by this kernel alone, so that ``writers_of`` knows all."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                fields, _, rest = line.partition(" - ")
                point = fields.split(" ")[4].replace("\\040", " ")
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):  # the last of two mounts on one point is the visible one
                    best, kind = point, rest.split(" ")[0]
    except (OSError, IndexError):
        return False
    return kind in _LOCAL_FILE_SYSTEMS


class Stability:
    """Remembers since when each file has looked the same. Times are monotonic milliseconds."""

    def __init__(self, quiet_period_ms: float):
        self._quiet_period_ms = quiet_period_ms
        self._seen: dict[str, tuple[tuple[int, ...], float]] = {}

    def is_stable(self, name: str, status: os.stat_result, now_ms: float, quiet_period_ms: float | None = None) -> bool:
        """Return whether ``name`` has looked as ``status`` says for ``quiet_period_ms``; the first look starts the clock."""
        # The inode change time moves with a rename, ours or the one that completed the file; so it is not part of the look.
        look = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)
        known = self._seen.get(name)
        if known is None or known[0] != look:
            self._seen[name] = (look, now_ms)
            return self._quiet_period_ms <= 0
        return now_ms - known[1] >= (self._quiet_period_ms if quiet_period_ms is None else quiet_period_ms)

    def carry_over(self, old: str, new: str) -> None:
        """Take a file that was judged complete and then renamed as stable, as long as it looks as it did."""
        if old in self._seen:
            self._seen[new] = (self._seen.pop(old)[0], -math.inf)

    def forget_all_but(self, names: set[str]) -> None:
        """Forget files that are gone."""
        if self._seen:
            self._seen = {name: seen for name, seen in self._seen.items() if name in names}
