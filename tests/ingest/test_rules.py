"""The rules as files are parsed: the table of cases, and the same answers as the reference on lines that nobody thought of."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.core.ids import message_id
from pipeline.core.messages import MessageRequest, Reason, Rejection, encode_member
from pipeline.core.validation import Kind, validate_line
from pipeline.ingest.parsing import ParsedPiece, fast_request
from tests.cases.requests import CASES, Case
from tests.ingest.files import ARRIVAL_MS, TOKEN, members, parsed


def parse_line(line: bytes, kind: Kind, arrival_ms: int, header: str | None) -> ParsedPiece:
    """Parse a file with one line, its second: the first keeps a byte order mark of the line from being the file's."""
    stamp = f"{arrival_ms}\t".encode() if kind == "sock" else b""
    first = (header or "").encode() if kind == "csv" else b""
    return parsed(first + b"\n" + stamp + line + b"\n", kind, 2 if kind == "csv" else 1, arrival_ms)


def assert_is(piece: ParsedPiece, expected: MessageRequest | Reason | None, line: bytes) -> None:
    """Compare what was parsed with what the reference says."""
    if isinstance(expected, MessageRequest):
        member = encode_member(
            message_id(TOKEN, 2), expected.message, expected.topic, expected.caller_id, expected.headers
        )
        found = (piece.due_ms, members(piece), piece.caller_ids, piece.rejected)
        ids = {} if expected.caller_id is None else {0: expected.caller_id}
        assert found == ([expected.due_ms], [member], ids, []), line
        return
    assert members(piece) == [], line
    assert [(r.line_no, r.rejection.reason, r.raw) for r in piece.rejected] == (
        [] if expected is None else [(2, expected, line.decode(errors="replace"))]
    )


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_line_of_the_table_is_judged_as_written(case: Case) -> None:
    assert_is(parse_line(case.line, case.kind, case.arrival_ms, case.header), case.expected, case.line)


@pytest.mark.parametrize(
    "line",
    [
        b'{"message":"m","delay_sec":5}',
        b' { "delay_sec" : 5 , "message" : "m" } \r',
        '{"message":"\u00e9\U0001f600","due":5}'.encode(),
        b'{"message":"a\\"b\\\\","due":"2026-01-01T00:00:00Z"}',
        b'{"message":"\\u00e9\\ud83d\\ude00","countdown":0}',
        b'{"message":"m","due":5,"id":"a","topic":"t","headers":{"a":"\\"","b":"c"}}',
    ],
)
def test_the_usual_lines_take_the_fast_form(line: bytes) -> None:
    assert fast_request(line, ARRIVAL_MS) is not None


@pytest.mark.parametrize(
    "line",
    [
        b'{"message":"m","message":"n","due":5}',
        b'{"message":"m","due":5,"due":5}',
        b'{"message":"\\u0022\\u0022","message":"n","due":5}',
        b'{"message":"n","message":"\\u0022\\u0022","due":5}',
        b'{"message":"m","due":5,"headers":{"a":"b","a":"c"}}',
        b'{"message":"m","due":5,"headers":{"a":"\\u0022\\u0022\\u0022\\u0022","a":"c"}}',
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
    st.tuples(_TEXTS, _ANY_JSON),
)
# Mostly one message and one due time, so that many lines are accepted.
_WHOLE_LINES = st.tuples(
    _TEXTS.filter(bool).map(lambda text: f'"message":{json.dumps(text)}'),
    st.one_of(
        st.tuples(st.sampled_from(["delay_sec", "countdown"]), _NUMBER_TEXTS), st.tuples(st.just("due"), _TIME_TEXTS)
    ).map(lambda pair: f'"{pair[0]}":{pair[1]}'),
    st.lists(_FIELDS.map(lambda pair: f"{json.dumps(pair[0])}:{pair[1]}"), max_size=1),
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
    st.sampled_from(["message", "delay_sec", "due", "id", "topic", "headers", " countdown ", '"due"', "x"]),
    min_size=1, max_size=4,
).map(",".join)  # fmt: skip


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
        st.tuples(_CSV_MESSAGES, _HEADERS.map(json.dumps)).map(lambda row: f"{row[0]},5,{_quoted(row[1])}"),
    ),
)
_LINE_CASES = st.one_of(
    st.tuples(st.just("json"), st.just(""), _LINES),
    st.tuples(st.just("json"), st.just(""), _WHOLE_LINES.map(_as_bytes)),
    _GOOD_CSV.map(lambda pair: ("csv", pair[0], _as_bytes(pair[1]))),
    st.tuples(st.just("csv"), _CSV_HEADERS, st.one_of(_CSV_LINES.map(_as_bytes), _LINES)),
)


@settings(max_examples=1_000, deadline=None)
@given(_LINE_CASES)
@example(("json", "", b'{"message":"\\u0022","due":5,"due":6}'))
def test_parsing_agrees_with_the_reference_on_lines_that_nobody_thought_of(case: tuple[Kind, str, bytes]) -> None:
    kind, header, line = case
    judged = validate_line(line, kind, ARRIVAL_MS, header)
    expected = judged.reason if isinstance(judged, Rejection) else judged
    assert_is(parse_line(line, kind, ARRIVAL_MS, header), expected, line)


@settings(max_examples=1_000, deadline=None)
@given(_WHOLE_LINES.map(_as_bytes))
def test_the_fast_form_takes_only_what_the_reference_takes(line: bytes) -> None:
    found = fast_request(line, ARRIVAL_MS)
    if found is not None:
        judged = validate_line(line, "json", ARRIVAL_MS)
        assert isinstance(judged, MessageRequest)
        assert (judged.due_ms, judged.message) == (found[0], found[1].message)
