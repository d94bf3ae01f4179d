"""Commands as they go on the wire, framed where many are made at once.

A client that packs millions of small arguments one by one costs more than all the rest of their way. The protocol is
https://redis.io/docs/latest/develop/reference/protocol-spec/, and only bulk strings are used of it.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.cold import COLD_HOUR_MAX, HOUR_MS
from pipeline.core.ids import MESSAGE_ID_LENGTH
from pipeline.store.base import MessageRows


@dataclass(frozen=True, slots=True)
class FramedRows:
    """Messages ready to be sent: one ZADD for each bucket, and the member that the server has first, for the wake-up."""

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
    import pyarrow as pa
    import pyarrow.compute as pc

    due_ms = pa.array(rows.due_ms, pa.int64())
    places, wire = _texts_of(_frame_columns(due_ms, rows.members))
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
        min(rows.members[: bisect_right(rows.due_ms, rows.due_ms[0])].to_pylist()),
    )


def frame_cold_places(rows: MessageRows, key: str) -> bytes:
    """Frame an HSET of the places of cold messages, which their rows have for members, by their idempotency keys."""
    header = _frame_header(2 + 2 * len(rows)) + _frame(("HSET", key))
    return header + b"".join(_frame_columns(rows.idempotency_keys, rows.members).to_pylist())


def count_hours(rows: MessageRows) -> dict[int, int]:
    """Return how many cold messages count for each hour since the epoch (``cold.hour_of``) that has any."""
    if not len(rows):
        return {}
    import pyarrow as pa
    import pyarrow.compute as pc

    hours = pc.divide(pa.array(rows.due_ms, pa.int64()), HOUR_MS)
    counts = pc.value_counts(pc.min_element_wise(hours, COLD_HOUR_MAX))
    return dict(zip(*(counts.field(name).to_pylist() for name in ("values", "counts")), strict=True))


def frame_places(rows: MessageRows, key: str) -> bytes:
    """Frame an HSET of the places of messages (``lua/include/places.lua``) by their idempotency keys."""
    header = _frame_header(2 + 2 * len(rows)) + _frame(("HSET", key))
    if isinstance(rows.members, list):
        columns = zip(rows.idempotency_keys, rows.members, rows.due_ms, strict=True)
        return header + b"".join(
            _frame((name, b"%b%d" % (member[:MESSAGE_ID_LENGTH], due_ms))) for name, member, due_ms in columns
        )
    import pyarrow as pa
    import pyarrow.compute as pc

    due_ms = pa.array(rows.due_ms, pa.int64()).cast(pa.string()).cast(pa.binary())
    places = pc.binary_join_element_wise(pc.binary_slice(rows.members, 0, MESSAGE_ID_LENGTH), due_ms, b"")
    return header + _joined(_frame_columns(rows.idempotency_keys, places))


def frame_names(rows: MessageRows) -> bytes:
    """Frame the idempotency keys of messages as arguments."""
    if isinstance(rows.members, list):
        return _frame(rows.idempotency_keys)
    return _joined(_frame_columns(rows.idempotency_keys))


def join(first: MessageRows, second: MessageRows) -> MessageRows:
    """Return the rows of both, one behind the other."""
    if not len(first) or not len(second):
        return first if len(first) else second
    import pyarrow as pa

    columns = zip(*((rows.due_ms, rows.members, rows.idempotency_keys) for rows in (first, second)), strict=True)
    due_ms, *texts = ([pa.array(part) for part in column] for column in columns)
    return MessageRows(pa.concat_arrays(due_ms).to_numpy(), *map(pa.concat_arrays, texts))


def repeated(rows: MessageRows) -> list[int]:
    """Return the places of messages whose idempotency key comes a second time."""
    keys: Any = rows.idempotency_keys
    if not isinstance(rows.members, list):
        import pyarrow.compute as pc

        if pc.count_distinct(keys).as_py() == len(rows):
            return []
        keys = keys.to_pylist()
    first = dict(zip(reversed(keys), range(len(rows) - 1, -1, -1), strict=True))
    return [place for place, key in enumerate(keys) if first[key] != place] if len(first) < len(rows) else []


def select(rows: MessageRows, places: Sequence[int]) -> MessageRows:
    """Return the messages at some places."""
    columns = (rows.due_ms, rows.members, rows.idempotency_keys)
    if isinstance(rows.members, list):
        return MessageRows(*([column[place] for place in places] for column in columns))
    import pyarrow as pa

    due_ms, *texts = columns
    return MessageRows(due_ms[[*places]], *(each.take(pa.array(places, pa.int64())) for each in texts))


def _frame_columns(*columns: Any) -> Any:
    """Frame the rows of columns, each value as an argument."""
    # Imported here, since only ingest has them: other programs start faster without, or on machines that lack them.
    import pyarrow as pa
    import pyarrow.compute as pc

    def as_binary(column: pa.Array) -> pa.Array:
        return column if pa.types.is_binary(column.type) else column.cast(pa.string()).cast(pa.binary())

    parts: list[Any] = []
    for column in map(as_binary, columns):
        parts += (b"\r\n$" if parts else b"$", as_binary(pc.binary_length(column)), b"\r\n", column)
    return pc.binary_join_element_wise(*parts, b"\r\n", b"")


def _texts_of(column: Any) -> tuple[memoryview, memoryview]:
    """Return where the texts of a column that was just made begin and end, and all of them in a row."""
    _, offsets, texts = column.buffers()
    return memoryview(offsets).cast("i"), memoryview(texts)


def _joined(column: Any) -> bytes:
    places, texts = _texts_of(column)
    return bytes(texts[: places[len(column)]])


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
    return FramedRows([*arguments], commands, min(zip(rows.due_ms, rows.members, strict=True))[1])


def frame_command(*arguments: str | bytes | int, more: int = 0, framed: bytes = b"") -> bytes:
    """Return a command of ``arguments``, its name included, and so many ``more``, which are framed already."""
    return _frame_header(len(arguments) + more) + _frame(arguments) + framed


def _frame_header(count: int) -> bytes:
    return b"*%d\r\n" % count


def _frame(arguments: Sequence[str | bytes | int]) -> bytes:
    encoded = [argument if isinstance(argument, bytes) else str(argument).encode() for argument in arguments]
    return b"".join(b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in encoded)
