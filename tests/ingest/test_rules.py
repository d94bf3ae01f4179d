"""The rules as files are parsed: the table of cases, and the same answers as the reference on lines that nobody thought of."""

import json
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.core.ids import message_id
from pipeline.core.messages import Cancellation, Message, Reason, Rejection, Replacement
from pipeline.core.validation import Kind, validate_line
from pipeline.ingest.parsing import ParsedPart
from pipeline.ingest.plain_lines import Lines, read_plain_lines
from pipeline.ingest.usual_lines import fast_request
from tests.cases.requests import CASES, Expected
from tests.examples import scaled
from tests.ingest.files import ARRIVAL_MS, TOKEN, dues, keys, members, parsed


def parse_line(line: bytes, kind: Kind, arrival_ms: int, header: str | None) -> ParsedPart:
    """Parse a file with one line, its second: the first keeps a byte order mark of the line from being the file's."""
    stamp = f"{arrival_ms}\t".encode() if kind == "sock" else b""
    first = (header or "").encode() if kind == "csv" else b""
    return parsed(first + b"\n" + stamp + line + b"\n", kind, 2 if kind == "csv" else 1, arrival_ms)


def assert_is(part: ParsedPart, expected: Expected, line: bytes) -> None:
    """Compare what was parsed with what the reference says."""
    if isinstance(expected, Message):
        member = expected.to_member(message_id(TOKEN, 2))
        found = (dues(part), members(part), keys(part), part.rejected)
        assert found == ([expected.due_ms], [member], [expected.id], []), line
        assert list(part.changes) == [], line
        return
    assert members(part) == [], line
    if isinstance(expected, Cancellation | Replacement):
        if isinstance(expected, Replacement):
            expected = Replacement(replace(expected.message, message_id=message_id(TOKEN, 2)))
        assert (list(part.changes), part.rejected) == ([expected], []), line
        return
    assert list(part.changes) == [], line
    assert [(r.line_no, r.rejection.reason, r.raw) for r in part.rejected] == (
        [] if expected is None else [(2, expected, line.decode(errors="replace"))]
    )


def test_every_line_of_the_table_is_judged_as_written() -> None:
    wrong = {}
    for case in CASES:
        try:
            assert_is(parse_line(case.line, case.kind, case.arrival_ms, case.header), case.expected, case.line)
        except AssertionError as difference:
            wrong[case.name] = str(difference)
    assert wrong == {}


@pytest.mark.parametrize(
    "line",
    [
        b'{"message":"m","delay_sec":5}',
        b' { "delay_sec" : 5 , "message" : "m" } \r',
        '{"message":"\u00e9\U0001f600","due":1700000000005}'.encode(),
        b'{"message":"a\\"b\\\\","due":"2026-01-01T00:00:00Z"}',
        b'{"message":"\\u00e9\\ud83d\\ude00","countdown":0}',
        b'{"message":"m","due":1700000000005,"id":"a","topic":"t","headers":{"a":"\\"","b":"c"}}',
    ],
)
def test_the_usual_lines_take_the_fast_form(line: bytes) -> None:
    assert fast_request(line, ARRIVAL_MS) is not None


@pytest.mark.parametrize(
    "line",
    [
        b'{"message":"m","message":"n","due":1700000000005}',
        b'{"message":"m","due":1700000000005,"due":1700000000005}',
        b'{"message":"\\u0022\\u0022","message":"n","due":1700000000005}',
        b'{"message":"n","message":"\\u0022\\u0022","due":1700000000005}',
        b'{"message":"m","due":1700000000005,"headers":{"a":"b","a":"c"}}',
        b'{"message":"m","due":1700000000005,"headers":{"a":"\\u0022\\u0022\\u0022\\u0022","a":"c"}}',
    ],
)
def test_a_name_that_is_there_twice_never_takes_the_fast_form(line: bytes) -> None:
    assert fast_request(line, ARRIVAL_MS) is None
    assert_is(parse_line(line, "json", ARRIVAL_MS, None), Reason.DUPLICATE_KEY, line)


_TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "a", "A.b-c_d:1", "2026-01-01T00:00:00Z", "é😀", "x" * 65, "x" * 129])
)
_NUMBERS = st.one_of(
    st.integers(-5, 2**65),
    st.floats(),
    st.decimals(min_value=-1, max_value=31_622_401, places=9).map(str),
    st.from_regex(r"-?[0-9]{1,3}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
)
_TIMES = st.from_regex(
    r"[0-9]{4}-(0[0-9]|1[0-3])-[0-3][0-9][Tt ][0-2][0-9]:[0-6][0-9]"
    r"(:[0-6][0-9]([.,][0-9]{1,10})?)?(Z|z|[+-][01][0-9](:?[0-6][0-9])?)?",
    fullmatch=True,
).filter(str.isascii)
_HEADERS = st.dictionaries(_TEXTS, _TEXTS, max_size=3)
_VALUES = st.one_of(_TEXTS, _NUMBERS, st.none(), st.booleans(), _HEADERS, st.lists(_TEXTS, max_size=2))


def _as_json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_ANY_JSON = _VALUES.map(json.dumps)
_NUMBER_TEXTS = _NUMBERS.map(_as_json)
_TIME_TEXTS = _TIMES.map(json.dumps)
_FIELDS = st.one_of(
    st.tuples(st.just("message"), st.one_of(_TEXTS.map(json.dumps), _ANY_JSON)),
    st.tuples(st.sampled_from(["delay_sec", "countdown"]), st.one_of(_NUMBER_TEXTS, _ANY_JSON)),
    st.tuples(st.just("due"), st.one_of(_TIME_TEXTS, _NUMBER_TEXTS, _ANY_JSON)),
    st.tuples(st.sampled_from(["id", "topic"]), st.one_of(_TEXTS.map(json.dumps), _ANY_JSON)),
    st.tuples(st.just("headers"), st.one_of(_HEADERS.map(json.dumps), _ANY_JSON)),
    st.tuples(st.just("cancel"), st.one_of(_TEXTS.map(json.dumps), _ANY_JSON)),
    st.tuples(st.just("replace"), st.one_of(st.sampled_from(["true", "false"]), _ANY_JSON)),
    st.tuples(_TEXTS, _ANY_JSON),
)
# Mostly one message and one due time, so that many lines are accepted.
_WHOLE_LINES = st.tuples(
    _TEXTS.filter(bool).map(lambda text: f'"message":{json.dumps(text)}'),
    st.one_of(
        st.tuples(st.sampled_from(["delay_sec", "countdown"]), _NUMBER_TEXTS), st.tuples(st.just("due"), _TIME_TEXTS)
    ).map(lambda pair: f'"{pair[0]}":{pair[1]}'),
    st.lists(_FIELDS.map(lambda pair: f"{json.dumps(pair[0])}:{pair[1]}"), max_size=2),
).map(lambda parts: "{" + ",".join([parts[0], parts[1], *parts[2]]) + "}")
_LOOSE_LINES = st.lists(_FIELDS, max_size=4).map(
    lambda pairs: "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in pairs) + "}"
)
_ODD_ENDS = st.sampled_from(["", "", "", " ", "\t", "x", "}", "]", ",", ",{}", "\0", "{}", "\x0b", "\u00a0"])
_JSON_LINES = st.tuples(_ODD_ENDS, st.one_of(_WHOLE_LINES, _LOOSE_LINES), _ODD_ENDS).map("".join)
_CELLS = st.one_of(_TEXTS, _NUMBER_TEXTS, _TIMES, _HEADERS.map(json.dumps), _ANY_JSON)
_CSV_LINES = st.lists(
    st.one_of(_CELLS, _CELLS.map(lambda cell: '"' + cell.replace('"', '""') + '"')), min_size=1, max_size=4
).map(",".join)
_CSV_HEADERS = st.lists(
    st.sampled_from(["message", "delay_sec", "due", "id", "topic", "headers", " countdown ", '"due"', "cancel", "replace", "x"]),
    min_size=1, max_size=4,
).map(",".join)  # fmt: skip


_SPECIAL = [b'"', b"\\", b"\x1f", b"\t", b",", b":", b"{", b"}", b"\xff", b"\xed\xa0\x80", b"0", b" "]


def _as_bytes(line: str) -> bytes:
    return line.encode(errors="surrogatepass").replace(b"\n", b" ").rstrip(b"\r")


def _mutated(parts: tuple[str, int, bytes]) -> bytes:
    line, at, patch = parts
    whole = _as_bytes(line)
    at %= len(whole) + 1
    return (whole[:at] + patch + whole[at + 1 :]).replace(b"\n", b" ").rstrip(b"\r")


_LINES: st.SearchStrategy[bytes] = st.one_of(
    _JSON_LINES.map(_as_bytes),
    st.tuples(_JSON_LINES, st.integers(0, 200), st.binary(max_size=2)).map(_mutated),
    st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"").rstrip(b"\r")),
)


def _quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"'


# Lines with nothing odd about them but their values, so that the forms are compared on many accepted requests too.
_CSV_MESSAGES = _TEXTS.map(_quoted)
_GOOD_CSV = st.one_of(
    st.tuples(st.just("message,delay_sec"), st.tuples(_CSV_MESSAGES, _NUMBER_TEXTS).map(",".join)),
    st.tuples(st.just("due,message"), st.tuples(_TIMES, _CSV_MESSAGES).map(lambda row: f"{_quoted(row[0])},{row[1]}")),
    st.tuples(
        st.just("message,due,headers"),
        st.tuples(_CSV_MESSAGES, _HEADERS.map(json.dumps)).map(lambda row: f"{row[0]},1700000000005,{_quoted(row[1])}"),
    ),
)
_LINE_CASES = st.one_of(
    st.tuples(st.just("json"), st.just(""), _LINES),
    st.tuples(st.just("json"), st.just(""), _WHOLE_LINES.map(_as_bytes)),
    _GOOD_CSV.map(lambda pair: ("csv", pair[0], _as_bytes(pair[1]))),
    st.tuples(st.just("csv"), _CSV_HEADERS, st.one_of(_CSV_LINES.map(_as_bytes), _LINES)),
)


@settings(max_examples=scaled(1_000))
@given(_LINE_CASES)
@example(("json", "", b'{"message":"\\u0022","due":1700000000005,"due":1700000000006}'))
def test_parsing_agrees_with_the_reference_on_lines_that_nobody_thought_of(case: tuple[Kind, str, bytes]) -> None:
    kind, header, line = case
    judged = validate_line(line, kind, ARRIVAL_MS, header)
    expected = judged.reason if isinstance(judged, Rejection) else judged
    assert_is(parse_line(line, kind, ARRIVAL_MS, header), expected, line)


@settings(max_examples=scaled(1_000))
@given(_WHOLE_LINES.map(_as_bytes))
def test_the_fast_form_takes_only_what_the_reference_takes(line: bytes) -> None:
    found = fast_request(line, ARRIVAL_MS)
    if found is not None:
        judged = validate_line(line, "json", ARRIVAL_MS)
        assert isinstance(judged, Message)
        assert judged == found


# What programs write: a text without escapes and a whole number.
_PLAIN_LINES = st.tuples(
    st.text(
        st.characters(min_codepoint=32, exclude_categories=["Cs"], exclude_characters='"\\'), min_size=1, max_size=8
    ),
    st.one_of(
        st.tuples(st.sampled_from(["delay_sec", "countdown"]), st.integers(0, 31_622_400) | st.integers(0, 9)),
        st.tuples(st.just("due"), st.integers(100_000_000_000, 253_402_300_799_999)),
    ),
    st.sampled_from(["", " "]),
    st.sampled_from(["", " "]),
).map(lambda parts: '{{"message":{2}"{0}",{3}"{1[0]}":{2}{1[1]}}}'.format(*parts))
_NEARLY_PLAIN_LINES = st.tuples(
    _PLAIN_LINES, st.integers(0, 60), st.one_of(st.binary(max_size=2), st.sampled_from(_SPECIAL))
).map(_mutated)


@settings(max_examples=scaled(1_000))
@given(st.lists(st.one_of(_PLAIN_LINES.map(str.encode), _NEARLY_PLAIN_LINES, _LINES), max_size=20), st.booleans())
def test_lines_that_are_read_at_once_are_read_as_the_reference_reads_them(sent: list[bytes], has_returns: bool) -> None:
    lines = Lines.of(b"".join(line + (b"\r\n" if has_returns else b"\n") for line in sent))
    plain = read_plain_lines(lines, ARRIVAL_MS)
    for index, due_ms, text in zip(plain.indexes.tolist(), plain.due_ms.tolist(), plain.texts.to_pylist(), strict=True):
        judged = validate_line(sent[index], "json", ARRIVAL_MS)
        assert judged == Message(due_ms, text.decode()), sent[index]


# The parts of a plain line, each with what else could stand in its place.
_PARTS = [
    ["{", " {", "", "[", "{{", "x{"],
    ['"message"', '"massage"', '"topic"', '"messages"', '""', "message"],
    [":", ": ", ":  ", " :", "=", "", ":x"],
    ['"m"', '""', '"é"', '"a\\nb"', '"a\x1fb"', '"a\tb"', '"a\x7fb"', '"m" ', "5",
     "{}", f'"{"x" * 262_144}"', f'"{"x" * 262_145}"'],
    [",", ", ", ",  ", " ,", ";", "", ",x", ",5", ",,"],
    ['"delay_sec"', '"countdown"', '"due"', '"delay"', '"delay_"', '"dua"', '"message"', '"topic"', "due"],
    [":", ": ", ":  ", " :", "=", "", "::"],
    ["5", "0", "00", "01", "-1", "+1", "1.0", "1e3", "", "31622400", "31622401", "253402300799999", "253402300800000", "1" * 16,
     "1700000000005", "1795291276", "99999999999", "100000000000",
     "1" * 40, str(2**64 + 5), "/", ":", "5 ", "5,", '"x"', "true", "null"],
    ["}", "} ", "}}", "", "]", "},", '}"'],
]  # fmt: skip
_USUAL = [
    ["{", '"message"', ":", '"m"', ",", *rest, "}"]
    for rest in (['"delay_sec"', ":", "5"], ['"due"', ":", "1700000000005"])
]


@pytest.mark.parametrize("arrival_ms", [ARRIVAL_MS, -1, 253_402_300_800_000])
def test_nothing_but_the_right_parts_make_a_plain_line(arrival_ms: int) -> None:
    """Two parts at a time are others than those that belong there, and each line is judged by the reference."""
    sent = set()
    for (one, ones), (other, others) in combinations(enumerate(_PARTS), 2):
        for usual, in_one, in_other in product(_USUAL, ones, others):
            parts = [in_one if n == one else in_other if n == other else part for n, part in enumerate(usual)]
            sent.add("".join(parts).encode())
    lines = Lines.of(b"\n".join(sent))
    plain = read_plain_lines(lines, arrival_ms)
    assert len(plain.indexes) > (40 if arrival_ms == ARRIVAL_MS else 5)
    cut = list(lines.cut(np.ones(len(lines), np.bool_)))
    for index, due_ms, text in zip(plain.indexes.tolist(), plain.due_ms.tolist(), plain.texts.to_pylist(), strict=True):
        judged = validate_line(cut[index], "json", arrival_ms)
        assert judged == Message(due_ms, text.decode()), cut[index][:200]


@given(st.lists(_PLAIN_LINES.map(str.encode), min_size=1, max_size=20), st.sampled_from([b"\n", b"\r\n"]))
def test_all_plain_lines_are_read_at_once_whatever_stands_between_them(sent: list[bytes], end: bytes) -> None:
    others = [b"", b"x", b'{"message":"a\\"b","due":1700000000005}', b'""""""']
    content = end.join(line for pair in zip(sent, others * len(sent), strict=False) for line in pair)
    found = read_plain_lines(Lines.of(content), ARRIVAL_MS)
    assert found.indexes.tolist() == list(range(0, 2 * len(sent), 2))


def test_a_file_of_all_kinds_of_lines_is_parsed_as_line_by_line() -> None:
    content = b"\n".join(case.line for case in CASES if case.kind == "json" and b"\n" not in case.line)
    content += b"\n" + b"".join(b'{"message":"m%d","delay_sec":%d}\n' % (n, n) for n in range(200))
    part = parsed(content)
    accepted = {}
    for line_no, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        judged = validate_line(line.removesuffix(b"\r"), "json", ARRIVAL_MS)
        if isinstance(judged, Message):
            accepted[message_id(TOKEN, line_no)] = (judged.due_ms, judged.body)
    found = map(Message.from_member, members(part), dues(part))
    assert {message.message_id: (message.due_ms, message.body) for message in found} == accepted
    assert len(accepted) > 250
