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
from collections.abc import Callable, Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from pipeline.core.errors import ConfigError, DiskFull, PipelineError
from pipeline.core.files import FULL, make_writable, read_mark
from pipeline.core.text import visible
from pipeline.ingest.parsing import FileText, RejectedLine
from pipeline.ingest.stores import Retry, retrying
from pipeline.landing.names import rejects_name

WORK_NAME = ".work"  # a folder of its own, since the rejects that users keep may be too many to look through
# Of a longer line this much is kept: one with the longest message is whole, and garbage of 8 MiB fills no disk.
RAW_CHARS_MAX: Final = 512 * 1024
_BUFFER_BYTES = 64 * 1024

T = TypeVar("T")


def reject_record(file_name: str, line: RejectedLine) -> dict[str, str | int]:
    """Return a rejected line for the rejects: where it stood, the reason, a sentence, the line."""
    return {
        "file": file_name,
        "line": line.line_no,
        "reason": line.rejection.reason.value,
        "detail": line.rejection.detail,
        **raw_fields(line.raw),
    }


def raw_fields(raw: str) -> dict[str, str | int]:
    """Return ``raw`` for the rejects, and of a line that is cut ``raw_length``, how many characters it had."""
    if len(raw) <= RAW_CHARS_MAX:
        return {"raw": raw}
    return {"raw": raw[:RAW_CHARS_MAX], "raw_length": len(raw)}


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

    While the disk of the folder is full it waits for room.

    Args:
        folder: a local folder, or one that every executor has mounted.

        mark: of that folder, if executors run on other machines than the driver; "" if they don't, and may make it.

        retry: makes a call again while it raises ``DiskFull``.
    """

    def __init__(self, folder: Path, mark: str = "", retry: Retry = retrying) -> None:
        self._folder = folder
        self._mark = mark
        self._retry = retry
        self._place = Path()  # of the rejects of the file that is written
        self._file: FileIO | None = None
        self._buffer = bytearray()  # what is not in the file yet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        try:
            if not failed:
                self.close()
        finally:
            if self._file is not None:  # the next try writes it again
                with contextlib.suppress(OSError), self._file as file:
                    os.unlink(str(file.name))

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
                self._file = self._with_room(self._open)
            self._buffer += json.dumps(record, ensure_ascii=False).encode() + b"\n"
            if len(self._buffer) >= _BUFFER_BYTES:
                self._write_buffer(self._file)

    def _open(self) -> FileIO:
        work = self._folder / WORK_NAME / f"{self._place.name}.{secrets.token_hex(8)}"  # one a task
        self._make_place(work.parent)
        return FileIO(work, "x")

    def _write_buffer(self, file: FileIO) -> None:
        """Write what is collected, however often that is interrupted by a full disk: no byte twice."""
        while self._buffer:
            written = self._with_room(lambda: file.write(self._buffer))
            del self._buffer[:written]

    def _with_room(self, call: Callable[[], T]) -> T:
        """Make a call again until the disk has room for it: with rejects that can't be written no batch can end."""

        def attempt() -> T:
            try:
                return call()
            except OSError as exc:
                if exc.errno not in FULL:
                    raise
                raise DiskFull(self._full()) from exc

        return self._retry(attempt)

    def _full(self) -> str:
        return f"the disk of {self._folder} is full: make room for the rejects; storing goes on from where it stopped."

    def _make_place(self, work: Path) -> None:
        if self._mark and read_mark(self._folder) != self._mark:
            raise PipelineError(
                f"An executor on {socket.gethostname()} does not see the rejects folder {self._folder}: mount it on every "
                "executor and start the job again; this batch is read once more then."
            )
        work.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Put the file in place.

        Raises:
            DiskFull: the disk took all of it and says only now that it is full, as that of a network may; some of it may be gone.
        """
        file = self._file
        if file is None:
            return
        self._write_buffer(file)
        try:
            os.fsync(file.fileno())
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            raise DiskFull(f"{self._full()} Start the job again then.") from exc
        file.close()
        try:
            self._with_room(lambda: os.rename(str(file.name), self._place))
        except FileNotFoundError:
            if not self._place.exists():
                raise  # otherwise another task has put the same in place, and taken this one for dead
        self._file = None
        for left in (self._folder / WORK_NAME).glob(f"{self._place.name}.*"):
            left.unlink(missing_ok=True)
