"""The rows that one stage hands to the next."""

from typing import Final

from pyspark.sql import types as T

OUTCOME_OK: Final = "ok"
OUTCOME_BLANK: Final = "blank"
OUTCOME_REJECTED: Final = "rejected"

# One row a file: what the sources deliver.
FILE_ROW: Final = T.StructType(
    [
        T.StructField("value", T.StringType()),  # the whole file, not necessarily UTF-8
        T.StructField("file_token", T.StringType()),
        T.StructField("first_line", T.LongType()),  # number of the first line of data in the original file, 1-based
        T.StructField("kind", T.StringType()),  # json, csv or sock
        T.StructField("file_name", T.StringType()),  # as the user named it
        T.StructField("file_arrival_ms", T.LongType()),  # when the file was last written, ms UTC
    ]
)

# One row a line, blank lines included, in the order of the file: what the writer gets.
LINE_ROW: Final = T.StructType(
    [
        T.StructField("file_token", T.StringType()),
        T.StructField("line_no", T.LongType()),  # in the original file, 1-based, a CSV header counted
        T.StructField("file_name", T.StringType()),
        T.StructField("kind", T.StringType()),
        T.StructField("arrival_ms", T.LongType()),  # ms UTC; null only for a socket line without one
        T.StructField("outcome", T.StringType()),  # ok, blank or rejected
        T.StructField("due_ms", T.LongType()),  # ms UTC; this and the next two are set if ok, else null
        T.StructField("bucket_start_ms", T.LongType()),
        T.StructField("member", T.StringType()),
        T.StructField("caller_id", T.StringType()),  # null if the caller gave none
        T.StructField("raw", T.StringType()),  # the line if rejected, what is not UTF-8 replaced by U+FFFD; else null
        T.StructField("header", T.StringType()),  # the header line of a rejected CSV row; else null
        # Set where only Spark can know it; for other rejected rows core.validation.validate_line finds it from raw,
        # kind, arrival_ms and header.
        T.StructField("reason", T.StringType()),
    ]
)
