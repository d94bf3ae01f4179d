"""From files to rows for the writer: pure DataFrame -> DataFrame functions in native columns.

Guarantee: the same file gives the same rows in the same order, whatever the cores, settings or number of attempts. So nothing here
reads a clock, draws a random number or depends on how Spark splits its work: a whole file is one input row, its lines are
numbered as they are split, and the arrival is the file's, or the socket line's own. No line makes a query fail, and every line
becomes a row.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline.core.ids import LINE_NO_MAX, TOKEN_LENGTH
from pipeline.core.messages import Reason
from pipeline.core.validation import LINE_BYTES_MAX
from pipeline.ingest import columns as C
from pipeline.ingest.schemas import LINE_ROW, OUTCOME_BLANK, OUTCOME_OK, OUTCOME_REJECTED

_BYTE_CHARSET = "ISO-8859-1"  # one character a byte, so any bytes survive it
_BOM = "\ufeff"


def select_line_rows(files: DataFrame) -> DataFrame:
    """Turn file rows (``schemas.FILE_ROW``) into line rows (``schemas.LINE_ROW``): the whole way, composed."""
    requests = files.transform(with_lines).transform(with_request_json).transform(with_fields)
    return requests.transform(with_due).transform(with_member).transform(with_outcome).select(*LINE_ROW.fieldNames())


def with_landing_columns(files: DataFrame) -> DataFrame:
    """Read token, first line, kind and original name from the names of landing files.

    Takes rows of a text source with ``wholetext``; the name is ``<token>.<first_line>.<kind>.<original name>``, the last
    percent-encoded with "=" for "%" and "+" for ".".
    """
    parts = F.split(F.col("_metadata.file_name"), r"\.", 4)
    quoted = F.try_element_at(parts, F.lit(4))
    return files.select(
        "value",
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
        "value",
        F.left(digest, F.lit(TOKEN_LENGTH)).alias("file_token"),
        # As in landing files: the header of a CSV file is line 1, its data starts on line 2.
        F.when(is_csv, F.lit(2)).otherwise(F.lit(1)).cast("bigint").alias("first_line"),
        F.when(is_csv, F.lit("csv")).otherwise(F.lit("json")).alias("kind"),
        # Spark gives the name as in a URI, where a plus sign is itself.
        _url_decoded(F.replace("_metadata.file_name", F.lit("+"), F.lit("%2B"))).alias("file_name"),
        F.unix_millis("_metadata.file_modification_time").alias("file_arrival_ms"),
    )


def with_lines(files: DataFrame) -> DataFrame:
    """Split files into lines: adds line_no, line (its end and the file's byte order mark removed), is_utf8, arrival_ms, header.

    Lines are numbered before any is dropped. Only the empty rest after the last line end, and a CSV header, are not lines.
    """
    is_csv, is_sock = F.col("kind") == "csv", F.col("kind") == "sock"
    # split() works on Java strings and would replace what is not UTF-8; read as one character a byte, it can be told apart.
    text = F.when(F.col("is_utf8_file"), F.col("value")).otherwise(
        F.decode(F.col("value").cast("binary"), _BYTE_CHARSET)
    )
    header = F.when(is_csv, _without_line_end(_without_bom(_as_sent(F.element_at("lines", 1)))))
    lines = (
        files.withColumn("is_utf8_file", F.is_valid_utf8("value"))
        .withColumn("lines", F.split(text, "\n"))
        .withColumns({"line_count": F.size("lines"), "header": header})
        .withColumn("names", C.csv_names(F.col("header")))
        # The outer form spares the filter that Spark would otherwise add, and which splits every file a second time.
        .select("*", F.posexplode_outer("lines").alias("position", "split_line"))
        .filter((F.col("split_line") != "") | (F.col("position") < F.col("line_count") - 1))
        .filter(~is_csv | (F.col("position") > 0))
    )
    is_first = (F.col("position") == 0) & (F.col("first_line") == 1)
    sent = _as_sent(F.col("split_line"))
    stamp = F.when(is_sock & F.rlike("sent", F.lit(r"\A[0-9]{1,15}\t")), F.substring_index("sent", "\t", 1))
    body = F.when(F.col("stamp").isNotNull(), F.substr("sent", F.length("stamp") + 2)).otherwise(F.col("sent"))
    return (
        lines.withColumn("sent", F.when(is_first, _without_bom(sent)).otherwise(sent))
        .withColumns({"stamp": stamp, "is_utf8": F.col("is_utf8_file") | F.is_valid_utf8("sent")})
        .withColumns(
            {
                "line_no": F.col("first_line") + F.col("position") - F.when(is_csv, F.lit(1)).otherwise(F.lit(0)),
                "line": _without_line_end(body),
                "arrival_ms": F.when(is_sock, F.col("stamp").try_cast("bigint")).otherwise(F.col("file_arrival_ms")),
            }
        )
    )


def with_request_json(lines: DataFrame) -> DataFrame:
    """Add request_json: the line if it is JSON, the JSON that means the same if it is CSV, null if it can't be either."""
    is_readable = F.col("is_utf8") & (F.octet_length("line") <= LINE_BYTES_MAX)
    is_csv = F.col("kind") == "csv"
    return (
        lines.withColumn("is_blank", is_readable & C.is_blank(F.col("line")))
        .withColumn("cells", F.when(is_csv & is_readable, C.csv_cells(F.col("line"))))
        .withColumn(
            "request_json",
            F.when(is_csv, C.csv_request_json(F.col("cells"), F.col("names"))).when(is_readable, F.col("line")),
        )
    )


def with_fields(lines: DataFrame) -> DataFrame:
    """Parse request_json: adds document, schema, message, topic, caller_id, headers, and is_request (right names and types)."""
    document, schema, headers_schema = F.col("document"), F.col("schema"), F.col("headers_schema")
    is_whole = C.is_guarded(document, F.col("request_json"))
    return (
        lines.withColumn("document", C.parse_guarded_json(F.col("request_json")))
        .withColumn("schema", F.schema_of_variant(document))
        .withColumn("headers_schema", C.headers_schema_of(document, schema))
        .withColumns(
            {
                "is_request": C.is_request_schema(schema, headers_schema) & is_whole,
                "message": F.try_variant_get(document, "$.line.message", "string"),
                "topic": C.text_field(document, schema, "topic"),
                "caller_id": C.text_field(document, schema, "id"),
                "headers": C.headers_of(document, headers_schema),
                "time": C.time_of(document, schema),
            }
        )
    )


def with_due(requests: DataFrame) -> DataFrame:
    """Add due_ms (null if there is none in range) and bucket_start_ms."""
    time, schema = F.col("time"), F.col("schema")
    due_ms = C.due_ms_of(time, schema, F.col("due_micros"), F.col("arrival_ms"), F.col("delay_ms"))
    return (
        requests.withColumn("due_text", C.due_text_of(time, schema))
        .withColumns({"due_micros": C.due_micros_of(F.col("due_text")), "delay_ms": C.delay_ms_of(time, schema)})
        .withColumn("due_ms", due_ms)
        .withColumn("due_ms", F.when(C.is_due_in_range(F.col("due_ms")), F.col("due_ms")))
        .withColumn("bucket_start_ms", C.bucket_start_ms_of(F.col("due_ms")))
    )


def with_member(requests: DataFrame) -> DataFrame:
    """Add member, the text that is stored."""
    names = ("file_token", "line_no", "message", "topic", "caller_id", "headers")
    return requests.withColumn("member", C.member_of(*[F.col(name) for name in names]))


def with_outcome(requests: DataFrame) -> DataFrame:
    """Add outcome, and of the other columns keep what the outcome calls for: raw, header and reason, or the message's own."""
    is_accepted = (
        F.col("is_request")
        & F.col("due_ms").isNotNull()
        & F.col("arrival_ms").isNotNull()
        & (F.col("line_no") <= LINE_NO_MAX)
        & C.is_message(F.col("message"))
        & C.is_absent_or_id(F.col("caller_id"))
        & C.is_absent_or_topic(F.col("topic"))
    )
    is_ok, is_rejected = F.col("outcome") == OUTCOME_OK, F.col("outcome") == OUTCOME_REJECTED
    outcome = F.when(F.col("is_blank"), OUTCOME_BLANK).when(is_accepted, OUTCOME_OK).otherwise(OUTCOME_REJECTED)
    reason = (
        F.when(~F.col("is_utf8"), Reason.NOT_UTF8)
        .when(F.col("arrival_ms").isNull(), Reason.BAD_SOCKET_LINE)
        .when(F.col("line_no") > LINE_NO_MAX, Reason.LINE_NO_TOO_HIGH)
    )
    kept = ("due_ms", "bucket_start_ms", "member", "caller_id")
    return requests.withColumn("outcome", outcome).withColumns(
        {name: F.when(is_ok, F.col(name)) for name in kept}
        | {
            "raw": F.when(is_rejected, F.make_valid_utf8("line")),
            "header": F.when(is_rejected, F.make_valid_utf8("header")),
            "reason": F.when(is_rejected, reason),
        }
    )


def _url_decoded(text: Column) -> Column:
    return F.coalesce(F.try_url_decode(text), text)


def _as_sent(line: Column) -> Column:
    """Give a line back its own bytes, if its file had to be read as one character a byte."""
    sent = F.encode(line, _BYTE_CHARSET).cast("string")
    return F.when(F.col("is_utf8_file"), line).otherwise(sent)


def _without_bom(line: Column) -> Column:
    return F.when(F.startswith(line, F.lit(_BOM)), F.substr(line, F.lit(2))).otherwise(line)


def _without_line_end(line: Column) -> Column:
    """Remove one carriage return from the end of a line."""
    return F.when(F.endswith(line, F.lit("\r")), F.left(line, F.length(line) - 1)).otherwise(line)
