"""Rows to chunks, without Spark."""

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ingest.chunks import FileChunk, cut_chunks

START_MS = 1_700_000_000_000
BUCKET_MS = 600_000
SCHEMA = pa.schema(
    [
        ("file_token", pa.string()),
        ("line_no", pa.int64()),
        ("outcome", pa.string()),
        ("due_ms", pa.int64()),
        ("bucket_start_ms", pa.int64()),
        ("member", pa.string()),
        ("caller_id", pa.string()),
    ]
)


def row(
    token: str, line_no: int, due_ms: int = START_MS, outcome: str = "ok", caller_id: str | None = None
) -> dict[str, Any]:
    accepted = outcome == "ok"
    return {
        "file_token": token,
        "line_no": line_no,
        "outcome": outcome,
        "due_ms": due_ms if accepted else None,
        "bucket_start_ms": due_ms - due_ms % BUCKET_MS if accepted else None,
        "member": f"{token}/{line_no}" if accepted else None,
        "caller_id": caller_id,
    }


def batches(rows: list[dict[str, Any]], size: int) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist(rows[n : n + size], SCHEMA) for n in range(0, len(rows), size)]


def spans(chunks: list[FileChunk]) -> list[tuple[str, int, int]]:
    return [(c.chunk.file_token, c.chunk.previous_line, c.chunk.last_line) for c in chunks]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_the_same_file_gives_the_same_chunks_however_arrow_cuts_its_batches(size: int) -> None:
    rows = [row("a", n) for n in range(1, 8)] + [row("b", n) for n in (1, 2)] + [row("c", n) for n in (11, 12, 13)]
    assert spans(list(cut_chunks(batches(rows, size), 3))) == [
        ("a", 0, 3),
        ("a", 3, 6),
        ("a", 6, 7),
        ("b", 0, 2),
        ("c", 0, 12),
        ("c", 12, 13),
    ]


def test_messages_are_sorted_by_due_time_and_cut_by_bucket() -> None:
    dues = [START_MS + BUCKET_MS, START_MS, START_MS + 1, START_MS]
    [only] = cut_chunks(batches([row("a", n, due) for n, due in enumerate(dues, start=1)], 10), 100)
    first = START_MS - START_MS % BUCKET_MS
    assert [(g.bucket_start_ms, list(g.pairs)) for g in only.chunk.groups] == [
        (first, [b"%d" % START_MS, b"a/2", b"%d" % START_MS, b"a/4", b"%d" % (START_MS + 1), b"a/3"]),
        (first + BUCKET_MS, [b"%d" % (START_MS + BUCKET_MS), b"a/1"]),
    ]


def test_blank_and_rejected_lines_belong_to_their_chunk_and_messages_with_an_id_go_apart() -> None:
    rows = [
        row("a", 1, outcome="blank"),
        row("a", 2, outcome="rejected"),
        row("a", 3, caller_id="order-1"),
        row("a", 4),
        row("a", 5, outcome="rejected"),
    ]
    [only] = cut_chunks(batches(rows, 2), 100)
    assert (only.lines, only.blank, only.chunk.rejected, only.rejected.column("line_no").to_pylist()) == (
        5,
        1,
        2,
        [2, 5],
    )
    assert [(m.caller_id, m.member) for m in only.chunk.identified] == [("order-1", b"a/3")]
    assert [g.pairs[1::2] for g in only.chunk.groups] == [[b"a/4"]]
    assert (only.chunk.previous_line, only.chunk.last_line) == (0, 5)


def test_lines_without_a_message_still_move_the_fence() -> None:
    [only] = cut_chunks(batches([row("a", 1, outcome="blank"), row("a", 2, outcome="rejected")], 1), 100)
    assert (only.chunk.last_line, only.chunk.rejected, list(only.chunk.groups)) == (2, 1, [])


def test_no_rows_are_no_chunks() -> None:
    assert list(cut_chunks([], 10)) == []
    assert list(cut_chunks([pa.RecordBatch.from_pylist([], SCHEMA)], 10)) == []


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 25)), min_size=1, max_size=5),
    size=st.integers(1, 30),
    chunk_lines=st.integers(1, 12),
    outcomes=st.randoms(use_true_random=False),
)
def test_every_row_is_in_exactly_one_chunk_and_chunks_of_a_file_follow_each_other(
    files: list[tuple[int, int]], size: int, chunk_lines: int, outcomes: Any
) -> None:
    kinds = ["ok", "ok", "ok", "blank", "rejected"]
    rows = [
        row(f"file{number}", line, START_MS + outcomes.randrange(2 * BUCKET_MS), outcomes.choice(kinds))
        for number, (first, count) in enumerate(files)
        for line in range(first, first + count)
    ]
    chunks = list(cut_chunks(batches(rows, size), chunk_lines))
    members = [m.decode() for c in chunks for g in c.chunk.groups for m in g.pairs[1::2]]
    assert sorted(members) == sorted(r["member"] for r in rows if r["outcome"] == "ok")
    assert sum(c.lines for c in chunks) == len(rows)
    assert sum(c.blank for c in chunks) == sum(r["outcome"] == "blank" for r in rows)
    for before, after in pairwise(chunks):
        same_file = before.chunk.file_token == after.chunk.file_token
        assert after.chunk.previous_line == (before.chunk.last_line if same_file else 0)
