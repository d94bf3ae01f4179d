"""Write the lines that are not accepted, with where they stood and why.

One file a landing file, named after it and put in place by a rename: a batch that is replayed writes the same file again.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from pipeline.core.ids import LINE_NO_MAX
from pipeline.core.messages import Reason, Rejection
from pipeline.core.validation import validate_line


def reject_record(row: Mapping[str, Any]) -> dict[str, str | int]:
    """Explain a rejected row (``schemas.LINE_ROW``) for the rejects: where the line stood, the line, the reason, a sentence."""
    known = {
        Reason.NOT_UTF8: "The line is not UTF-8; what could not be read is replaced here.",
        Reason.BAD_SOCKET_LINE: "The socket line has no arrival time in front of it.",
        Reason.LINE_NO_TOO_HIGH: f"The line's number is above {LINE_NO_MAX}; split the file.",
    }
    if row["reason"] is not None:
        found = Rejection(Reason(row["reason"]), known[Reason(row["reason"])])
    else:
        judged = validate_line(row["raw"], row["kind"], row["arrival_ms"], row["header"])
        # Tests hold the two forms of the rules together; should they differ all the same, that must show.
        unexplained = Rejection(
            Reason.UNEXPLAINED, "The line was refused and the reason is not known; please report this."
        )
        found = judged if isinstance(judged, Rejection) else unexplained
    place: dict[str, str | int] = {"file": row["file_name"], "line": row["line_no"]}
    return place | {"reason": str(found.reason), "detail": found.detail, "raw": row["raw"]}


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
