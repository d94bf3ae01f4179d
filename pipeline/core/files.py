"""Files that are there whole or not at all, and locks that end with their process."""

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import IO, Any, Final

SCRATCH_PREFIX: Final = ".tmp-"  # of files that are about to be renamed into place
MARK_NAME: Final = ".folder-id"


def make_writable(folder: Path) -> None:
    """Make a folder, if it is not there, and find out now that files can be made in it.

    Raises:
        OSError: they can't.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{os.getpid()}"
    probe.touch()
    probe.unlink()


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
        with open(scratch, "wb") as file:
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
