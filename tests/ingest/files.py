"""Landing files for the tests, from bytes."""

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from pipeline.core.validation import Kind
from pipeline.ingest.parsing import FileText, ParsedPiece, parse_file
from pipeline.ingest.schemas import FILE_ROW

ARRIVAL_MS = 1_700_000_000_123
TOKEN = "OZ0aaaabbbbbbb"

FileParts = tuple[str, int, str, bytes]


def file_rows(spark: SparkSession, files: Sequence[FileParts], arrival_ms: int = ARRIVAL_MS) -> DataFrame:
    """Make file rows of (token, first line, kind, content)."""
    rows = [
        (bytearray(content), token, first_line, kind, "a.jsonl", arrival_ms)
        for token, first_line, kind, content in files
    ]
    return spark.createDataFrame(rows, FILE_ROW)


def parsed(
    content: bytes, kind: Kind = "json", first_line: int = 1, arrival_ms: int = ARRIVAL_MS, token: str = TOKEN
) -> ParsedPiece:
    """Parse a file that is one piece."""
    (piece,) = parse_file(FileText(token, first_line, kind, "a.jsonl", arrival_ms, content))
    return piece


def members(piece: ParsedPiece) -> list[bytes]:
    """The members of a piece, in line order."""
    return [piece.members[index].as_py() for index in piece.line_nos.argsort().tolist()]


def dues(piece: ParsedPiece) -> list[int]:
    """When they are due, in line order."""
    return piece.due_ms[piece.line_nos.argsort()].tolist()
