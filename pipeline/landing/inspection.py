"""Judges what lies in the input folder: take it, wait for it, leave it, or put it aside."""

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from pipeline.landing.names import kind_of
from pipeline.landing.wholeness import Stillness, Writers, leases_tell, writers_of

# Where only inotify knows that a file was created and not closed: how long to believe in a writer that gives no sign of
# life.
OPEN_SETTLE_MS = 60_000.0


class Action(Enum):
    """What to do with one entry of the input folder."""

    TAKE = "take"
    WAIT = "wait"
    IGNORE = "ignore"
    QUARANTINE = "quarantine"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason`` and ``detail`` are set for IGNORE and QUARANTINE."""

    action: Action
    reason: str = ""
    detail: str = ""


class Hints(Protocol):
    """What somebody who watched the folder knows of a file (a ``Watcher``)."""

    def closed(self, name: str) -> bool | None:
        """Whether the writer closed it or renamed it in; False: created, not closed; None: not seen."""
        ...


TAKE, WAIT, GONE = Verdict(Action.TAKE), Verdict(Action.WAIT), Verdict(Action.GONE)


class Inspector:
    """Looks at files without changing anything. Holds what is known of those that have to be still for a while."""

    def __init__(self, input_dir: Path, own_folders: Iterable[Path], settle_ms: float, hints: Hints | None):
        self._prefix = os.path.join(input_dir, "")
        self._own = {os.fspath(folder) for folder in own_folders}
        self._leases_tell = leases_tell(input_dir)
        self._hints = hints
        self.stillness = Stillness(settle_ms)

    def judge(self, name: str, status: os.stat_result, now_ms: float) -> Verdict:
        """Judge one entry. A fault has to last for the settling time: a copy may begin unreadable.

        Args:
            status: of the entry itself (a symlink is not followed).

            now_ms: monotonic milliseconds.

        Raises:
            OSError: something is wrong that is not the entry's fault.
        """
        path = self._prefix + name
        if kind_of(name) is None:
            return self._other(path, status)
        fault = _fault_of_type(path, status)
        if fault is not None:
            if fault.action is Action.QUARANTINE and not self.stillness.is_still(name, status, now_ms):
                return WAIT
            return fault
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return GONE
        except BlockingIOError:  # somebody holds a write lease
            return WAIT
        except PermissionError:
            if not self.stillness.is_still(name, status, now_ms):
                return WAIT
            return Verdict(
                Action.QUARANTINE,
                "not_readable",
                "The file may not be read by the user of the ingest job: change its mode.",
            )
        try:
            return TAKE if self.is_whole(name, descriptor, now_ms) else WAIT
        finally:
            os.close(descriptor)

    def is_whole(self, name: str, descriptor: int, now_ms: float) -> bool:
        """Tell whether nobody writes the open file any more, as far as can be known."""
        if self._leases_tell:
            writers = writers_of(descriptor)
            if writers is not Writers.UNKNOWN:
                return writers is Writers.NONE
        closed = self._hints.closed(name) if self._hints else None
        still_ms = None
        if closed is False and self._was_opened(name):
            still_ms = OPEN_SETTLE_MS
        return self.stillness.is_still(name, os.fstat(descriptor), now_ms, still_ms) or closed is True

    def _was_opened(self, name: str) -> bool:
        """Tell whether the creation of ``name`` was the beginning of a writing: making a link is the whole of it."""
        try:
            status = os.lstat(self._prefix + name)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_nlink == 1

    def _other(self, path: str, status: os.stat_result) -> Verdict:
        if path in self._own:
            return GONE
        if stat.S_ISDIR(status.st_mode):
            return Verdict(Action.IGNORE, "is_a_directory", "Folders are not looked into: move its files up.")
        return Verdict(
            Action.IGNORE,
            "unknown_type",
            "The name ends in none of .json, .jsonl, .csv or these with .gz: rename the file.",
        )


def _fault_of_type(path: str, status: os.stat_result) -> Verdict | None:
    """Return why an entry can't be an input by its type, None if it can."""
    target = status
    if stat.S_ISLNK(status.st_mode):
        try:
            target = os.stat(path)
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):
                raise
            if not os.path.lexists(path):
                return GONE
            return Verdict(
                Action.QUARANTINE,
                "not_a_regular_file",
                f"The link leads nowhere ({exc.strerror}): drop the file itself.",
            )
        if status.st_uid not in (target.st_uid, os.geteuid()):
            return Verdict(
                Action.QUARANTINE,
                "not_readable",
                "The link and its file belong to different users: drop the file itself.",
            )
    if stat.S_ISDIR(target.st_mode):
        return Verdict(
            Action.QUARANTINE, "is_a_directory", "It has a file's name but is a folder: drop its files instead."
        )
    if not stat.S_ISREG(target.st_mode):
        return Verdict(
            Action.QUARANTINE,
            "not_a_regular_file",
            "It is a pipe, socket or device: write the requests to a file instead.",
        )
    return None
