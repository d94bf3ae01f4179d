"""Commands as they go on the wire, framed where many are made at once.

A client that packs millions of small arguments one by one costs more than all the rest of their way. The protocol is
https://redis.io/docs/latest/develop/reference/protocol-spec/, and only bulk strings are used of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.store.base import MessageRows


@dataclass(frozen=True, slots=True)
class FramedRows:
    """Messages ready to be sent: one ZADD for each bucket, and the first member, for the wake-up."""

    bucket_starts: Sequence[int]
    commands: Sequence[bytes]
    first_member: bytes = b""


def frame_rows(rows: MessageRows, key_of: Callable[[int], str]) -> FramedRows:
    """Frame messages and cut them by bucket.

    Args:
        key_of: returns the key of the bucket that starts at an epoch ms.
    """
    if not len(rows):
        return FramedRows([], [])
    if isinstance(rows.members, list):
        return _frame_lists(rows, key_of)
    # Imported here, since only ingest has them: other programs start faster without, or on machines that lack them.
    import pyarrow as pa
    import pyarrow.compute as pc

    def lengths(column: pa.Array) -> pa.Array:
        return pc.binary_length(column).cast(pa.string()).cast(pa.binary())

    due_ms, members = pa.array(rows.due_ms, pa.int64()), rows.members
    scores = due_ms.cast(pa.string()).cast(pa.binary())
    columns = (b"$", lengths(scores), b"\r\n", scores, b"\r\n$", lengths(members), b"\r\n", members, b"\r\n")
    _, offsets, pairs = pc.binary_join_element_wise(*columns, b"").buffers()
    places, wire = memoryview(offsets).cast("i"), memoryview(pairs)
    # All are framed at once: a call for each bucket would cost more than the framing.
    buckets = pc.run_end_encode(pc.multiply(pc.divide(due_ms, BUCKET_WIDTH_MS), BUCKET_WIDTH_MS))
    starts, ends = buckets.values.to_pylist(), buckets.run_ends.to_pylist()
    return FramedRows(
        starts,
        [
            b"".join(
                (
                    _frame_header(2 + 2 * (end - first)),
                    _frame(("ZADD", key_of(start))),
                    wire[places[first] : places[end]],
                )
            )
            for start, first, end in zip(starts, [0, *ends], ends, strict=False)
        ],
        members[0].as_py(),
    )


def _frame_lists(rows: MessageRows, key_of: Callable[[int], str]) -> FramedRows:
    """Frame messages one by one."""
    arguments: dict[int, list[bytes]] = {}
    for due_ms, member in zip(rows.due_ms, rows.members, strict=True):
        score = b"%d" % due_ms
        pair = b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(score), score, len(member), member)
        arguments.setdefault(bucket_start_ms(due_ms), []).append(pair)
    commands = [
        b"".join((_frame_header(2 + 2 * len(pairs)), _frame(("ZADD", key_of(start))), *pairs))
        for start, pairs in arguments.items()
    ]
    return FramedRows([*arguments], commands, rows.members[0])


def frame_command(*arguments: str | bytes | int) -> bytes:
    """Return a command of ``arguments``, its name included."""
    return _frame_header(len(arguments)) + _frame(arguments)


def _frame_header(count: int) -> bytes:
    return b"*%d\r\n" % count


def _frame(arguments: Sequence[str | bytes | int]) -> bytes:
    encoded = [argument if isinstance(argument, bytes) else str(argument).encode() for argument in arguments]
    return b"".join(b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in encoded)
