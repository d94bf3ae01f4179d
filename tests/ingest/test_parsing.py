"""From bytes to lines: where they end, how they are numbered, and the parts of large files."""

import pytest

from pipeline.core.ids import LINE_NO_MAX
from pipeline.core.messages import Reason
from pipeline.ingest import parsing
from pipeline.ingest.parsing import FileText, ParsedPart, parse_file
from tests.ingest.files import ARRIVAL_MS, TOKEN, dues, members, parsed

GOOD = b'{"message":"m","due":1700000000005}'


def places(part: ParsedPart) -> list[tuple[int, str]]:
    """Where the lines stood that are no requests, and what they were."""
    return [(line.line_no, line.raw) for line in part.rejected]


@pytest.mark.parametrize(
    ("content", "wanted", "blank"),
    [
        (b"", [], 0),
        (b"\n", [], 1),
        (b"a", [(1, "a")], 0),
        (b"a\n", [(1, "a")], 0),
        (b"a\n\n", [(1, "a")], 1),
        (b"\na\n \nb", [(2, "a"), (4, "b")], 2),
        (b"a\r\nb\r\r\nc\rd\n\r\n", [(1, "a"), (2, "b\r"), (3, "c\rd")], 1),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", [(1, "a"), (2, "\ufeffb")], 0),
        ("a\u2028b\x0bc\x85d\0e\n".encode(), [(1, "a\u2028b\x0bc\x85d\0e")], 0),
    ],
)
def test_lines_end_with_a_newline_only(content: bytes, wanted: list[tuple[int, str]], blank: int) -> None:
    part = parsed(content)
    assert (places(part), part.blank, part.lines) == (wanted, blank, len(wanted) + blank)


def test_a_later_segment_counts_on_and_has_no_byte_order_mark() -> None:
    assert places(parsed(b"\xef\xbb\xbfa\nb\n", first_line=1001)) == [(1001, "\ufeffa"), (1002, "b")]


def test_a_csv_header_is_no_line_and_rows_are_numbered_from_the_first_line() -> None:
    part = parsed(b"\xef\xbb\xbfdue,message\r\n1700000000005,m\r\n\r\n1700000000006,n\nx", "csv", 2)
    assert members(part) == [f"{TOKEN}00000002mm".encode(), f"{TOKEN}00000004mn".encode()]
    assert (places(part), part.lines, part.blank) == ([(5, "x")], 4, 1)


@pytest.mark.parametrize("content", [b"", b"due,message", b"due,message\n"])
def test_a_csv_file_without_rows_has_no_lines(content: bytes) -> None:
    part = parsed(content, "csv", 2)
    assert (members(part), part.rejected, part.lines, part.blank) == ([], [], 0, 0)


def test_a_socket_line_brings_its_own_arrival() -> None:
    delay = b'{"message":"m","delay_sec":1}'
    part = parsed(b"17\t" + delay + b"\r\n18\t\n19\t" + delay + b"\tx\n20\t" + delay, "sock")
    assert (dues(part), part.blank, places(part)) == ([1017, 1020], 1, [(3, delay.decode() + "\tx")])


@pytest.mark.parametrize("line", [b"x", GOOD, b"-1\tx", b"\tx", b"1" * 30 + b"\tx", b"1x\ty"])
def test_a_socket_line_without_an_arrival_is_rejected(line: bytes) -> None:
    (found,) = parsed(line, "sock").rejected
    assert (found.raw, found.rejection.reason) == (line.decode(), Reason.BAD_SOCKET_LINE)


def test_one_bad_byte_spoils_its_own_line_only() -> None:
    content = (
        'é\n{"message":"é","due":1700000000005}\n'.encode()
        + b'\xff{"x"\xc3\n{"message":"\xc3\xa9","due":1700000000006}\r\n'
    )
    part = parsed(content + GOOD + b"\xc3\r\n")
    assert [m.decode()[22:] for m in members(part)] == ["mé", "mé"]
    assert [(r.line_no, r.rejection.reason) for r in part.rejected] == [
        (1, Reason.NOT_JSON), (3, Reason.NOT_UTF8), (5, Reason.NOT_UTF8)
    ]  # fmt: skip
    assert part.rejected[1].raw == '\ufffd{"x"\ufffd'


def test_the_highest_line_number_is_taken_and_the_next_is_not() -> None:
    part = parsed(GOOD + b"\n" + GOOD, first_line=LINE_NO_MAX)
    assert members(part) == [f"{TOKEN}ffffffffmm".encode()]
    assert [(r.line_no, r.rejection.reason) for r in part.rejected] == [(LINE_NO_MAX + 1, Reason.LINE_NO_TOO_HIGH)]


@pytest.mark.parametrize("arrival_ms", [-1, 253_402_300_800_000])
def test_an_arrival_outside_the_years_makes_a_rejection(arrival_ms: int) -> None:
    (found,) = parsed(b'{"message":"m","delay_sec":0}', arrival_ms=arrival_ms).rejected
    assert found.rejection.reason == Reason.DUE_OUT_OF_RANGE


def test_equal_lines_are_two_messages() -> None:
    assert members(parsed(GOOD + b"\n" + GOOD)) == [f"{TOKEN}00000001mm".encode(), f"{TOKEN}00000002mm".encode()]


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_a_large_file_comes_in_parts_that_count_on_and_have_markers_of_their_own(
    monkeypatch: pytest.MonkeyPatch, kind: parsing.Kind
) -> None:
    monkeypatch.setattr(parsing, "PART_BYTES", 100)
    head, line = (b"due,message\n", b"1700000000005,m\n") if kind == "csv" else (b"", GOOD + b"\n")
    first_line = 2 if kind == "csv" else 1
    whole = head + line * 200
    parts = list(parse_file(FileText(TOKEN, first_line, kind, "a", ARRIVAL_MS, whole)))
    assert [m for part in parts for m in members(part)] == [
        f"{TOKEN}{first_line + n:08x}mm".encode() for n in range(200)
    ]
    assert parts[0].part_id == TOKEN
    assert parts[1].part_id == f"{TOKEN}.{first_line + parts[0].lines}"
    assert len({part.part_id for part in parts}) == len(parts) > 5
    assert sum(part.lines for part in parts) == 200
