"""Judges what lies in the input folder: take it, wait for it, leave it, or move it to quarantine."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from threading import Event
from typing import BinaryIO, Protocol

from pipeline.landing.completeness import Stability, Writers, leases_are_reliable, writers_of
from pipeline.landing.names import is_unfinished, kind_of

# Where only inotify knows that a file was created and not closed: how long to believe in a writer that changes nothing.
OPEN_QUIET_PERIOD_MS = 60_000.0
DOCUMENT_BYTES_MAX = 8 << 20  # a larger file is not looked at as one JSON document, and is read line by line
_FIRST_LINE_BYTES_MAX = 64 << 10
_JSON = json.JSONDecoder(object_pairs_hook=len)  # keeps nothing of the objects
_NO_TARGET = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

# ``mv`` of several files looks at each once more behind its rename, and fails if it is gone by then. So an entry stays for so long
# after it came. The time of change of an inode may be a tick of the kernel, 4 ms, behind.
SETTLE_MS = 10


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


class UnusableFile(Exception):
    """Nothing of the file can be ingested, and nothing of it has landed: ``reason`` is a code, ``detail`` one sentence."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Hints(Protocol):
    """What somebody who watched the folder knows of a file (a ``Watcher``)."""

    def closed(self, name: str) -> bool | None:
        """Whether the writer closed it or renamed it in; False: created, not closed; None: not seen."""
        ...


TAKE, WAIT, GONE = Verdict(Action.TAKE), Verdict(Action.WAIT), Verdict(Action.GONE)


class Inspector:
    """Looks at files without changing anything. Remembers those that have to be stable for a while."""

    def __init__(self, input_dir: Path, own_folders: Iterable[Path], quiet_period_ms: float, hints: Hints | None):
        self._prefix = os.path.join(input_dir, "")
        self._own = {os.fspath(folder) for folder in own_folders}
        self._leases_are_reliable = leases_are_reliable(input_dir)
        self._hints = hints
        self.stability = Stability(quiet_period_ms)

    def list_entries(self, wall_ms: Callable[[], int]) -> list[tuple[str, os.stat_result]]:
        """List the entries whose names are finished, by arrival, with the status of each itself, once they have settled."""
        found = []
        with os.scandir(self._prefix) as entries:
            for entry in entries:
                if not is_unfinished(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        found.append((entry.name, entry.stat(follow_symlinks=False)))
        found.sort(key=lambda item: (_changed_ns(item[1]), item[1].st_mtime_ns, item[0]))
        # The clock is read after the folder, so that what came meanwhile has an age; negative means a clock that was set back.
        age_ms = wall_ms() - max((status.st_ctime_ns for _, status in found), default=0) // 1_000_000
        if 0 <= age_ms < SETTLE_MS:
            Event().wait((SETTLE_MS - age_ms) / 1_000)
        return found

    def arrival_ms(self, name: str, now_ms: int) -> int:
        """Return when an entry, and what it links to, changed last in content or inode (epoch ms UTC); the future is now."""
        path = self._prefix + name
        status = os.lstat(path)
        changed_ns = _changed_ns(status)
        if stat.S_ISLNK(status.st_mode):
            changed_ns = max(changed_ns, _changed_ns(os.stat(path)))
        return max(0, min(changed_ns // 1_000_000, now_ms))

    def judge(self, name: str, status: os.stat_result, now_ms: float) -> Verdict:
        """Judge one entry. A fault has to last for the quiet period: a copy may begin unreadable.

        Args:
            status: of the entry itself (a symlink is not followed).

            now_ms: monotonic milliseconds.

        Raises:
            OSError: something is wrong that is not the entry's fault.
        """
        path = self._prefix + name
        if kind_of(name) is None:
            return self._other(path, status)
        try:
            descriptor = open_input(path, status)
        except FileNotFoundError:
            return GONE
        except BlockingIOError:  # somebody holds a write lease
            return WAIT
        except UnusableFile as fault:
            if not self.stability.is_stable(name, status, now_ms):
                return WAIT
            return Verdict(Action.QUARANTINE, fault.reason, fault.detail)
        try:
            return TAKE if self.is_complete(name, descriptor, now_ms) else WAIT
        finally:
            os.close(descriptor)

    def is_complete(self, name: str, descriptor: int, now_ms: float) -> bool:
        """Return whether nobody writes the open file any more, as far as can be known."""
        if self._leases_are_reliable:
            writers = writers_of(descriptor)
            if writers is not Writers.UNKNOWN:
                return writers is Writers.NONE
        closed = self._hints.closed(name) if self._hints else None
        quiet_period_ms = None
        if closed is False and self._was_opened(name):
            quiet_period_ms = OPEN_QUIET_PERIOD_MS
        return self.stability.is_stable(name, os.fstat(descriptor), now_ms, quiet_period_ms) or closed is True

    def _was_opened(self, name: str) -> bool:
        """Return whether ``name`` was created to be written: a link is complete when it is made."""
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


def set_arrival(descriptor: int, arrival_ms: int) -> bool:
    """Make the arrival the file's time of change; False if it may not be changed, as the file is another user's."""
    if os.fstat(descriptor).st_mtime_ns // 1_000_000 != arrival_ms:
        try:
            os.utime(descriptor, ns=(arrival_ms * 1_000_000,) * 2)
        except PermissionError:
            return False
    return True


def _changed_ns(status: os.stat_result) -> int:
    return max(status.st_mtime_ns, status.st_ctime_ns)


def open_input(path: str, entry: os.stat_result) -> int:
    """Open a file of a user for reading, without ever waiting: what was opened, not only what was named, is checked.

    Args:
        path: the entry, or what it points to if it is a symlink.

        entry: status of the entry itself. Behind a symlink there must be a regular file of the link's owner; a link of our
            own user may point to anybody's.

    Raises:
        UnusableFile: it is no regular file, may not be read, or belongs to another user than its link.
        FileNotFoundError: the entry itself is gone.
        BlockingIOError: somebody holds a write lease.
    """
    is_link = stat.S_ISLNK(entry.st_mode)
    try:
        _check(os.stat(path) if is_link else entry, entry)  # first, as to open a device may have effects
        follow = 0 if is_link else os.O_NOFOLLOW
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow)
    except PermissionError as exc:
        raise UnusableFile(
            "not_readable", "The file may not be read by the user of the ingest job: change its mode."
        ) from exc
    except OSError as exc:
        if is_link and exc.errno in _NO_TARGET:
            raise UnusableFile(
                "not_a_regular_file", f"The link leads nowhere ({exc.strerror}): drop the file itself."
            ) from exc
        if exc.errno in (errno.ELOOP, errno.ENXIO):  # swapped since ``entry`` was read, for a link or a socket
            raise UnusableFile("not_a_regular_file", "It was replaced while it was looked at: drop it again.") from exc
        raise
    try:
        _check(os.fstat(descriptor), entry)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(status: os.stat_result, entry: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise UnusableFile("is_a_directory", "It is a folder; drop the files in it instead.")
    if not stat.S_ISREG(status.st_mode):
        raise UnusableFile(
            "not_a_regular_file", "It is a pipe, socket or device: write the requests to a file instead."
        )
    if stat.S_ISLNK(entry.st_mode) and entry.st_uid not in (status.st_uid, os.geteuid()):
        raise UnusableFile("not_readable", "The link and its file belong to different users: drop the file itself.")


def check_lines(source: BinaryIO) -> None:
    """Look, from its beginning, whether a file is meant to be read line by line.

    Raises:
        UnusableFile: the whole file, of at most ``DOCUMENT_BYTES_MAX``, is one JSON document over several lines.
    """
    head = source.read(_FIRST_LINE_BYTES_MAX).removeprefix(b"\xef\xbb\xbf").lstrip()
    first_line, line_end, _ = head.partition(b"\n")
    # The first line of such a document is no document, which is found out without reading on.
    if not line_end or first_line[:1] not in (b"{", b"[") or _is_json(first_line):
        return
    document = head + source.read(DOCUMENT_BYTES_MAX)
    if len(document) <= DOCUMENT_BYTES_MAX and _is_json(document):
        raise UnusableFile(
            "not_json_lines", "This file is one JSON document over several lines; write one object a line."
        )


def _is_json(text: bytes) -> bool:
    try:
        _JSON.decode(text.decode())
    except (ValueError, RecursionError):
        return False
    return True
