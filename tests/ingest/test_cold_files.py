"""Cold files: what is written down is what is read, whole or not at all, and a folder that is away is never an empty one."""

import errno
import io
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.cold import cold_place, read_cold_place
from pipeline.core.errors import ColdUnavailable, PipelineError
from pipeline.core.ids import TOKEN_ALPHABET
from pipeline.ingest import cold_files
from pipeline.ingest.cold_files import ColdFile, cold_file_of
from pipeline.ingest.cold_folder import DONE_NAME, IDENTITY_NAME, ColdFolder, ColdName
from pipeline.ingest.parsing import cold_places
from pipeline.ingest.transactions import ALL_STORED, PartQueue, Step
from tests.ingest.files import TOKEN
from tests.ingest.test_transactions import bodies, part_of, queue_of

UNLIMITED = 10**12
NAME = ColdName(TOKEN, 0, 5, 7)


@pytest.fixture
def folder(tmp_path: Path) -> ColdFolder:
    return open_folder(tmp_path / "cold")


def open_folder(path: Path) -> ColdFolder:
    folder = ColdFolder(str(path), "id")
    folder.write_identity({"id": "id", "namespace": "n"})
    return folder


def written(write: Any) -> pa.Table:
    """What goes into a file."""
    return pq.read_table(pa.BufferReader(_in_memory(write)))


def _in_memory(write: Any) -> bytes:
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


def names_in(folder: ColdFolder) -> list[str]:
    return sorted(os.listdir(folder.url))


def rows_of(folder: ColdFolder, name: ColdName, first: int = 0, until: int = UNLIMITED) -> list[tuple[Any, ...]]:
    with ColdFile(folder, name) as file:
        part = file.rows(first, until).part
    columns = part.due_ms.tolist(), part.line_nos.tolist(), part.members.to_pylist(), part.idempotency_keys.to_pylist()
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("name", [NAME, ColdName(f"{TOKEN}.100001", 12, 1_700_000_000_000, 253_402_300_799_999)])
def test_a_name_says_what_is_in_the_file(name: ColdName) -> None:
    assert ColdName.parse(str(name)) == name
    assert name.token == TOKEN


@pytest.mark.parametrize(
    "name",
    ["", "duetime-cold.json", "a+1+2.parquet", "a+b+1+2.parquet", "+0+1+2.parquet", "a+0+1+2.parquet.tmp", "done"],
)
def test_other_files_are_none(name: str) -> None:
    assert ColdName.parse(name) is None
    assert ColdName.parse(f".tmp-{NAME}.1234") is None


@given(
    st.integers(0, 253_402_300_799_999), st.text(TOKEN_ALPHABET, min_size=14, max_size=14), st.integers(0, 2**32 - 1)
)
def test_a_place_of_a_cold_message_says_its_id_and_the_hour_in_which_it_is_due(
    due_ms: int, token: str, line: int
) -> None:
    message_id = f"{token}{line:08x}"
    place = cold_place(message_id, due_ms)
    assert read_cold_place(place) == (message_id, min(due_ms // 3_600_000, 2**20 - 1))
    members = [f"{TOKEN}00000001mx".encode(), f"{message_id}mx".encode(), f"{TOKEN}00000002mx".encode()]
    found = cold_places(pa.array(members, pa.binary())[1:], np.array([due_ms] * 2))
    assert found.to_pylist() == [place, cold_place(f"{TOKEN}00000002", due_ms)]
    assert read_cold_place(f"{message_id}{due_ms}".encode()) is None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 50), st.randoms())
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, dues: list[int], cold_from_ms: int, chance: random.Random
) -> None:
    ids = {index: f"id-{index}" for index in range(len(dues)) if chance.random() < 0.3}
    queue = PartQueue(part_of(*dues, ids=ids), cold_from_ms=cold_from_ms)
    cold = [(due, line) for due, line in sorted(zip(dues, range(1, len(dues) + 1), strict=True)) if due >= cold_from_ms]
    assert (queue.cold_begin, queue.cold_from_ms) == (len(dues) - len(cold), cold_from_ms if cold else None)
    if not cold:
        return
    folder = open_folder(tmp_path_factory.mktemp("cold"))
    name, write = cold_file_of(queue, "source", 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold_files, "ROW_GROUP_ROWS", 7)
        folder.write([(name, write)])
    assert folder.names() == [name] == [ColdName(TOKEN, 3, cold[0][0], cold[-1][0])]
    expected = [
        (due, line, f"{TOKEN}{line:08x}m{line}".encode(), ids[line - 1].encode() if line - 1 in ids else None)
        for due, line in cold
    ]
    assert rows_of(folder, name) == expected
    until = chance.randint(0, 52)
    with ColdFile(folder, name) as file:
        found = file.rows(0, until)
    assert found.part.line_nos.tolist() == [line for due, line in cold if due < until]
    later = [due for due, _ in cold if due >= until]
    assert (found.is_end, found.next_due_ms) == (not later, min(later, default=until))
    stored = chance.choice(cold)
    with ColdFile(folder, name) as file:
        counting = file.rows(0, until, stored)
    wanted_lines = [line for due, line in cold if due < until and (due, line) <= stored]
    assert counting.part.line_nos.tolist() == wanted_lines
    left = [due for due, line in cold if due >= until or (due, line) > stored]
    assert (counting.is_end, counting.next_due_ms) == (not left, min(left, default=until))
    first = chance.randint(0, 52)
    windowed = rows_of(folder, name, first, until)
    wanted = [row for row in expected if first <= row[0] < until]
    assert [row for row in windowed if row[0] >= first] == wanted


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 10)), st.integers(1, 7)), min_size=1, max_size=4),
    st.randoms(),
)
def test_each_message_is_stored_or_in_the_one_file_of_its_part_whatever_the_settings_of_those_who_write_it(
    dues: list[int], writers: list[tuple[int | None, int]], chance: random.Random
) -> None:
    """Each writer has a horizon and a size of transactions of its own, and all but the last die somewhere."""
    ids = {index: f"id-{index}" for index in range(len(dues)) if chance.random() < 0.3}
    hot: list[str] = []
    counted = 0
    files: dict[str, list[int]] = {}
    marker = ""
    for number, (cold_from_ms, size) in enumerate(writers):
        queue = PartQueue(part_of(*dues, ids=ids), cold_from_ms=cold_from_ms)
        queue.resume(marker)
        while step := Step([queue], size, 10**6):
            for part in step.opens_cold:
                name, write = cold_file_of(part, "source", 0)
                files[str(name)] = written(write)["line"].to_pylist()
            if number < len(writers) - 1 and chance.random() < 0.4:
                break
            transaction = step.transaction
            assert len(transaction.identified) + len(transaction.cold_identified) <= size >= len(transaction.rows)
            assert not (transaction.cold or transaction.cold_identified) or files, "they are in no file yet"
            hot += bodies([transaction])
            counted += len(transaction.cold) + len(transaction.cold_identified)
            step.advance()
            marker = queue.marker
    assert marker == ALL_STORED
    assert len(files) <= 1
    in_file = [str(line) for lines in files.values() for line in lines]
    assert counted == len(in_file)
    assert sorted([*hot, *in_file], key=int) == [str(line) for line in range(1, len(dues) + 1)]


def test_messages_without_a_key_cost_a_transaction_nothing_each_and_others_as_usual() -> None:
    queue = PartQueue(part_of(*range(10), ids={3: "a", 5: "b", 6: "c", 9: "d"}), cold_from_ms=2)
    found = []
    while step := Step([queue], 2, 1):
        found.append(step.transaction)
        step.advance()
    assert [len(each.rows) for each in found] == [1, 1, 0, 0]  # one byte is room for one message
    assert [len(each.cold) for each in found] == [0, 0, 2, 2]
    assert [each.cold_identified.idempotency_keys.to_pylist() for each in found[2:]] == [[b"a", b"b"], [b"c", b"d"]]
    assert found[2].cold_identified.members[0].as_py() == cold_place(f"{TOKEN}00000004", 3)
    assert [each.moves[0].after for each in found] == ["0 00000001 2", "1 00000002 2", "5 00000006 2", "all"]


def test_where_cold_messages_begin_is_agreed_on_before_any_is_counted() -> None:
    queue = PartQueue(part_of(5, 6), cold_from_ms=5)
    first = Step([queue], 10, 10)
    assert first.opens_cold == []
    transaction = first.transaction
    assert (len(transaction.rows), len(transaction.cold)) == (0, 0)
    assert (transaction.moves[0].before, transaction.moves[0].after) == ("", "0 00000000 5")
    first.advance()
    assert Step([queue], 10, 10).opens_cold == [queue]
    other = PartQueue(part_of(5, 6), cold_from_ms=6)
    assert other.resume("0 00000000 5") == 0 and other.cold_begin == 0


def test_a_part_that_was_begun_without_a_cold_folder_goes_on_without() -> None:
    queue = PartQueue(part_of(1, 2, 3), cold_from_ms=2)
    queue.resume("1 00000001")
    assert (queue.place, queue.cold_begin) == (1, 3)
    queue.resume("")
    assert queue.cold_begin == 1


def test_a_queue_without_a_horizon_has_no_cold_messages() -> None:
    assert queue_of(1, 2, 3).cold_begin == 3


@pytest.mark.parametrize("broken", ["fsync", "rename"])
def test_a_file_is_there_whole_or_not_at_all(folder: ColdFolder, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    queue = PartQueue(part_of(5, 6, 7), cold_from_ms=5)
    files = [cold_file_of(queue, "source", 0)]

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fail)
        with pytest.raises(ColdUnavailable, match=r"can't be used \(No space left on device\)\.$"):
            folder.write(files)
    assert names_in(folder) == [IDENTITY_NAME]
    for _ in range(2):
        folder.write(files)
        assert names_in(folder) == sorted([IDENTITY_NAME, str(NAME)])


def test_a_folder_that_is_away_is_no_empty_one(folder: ColdFolder, tmp_path: Path) -> None:
    files = [cold_file_of(PartQueue(part_of(5, 6, 7), cold_from_ms=5), "source", 0)]
    folder.write(files)
    (tmp_path / "cold").rename(tmp_path / "away")
    for other in (False, True):
        if other:
            ColdFolder(folder.url).write_identity({"id": "other", "namespace": "n"})
        what = "is another one than Redis knows" if other else f"has no {IDENTITY_NAME}"
        for call in (folder.names, folder.check, lambda: folder.write(files)):
            with pytest.raises(ColdUnavailable, match=f"^The cold folder {folder.url} {what}: mount the right one"):
                call()
    assert names_in(folder) == [IDENTITY_NAME]


def test_what_is_no_folder_or_no_such_store_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ColdUnavailable, match="can't be used"):
        ColdFolder(str(tmp_path / "file" / "cold"), "id").write_identity({})
    with pytest.raises(ColdUnavailable, match=r"^cold\.folder can't be ftp://x"):
        ColdFolder("ftp://x/y")


def test_a_damaged_file_is_named(folder: ColdFolder) -> None:
    Path(folder.path(NAME)).write_bytes(b"PAR1 and no more")
    with pytest.raises(PipelineError, match=f"^The cold file {re.escape(folder.path(NAME))} is damaged"):
        ColdFile(folder, NAME)
    with pytest.raises(FileNotFoundError):
        ColdFile(folder, ColdName(TOKEN, 1, 5, 7))


def test_what_is_done_moves_away_and_back(folder: ColdFolder) -> None:
    folder.write([cold_file_of(PartQueue(part_of(5, 6, 7), cold_from_ms=5), "source", 0)])
    for _ in range(2):  # another process may have done it
        folder.move(NAME, (), (DONE_NAME, 17))
    assert folder.names() == [] and folder.done_minutes() == [17] and folder.names(DONE_NAME, 17) == [NAME]
    folder.move(NAME, (DONE_NAME, 17), ())
    assert folder.names() == [NAME]
    folder.move(NAME, (), (DONE_NAME, 18))
    for _ in range(2):
        folder.delete_done(18)
    assert folder.done_minutes() == [17]
    folder.delete(NAME)


def test_a_file_is_a_table_that_others_can_read(folder: ColdFolder) -> None:
    queue = PartQueue(part_of(5, 6, ids={1: "b"}), cold_from_ms=5)
    name, write = cold_file_of(queue, "source", 2)
    folder.write([(name, write)])
    with pq.ParquetFile(folder.path(name)) as file:
        assert file.read().to_pylist() == [
            {"due_ms": 5, "line": 1, "id": None, "member": b"m1"},
            {"due_ms": 6, "line": 2, "id": b"b", "member": b"m2"},
        ]
        assert {key: file.schema_arrow.metadata[key] for key in (b"source_id", b"part_id", b"shard")} == {
            b"source_id": b"source",
            b"part_id": TOKEN.encode(),
            b"shard": b"2",
        }
        assert file.schema_arrow.field("id").type == pa.binary()
