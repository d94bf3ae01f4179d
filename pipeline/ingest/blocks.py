"""The rows of a table as they are written down: blocks of messages, each a line of text, which any file system of Spark can hold.

    <token> <rows> <base64 of an Arrow stream: due_ms, rest, and key if any row has one>

``rest`` is a member without its message id, as ``core/messages.py`` has it. The id is the block's token and the number of the row,
so a block gives the same messages whenever it is read. It is stored like a part of a landing file, by a progress marker of its own.
"""

import binascii
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pandas.util import hash_array
from pyspark import TaskContext

from pipeline.core.errors import PipelineError
from pipeline.core.ids import MESSAGE_ID_LENGTH, TOKEN_HALF_BITS, encode_token, token_epoch_ms
from pipeline.core.validation import REQUEST_BYTES_MAX
from pipeline.ingest.columns import join
from pipeline.ingest.parsing import ParsedPart, as_hex
from pipeline.ingest.shard_writer import finish_all, open_shard_writers, split_by_shard
from pipeline.ingest.stores import Patience, WriterSettings
from pipeline.ingest.summary import Summary
from pipeline.ingest.transactions import PartQueue
from pipeline.ingest.writer import PartitionWriter

# What a task holds of a table. Larger blocks cost the server less, as the messages of a transaction are nearer in time.
BLOCK_ROWS: Final = 250_000
BLOCK_BYTES: Final = 16 * 1024 * 1024

DIGEST_BITS: Final = 64

_BLOCK_BITS: Final = 22  # of a token's second half, for the number of a block in its task; the other bits count tasks
_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4")


def token_of(arrival_ms: int, seed: int, task: int, number: int) -> str:
    """Name a block, unlike all others of its table, by its number in its task, counted on from a random number of the table.

    Args:
        arrival_ms: of the table, epoch ms UTC.

        seed: of ``TOKEN_HALF_BITS`` random bits, so that tables of the same millisecond have other tokens.
    """
    return encode_token(arrival_ms, (seed + (task << _BLOCK_BITS) + number) % (1 << TOKEN_HALF_BITS))


class Block(NamedTuple):
    """A block as it is written, the number of its rows, and their part of the digest of the table."""

    line: str
    rows: int
    digest: int


def digest_of(asked_ms: pa.Array, rest: pa.Array) -> int:
    """Return the sum of the hashes of rows: the same for the same rows, however they are ordered and divided.

    Args:
        asked_ms: the due time, or for a row with a delay of n ms, which is due later each time that it comes, -1 - n.

        rest: see above.
    """
    if not len(rest):
        return 0
    texts = hash_array(rest.cast(pa.binary()).to_numpy(zero_copy_only=False), categorize=False)
    # Of both together: the times of two rows may not change places.
    hashes = hash_array(texts + 31 * hash_array(asked_ms.to_numpy()))
    return int(hashes.sum(dtype=np.uint64))


def add_digests(digests: Iterable[int]) -> int:
    """Return the digest of all rows from those of some."""
    return sum(digests) % (1 << DIGEST_BITS)


class Packing:
    """Collects the messages of a task, and writes them as blocks.

    Args:
        arrival_ms: see ``token_of``, as ``seed``.

        task: the number of the partition.
    """

    def __init__(self, arrival_ms: int, seed: int, task: int) -> None:
        self._names = (token_of(arrival_ms, seed, task, number) for number in range(1 << _BLOCK_BITS))
        self._waiting: list[pa.Table] = []
        self._rows = 0
        self._bytes = 0

    def add(self, due_ms: pa.Array, rest: pa.Array, key: pa.Array, asked_ms: pa.Array) -> Iterator[Block]:
        """Take messages; yields the blocks that are full. ``asked_ms`` is for ``digest_of``."""
        messages = pa.table(
            {"due_ms": due_ms, "rest": rest.cast(pa.binary()), "key": key.cast(pa.binary()), "asked_ms": asked_ms}
        )
        rows = len(messages) // (messages.nbytes // BLOCK_BYTES + 1) + 1  # long messages: fewer at a time
        for start in range(0, len(messages), rows):
            piece = messages.slice(start, rows)
            self._waiting.append(piece)
            self._rows += len(piece)
            self._bytes += piece.nbytes
            if self._rows >= BLOCK_ROWS or self._bytes >= BLOCK_BYTES:
                yield from self.finish()

    def finish(self) -> Iterator[Block]:
        """Yield what is left, as one block, if anything is."""
        if not self._rows:
            return
        messages, rows = pa.concat_tables(self._waiting).combine_chunks(), self._rows
        self._waiting, self._rows, self._bytes = [], 0, 0
        digest = digest_of(_whole(messages["asked_ms"]), _whole(messages["rest"]))
        messages = messages.drop_columns(["asked_ms"])
        if messages["key"].null_count == rows:
            messages = messages.drop_columns(["key"])
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, messages.schema, options=_OPTIONS) as writer:
            writer.write_table(messages)
        text = binascii.b2a_base64(stream.getvalue(), newline=False).decode()
        yield Block(f"{next(self._names)} {rows} {text}", rows, digest)


class Packer:
    """The mapInArrow function that writes a table down: rows with ``due_ms``, ``rest``, ``id``, ``asked_ms`` and
    ``refused`` in, lines out.

    A row that is ``refused`` is a line as it is. Tasks may run more than once: Spark keeps what one attempt has written.
    """

    COLUMNS: Final = "value string, accepted long, refused long, digest long"

    def __init__(self, arrival_ms: int, seed: int) -> None:
        self._arrival_ms = arrival_ms
        self._seed = seed

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write down the rows of a task."""
        packing = Packing(self._arrival_ms, self._seed, task_number())
        for batch in batches:
            refused = batch.column("refused")
            if refused.null_count < len(refused):
                yield _lines(refused.drop_null(), 0, 1, 0)
                batch = batch.filter(refused.is_null())
            columns = (batch.column(name) for name in ("due_ms", "rest", "id", "asked_ms"))
            for block in packing.add(*columns):
                yield _lines(pa.array([block.line]), block.rows, 0, block.digest)
        for block in packing.finish():
            yield _lines(pa.array([block.line]), block.rows, 0, block.digest)


def count_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return what ``Packer`` tells of rows, and write nothing down: a mapInArrow function with its columns."""
    for batch in batches:
        refused = batch.column("refused")
        accepted = batch.filter(refused.is_null())
        digest = digest_of(accepted.column("asked_ms"), accepted.column("rest"))
        yield _lines(pa.array([""]), len(accepted), len(batch) - len(accepted), digest)


def _lines(lines: pa.Array, accepted: int, refused: int, digest: int) -> pa.RecordBatch:
    digests = np.full(len(lines), digest, np.uint64).view(np.int64)  # Spark has no numbers without a sign
    counts = (np.full(len(lines), count) for count in (accepted, refused))
    arrays = [lines.cast(pa.string()), *map(pa.array, (*counts, digests))]
    return pa.RecordBatch.from_arrays(arrays, ["value", "accepted", "refused", "digest"])


def task_number() -> int:
    """Return the number of the partition that this process works on."""
    context = TaskContext.get()
    return context.partitionId() if context else 0


def rests_of(members: pa.Array) -> pa.Array:
    """Return members without their message ids."""
    return pc.binary_slice(members, MESSAGE_ID_LENGTH, REQUEST_BYTES_MAX * 2)  # without an end Arrow 26 fails


def read_block(line: bytes) -> ParsedPart:
    """Read a block.

    Raises:
        PipelineError: it is not as it was written.
    """
    token, _, rest = line.partition(b" ")
    told, _, text = rest.partition(b" ")
    try:
        rows = int(told)
        messages: Any = pa.ipc.open_stream(binascii.a2b_base64(text, strict_mode=True)).read_all().combine_chunks()
        if len(messages) != rows:
            raise ValueError(f"it has {len(messages)} rows, not {rows}")
    except (ValueError, OSError) as exc:  # of which those of Arrow and of base64 are kinds
        name = token[:MESSAGE_ID_LENGTH].decode(errors="replace")
        raise PipelineError(f"The staged block {name} is damaged ({exc}): is its file whole?") from exc
    line_nos = np.arange(1, rows + 1)
    has_keys = "key" in messages.column_names
    return ParsedPart(
        token.decode(),
        line_nos=line_nos,
        due_ms=messages["due_ms"].to_numpy(),
        members=join(token, as_hex(line_nos), _whole(messages["rest"])),
        idempotency_keys=_whole(messages["key"]) if has_keys else pa.nulls(rows, pa.binary()),
        rejected=[],
        lines=rows,
        blank=0,
    )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def store_blocks(lines: Iterable[bytes], settings: WriterSettings) -> Summary:
    """Store blocks, what is not stored yet of them. A wait for Redis has no limit.

    Raises:
        PipelineError: one is damaged.
    """
    writers, summary, cold = open_shard_writers(settings, Patience()), Summary(), settings.cold
    for line in lines:
        part = read_block(line)
        summary.add(Summary(part.lines))
        # A token begins with the time of the call that wrote the block, so all who store it split it in the same way.
        cold_from_ms = cold.cold_from_ms(token_epoch_ms(part.part_id)) if cold else None
        for shard, share in split_by_shard(part, len(writers)).items():
            writers[shard].add(PartQueue(share, cold_from_ms=cold_from_ms))
    summary.add(finish_all(writers))
    return summary


class BlockWriter(PartitionWriter):
    """The mapInArrow function that stores blocks: their lines in, one summary row out."""

    def write(self, batches: Iterable[pa.RecordBatch]) -> Summary:
        """Store the blocks of a task; Spark ends a wait for Redis by ending the task."""
        lines = (line.as_py() for batch in batches for line in batch.column(0).cast(pa.binary()))
        return store_blocks(lines, self._settings)
