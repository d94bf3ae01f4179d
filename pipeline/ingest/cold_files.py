"""What is in a cold file: rows of messages in order of due time, as a Parquet table that other programs can read."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.core.ids import MESSAGE_ID_LENGTH
from pipeline.ingest.cold_folder import ColdFolder, ColdName
from pipeline.ingest.columns import join
from pipeline.ingest.parsing import ParsedPart, as_hex
from pipeline.ingest.transactions import PartQueue

ROW_GROUP_ROWS: Final = 10_000  # what is read at a time
SOURCE: Final = b"source_id"  # in the metadata: of the landing file
REPLACES: Final = b"replaces"  # in the metadata of a merged file: the names of those that it was made of
MERGED_FIELD: Final = pa.field(
    "token", pa.dictionary(pa.int32(), pa.string()), nullable=False
)  # the last one of merged files
SCHEMA: Final = pa.schema(
    [
        pa.field("due_ms", pa.int64(), nullable=False),
        pa.field("line", pa.uint32(), nullable=False),
        pa.field("id", pa.binary()),  # the idempotency key, null if there is none
        pa.field("member", pa.binary(), nullable=False),  # without the message id, which token and line are
    ]
)

END: Final = 1 << 30  # of any member; Arrow 26 fails without an end
NewFile = tuple[ColdName, Callable[[Any], object]]  # and what writes it into an open file


def _write_table(table: pa.Table, file: Any) -> None:
    pq.write_table(
        table,
        file,
        row_group_size=ROW_GROUP_ROWS,
        compression="zstd",
        use_dictionary=False,
        column_encoding={"due_ms": "DELTA_BINARY_PACKED", "line": "DELTA_BINARY_PACKED"},
        write_statistics=["due_ms"],
    )


def new_file(name: ColdName, table: pa.Table) -> NewFile:
    """Return what ``ColdFolder.write`` takes."""
    return name, partial(_write_table, table)


def cold_file_of(queue: PartQueue, source_id: str, shard: int) -> NewFile:
    """Return the file of the cold messages of a part: always the same for the same part and the same ``cold_from_ms``."""
    cold = slice(queue.cold_begin, None)
    due_ms = queue.due_ms[cold]
    name = ColdName(queue.part_id, shard, int(due_ms[0]), int(due_ms[-1]))
    columns = [
        pa.array(due_ms),
        pa.array(queue.line_nos[cold]).cast(pa.uint32()),
        queue.keys[cold],
        pc.binary_slice(queue.members[cold], MESSAGE_ID_LENGTH, END),
    ]
    about = {SOURCE: source_id, "part_id": queue.part_id, "shard": str(shard)}
    return new_file(name, pa.table(columns, schema=SCHEMA.with_metadata(about)))


@dataclass(frozen=True, slots=True)
class ColdRows:
    """Some rows of a cold file. ``is_end`` says that none follows, else the next is due at ``next_due_ms``, epoch ms UTC."""

    part: ParsedPart
    is_end: bool
    next_due_ms: int


class ColdFile:
    """A cold file that is open, to be closed.

    Raises:
        FileNotFoundError: it is not there.
        ColdUnavailable: the folder can't be used.
        PipelineError: it is damaged.
    """

    def __init__(self, folder: ColdFolder, name: ColdName) -> None:
        self.name = name
        self._folder = folder
        with folder.used(name):
            self._file = pq.ParquetFile(folder.open(name))
        about = self._file.schema_arrow.metadata or {}
        self.source_id = about.get(SOURCE, b"").decode()  # of the landing file; "" if it is merged
        self.replaces = [each for text in json.loads(about.get(REPLACES, b"[]")) if (each := ColdName.parse(text))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def table(self) -> pa.Table:
        """Return all that is in it."""
        with self._folder.used(self.name):
            return self._file.read(use_threads=False)

    def rows(self, from_due_ms: int, until_due_ms: int, stored: tuple[int, int] | None = None) -> ColdRows:
        """Return rows that are due before ``until_due_ms``, and at or after ``from_due_ms``, or up to ``ROW_GROUP_ROWS`` sooner.

        Args:
            stored: due time and line of the last row that counts by now; None means all do.
        """
        with self._folder.used(self.name):
            groups = range(self._file.metadata.num_row_groups)
            bounds = [self._file.metadata.row_group(group).column(0).statistics for group in groups]
            wanted = [g for g in groups if bounds[g].max >= from_due_ms and bounds[g].min < until_due_ms]
            table = self._file.read_row_groups(wanted, use_threads=False)
        later = [bounds[group].min for group in groups if bounds[group].min >= until_due_ms]
        due_ms = table["due_ms"].to_numpy()
        end = int(np.searchsorted(due_ms, until_due_ms, side="left"))
        if stored is not None:
            lines = table["line"].to_numpy()
            end = min(end, int(np.count_nonzero((due_ms < stored[0]) | ((due_ms == stored[0]) & (lines <= stored[1])))))
        if end < len(table):
            later = [int(due_ms[end])]
        first_row = wanted[0] * ROW_GROUP_ROWS if wanted else 0
        return ColdRows(_part_of(self.name, table[:end], first_row), not later, min(later, default=until_due_ms))

    def find(self, token: str, line: int) -> tuple[bytes, int] | None:
        """Return a message by the parts of its id: its member, and when it is due, epoch ms UTC. None if it is not there."""
        is_merged = self.name.is_merged
        with self._folder.used(self.name):
            for group in range(self._file.metadata.num_row_groups):
                columns = ["line", "token"] if is_merged else ["line"]
                table = self._file.read_row_group(group, columns=columns, use_threads=False)
                is_it = table["line"].to_numpy() == line
                if is_merged:
                    is_it &= np.array(table["token"].to_pylist()) == token
                if len(places := np.flatnonzero(is_it)):
                    [row] = self._file.read_row_group(group, use_threads=False).slice(int(places[0]), 1).to_pylist()
                    return f"{token}{line:08x}".encode() + row["member"], row["due_ms"]
        return None


def _part_of(name: ColdName, table: pa.Table, first_row: int) -> ParsedPart:
    """Return rows of a cold file as they came out of their landing file; a merged file has numbers of its own for lines."""
    due_ms, lines, keys, rests, *tokens = (column.combine_chunks() for column in table.columns)
    line_nos = lines.cast(pa.int64()).to_numpy()
    members = join(tokens[0].cast(pa.binary()) if tokens else name.token.encode(), as_hex(line_nos), rests)
    if tokens:
        line_nos = np.arange(first_row, first_row + len(table))
    return ParsedPart(
        part_id=name.marker_id,
        line_nos=line_nos,
        due_ms=due_ms.to_numpy(),
        members=members,
        idempotency_keys=keys,
        rejected=[],
        lines=len(line_nos),
        blank=0,
    )


def merged_file(tables: dict[ColdName, pa.Table], shard: int) -> NewFile:
    """Return one file of several: their rows in order of due time, and of message ids."""
    columns = [*SCHEMA.names, MERGED_FIELD.name]
    with_tokens = [
        table.append_column(MERGED_FIELD.name, pa.array([name.token] * len(table), pa.string()))
        for name, table in tables.items()
    ]
    table = pa.concat_tables(with_tokens).select(columns)
    table = table.take(pc.sort_indices(table, [("due_ms", "ascending"), ("token", "ascending"), ("line", "ascending")]))
    first, last = table["due_ms"][0].as_py(), table["due_ms"][-1].as_py()
    about = {REPLACES: json.dumps([str(name) for name in tables])}
    schema = SCHEMA.append(MERGED_FIELD).with_metadata(about)
    return new_file(ColdName.of_merged(shard, first, last), table.cast(schema))
