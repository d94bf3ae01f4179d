"""Messages as ZADD commands: what the server gets, byte by byte."""

import numpy as np
import pyarrow as pa
import pytest

from pipeline.store.base import MessageRows
from pipeline.store.resp import FramedRows, frame_command, frame_rows

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


def test_no_messages_need_no_command() -> None:
    assert frame_rows(MessageRows([], []), str) == FramedRows([], [])


def test_a_command_is_framed_as_the_protocol_says() -> None:
    assert frame_command("SET", b"k\0", 12) == b"*3\r\n$3\r\nSET\r\n$2\r\nk\0\r\n$2\r\n12\r\n"
