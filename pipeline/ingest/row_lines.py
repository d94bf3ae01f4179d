"""Rows of Arrow as request lines, which a data source judges them by: it has no DataFrame to put column functions on."""

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_INFINITE: Final = msgspec.Raw(b"1e999")  # a number that is out of every range, as NaN is, for which JSON has no word
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


def request_lines(batch: pa.RecordBatch, fields: Mapping[str, str]) -> Iterator[bytes]:
    """Write the rows of a batch as request lines."""
    columns = {field: _as_values(batch.column(column)) for field, column in fields.items()}
    for values in zip(*columns.values(), strict=True):
        yield _encode({field: value for field, value in zip(columns, values, strict=True) if value is not None})


def _as_values(column: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        times = pc.strftime(column.cast(pa.timestamp("us")), "%Y-%m-%dT%H:%M:%S")
        column = pc.binary_join_element_wise(times, "Z", "")
    if pa.types.is_floating(column.type):
        return [value if value is None or isfinite(value) else _INFINITE for value in column.to_pylist()]
    if pa.types.is_map(column.type):
        return [None if value is None else dict(value) for value in column.to_pylist()]
    return list(column.to_pylist())


def has_due_times(batch: pa.RecordBatch, fields: Mapping[str, str]) -> Any:
    """Return for each row whether it says a due time."""
    if "due" not in fields:
        return np.zeros(len(batch), np.bool_)
    return batch.column(fields["due"]).is_valid().to_numpy(zero_copy_only=False)
