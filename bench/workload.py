"""The requests that are measured: the same ones for the same seed, and the members that must come of them."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from pipeline.config import IngestSettings
from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.due import time_of_ms
from pipeline.core.ids import message_id
from pipeline.core.messages import Message
from pipeline.core.validation import Kind
from pipeline.landing.names import Token, landing_name, quote_name

SEED = 20260101
ARRIVAL_MS = 1_767_225_600_000  # 2026-01-01: fixed, so that every run fills the same buckets
DAY_SEC = 86_400
FILE_BYTES_MAX = IngestSettings().segment_bytes  # as the gatekeeper cuts
FILES_MIN = 4


@dataclass(frozen=True, slots=True)
class Form:
    """How requests are written: the line of request ``number``, which is due so many seconds after its arrival, and its message."""

    line_of: Callable[[int, int], str]
    message_of: Callable[[int, int], Message]
    header: str = ""  # of a CSV file


def message_text(number: int) -> str:
    """Return the text of a request: 33 bytes."""
    return f"reminder {number:09d} for a customer"


def _due_ms(delay_sec: int) -> int:
    return ARRIVAL_MS + delay_sec * 1000


def _due_text(delay_sec: int) -> str:
    return f"{time_of_ms(_due_ms(delay_sec)):%Y-%m-%dT%H:%M:%SZ}"


def _key(number: int) -> str:
    return f"order-{number:09d}"


def _plain(number: int, delay_sec: int) -> Message:
    return Message(_due_ms(delay_sec), message_text(number))


def _whole(number: int, delay_sec: int) -> Message:
    """Return a message with all that it can have; its text is JSON."""
    text = f'{{"customer":{number},"text":"{message_text(number)}"}}'
    headers = {"trace": f"{number:016x}", "tenant": "acme"}
    return Message(_due_ms(delay_sec), text, "reminders", _key(number), headers)


def _whole_line(number: int, delay_sec: int) -> str:
    message = _whole(number, delay_sec)
    fields = {"id": message.id, "topic": message.topic, "due": _due_text(delay_sec), "headers": message.headers}
    return json.dumps(fields | {"message": message.body}, separators=(",", ":"))


FORMS = {
    "plain": Form(lambda n, delay: f'{{"message":"{message_text(n)}","delay_sec":{delay}}}', _plain),
    "topic": Form(
        lambda n, delay: f'{{"message":"{message_text(n)}","delay_sec":{delay},"topic":"reminders"}}',
        lambda n, delay: replace(_plain(n, delay), topic="reminders"),
    ),
    "due": Form(lambda n, delay: f'{{"message":"{message_text(n)}","due":"{_due_text(delay)}"}}', _plain),
    "id": Form(
        lambda n, delay: f'{{"message":"{message_text(n)}","delay_sec":{delay},"id":"{_key(n)}"}}',
        lambda n, delay: replace(_plain(n, delay), id=_key(n)),
    ),
    "everything": Form(_whole_line, _whole),
    "csv": Form(lambda n, delay: f"{message_text(n)},{delay}", _plain, header="message,delay_sec"),
}


@dataclass(frozen=True, slots=True)
class LandingFile:
    """One landing file: its lines are the requests ``first`` up to ``first + rows``."""

    token: str
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Landing files in ``folder``. ``delays`` has the seconds of request 0, 1, 2, …"""

    folder: Path
    form: Form
    files: tuple[LandingFile, ...]
    delays: "np.ndarray[tuple[int], np.dtype[np.int64]]"

    @property
    def rows(self) -> int:
        return len(self.delays)

    def members(self) -> Iterator[tuple[int, bytes]]:
        """Yield (due_ms, member) of every request, in order of arrival: what the pipeline has to store."""
        return ((due_ms, member) for due_ms, member, _ in self.messages())

    def messages(self) -> Iterator[tuple[int, bytes, str]]:
        """Yield the same with the idempotency key, which is empty if there is none."""
        first_line = _first_line(self.form)
        for file in self.files:
            for line in range(file.rows):
                number = file.first + line
                message = self.form.message_of(number, int(self.delays[number]))
                yield message.due_ms, message.to_member(message_id(file.token, first_line + line)), message.id


def bucket_start_ms(due_ms: int) -> int:
    """Return the start of the bucket of a due time."""
    return due_ms - due_ms % BUCKET_WIDTH_MS


def write_workload(folder: Path, rows: int, generation: int = 0, form: str = "plain") -> Workload:
    """Write landing files of equal length, at least four, with delays spread evenly and at random over a day.

    Args:
        generation: gives other message ids to the same requests, for a server that has stored them before.

        form: how the requests are written, of ``FORMS``.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    delays = np.random.default_rng(SEED).integers(0, DAY_SEC, rows)
    made = FORMS[form]
    kind: Kind = "csv" if made.header else "json"
    line_bytes = len(made.line_of(rows, DAY_SEC - 1)) + 1
    count = max(FILES_MIN, -(-rows * line_bytes // FILE_BYTES_MAX))
    edges = [rows * number // count for number in range(count + 1)]
    files = []
    for number, (first, end) in enumerate(pairwise(edges)):
        token = Token(ARRIVAL_MS + number, generation)
        path = folder / landing_name(token, _first_line(made), kind, quote_name(f"bench-{number}.{kind}"))
        with open(path, "w", encoding="ascii") as out:
            if made.header:
                out.write(f"{made.header}\n")
            out.writelines(
                f"{made.line_of(n, delay)}\n" for n, delay in enumerate(delays[first:end].tolist(), start=first)
            )
        os.utime(path, ns=(ARRIVAL_MS * 1_000_000,) * 2)
        files.append(LandingFile(str(token), first, end - first))
    return Workload(folder, made, tuple(files), delays)


def _first_line(form: Form) -> int:
    return 2 if form.header else 1
