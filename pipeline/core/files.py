"""Files that are there whole or not at all, and locks that end with their process."""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import IO, Any, Final

from pipeline.core.errors import ConfigError

SCRATCH_PREFIX: Final = ".tmp-"  # of files that are about to be renamed into place
MARK_NAME: Final = ".folder-id"
FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT))  # the disk, or the user's share of it


def make_writable(folder: Path) -> None:
    """Make a folder, if it is not there, and find out now that files can be made in it.

    Raises:
        OSError: they can't.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{os.getpid()}"
    create(probe).close()
    probe.unlink()


def make_private(folder: Path) -> None:
    """Make a folder that this user alone may use, or check one that is there: nobody else may change what is in it.

    Others may go on reading it. Write permission of the group is taken away: an umask of 002, or a volume of Kubernetes with an
    ``fsGroup``, gives it.

    Raises:
        ConfigError: it is a link, belongs to another user, or everybody may write it, so that its content can't be trusted.
        OSError: it can't be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = os.lstat(folder)
    if stat.S_ISLNK(status.st_mode):
        why = "is a link, which another user may have made"
    elif status.st_uid != os.geteuid() and status.st_uid != _owner_of_new_files(folder.parent):
        why = f"belongs to another user (uid {status.st_uid})"
    elif stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IWOTH:
        why = "may be written by every user"
    else:
        if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IWGRP:
            folder.chmod(stat.S_IMODE(status.st_mode) & ~stat.S_IWGRP)
        return
    raise ConfigError(
        f"{folder} {why}: look at what is in it, make it a folder that belongs to the job's user and that nobody else may "
        "write (chown, chmod 700) or remove it, and start again."
    )


def _owner_of_new_files(folder: Path) -> int:
    """Return the owner that a file system gives to our files: on a network's it may be another user than we are."""
    probe = folder / f".probe-{secrets.token_hex(8)}"
    with create(probe) as file:
        probe.unlink()
        return os.fstat(file.fileno()).st_uid


def create(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a new file for writing in place of what another try has left there. No link is followed, so no other file changes.

    Raises:
        OSError: it can't be made.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb")


def mark_folder(folder: Path) -> str:
    """Return the random text that tells a folder from all others, also from one of the same path on another machine.

    Raises:
        OSError: it can't be read or written.
    """
    path = folder / MARK_NAME
    if not read_mark(folder):
        write_whole(path, secrets.token_hex(16).encode())
    return path.read_text(encoding="ascii")


def read_mark(folder: Path) -> str:
    """Return what ``mark_folder`` does for a folder that has it, or "" if the folder or its mark is not to be seen here."""
    try:
        return (folder / MARK_NAME).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a small file so that its place has all of it or what was there before, also after a power cut.

    Raises:
        OSError: it can't be written; nothing is left of it.
    """
    folder, name = os.path.split(path)
    scratch = os.path.join(folder, f"{SCRATCH_PREFIX}{name.lstrip('.')}")
    try:
        with create(scratch) as file:
            file.write(data)
            put_in_place(file, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def put_in_place(file: IO[Any], path: str | os.PathLike[str]) -> None:
    """Close a file that is written under another name and rename it to ``path``, once its content is on the disk.

    Raises:
        OSError: it can't be written, or its own name is gone.
    """
    with file:
        file.flush()
        os.fsync(file.fileno())
    os.rename(file.name, path)


def try_lock(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Take ``LOCK_SH`` or ``LOCK_EX`` at once, or return False. A lock that was held before is given up in both cases.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
