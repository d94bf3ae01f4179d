"""Cut a partition's rows into chunks, the portions that one atomic script call stores.

A chunk is a block of ``chunk_lines`` line numbers of one landing file, so the same file gives the same chunks however
Spark cuts its partitions and Arrow its batches. Within a chunk the messages are sorted by due time, which halves what they
cost the server's skip list (docs/adr/0004-sorted-chunks.md).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.ingest.schemas import OUTCOME_OK, OUTCOME_REJECTED
from pipeline.store.base import Chunk, Group, IdentifiedMessage

MESSAGE_COLUMNS = ["due_ms", "bucket_start_ms", "member", "caller_id"]


@dataclass(frozen=True, slots=True)
class FileChunk:
    """A chunk to store, the rows of it that are rejected, and how many of its lines were blank."""

    chunk: Chunk
    rejected: pa.Table
    lines: int
    blank: int
    size_bytes: int


def cut_chunks(batches: Iterable[pa.RecordBatch], chunk_lines: int) -> Iterator[FileChunk]:
    """Yield the chunks of a partition in order.

    Args:
        batches: rows of ``schemas.LINE_ROW``; those of a file are together and in line order.

        chunk_lines: line numbers a chunk.
    """
    file_token, last_line = "", 0
    for key, slices in _blocks(batches, chunk_lines):
        previous_line = last_line if key[0] == file_token else 0
        table = pa.Table.from_batches(slices).combine_chunks()
        file_token, last_line = key[0], table.column("line_no")[-1].as_py()
        yield _build_chunk(table, file_token, previous_line, last_line)


def _blocks(
    batches: Iterable[pa.RecordBatch], chunk_lines: int
) -> Iterator[tuple[tuple[str, int], list[pa.RecordBatch]]]:
    """Yield the rows of one file and block of line numbers together, though they may come in several batches."""
    current: tuple[str, int] | None = None
    slices: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows == 0:
            continue
        tokens = batch.column("file_token").dictionary_encode()
        codes = tokens.indices.to_numpy()
        blocks = (batch.column("line_no").to_numpy() - 1) // chunk_lines
        starts = np.flatnonzero((codes[1:] != codes[:-1]) | (blocks[1:] != blocks[:-1])) + 1
        edges = [0, *starts.tolist(), batch.num_rows]
        for start, end in pairwise(edges):
            key = (tokens.dictionary[int(codes[start])].as_py(), int(blocks[start]))
            if key != current and current is not None:
                yield current, slices
                slices = []
            current = key
            slices.append(batch.slice(start, end - start))
    if current is not None:
        yield current, slices


def _build_chunk(table: pa.Table, file_token: str, previous_line: int, last_line: int) -> FileChunk:
    outcome = table.column("outcome")
    messages = _where(table.select(MESSAGE_COLUMNS), pc.equal(outcome, OUTCOME_OK))
    rejected = _where(table, pc.equal(outcome, OUTCOME_REJECTED))
    with_id = pc.is_valid(messages.column("caller_id"))
    identified = _where(messages, with_id)
    chunk = Chunk(
        file_token=file_token,
        previous_line=previous_line,
        last_line=last_line,
        rejected=rejected.num_rows,
        groups=_groups(messages if identified.num_rows == 0 else _where(messages, pc.invert(with_id))),
        identified=[
            IdentifiedMessage(row["bucket_start_ms"], row["due_ms"], row["member"].encode(), row["caller_id"])
            for row in identified.to_pylist()
        ],
    )
    blank = table.num_rows - messages.num_rows - rejected.num_rows
    return FileChunk(chunk, rejected, table.num_rows, blank, table.nbytes)


def _where(table: pa.Table, mask: pa.ChunkedArray) -> pa.Table:
    """Filter; the usual cases, all rows and none, are many times cheaper than a real filter."""
    count = pc.sum(mask).as_py() or 0
    if count == table.num_rows:
        return table
    return table.filter(mask) if count else table.slice(0, 0)


def _groups(messages: pa.Table) -> list[Group]:
    """Sort by due_ms and cut by bucket."""
    if messages.num_rows == 0:
        return []
    due_ms = messages.column("due_ms").to_numpy()
    order = np.argsort(due_ms, kind="stable")
    buckets = messages.column("bucket_start_ms").to_numpy()[order]
    pairs: list[bytes] = [b""] * (2 * len(order))
    pairs[0::2] = pc.cast(pc.cast(pa.array(due_ms[order]), pa.string()), pa.binary()).to_pylist()
    pairs[1::2] = pc.cast(messages.column("member").take(pa.array(order)), pa.binary()).to_pylist()
    starts = np.flatnonzero(buckets[1:] != buckets[:-1]) + 1
    edges = [0, *starts.tolist(), len(order)]
    return [Group(int(buckets[start]), pairs[2 * start : 2 * end]) for start, end in pairwise(edges)]
