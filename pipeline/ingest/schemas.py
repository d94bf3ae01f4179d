"""The rows that one stage hands to the next."""

from typing import Final

from pyspark.sql import types as T

# One row a file: what the sources deliver.
FILE_ROW: Final = T.StructType(
    [
        T.StructField("value", T.BinaryType()),  # the whole file
        T.StructField("file_token", T.StringType()),
        T.StructField("first_line", T.LongType()),  # number of the first line of data in the original file, 1-based
        T.StructField("kind", T.StringType()),  # json, csv or sock
        T.StructField("file_name", T.StringType()),  # as the user named it
        T.StructField("file_arrival_ms", T.LongType()),  # when the file was last written, ms UTC
    ]
)

# One row a line that is not blank: what the writer stores, or refuses.
LINE_ROW: Final = T.StructType(
    [
        T.StructField("fence_token", T.StringType()),  # the file's token, or that of a piece of a large file
        T.StructField("due_ms", T.LongType()),  # ms UTC; null if the line is refused, as are the next three
        T.StructField("bucket_start_ms", T.LongType()),
        T.StructField("member", T.BinaryType()),
        T.StructField("caller_id", T.StringType()),  # null also if the caller gave none
        T.StructField("line_no", T.LongType()),  # of a refused line, in the original file, 1-based; else null
        T.StructField("reason", T.StringType()),  # core.messages.Reason of a refused line; else null
    ]
)
