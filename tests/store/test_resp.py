"""Messages as ZADD commands: what the server gets, byte by byte."""

import numpy as np
import pyarrow as pa
import pytest

from pipeline.store.base import MessageRows
from pipeline.store.resp import (
    FramedRows,
    frame_command,
    frame_names,
    frame_places,
    frame_rows,
    repeated,
    select,
)

DUE_MS = [0, 599_999, 600_000, 1_700_000_000_000]
MEMBERS = [b"a", b"", "b\r\n\u00e4".encode(), b"d" * 300]


def framed(*messages: tuple[int, bytes], start_ms: int) -> bytes:
    arguments = (argument for due_ms, member in messages for argument in (due_ms, member))
    return frame_command("ZADD", f"bucket {start_ms}", *arguments)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("is_column", [False, True])
def test_messages_become_one_command_for_each_bucket(first: int, is_column: bool) -> None:
    rows = MessageRows(DUE_MS[first:], MEMBERS[first:])
    if is_column:  # slices, as a writer has them
        rows = MessageRows(np.array(DUE_MS, np.int64)[first:], pa.array(MEMBERS, pa.binary())[first:])
    assert frame_rows(rows, lambda start_ms: f"bucket {start_ms}") == FramedRows(
        [0, 600_000, 1_699_999_800_000],
        [
            framed(*[(0, b"a"), (599_999, b"")][first:], start_ms=0),
            framed((600_000, MEMBERS[2]), start_ms=600_000),
            framed((1_700_000_000_000, MEMBERS[3]), start_ms=1_699_999_800_000),
        ],
        MEMBERS[first],
    )


@pytest.mark.parametrize("is_column", [False, True])
def test_of_messages_that_are_due_first_together_the_first_member_is_the_first(is_column: bool) -> None:
    due_ms, members = [5, 5, 5, 6], [b"b", b"a", b"c", b"0"]
    rows = MessageRows(np.array(due_ms), pa.array(members, pa.binary())) if is_column else MessageRows(due_ms, members)
    assert frame_rows(rows, str).first_member == b"a"


def test_no_messages_need_no_command() -> None:
    assert frame_rows(MessageRows([], []), str) == FramedRows([], [])


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("is_column", [False, True])
def test_idempotency_keys_are_framed_with_the_places_of_their_messages(first: int, is_column: bool) -> None:
    keys, members = ["k", "", "order-1", "\u00e4"], [b"%022dm" % number for number in range(4)]
    rows = MessageRows(DUE_MS[first:], members[first:], keys[first:])
    if is_column:
        columns = (pa.array(column, pa.binary())[first:] for column in (members, [key.encode() for key in keys]))
        rows = MessageRows(np.array(DUE_MS, np.int64)[first:], *columns)
    pairs = [
        (key, member[:22] + str(due_ms).encode()) for key, member, due_ms in zip(keys, members, DUE_MS, strict=True)
    ]
    arguments = [value for pair in pairs[first:] for value in pair]
    assert frame_places(rows, "p") == frame_command("HSET", "p", *arguments)
    assert frame_command("X", more=len(rows), framed=frame_names(rows)) == frame_command("X", *keys[first:])


@pytest.mark.parametrize("is_column", [False, True])
def test_an_idempotency_key_counts_where_it_comes_first(is_column: bool) -> None:
    keys = ["a", "b", "a", "a", "b"]
    rows = MessageRows([*range(5)], [b"%d" % number for number in range(5)], keys)
    if is_column:
        rows = MessageRows(np.arange(5), pa.array(rows.members, pa.binary()), pa.array(keys).cast(pa.binary()))
    assert (repeated(rows), repeated(select(rows, [0, 1])), repeated(select(rows, []))) == ([2, 3, 4], [], [])
    chosen = select(rows, [1, 3])
    assert ([*chosen.due_ms], [*map(str, chosen.members)]) == ([1, 3], [*map(str, (rows.members[1], rows.members[3]))])


def test_a_command_is_framed_as_the_protocol_says() -> None:
    assert frame_command("SET", b"k\0", 12) == b"*3\r\n$3\r\nSET\r\n$2\r\nk\0\r\n$2\r\n12\r\n"
