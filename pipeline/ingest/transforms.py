"""Pure DataFrame -> DataFrame functions: files to rows, and tables of requests to due times and refusals.

Guarantee: the same input gives the same rows, whatever the cores, settings or number of attempts. So nothing here reads a clock,
draws a random number or depends on how Spark splits its work: a whole file is one row, and the arrival is the file's, or given.

**Files.** ``with_landing_columns`` and ``with_direct_columns`` say which they are. Python workers read what their names say, and
their lines, which is several times faster than in columns (docs/adr/0008-parsing-in-python.md).

**Tables**, which programs schedule (``tables.py``). Null is an absent field.

    judged = table.transform(with_message_text).transform(with_due_ms, arrival_ms).transform(with_bucket).transform(with_refusal)
    written = judged.where("refusal is null").transform(with_rest)

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

import logging
import socket
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.due import DELAY_SEC_MAX, DUE_MS_MAX, EPOCH_MS_MIN, LOCAL_TIME_PATTERN, ZONED_TIME_PATTERN
from pipeline.core.errors import PipelineError
from pipeline.core.ids import TOKEN_LENGTH
from pipeline.core.messages import DEFAULT_TOPIC, FORM_JSON, FORM_PLAIN, REQUEST_FIELDS, Reason
from pipeline.core.text import visible
from pipeline.core.validation import ID_PATTERN, MESSAGE_BYTES_MAX, REQUEST_BYTES_MAX, TOPIC_PATTERN
from pipeline.ingest.parsing import FileText
from pipeline.landing.names import LandingName, parse_landing_name

log = logging.getLogger(__name__)

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
    """Read file rows as they come to a Python worker, and the files that are not in them.

    Raises:
        PipelineError: a file can't be read.
    """
    for batch in batches:
        for row in batch.to_pylist():
            name = row["path"].rpartition("/")[2]
            landed = parse_landing_name(name)
            if landed is None and row["value"] is None:  # somebody else has put it there
                log.warning(
                    "%s is no landing file, and nothing of it is read: take it out of that folder", visible(row["path"])
                )
                continue
            landed = landed or LandingName(name[:TOKEN_LENGTH], 1, "json", name)
            yield FileText(
                token=landed.token,
                first_line=landed.first_line,
                kind=landed.kind,  # type: ignore[arg-type]  # one of ``names.KINDS``
                name=landed.original_name,
                arrival_ms=row["arrival_ms"],
                content=_read_file(row["path"]) if row["value"] is None else row["value"],
                is_repeated=landed.is_repeated,
                has_waited=landed.has_waited,
            )


def _read_file(path: str) -> bytes:
    try:
        return Path(path.removeprefix("file:")).read_bytes()
    except OSError as exc:
        raise PipelineError(
            f"{socket.gethostname()} can't read a landing file ({exc}): let the user of its executor read that folder and start "
            "the job again; nothing of this batch was deleted."
        ) from exc


def with_landing_columns(files: DataFrame) -> DataFrame:
    """Make file rows of a ``binaryFile`` source that finds landing files; the workers read what is in them.

    That is faster than through Java (docs/adr/0008-parsing-in-python.md). Each column costs the planning of a micro-batch a
    millisecond.
    """
    return files.select(
        F.lit(None).cast("binary").alias("value"), "path", F.unix_millis("modificationTime").alias("arrival_ms")
    )


def with_direct_columns(files: DataFrame) -> DataFrame:
    """Make file rows of files that were not landed, with the name that they would have: the token is a hash of path and time."""
    identity = F.concat_ws(
        "\n", "_metadata.file_path", F.unix_millis("_metadata.file_modification_time").cast("string")
    )
    is_csv = F.rlike(F.lower("_metadata.file_name"), F.lit(r"\.csv(\.gz)?\z"))
    token = F.left(F.translate(F.base64(F.unhex(F.sha2(identity, 256))), "+/", "-_"), F.lit(TOKEN_LENGTH))
    # As in landing files: the header of a CSV file is line 1, its data starts on line 2.
    line_and_kind = F.when(is_csv, F.lit("2.csv")).otherwise(F.lit("1.json"))
    # Spark gives the name as in a URI, where a plus sign and an equals sign are themselves.
    escaped = F.replace(F.replace("_metadata.file_name", F.lit("="), F.lit("%3D")), F.lit("+"), F.lit("%2B"))
    return files.select(
        F.col("value").cast("binary"),
        F.concat_ws(".", token, line_and_kind, F.translate(escaped, "%.", "=+")).alias("path"),
        F.unix_millis("_metadata.file_modification_time").alias("arrival_ms"),
    )


def check_types(schema: T.StructType) -> None:
    """See that fields have columns of types that they can have.

    Raises:
        TypeError: one has not.
    """
    for field in schema:
        allowed = _TYPES.get(field.name)
        if field.name == "due" and isinstance(field.dataType, T.TimestampNTZType | T.DateType):
            clock = " 09:00:00" if isinstance(field.dataType, T.DateType) else ""
            raise TypeError(
                f"The column due is of type {field.dataType.simpleString()}, which has no time zone: make it a timestamp, "
                f"for example try_to_timestamp(concat(cast(due as string), '{clock} Europe/Berlin'))."
            )
        if allowed and not isinstance(field.dataType, (*allowed, T.NullType)):
            raise TypeError(
                f"The column {field.name} is of type {field.dataType.simpleString()}, which no request has."
            )


def with_message_text(table: DataFrame) -> DataFrame:
    """Write ``message`` as JSON unless it is a string.

    Raises:
        TypeError: a column has a type that its field can't have.
    """
    check_types(table.schema)
    if "message" not in table.columns or isinstance(table.schema["message"].dataType, T.StringType | T.NullType):
        return table
    return table.withColumn("message", F.to_json("message"))


def with_due_ms(table: DataFrame, arrival_ms: int) -> DataFrame:
    """Add ``due_ms``, epoch ms UTC rounded up; null where no field says a time that can be read.

    Args:
        arrival_ms: when the table arrived, epoch ms UTC, which delays count from.
    """
    due_ms = _due_ms(table) if "due" in table.columns else F.lit(None).cast("bigint")
    if {"delay_sec", "countdown"} & {*table.columns}:
        due_ms = F.coalesce(due_ms, F.lit(arrival_ms) + _delay_ms(_delay(table)))
    return table.withColumn("due_ms", due_ms)


def with_bucket(table: DataFrame) -> DataFrame:
    """Add ``bucket_start_ms``, the start of the ten minutes that ``due_ms`` lies in, epoch ms UTC."""
    return table.withColumn("bucket_start_ms", F.col("due_ms") - F.pmod("due_ms", F.lit(BUCKET_WIDTH_MS)))


def with_refusal(table: DataFrame) -> DataFrame:
    """Add ``refusal``, the ``Reason`` for which the row of ``with_due_ms`` is refused; null if it is accepted.

    A row that cancels is accepted without ``due_ms``.
    """
    names = {*table.columns}
    message, due_ms = _column(table, "message"), F.col("due_ms")
    times = [F.col(name).isNotNull().cast("int") for name in ("delay_sec", "countdown", "due") if name in names]
    # What is about a column that is not there is left out: it would be half of the time that the driver takes to plan.
    refusals = [(message.isNull(), Reason.MISSING_MESSAGE)]
    if "message" in names:
        size = F.octet_length(message.cast("string"))
        refusals += [(size == 0, Reason.EMPTY_MESSAGE), (size > MESSAGE_BYTES_MAX, Reason.MESSAGE_TOO_LONG)]
    refusals += [(sum(times, F.lit(0)) == 0, Reason.MISSING_DUE)]
    if len(times) > 1:
        refusals += [(sum(times, F.lit(0)) > 1, Reason.BOTH_DUE)]
    if names & {"delay_sec", "countdown"}:
        refusals += [(~_delay(table).cast("double").between(0, DELAY_SEC_MAX), Reason.DELAY_OUT_OF_RANGE)]
    if "due" in names:
        due = F.col("due")
        is_no_time = due.isNotNull() & due_ms.isNull()
        if _is(table, "due", T.StringType):
            refusals += [(is_no_time & _matches(due, LOCAL_TIME_PATTERN), Reason.DUE_WITHOUT_ZONE)]
        refusals += [(is_no_time, Reason.NOT_A_TIME)]
        if _is(table, "due", T.IntegralType):
            refusals += [(due_ms.between(0, EPOCH_MS_MIN - 1), Reason.DUE_IN_SECONDS)]
    refusals += [(~due_ms.between(0, DUE_MS_MAX), Reason.DUE_OUT_OF_RANGE)]
    if "id" in names:
        refusals += [(~_matches(F.col("id"), ID_PATTERN), Reason.BAD_ID)]
    if "topic" in names:
        refusals += [(~_matches(F.col("topic"), TOPIC_PATTERN), Reason.BAD_TOPIC)]
    if _is(table, "headers", T.MapType):
        headers = F.col("headers")
        refusals += [
            (F.exists(F.map_values(headers), lambda text: text.isNull()), Reason.BAD_HEADERS),
            (F.octet_length(F.to_json(headers)) > REQUEST_BYTES_MAX, Reason.LINE_TOO_LONG),
        ]
    replaces = F.coalesce(_column(table, "replace"), F.lit(False))
    if "replace" in names:
        refusals += [(replaces & _column(table, "id").isNull(), Reason.REPLACE_WITHOUT_ID)]
    refusal = _first(refusals)
    if "cancel" in names:
        cancel = F.col("cancel")
        others = [F.col(name).isNotNull() for name in REQUEST_FIELDS if name in names - {"cancel", "replace"}]
        of_cancel = [
            (reduce(Column.__or__, [*others, replaces]), Reason.CANCEL_NOT_ALONE),
            (~_matches(cancel, ID_PATTERN), Reason.BAD_ID),
        ]
        refusal = F.when(cancel.isNull(), refusal).otherwise(_first(of_cancel))
    return table.withColumn("refusal", refusal)


def with_rest(table: DataFrame) -> DataFrame:
    """Add ``rest``, what the member of an accepted request holds behind its id: byte for byte as ``Message.to_member`` writes it.

    Text that is not UTF-8, which only a cast from binary makes, has U+FFFD for each byte that can't be read.
    """
    message = F.make_valid_utf8(_column(table, "message").cast("string"))
    fields = {"message": message}
    if "topic" in table.columns:
        fields["topic"] = F.when(F.col("topic") != DEFAULT_TOPIC, F.col("topic"))
    if "id" in table.columns:
        fields["id"] = F.col("id")
    if _is(table, "headers", T.MapType):
        texts = F.col("headers").cast("map<string,string>")
        fields["headers"] = F.when(F.size(texts) > 0, _in_order(texts))
    plain = F.concat(F.lit(FORM_PLAIN), message)
    if len(fields) == 1:
        return table.withColumn("rest", plain)
    whole = F.to_json(F.struct(*(field.alias(name) for name, field in fields.items())), {"ignoreNullFields": "true"})
    is_plain = reduce(Column.__and__, (field.isNull() for name, field in fields.items() if name != "message"))
    return table.withColumn("rest", F.when(is_plain, plain).otherwise(F.concat(F.lit(FORM_JSON), whole)))


def _in_order(headers: Column) -> Column:
    """Sort a map by the UTF-16 code units of its names."""
    named = F.transform(
        F.map_entries(headers),
        lambda entry: F.struct(F.encode(entry["key"], "UTF-16BE").alias("units"), entry.alias("entry")),
    )
    return F.map_from_entries(F.transform(F.array_sort(named), lambda each: each["entry"]))


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
