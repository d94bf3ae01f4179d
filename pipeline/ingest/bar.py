"""The progress bar of ``--once`` on a terminal: bytes taken in, their rate, the time that is left."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from pipeline.core.clock import Clock
from pipeline.core.errors import StoreError
from pipeline.ingest.transactions import ALL_STORED
from pipeline.landing.names import parse_landing_name

LOOK_MS = 200
FILES_A_LOOK = 5_000  # about as many lie before those that nobody has started


class StoredBytes:
    """How many bytes of the landing files that are there now have been stored, file by file."""

    def __init__(self, landing: Path, markers_of: Callable[[Sequence[str]], list[str]]) -> None:
        self._landing = landing
        self._markers_of = markers_of
        names = sorted(os.listdir(landing))
        self._left = {
            landed.token: (name, (landing / name).stat().st_size)
            for name in names
            if (landed := parse_landing_name(name))
        }
        self._bytes = 0
        self.total_bytes = sum(size for _, size in self._left.values())

    def count(self) -> int:
        """Look again. A file that is gone was stored whole; of the others the markers say how far they are."""
        here = set(os.listdir(self._landing))
        asked = list(self._left)[:FILES_A_LOOK]
        marked = {token for token, marker in zip(asked, self._markers_of(asked), strict=True) if marker == ALL_STORED}
        for token, (name, size) in list(self._left.items()):
            if token in marked or name not in here:
                self._bytes += size
                del self._left[token]
        return self._bytes


@contextmanager
def intake_bar(
    landing: Path, markers_of: Callable[[Sequence[str]], list[str]], stream: TextIO, clock: Clock
) -> Iterator[Callable[[], None]]:
    """Draw a bar on ``stream`` while the block lasts, if it is a terminal; log lines stand above it.

    Args:
        markers_of: returns the markers of landing files.

    Returns:
        What moves the bar; it may be called as often as one likes.
    """
    stored = StoredBytes(landing, markers_of) if stream.isatty() else None
    if stored is None or not stored.total_bytes:
        yield lambda: None
        return
    tqdm.monitor_interval = 0  # no thread beside Spark's
    next_ms = 0.0
    with (
        logging_redirect_tqdm(),
        tqdm(
            total=stored.total_bytes, desc="taking in", unit="B", unit_scale=True, file=stream, dynamic_ncols=True
        ) as bar,
    ):

        def move() -> None:
            nonlocal next_ms
            if clock.monotonic_ms() >= next_ms:
                next_ms = clock.monotonic_ms() + LOOK_MS
                _draw(bar, stored)

        yield move
        _draw(bar, stored)


def _draw(bar: "tqdm[None]", stored: StoredBytes) -> None:
    try:
        bar.update(max(0, stored.count() - bar.n))
    except (StoreError, OSError):
        return  # the query itself logs the error
    bar.refresh()  # the time goes on, too
