"""Write the lines that are not accepted, with where they stood and why.

One file a landing file, named after the original file, the day it arrived and its token, and put in place by a rename: a batch
that is replayed writes the same file again, and removes what tasks that died have left of it. Records of Kafka have one a
transaction, named after the partition and the first offset.
"""

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Self

from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.files import make_writable, put_in_place, read_mark
from pipeline.core.text import visible
from pipeline.ingest.parsing import FileText, RejectedLine
from pipeline.landing.names import rejects_name

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


def first_reject(file_name: str, lines: Sequence[RejectedLine]) -> str:
    """Say for a log where the first rejected line stood and why: ``bad.jsonl line 1, both_due``; "" if there is none."""
    return f"{visible(file_name)} line {lines[0].line_no}, {lines[0].rejection.reason.value}" if lines else ""


def check_rejects_folder(folder: Path) -> None:
    """Find out at the start, not at the first reject, that the folder can't be written.

    Raises:
        ConfigError: so it is.
    """
    try:
        make_writable(folder)
    except OSError as exc:
        raise ConfigError(
            f"The rejects folder {folder} can't be written ({exc.strerror}); name another with --rejects."
        ) from exc


class RejectsWriter:
    """Collects the rejects of one landing file at a time; ``close`` puts the last one in place, and so does the end of ``with``.

    Args:
        folder: a local folder, or one that every executor has mounted.

        mark: of that folder, if executors run on other machines than the driver; "" if they don't, and may make it.
    """

    def __init__(self, folder: Path, mark: str = "") -> None:
        self._folder = folder
        self._mark = mark
        self._place = Path()  # of the rejects of the file that is written
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if not failed:
            self.close()
        elif self._file is not None:  # the next try writes it again
            with contextlib.suppress(OSError), self._file as file:
                os.unlink(file.name)

    def write(self, file: FileText, records: Iterable[dict[str, Any]]) -> None:
        """Append the records of a part of the file.

        Raises:
            PipelineError: this executor does not see the driver's folder; nobody would look for rejects on its own disk.
        """
        place = self._folder / rejects_name(file.arrival_ms, file.name, file.token)
        if place != self._place:
            self.close()
            self._place = place
        for record in records:
            if self._file is None:
                work = self._folder / WORK_NAME / f"{place.name}.{secrets.token_hex(8)}"  # one a task
                self._make_place(work.parent)
                self._file = work.open("x", encoding="utf-8")
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def _make_place(self, work: Path) -> None:
        if self._mark and read_mark(self._folder) != self._mark:
            raise PipelineError(
                f"An executor on {socket.gethostname()} does not see the rejects folder {self._folder}: mount it on every "
                "executor and start the job again; this batch is read once more then."
            )
        work.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Put the file in place."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            put_in_place(file, self._place)
        except FileNotFoundError:
            if not self._place.exists():
                raise  # otherwise another task has put the same in place, and taken this one for dead
        for left in (self._folder / WORK_NAME).glob(f"{self._place.name}.*"):
            left.unlink(missing_ok=True)
