"""What can't be read at all is put aside, whole, with a record that says why."""

import contextlib
import json
import os
import shutil
import stat
from pathlib import Path

from pipeline.core.errors import ConfigError
from pipeline.landing.folder import write_whole
from pipeline.landing.names import Token, printable_name, unquote_name
from pipeline.landing.reports import Quarantined


class Quarantine:
    """A folder for what was put aside and one for the records.

    Raises:
        ConfigError: one of the folders can't be made or written.
    """

    def __init__(self, quarantine_dir: str | os.PathLike[str], rejects_dir: str | os.PathLike[str]):
        self.path = Path(quarantine_dir).absolute()
        self.rejects_path = Path(rejects_dir).absolute()
        for folder in (self.path, self.rejects_path):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / f".probe-{os.getpid()}"
                probe.touch()
                probe.unlink()
            except OSError as exc:
                raise ConfigError(
                    f"{folder} can't be written ({exc.strerror}): let this user write it, or configure another folder."
                ) from exc

    def put(self, path: str, token: Token, quoted: str, reason: str, detail: str) -> Quarantined:
        """Move ``path`` aside and write its record. The token makes both names, so doing it again overwrites.

        The record goes first: a crash in between leaves the input where it was, to be judged again, and a record too
        many rather than one too few.

        Raises:
            OSError: it can't be moved or the record can't be written; the input is where it was and no record remains.
        """
        name = f"{token}.{quoted}"
        target = self.path / name
        record = self.rejects_path / f"{name}.jsonl"
        result = Quarantined(unquote_name(quoted), reason, detail, printable_name(str(target)))
        fields = {
            "raw": None, "file": result.file, "line": None,
            "reason": reason, "detail": detail, "quarantined": result.path,
        }  # fmt: skip
        write_whole(str(record), json.dumps(fields, ensure_ascii=False).encode() + b"\n")
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
        scratch = target.with_name(f".tmp-{target.name}")
        try:
            shutil.copy2(path, scratch)
            with open(scratch, "rb") as copy:
                os.fsync(copy.fileno())
            os.rename(scratch, target)
            os.unlink(path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise
