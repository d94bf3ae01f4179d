"""Folders, a clock that the test moves, and a gatekeeper over them."""

import gzip
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.landing.gatekeeper import Gatekeeper
from pipeline.landing.names import parse_landing_name

NOW_MS = 1_800_000_000_000


@dataclass
class ManualClock:
    wall: int = NOW_MS
    monotonic: float = 0.0

    def wall_ms(self) -> int:
        return self.wall

    def monotonic_ms(self) -> float:
        return self.monotonic

    def advance_ms(self, ms: int) -> None:
        self.wall += ms
        self.monotonic += ms


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
        options.setdefault("clock", self.clock)
        keeper = Gatekeeper(self.inbox, self.landing, self.quarantine, self.rejects, **options)  # type: ignore[arg-type]
        self.opened.append(keeper)
        return keeper

    def drop(
        self, name: str, data: bytes = b'{"message":"m","delay_sec":1}\n', mtime_ms: int | None = NOW_MS - 5000
    ) -> Path:
        """Put a whole file into the inbox, written at ``mtime_ms``."""
        path = self.inbox / name
        path.write_bytes(gzip.compress(data) if name.lower().endswith(".gz") else data)
        if mtime_ms is not None:
            os.utime(path, ns=(mtime_ms * 1_000_000,) * 2)
        return path

    def landed(self) -> list[Path]:
        """The published files, in the order of their names."""
        return sorted(path for path in self.landing.iterdir() if not path.name.startswith("."))

    def hidden(self) -> list[str]:
        """What is in the landing folder besides, apart from what belongs there."""
        names = sorted(path.name for path in self.landing.iterdir() if path.name.startswith("."))
        return [name for name in names if name not in (".lock", ".source-id")]

    def lines(self) -> list[tuple[int, bytes]]:
        """(original line number, line) of all that is published, CSV headers left out."""
        found = []
        for path in self.landed():
            name = parse_landing_name(path.name)
            assert name is not None
            lines = path.read_bytes().splitlines(keepends=True)
            if name.kind == "csv":
                lines = lines[1:]
            found += [(name.first_line + index, line) for index, line in enumerate(lines)]
        return found


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def folders(tmp_path: Path, clock: ManualClock) -> Iterator[Folders]:
    made = Folders(tmp_path, clock)
    made.inbox.mkdir()
    yield made
    for keeper in made.opened:
        keeper.close()


@pytest.fixture
def make_folders(tmp_path: Path) -> Callable[[str], Folders]:
    """Fresh folders for each example of a property, below the test's own."""

    def make(name: str) -> Folders:
        made = Folders(tmp_path / name, ManualClock())
        made.inbox.mkdir(parents=True)
        return made

    return make
