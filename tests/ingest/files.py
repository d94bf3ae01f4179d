"""Landing files for the tests, from bytes."""

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from pipeline.core.validation import Kind
from pipeline.ingest.parsing import FileText, ParsedPart, parse_file
from pipeline.ingest.schemas import FILE_ROW

ARRIVAL_MS = 1_700_000_000_123
TOKEN = "OZ0aaaabbbbbbb"

FileParts = tuple[str, int, str, bytes]


def file_rows(spark: SparkSession, files: Sequence[FileParts], arrival_ms: int = ARRIVAL_MS) -> DataFrame:
    """Make file rows of (token, first line, kind, content)."""
    rows = [
        (bytearray(content), f"{token}.{first_line}.{kind}.a+jsonl", arrival_ms)
        for token, first_line, kind, content in files
    ]
    return spark.createDataFrame(rows, FILE_ROW)


def parsed(
    content: bytes, kind: Kind = "json", first_line: int = 1, arrival_ms: int = ARRIVAL_MS, token: str = TOKEN
) -> ParsedPart:
    """Parse a file that is a single part."""
    (part,) = parse_file(FileText(token, first_line, kind, "a.jsonl", arrival_ms, content))
    return part


def members(part: ParsedPart) -> list[bytes]:
    """The members of a part, in line order."""
    return [part.members[index].as_py() for index in part.line_nos.argsort().tolist()]


def dues(part: ParsedPart) -> list[int]:
    """When they are due, in line order."""
    return part.due_ms[part.line_nos.argsort()].tolist()


def keys(part: ParsedPart) -> list[str]:
    """Their idempotency keys, in line order."""
    return [(part.idempotency_keys[index].as_py() or b"").decode() for index in part.line_nos.argsort().tolist()]
