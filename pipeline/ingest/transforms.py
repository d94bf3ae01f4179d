"""From what Spark reads to what the writer takes: pure DataFrame -> DataFrame functions.

Guarantee: the same file gives the same rows in the same order, whatever the cores, settings or number of attempts. So nothing here
reads a clock, draws a random number or depends on how Spark splits its work: a whole file is one input row, and the arrival is
the file's, or the socket line's own.
"""

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.ids import TOKEN_LENGTH
from pipeline.ingest.parsing import FileText, ParsedPiece, parse_file
from pipeline.ingest.schemas import LINE_ROW


def select_line_rows(files: DataFrame) -> DataFrame:
    """Turn file rows (``schemas.FILE_ROW``) into line rows (``schemas.LINE_ROW``), to look at what would be stored.

    The writer goes the same way, and spares the rows the way back to the JVM.
    """
    return files.mapInArrow(_line_batches, LINE_ROW)


def file_texts(batches: Iterable[pa.RecordBatch]) -> Iterator[FileText]:
    """Read file rows as they come to a Python worker."""
    for batch in batches:
        for row in batch.to_pylist():
            yield FileText(
                token=row["file_token"],
                first_line=row["first_line"],
                kind=row["kind"],
                name=row["file_name"],
                arrival_ms=row["file_arrival_ms"],
                content=row["value"],
            )


def with_landing_columns(files: DataFrame) -> DataFrame:
    """Read token, first line, kind and original name from the names of landing files.

    Takes rows of a text source with ``wholetext``; the name is ``<token>.<first_line>.<kind>.<original name>``, the last
    percent-encoded with "=" for "%" and "+" for ".".
    """
    parts = F.split(F.col("_metadata.file_name"), r"\.", 4)
    quoted = F.try_element_at(parts, F.lit(4))
    return files.select(
        F.col("value").cast("binary"),
        F.try_element_at(parts, F.lit(1)).alias("file_token"),
        F.coalesce(F.try_element_at(parts, F.lit(2)).try_cast("bigint"), F.lit(1)).alias("first_line"),
        F.try_element_at(parts, F.lit(3)).alias("kind"),
        F.coalesce(F.try_url_decode(F.translate(quoted, "=+", "%.")), quoted).alias("file_name"),
        F.unix_millis("_metadata.file_modification_time").alias("file_arrival_ms"),
    )


def with_direct_columns(files: DataFrame) -> DataFrame:
    """Derive the same columns for files that were not landed: the token is a hash of path and time of last change."""
    identity = F.concat_ws(
        "\n", "_metadata.file_path", F.unix_millis("_metadata.file_modification_time").cast("string")
    )
    digest = F.translate(F.base64(F.unhex(F.sha2(identity, 256))), "+/", "-_")
    is_csv = F.rlike(F.lower("_metadata.file_name"), F.lit(r"\.csv(\.gz)?\z"))
    return files.select(
        F.col("value").cast("binary"),
        F.left(digest, F.lit(TOKEN_LENGTH)).alias("file_token"),
        # As in landing files: the header of a CSV file is line 1, its data starts on line 2.
        F.when(is_csv, F.lit(2)).otherwise(F.lit(1)).cast("bigint").alias("first_line"),
        F.when(is_csv, F.lit("csv")).otherwise(F.lit("json")).alias("kind"),
        # Spark gives the name as in a URI, where a plus sign is itself.
        _url_decoded(F.replace("_metadata.file_name", F.lit("+"), F.lit("%2B"))).alias("file_name"),
        F.unix_millis("_metadata.file_modification_time").alias("file_arrival_ms"),
    )


def _line_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    schema = to_arrow_schema(LINE_ROW)
    for file in file_texts(batches):
        for piece in parse_file(file):
            yield pa.RecordBatch.from_pylist(_accepted(piece) + _refused(piece), schema=schema)


def _accepted(piece: ParsedPiece) -> list[dict[str, object]]:
    columns = zip(piece.due_ms.tolist(), piece.members.to_pylist(), strict=True)
    rows = [
        {
            "fence_token": piece.fence_token,
            "due_ms": due_ms,
            "bucket_start_ms": bucket_start_ms(due_ms),
            "member": member,
            "caller_id": piece.caller_ids.get(index),
        }
        for index, (due_ms, member) in enumerate(columns)
    ]
    return [rows[index] for index in piece.line_nos.argsort()]


def _refused(piece: ParsedPiece) -> list[dict[str, object]]:
    return [
        {"fence_token": piece.fence_token, "line_no": line.line_no, "reason": line.rejection.reason.value}
        for line in piece.rejected
    ]


def _url_decoded(text: Column) -> Column:
    return F.coalesce(F.try_url_decode(text), text)
