"""Write the lines that are not accepted, with where they stood and why.

One file a landing file, named after it and put in place by a rename: a batch that is replayed writes the same file again, and
removes what tasks that died have left of it.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from pipeline.ingest.parsing import RejectedLine

WORK_NAME = ".work"  # a folder of its own, since the rejects that users keep may be too many to look through


def reject_record(file_name: str, line: RejectedLine) -> dict[str, str | int]:
    """Return a rejected line for the rejects: where it stood, the reason, a sentence, the line."""
    return {
        "file": file_name,
        "line": line.line_no,
        "reason": line.rejection.reason.value,
        "detail": line.rejection.detail,
        "raw": line.raw,
    }


class RejectsWriter:
    """Collects the rejects of one landing file at a time; ``close`` puts the last one in place.

    Args:
        folder: a local folder, or one that every executor has mounted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_token = ""
        self._file: IO[str] | None = None
        self._work = Path()

    def write(self, file_token: str, records: Iterable[dict[str, Any]]) -> None:
        """Append the records of a piece of the file."""
        if file_token != self._file_token:
            self.close()
            self._file_token = file_token
        for record in records:
            if self._file is None:
                # The process id keeps apart two tasks that run the same file at the same time.
                self._work = self._folder / WORK_NAME / f"{file_token}.{os.getpid()}"
                self._work.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._work.open("w", encoding="utf-8")
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Put the file in place."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            place = self._folder / f"{self._file_token}.jsonl"
            try:
                self._work.replace(place)
            except FileNotFoundError:
                if not place.exists():
                    raise  # otherwise another task has put the same in place, and taken this one for dead
            for left in self._work.parent.glob(f"{self._file_token}.*"):
                left.unlink(missing_ok=True)
            self._file = None
