"""Pure DataFrame -> DataFrame functions: files to rows, and tables of requests to due times and refusals.

Guarantee: the same input gives the same rows, whatever the cores, settings or number of attempts. So nothing here reads a clock,
draws a random number or depends on how Spark splits its work: a whole file is one row, and the arrival is the file's, or given.

**Files.** ``with_landing_columns`` and ``with_direct_columns`` say what a file is. Its lines are parsed in Python workers, which is
several times faster than in columns (docs/adr/0008-parsing-in-python.md).

**Tables**, which programs schedule (``tables.py``). Null is an absent field.

    judged = table.transform(with_message_text).transform(with_due_ms, arrival_ms).transform(with_bucket).transform(with_refusal)

| column | type |
|---|---|
| ``message`` | string; a struct, map or array is written as JSON |
| ``due`` | timestamp, ISO 8601 string with a zone, or whole number of epoch ms |
| ``delay_sec``, ``countdown`` | number of seconds |
| ``id``, ``topic`` | string |
| ``headers`` | map of strings |
| ``cancel`` | string; stands alone |
| ``replace`` | boolean |

``core/validation.py`` is the reference of the rules for both; ``tests/cases`` holds them together.
"""

from collections.abc import Iterable, Iterator
from functools import reduce

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.due import DELAY_SEC_MAX, DUE_MS_MAX, EPOCH_MS_MIN, LOCAL_TIME_PATTERN, ZONED_TIME_PATTERN
from pipeline.core.ids import TOKEN_LENGTH
from pipeline.core.messages import REQUEST_FIELDS, Reason
from pipeline.core.validation import ID_PATTERN, MESSAGE_BYTES_MAX, TOPIC_PATTERN
from pipeline.ingest.parsing import FileText
from pipeline.landing.names import REPEATED, WAITED

# What each column may be. A column of another type is an error of the program, not of a row.
_TYPES: dict[str, tuple[type[T.DataType], ...]] = {
    "message": (T.StringType, T.StructType, T.MapType, T.ArrayType),
    "due": (T.TimestampType, T.StringType, T.IntegralType),
    "delay_sec": (T.NumericType,),
    "countdown": (T.NumericType,),
    "id": (T.StringType,),
    "topic": (T.StringType,),
    "headers": (T.MapType,),
    "cancel": (T.StringType,),
    "replace": (T.BooleanType,),
}


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
                is_repeated=row["is_repeated"],
                has_waited=row["has_waited"],
            )


def with_landing_columns(files: DataFrame) -> DataFrame:
    """Read token, first line, kind and original name from the names of landing files.

    Takes rows of a text source with ``wholetext``; the name is ``<token>.<first_line>.<kind>.<original name>``, the last
    percent-encoded with "=" for "%" and "+" for ".", and says at its end whether the file is read again.
    """
    parts = F.split(F.col("_metadata.file_name"), r"\.", 4)
    whole = F.try_element_at(parts, F.lit(4))
    quoted = F.regexp_replace(whole, REPEATED.pattern, "")
    return files.select(
        F.col("value").cast("binary"),
        F.try_element_at(parts, F.lit(1)).alias("file_token"),
        F.coalesce(F.try_element_at(parts, F.lit(2)).try_cast("bigint"), F.lit(1)).alias("first_line"),
        F.try_element_at(parts, F.lit(3)).alias("kind"),
        F.coalesce(F.try_url_decode(F.translate(quoted, "=+", "%.")), quoted).alias("file_name"),
        F.unix_millis("_metadata.file_modification_time").alias("file_arrival_ms"),
        (whole != quoted).alias("is_repeated"),
        ((whole != quoted) & F.endswith(whole, F.lit(WAITED))).alias("has_waited"),
    )


def with_staged_columns(files: DataFrame, stage: str, arrival_ms: int) -> DataFrame:
    """Derive the same columns for the staged files of a table: the token is a hash of the stage and the name of the file.

    Args:
        stage: unique among all that are ever staged.

        arrival_ms: of all of them, epoch ms UTC.
    """
    return files.select(
        F.col("value").cast("binary"),
        _token(F.concat_ws("\n", F.lit(stage), F.col("_metadata.file_name"))).alias("file_token"),
        F.lit(1).cast("bigint").alias("first_line"),
        F.lit("json").alias("kind"),
        F.col("_metadata.file_name").alias("file_name"),
        F.lit(arrival_ms).cast("bigint").alias("file_arrival_ms"),
        F.lit(False).alias("is_repeated"),
        F.lit(False).alias("has_waited"),
    )


def with_direct_columns(files: DataFrame) -> DataFrame:
    """Derive the same columns for files that were not landed: the token is a hash of path and time of last change."""
    identity = F.concat_ws(
        "\n", "_metadata.file_path", F.unix_millis("_metadata.file_modification_time").cast("string")
    )
    is_csv = F.rlike(F.lower("_metadata.file_name"), F.lit(r"\.csv(\.gz)?\z"))
    return files.select(
        F.col("value").cast("binary"),
        _token(identity).alias("file_token"),
        # As in landing files: the header of a CSV file is line 1, its data starts on line 2.
        F.when(is_csv, F.lit(2)).otherwise(F.lit(1)).cast("bigint").alias("first_line"),
        F.when(is_csv, F.lit("csv")).otherwise(F.lit("json")).alias("kind"),
        # Spark gives the name as in a URI, where a plus sign is itself.
        _url_decoded(F.replace("_metadata.file_name", F.lit("+"), F.lit("%2B"))).alias("file_name"),
        F.unix_millis("_metadata.file_modification_time").alias("file_arrival_ms"),
        F.lit(False).alias("is_repeated"),
        F.lit(False).alias("has_waited"),
    )


def _token(identity: Column) -> Column:
    return F.left(F.translate(F.base64(F.unhex(F.sha2(identity, 256))), "+/", "-_"), F.lit(TOKEN_LENGTH))


def _url_decoded(text: Column) -> Column:
    return F.coalesce(F.try_url_decode(text), text)


def with_message_text(table: DataFrame) -> DataFrame:
    """Write ``message`` as JSON unless it is a string.

    Raises:
        TypeError: a column has a type that its field can't have.
    """
    for field in table.schema:
        allowed = _TYPES.get(field.name)
        if allowed and not isinstance(field.dataType, (*allowed, T.NullType)):
            raise TypeError(
                f"The column {field.name} is of type {field.dataType.simpleString()}, which no request has."
            )
    if "message" not in table.columns or isinstance(table.schema["message"].dataType, T.StringType | T.NullType):
        return table
    return table.withColumn("message", F.to_json("message"))


def with_due_ms(table: DataFrame, arrival_ms: int) -> DataFrame:
    """Add ``due_ms``, epoch ms UTC rounded up; null where no field says a time that can be read.

    Args:
        arrival_ms: when the table arrived, epoch ms UTC, which delays count from.
    """
    return table.withColumn("due_ms", F.coalesce(_due_ms(table), F.lit(arrival_ms) + _delay_ms(_delay(table))))


def with_bucket(table: DataFrame) -> DataFrame:
    """Add ``bucket_start_ms``, the start of the ten minutes that ``due_ms`` lies in, epoch ms UTC."""
    return table.withColumn("bucket_start_ms", F.col("due_ms") - F.pmod("due_ms", F.lit(BUCKET_WIDTH_MS)))


def with_refusal(table: DataFrame) -> DataFrame:
    """Add ``refusal``, the ``Reason`` for which the row of ``with_due_ms`` is refused; null if it is accepted.

    A row that cancels is accepted without ``due_ms``.
    """
    message, due, due_ms = _column(table, "message"), _column(table, "due"), F.col("due_ms")
    times = sum((_column(table, name).isNotNull().cast("int") for name in ("delay_sec", "countdown", "due")), F.lit(0))
    delay = _delay(table).cast("double")
    headers, replaces = _column(table, "headers"), F.coalesce(_column(table, "replace"), F.lit(False))
    no_text = (
        F.exists(F.map_values(headers), lambda text: text.isNull())
        if _is(table, "headers", T.MapType)
        else F.lit(False)
    )
    refusals = [
        (message.isNull(), Reason.MISSING_MESSAGE),
        (message == "", Reason.EMPTY_MESSAGE),
        (F.octet_length(message.cast("string")) > MESSAGE_BYTES_MAX, Reason.MESSAGE_TOO_LONG),
        (times == 0, Reason.MISSING_DUE),
        (times > 1, Reason.BOTH_DUE),
        (~delay.between(0, DELAY_SEC_MAX), Reason.DELAY_OUT_OF_RANGE),
        (due.isNotNull() & due_ms.isNull() & _matches(due, LOCAL_TIME_PATTERN), Reason.DUE_WITHOUT_ZONE),
        (due.isNotNull() & due_ms.isNull(), Reason.NOT_A_TIME),
        (F.lit(_is(table, "due", T.IntegralType)) & due_ms.between(0, EPOCH_MS_MIN - 1), Reason.DUE_IN_SECONDS),
        (~due_ms.between(0, DUE_MS_MAX), Reason.DUE_OUT_OF_RANGE),
        (~_matches(_column(table, "id"), ID_PATTERN), Reason.BAD_ID),
        (~_matches(_column(table, "topic"), TOPIC_PATTERN), Reason.BAD_TOPIC),
        (no_text, Reason.BAD_HEADERS),
        (replaces & _column(table, "id").isNull(), Reason.REPLACE_WITHOUT_ID),
    ]
    cancel = _column(table, "cancel")
    others = [_column(table, name).isNotNull() for name in REQUEST_FIELDS if name not in ("cancel", "replace")]
    of_cancel = [
        (reduce(Column.__or__, [*others, replaces]), Reason.CANCEL_NOT_ALONE),
        (~_matches(cancel, ID_PATTERN), Reason.BAD_ID),
    ]
    return table.withColumn("refusal", F.when(cancel.isNull(), _first(refusals)).otherwise(_first(of_cancel)))


def _first(refusals: list[tuple[Column, Reason]]) -> Column:
    return F.coalesce(*(F.when(condition, F.lit(reason.value)) for condition, reason in refusals))


def _is(table: DataFrame, name: str, kind: type[T.DataType]) -> bool:
    return name in table.columns and isinstance(table.schema[name].dataType, kind)


def _column(table: DataFrame, name: str) -> Column:
    return F.col(name) if name in table.columns else F.lit(None)


def _delay(table: DataFrame) -> Column:
    return F.coalesce(_column(table, "delay_sec"), _column(table, "countdown"))


def _delay_ms(seconds: Column) -> Column:
    """Round to the nearest microsecond, then up to the ms."""
    is_possible = seconds.cast("double").between(0, DELAY_SEC_MAX)
    return F.ceil(F.when(is_possible, seconds).cast("decimal(20,6)") * 1000).cast("bigint")


def _due_ms(table: DataFrame) -> Column:
    due = _column(table, "due")
    if _is(table, "due", T.IntegralType):
        return due.cast("bigint")
    if _is(table, "due", T.StringType):
        # Spark reads offsets without a colon, small letters and commas in another way than ISO 8601, or not at all.
        written = F.regexp_replace(F.translate(F.upper(due), ",", "."), r"([+-]\d\d)(\d\d)$", "$1:$2")
        with_seconds = F.regexp_replace(written, r"^(.{10}.\d\d:\d\d)(?!:)", "$1:00")
        is_time = _matches(due, ZONED_TIME_PATTERN) & ~due.startswith(
            "0000"
        )  # Spark has a year 0, the reference has none
        due = F.when(is_time, with_seconds).try_cast("timestamp")
    micros = F.unix_micros(due.cast("timestamp"))
    # Before 1970 stays before 1970, even by a microsecond, which rounding up would turn into 0.
    return (
        F.when(micros.between(-999, -1), F.lit(-1))
        .otherwise(F.ceil(micros / F.lit(1000).cast("decimal(4,0)")))
        .cast("bigint")
    )


def _matches(text: Column, pattern: str) -> Column:
    return F.rlike(text.cast("string"), F.lit(rf"\A(?:{pattern})\z"))
