"""Folders, a clock that the test moves, and a gatekeeper over them."""

import gzip
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.config import IngestSettings
from pipeline.landing.gatekeeper import Gatekeeper
from pipeline.landing.names import LandingName, parse_landing_name
from pipeline.landing.reports import RefusedFile
from tests.clock import ManualClock

# An hour ahead of the real clock, and so of each change of an inode in a test: a file's arrival is the time of change of its
# content wherever a test sets that between the two.
NOW_MS = time.time_ns() // 1_000_000 + 3_600_000
LINE = b'{"message":"m","delay_sec":1}\n'


@dataclass
class Folders:
    """An input folder and all that belongs to it, and the gatekeepers opened over it."""

    root: Path
    clock: ManualClock
    opened: list[Gatekeeper] = field(default_factory=list)

    @property
    def inbox(self) -> Path:
        return self.root / "inbox"

    @property
    def landing(self) -> Path:
        return self.inbox / ".landing"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def rejects(self) -> Path:
        return self.root / "rejects"

    def open(self, **options: object) -> Gatekeeper:
        options = {"clock": self.clock, "segment_bytes": IngestSettings().segment_bytes, **options}
        gatekeeper = Gatekeeper(self.inbox, self.landing, self.quarantine, self.rejects, **options)  # type: ignore[arg-type]
        self.opened.append(gatekeeper)
        return gatekeeper

    def reopen(self, **options: object) -> Gatekeeper:
        """Open a new gatekeeper after the last one, as a restart does."""
        self.opened.pop().close()
        return self.open(**options)

    def drop(self, name: str, data: bytes = LINE, mtime_ms: int | None = NOW_MS - 5000) -> Path:
        """Put a complete file into the inbox, written at ``mtime_ms``."""
        path = self.inbox / name
        path.write_bytes(gzip.compress(data) if name.lower().endswith(".gz") else data)
        if mtime_ms is not None:
            os.utime(path, ns=(mtime_ms * 1_000_000,) * 2)
        return path

    def landed(self) -> list[Path]:
        """The published files, in the order of their names."""
        return sorted(path for path in self.landing.iterdir() if not path.name.startswith("."))

    def names(self) -> list[LandingName]:
        """What the names of the published files say, in their order."""
        names = [parse_landing_name(path.name) for path in self.landed()]
        assert None not in names
        return [name for name in names if name]

    def originals(self) -> list[str]:
        """The original names of the published files, in the order of their landing names."""
        return [name.original_name for name in self.names()]

    def hidden(self) -> list[str]:
        """What is in the landing folder besides, apart from what belongs there."""
        names = sorted(path.name for path in self.landing.iterdir() if path.name.startswith("."))
        return [name for name in names if name not in (".lock", ".source-id")]

    def lines(self) -> list[tuple[int, bytes]]:
        """(original line number, line) of all that is published, CSV headers left out."""
        found = []
        for path, name in zip(self.landed(), self.names(), strict=True):
            lines = path.read_bytes().splitlines(keepends=True)
            if name.kind == "csv":
                lines = lines[1:]
            found += [(name.first_line + index, line) for index, line in enumerate(lines)]
        return found


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def folders(tmp_path: Path, clock: ManualClock) -> Iterator[Folders]:
    made = Folders(tmp_path, clock)
    made.inbox.mkdir()
    yield made
    for gatekeeper in made.opened:
        gatekeeper.close()


@pytest.fixture
def make_folders(tmp_path: Path) -> Callable[[str], Folders]:
    """Fresh folders for each example of a property, below the test's own."""

    def make(name: str) -> Folders:
        made = Folders(tmp_path / name, ManualClock(NOW_MS))
        made.inbox.mkdir(parents=True)
        return made

    return make


def mtime_ms(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000


def step_until_idle(gatekeeper: Gatekeeper, steps_max: int = 10_000) -> list[RefusedFile]:
    """Step until nothing is left to do; return what was moved to quarantine."""
    quarantined = []
    for _ in range(steps_max):
        report = gatekeeper.step()
        quarantined += report.quarantined
        if not report.busy and not report.waiting:
            return quarantined
    raise AssertionError("it never comes to an end")
