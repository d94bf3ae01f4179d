"""Files that can't be ingested at all are moved to quarantine, unchanged, with a record that says why."""

import contextlib
import json
import os
import shutil
import stat
from pathlib import Path

from pipeline.core.errors import ConfigError
from pipeline.core.files import SCRATCH_PREFIX, create, make_writable, put_in_place, write_whole
from pipeline.landing.names import Token, printable_name, rejects_name, unquote_name
from pipeline.landing.reports import RefusedFile


class Quarantine:
    """A folder for such files and one for the records.

    Raises:
        ConfigError: one of the folders can't be made or written.
    """

    def __init__(self, quarantine_dir: str | os.PathLike[str], rejects_dir: str | os.PathLike[str]):
        self.path = Path(quarantine_dir).absolute()
        self.rejects_path = Path(rejects_dir).absolute()
        for folder in (self.path, self.rejects_path):
            try:
                make_writable(folder)
            except OSError as exc:
                raise ConfigError(
                    f"{folder} can't be written ({exc.strerror}): let this user write it, or configure another folder."
                ) from exc

    def put(self, path: str, token: Token, quoted: str, reason: str, detail: str) -> RefusedFile:
        """Move ``path`` to quarantine and write its record. The token makes both names, so a second try overwrites.

        The record goes first: a crash in between leaves the input where it was, to be judged again, and a record too
        many rather than one too few.

        Raises:
            OSError: it can't be moved or the record can't be written; the input is where it was and no record remains.
        """
        target = self.path / f"{token}.{quoted}"
        result = RefusedFile(unquote_name(quoted), reason, detail, printable_name(str(target)))
        record = self.rejects_path / rejects_name(token.epoch_ms, result.file, str(token))
        fields = {
            "file": result.file, "line": None, "reason": reason, "detail": detail,
            "raw": None, "quarantined": result.path,
        }  # fmt: skip
        write_whole(record, json.dumps(fields, ensure_ascii=False).encode() + b"\n")
        try:
            _move(path, target)
        except BaseException:
            with contextlib.suppress(OSError):
                record.unlink()
            raise
        return result


def _move(path: str, target: Path) -> None:
    try:
        os.rename(path, target)
    except OSError:
        # Another file system, perhaps. Only a regular file can be copied faithfully; anything else stays.
        if not stat.S_ISREG(os.lstat(path).st_mode) or os.lstat(path).st_dev == os.stat(target.parent).st_dev:
            raise
        scratch = target.with_name(f"{SCRATCH_PREFIX}{target.name}")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as original, create(scratch) as copy:
                shutil.copyfileobj(original, copy)
                shutil.copystat(path, scratch, follow_symlinks=False)
                put_in_place(copy, target)
            os.unlink(path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise
