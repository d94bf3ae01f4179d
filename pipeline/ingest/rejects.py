"""Write the lines that are not accepted, with where they stood and why.

One file a landing file, named after it and put in place by a rename: a batch that is replayed writes the same file again.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final

from pipeline.core.messages import Reason, Rejection
from pipeline.core.validation import validate_line

DETAILS: Final = {
    Reason.NOT_UTF8: "The line is not UTF-8.",
    Reason.LINE_TOO_LONG: "The line is longer than the limit.",
    Reason.LINE_NO_TOO_HIGH: "The file has more lines than a message id can number.",
    Reason.BAD_SOCKET_LINE: "The line has no arrival time in front of it.",
}


def reject_record(row: Mapping[str, Any]) -> dict[str, Any]:
    """Say in one record what was sent, where it stood, and what is wrong with it.

    The accept path stays in Spark's columns; only here, for what they refused, the reason is found in Python.

    Args:
        row: a rejected row of ``schemas.LINE_ROW``.
    """
    verdict = validate_line(row["raw"], row["kind"], row["arrival_ms"] or 0, row["header"])
    if not isinstance(verdict, Rejection) or row["reason"]:
        reason = Reason(row["reason"] or Reason.UNEXPLAINED)
        verdict = Rejection(reason, DETAILS.get(reason, "The line was refused; please report it with its text."))
    return {
        "raw": row["raw"],
        "file": row["file_name"],
        "line": row["line_no"],
        "reason": str(verdict.reason),
        "detail": verdict.detail,
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
        """Append the records of a chunk: ``raw``, ``file``, ``line``, ``reason``, ``detail``."""
        if file_token != self._file_token:
            self.close()
            self._file_token = file_token
        for record in records:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                # The process id keeps apart two tasks that run the same file at the same time.
                self._work = self._folder / f".{file_token}.{os.getpid()}.tmp"
                self._file = self._work.open("w", encoding="utf-8")
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Put the file in place."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._work.replace(self._folder / f"{self._file_token}.jsonl")
            self._file = None
