"""The requests that are measured: the same ones for the same seed, and the members that must come of them."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.ids import message_id
from pipeline.core.messages import Message
from pipeline.landing.names import Token, landing_name, quote_name

SEED = 20260101
ARRIVAL_MS = 1_767_225_600_000  # 2026-01-01: fixed, so that every run fills the same buckets
DAY_SEC = 86_400
FILE_BYTES_MAX = 32 * 1024 * 1024  # as the gatekeeper cuts
LINE_BYTES = 73  # of the longest line
FILES_MIN = 4


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
    files: tuple[LandingFile, ...]
    delays: "np.ndarray[tuple[int], np.dtype[np.int64]]"

    @property
    def rows(self) -> int:
        return len(self.delays)

    def members(self) -> Iterator[tuple[int, bytes]]:
        """Yield (due_ms, member) of every request, in order of arrival: what the pipeline has to store."""
        for file in self.files:
            for line in range(file.rows):
                number = file.first + line
                due_ms = ARRIVAL_MS + int(self.delays[number]) * 1000
                yield due_ms, Message(due_ms, message_text(number)).to_member(message_id(file.token, line + 1))


def message_text(number: int) -> str:
    """Return the text of a request: 33 bytes."""
    return f"reminder {number:09d} for a customer"


def bucket_start_ms(due_ms: int) -> int:
    """Return the start of the bucket of a due time."""
    return due_ms - due_ms % BUCKET_WIDTH_MS


def write_workload(folder: Path, rows: int, generation: int = 0) -> Workload:
    """Write landing files of equal length, at least four, with delays spread evenly and at random over a day.

    Args:
        generation: gives other message ids to the same requests, for a server that has stored them before.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    delays = np.random.default_rng(SEED).integers(0, DAY_SEC, rows)
    count = max(FILES_MIN, -(-rows * LINE_BYTES // FILE_BYTES_MAX))
    edges = [rows * number // count for number in range(count + 1)]
    files = []
    for number, (first, end) in enumerate(pairwise(edges)):
        token = Token(ARRIVAL_MS + number, generation)
        path = folder / landing_name(token, 1, "json", quote_name(f"bench-{number}.jsonl"))
        with open(path, "w", encoding="ascii") as out:
            out.writelines(
                f'{{"message":"{message_text(n)}","delay_sec":{delay}}}\n'
                for n, delay in enumerate(delays[first:end].tolist(), start=first)
            )
        os.utime(path, ns=(ARRIVAL_MS * 1_000_000,) * 2)
        files.append(LandingFile(str(token), first, end - first))
    return Workload(folder, tuple(files), delays)
