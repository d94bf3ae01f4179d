"""Large files: every line lands once, at its number, whatever the sizes and wherever a crash strikes."""

import builtins
import gzip
import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import SourceError
from pipeline.landing.lines import LineBlocks
from pipeline.landing.names import Token, parse_token
from tests.examples import SHARING_FIXTURES, scaled
from tests.landing.conftest import NOW_MS, Folders, mtime_ms, step_until_idle

NUMBERED = b"".join(b"line %d\n" % number for number in range(1, 41))


class Crash(BaseException):
    """The process dies here; nothing it would have done after this may happen."""


class DyingFileSystem:
    """Lets so many changes of the file system happen and then none, as if the process had been killed."""

    CHANGES = ("rename", "unlink", "fsync", "utime")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        for name in self.CHANGES:
            monkeypatch.setattr(os, name, self.dying(getattr(os, name)))
        monkeypatch.setattr(builtins, "open", self.dying_open(builtins.open))

    def change(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Crash

    def dying(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.change()
            return real(*args, **options)

        return call

    def dying_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "w" in mode:
                self.change()
            return real(path, mode, *args, **options)

        return call


def tokens_of(folders: Folders) -> list[Token]:
    tokens = [parse_token(name.token) for name in folders.names()]
    return [token for token in tokens if token]


def numbered(data: bytes, first: int = 1) -> list[tuple[int, bytes]]:
    return list(enumerate(data.splitlines(keepends=True), first))


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_large_file_lands_in_segments_with_rising_tokens_and_its_arrival_time(folders: Folders, name: str) -> None:
    folders.drop(name, NUMBERED, NOW_MS - 999_877)
    step_until_idle(folders.open(segment_bytes=100))
    assert len(folders.landed()) > 3
    assert folders.lines() == numbered(NUMBERED)
    tokens = tokens_of(folders)
    assert [token.epoch_ms for token in tokens] == [tokens[0].epoch_ms + index for index in range(len(tokens))]
    assert len({token.random_bits for token in tokens}) == 1
    assert all(path.stat().st_size <= 100 for path in folders.landed())
    assert {mtime_ms(path) for path in folders.landed()} == {NOW_MS - 999_877}
    assert folders.hidden() == [] and not (folders.inbox / name).exists()


def test_what_is_claimed_after_a_large_file_has_later_tokens(folders: Folders) -> None:
    gatekeeper = folders.open(segment_bytes=100)
    folders.drop("a.json", NUMBERED)
    step_until_idle(gatekeeper)
    folders.drop("b.json")
    gatekeeper.step()
    assert folders.originals()[-1] == "b.json"


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_each_csv_segment_begins_with_the_header(folders: Folders, name: str) -> None:
    header = b"\xef\xbb\xbfmessage,delay_sec\r\n"
    folders.drop(name, header + NUMBERED)
    step_until_idle(folders.open(segment_bytes=100))
    assert len(folders.landed()) > 3
    assert all(path.read_bytes().startswith(header) for path in folders.landed())
    assert folders.lines() == numbered(NUMBERED, 2)


def test_a_csv_file_of_one_header_and_a_gzipped_nothing_land(folders: Folders) -> None:
    folders.drop("a.csv.gz", b"message,delay_sec", NOW_MS - 2000)
    folders.drop("b.csv.gz", b"", NOW_MS - 1000)
    step_until_idle(folders.open())
    assert [path.read_bytes() for path in folders.landed()] == [b"message,delay_sec", b""]


def test_a_file_whose_csv_header_has_no_end_is_moved_to_quarantine(folders: Folders) -> None:
    folders.drop("a.csv", b"x" * 3000)
    gatekeeper = folders.open(segment_bytes=1000, line_bytes_max=500)
    report = gatekeeper.step()
    assert [put.reason for put in report.quarantined] == ["header_too_long"] and folders.landed() == []


def test_a_line_longer_than_a_segment_makes_a_longer_segment(folders: Folders) -> None:
    data = b"a\n" + b"x" * 300 + b"\nb\n" + b"y" * 500 + b"\n"
    folders.drop("a.json", data)
    step_until_idle(folders.open(segment_bytes=100))
    assert folders.lines() == numbered(data) and len(folders.landed()) == 4


def test_nothing_follows_a_long_line_in_its_segment(folders: Folders) -> None:
    data = b"y" * 99 + b"\n" + b"a\n" * 50  # the long line ends just where a block of 100 bytes ends
    folders.drop("a.json", data)
    step_until_idle(folders.open(segment_bytes=30, line_bytes_max=200))
    assert [path.stat().st_size for path in folders.landed()] == [100, 30, 30, 30, 10]
    assert folders.lines() == numbered(data)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize("segment_bytes", [50, 100_000])
def test_a_line_that_is_too_long_is_cut_and_the_original_is_kept(
    folders: Folders, name: str, segment_bytes: int
) -> None:
    data = b"a\n" + b"x" * 5000 + b"\nb\n" + b"y" * 1000 + b"\n" + b"z" * 1001
    path = folders.drop(name, data)
    original = path.read_bytes()
    os.link(path, folders.root / "makes it a copy")
    gatekeeper = folders.open(segment_bytes=segment_bytes, line_bytes_max=1000)
    (put,) = step_until_idle(gatekeeper)
    assert folders.lines() == numbered(b"a\n" + b"x" * 1000 + b"\nb\n" + b"y" * 1000 + b"\n" + b"z" * 1000 + b"\n")
    assert put.reason == "line_too_long" and put.detail.startswith("2 lines, line 2 the first")
    assert Path(put.path).read_bytes() == original and folders.hidden() == []


@pytest.mark.parametrize("read_in_between", [False, True], ids=["", "Spark reads in between"])
@pytest.mark.parametrize(
    "name", ["a.json", "a.csv", "a.json.gz", "small.json", "small.json.gz", "cut.json", "linked.json"]
)
def test_a_crash_anywhere_loses_no_line_and_lands_none_twice(
    make_folders: Callable[[str], Folders], monkeypatch: pytest.MonkeyPatch, name: str, read_in_between: bool
) -> None:
    """Strikes before the first change of the file system, before the second, and so on until none is left to strike."""
    disk = DyingFileSystem(monkeypatch)
    for changes in itertools.count():
        folders = make_folders(str(changes))
        data = b"h\n" + NUMBERED if name.endswith("csv") else NUMBERED
        expected = numbered(NUMBERED, 2 if name.endswith("csv") else 1)
        options: dict[str, Any] = {
            "segment_bytes": 1000 if name.startswith(("small", "linked")) else 100,
            "slice_ms": 1e9,
        }
        if name == "cut.json":
            data, expected = b"x" * 500 + b"\n" + data, [(1, b"x" * 50 + b"\n"), *numbered(NUMBERED, 2)]
            options["line_bytes_max"] = 50
        if name == "linked.json":
            (folders.root / "target").write_bytes(data)
            (folders.inbox / name).symlink_to("../target")
        else:
            folders.drop(name, data)
        gatekeeper = folders.open(**options)
        disk.left = changes
        try:
            step_until_idle(gatekeeper)
            crashed = False
        except Crash:
            crashed = True
        disk.left = None
        gatekeeper.close()
        arrivals = {mtime_ms(path) for path in folders.landed()}
        lines, names = folders.lines(), [path.name for path in folders.landed()]
        if read_in_between:
            for path in folders.landed():
                path.unlink()
        else:
            lines, names = [], []
        folders.clock.advance_ms(60_000)
        gatekeeper = folders.open(**options)
        step_until_idle(gatekeeper)
        gatekeeper.close()
        arrivals |= {mtime_ms(path) for path in folders.landed()}
        assert len(arrivals) == 1, f"another arrival after {changes} changes"
        assert sorted(lines + folders.lines()) == expected, f"after {changes} changes"
        names += [path.name for path in folders.landed()]
        assert len(names) == len(set(names)), f"published twice after {changes} changes"
        assert folders.hidden() == []
        assert len(list(folders.quarantine.iterdir())) == (name == "cut.json")
        if not crashed:
            break
    assert changes >= {"small.json": 2}.get(name, 5), "the crashes did not strike"


def test_a_resumed_split_gives_the_names_of_an_undisturbed_one(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.drop("a.json", NUMBERED)
    disk = DyingFileSystem(monkeypatch)
    gatekeeper = folders.open(segment_bytes=100)
    disk.left = 12
    with pytest.raises(Crash):
        step_until_idle(gatekeeper)
    disk.left = None
    gatekeeper.close()
    first = [path.name for path in folders.landed()]
    step_until_idle(folders.open(segment_bytes=100))
    tokens = tokens_of(folders)
    assert first and first == [path.name for path in folders.landed()][: len(first)]
    assert [token.epoch_ms - tokens[0].epoch_ms for token in tokens] == list(range(len(tokens)))


def test_a_split_goes_on_also_when_the_file_would_fit_into_one_segment_now(folders: Folders) -> None:
    folders.drop("a.json", NUMBERED)
    gatekeeper = folders.open(segment_bytes=100, slice_ms=0)
    gatekeeper.step()
    gatekeeper.close()
    read = folders.lines()
    for path in folders.landed():
        path.unlink()
    step_until_idle(folders.open(segment_bytes=1_000_000))
    assert read and read + folders.lines() == numbered(NUMBERED)
    assert folders.hidden() == []


def test_a_disk_that_fills_while_splitting_loses_nothing(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.drop("a.json", NUMBERED)
    gatekeeper = folders.open(segment_bytes=100)
    fsync, calls = os.fsync, itertools.count()

    def sometimes_full(descriptor: int) -> None:
        if next(calls) % 4 == 3:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sometimes_full)
    failures = 0
    while True:
        try:
            report = gatekeeper.step()
        except SourceError as exc:
            assert "is full" in str(exc)
            failures += 1
            assert failures < 100
            continue
        if not report.busy and not report.waiting:
            break
    assert folders.lines() == numbered(NUMBERED) and failures > 2
    assert folders.hidden() == []


def test_a_small_file_does_not_wait_for_a_large_one(folders: Folders) -> None:
    folders.drop("large.json", NUMBERED)
    gatekeeper = folders.open(segment_bytes=100, slice_ms=0)
    report = gatekeeper.step()
    assert report.busy and report.wait_s(5) == 0
    folders.drop("small.json")
    gatekeeper.step()
    assert "small.json" in folders.originals()
    step_until_idle(gatekeeper)


line_lists = st.lists(st.binary(max_size=60).map(lambda line: line.replace(b"\n", b" ")), max_size=30)


@settings(max_examples=scaled(120), suppress_health_check=SHARING_FIXTURES)
@given(line_lists, st.booleans(), st.integers(1, 120), st.sampled_from(["a.json", "a.json.gz", "a.csv"]))
def test_segments_of_any_size_reassemble_to_the_file(
    make_folders: Callable[[str], Folders], lines: list[bytes], ended: bool, segment_bytes: int, name: str
) -> None:
    folders = make_folders(os.urandom(8).hex())
    data = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    folders.drop(name, data)
    # The short limit makes blocks of 100 bytes, which end anywhere in a line or a segment.
    gatekeeper = folders.open(segment_bytes=segment_bytes, line_bytes_max=200)
    step_until_idle(gatekeeper)
    gatekeeper.close()
    rows = data.split(b"\n") if data else []
    rows = [row + b"\n" for row in rows[:-1]] + ([rows[-1]] if rows and rows[-1] else [])
    found: list[tuple[int, bytes]] = []
    for path, landing_name in zip(folders.landed(), folders.names(), strict=True):
        landed = path.read_bytes().split(b"\n")
        landed = [line + b"\n" for line in landed[:-1]] + ([landed[-1]] if landed[-1] else [])
        if landing_name.kind == "csv":
            assert landed[:1] == rows[:1]
            landed = landed[1:]
        if len(data) > segment_bytes:
            assert len(landed) <= 1 or sum(map(len, landed)) <= segment_bytes
        found += list(enumerate(landed, landing_name.first_line))
    assert found == (list(enumerate(rows[1:], 2)) if name == "a.csv" else list(enumerate(rows, 1)))


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(2, 30), st.booleans())
def test_line_blocks_cut_only_lines_that_are_too_long(lengths: list[int], line_bytes_max: int, ended: bool) -> None:
    data = b"\n".join(b"x" * length for length in lengths) + b"\n" * ended
    blocks = LineBlocks(io.BytesIO(data), line_bytes_max)
    taken = []
    while (block := blocks.take()) is not None:
        assert block.cut or block.source_bytes == len(block.data)
        taken.append(block)
    assert sum(block.source_bytes for block in taken) == len(data)
    expected = []
    for line in data.splitlines(keepends=True):
        expected.append(line if len(line.rstrip(b"\n")) <= line_bytes_max else line[:line_bytes_max] + b"\n")
    assert b"".join(block.data for block in taken) == b"".join(expected)


def test_a_line_of_any_length_is_read_in_bounded_memory() -> None:
    class Endless(io.RawIOBase):
        left = 300 << 20

        def read(self, size: int = -1) -> bytes:
            size = min(size, self.left)
            self.left -= size
            return b"x" * size

    import tracemalloc

    tracemalloc.start()
    blocks = LineBlocks(Endless(), 8 << 20)
    block = blocks.take()
    assert (block.source_bytes, len(block.data), block.cut) == (300 << 20, (8 << 20) + 1, True)
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()
    assert blocks.take() is None


def test_gzip_members_one_after_the_other_are_one_file(folders: Folders) -> None:
    (folders.inbox / "a.json.gz").write_bytes(gzip.compress(b"1\n") + gzip.compress(b"2\n"))
    step_until_idle(folders.open())
    assert [line for _, line in folders.lines()] == [b"1\n", b"2\n"]
