"""The rows that Spark passes to the Python workers."""

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
        T.StructField(
            "is_repeated", T.BooleanType()
        ),  # whether it is read again: what its progress markers lack is left
        T.StructField(
            "has_waited", T.BooleanType()
        ),  # whether that is so since a shard was away; else a failover has been
    ]
)
