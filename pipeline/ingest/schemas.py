"""The rows that Spark passes to the Python workers."""

from typing import Final

from pyspark.sql import types as T

# One row a file: what the sources deliver.
FILE_ROW: Final = T.StructType(
    [
        T.StructField("value", T.BinaryType()),  # the whole file; null: the worker reads it
        T.StructField("path", T.StringType()),  # whose last part is the name of a landing file (landing/names.py)
        T.StructField("arrival_ms", T.LongType()),  # when the file was last written, ms UTC
    ]
)
