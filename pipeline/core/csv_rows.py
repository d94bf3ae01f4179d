"""One CSV record a line, RFC 4180 without line ends in cells.

Common CSV parsers accept much that no rule allows (text after a closing quote, backslash escapes), so rows are split with the
patterns below. Every repetition in them is possessive: a long cell costs no backtracking.
"""

import re
from typing import Final

from pipeline.core.messages import REQUEST_FIELDS, Reason, Rejection

CELL_PATTERN: Final = r'(?:"[^"]*+(?:""[^"]*+)*+"|[^",]*+)'
ROW_PATTERN: Final = f"{CELL_PATTERN}(?:,{CELL_PATTERN})*+"

_CELL_AFTER_COMMA: Final = re.compile(f",{CELL_PATTERN}")
_ROW: Final = re.compile(ROW_PATTERN)


def split_csv_row(line: str) -> list[str] | None:
    """Split one line into its cells, unquoted; None if its quotes are not those of RFC 4180."""
    if _ROW.fullmatch(line) is None:
        return None
    return [_unquoted(found[1:]) for found in _CELL_AFTER_COMMA.findall("," + line)]


def parse_csv_header(line: str) -> list[str] | Rejection:
    """Read the names of the columns, trimmed of spaces and tabs; the rejection is that of every row of the file."""
    cells = split_csv_row(line)
    if cells is None:
        return Rejection(Reason.BAD_CSV_HEADER, "The header line's quotes are not closed or not doubled inside a cell.")
    names = [cell.strip(" \t") for cell in cells]
    for name in names:
        if name not in REQUEST_FIELDS:
            known = ", ".join(REQUEST_FIELDS)
            return Rejection(
                Reason.BAD_CSV_HEADER, f"The header line names the column {name[:80]!r}; known are {known}."
            )
        if names.count(name) > 1:
            return Rejection(Reason.BAD_CSV_HEADER, f"The header line names the column {name} twice.")
    return names


def _unquoted(cell: str) -> str:
    return cell[1:-1].replace('""', '"') if cell.startswith('"') else cell
