"""The Column form of the rules: the same table as the Python form, and the same answers on lines that nobody thought of."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import Row, SparkSession

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.ids import encode_token, message_id
from pipeline.core.messages import MessageRequest, Reason, encode_member
from pipeline.core.validation import validate_line
from pipeline.ingest.rejects import reject_record
from pipeline.ingest.schemas import OUTCOME_BLANK, OUTCOME_OK, OUTCOME_REJECTED
from tests.cases.requests import CASES, Case
from tests.ingest.files import ARRIVAL_MS, FileParts, line_rows

# Each case is a file of its own. The empty line in front keeps a byte order mark of the case from being the file's.
_TOKENS = [encode_token(number, 7) for number in range(len(CASES))]


def _file_of(token: str, case: Case) -> FileParts:
    stamp = f"{case.arrival_ms}\t".encode() if case.kind == "sock" else b""
    header = (case.header or "").encode() if case.kind == "csv" else b""
    return (token, 2 if case.kind == "csv" else 1, case.kind, header + b"\n" + stamp + case.line + b"\n")


def _expected(request: MessageRequest, row: Row) -> dict[str, object]:
    member = encode_member(
        message_id(row.file_token, 2), request.message, request.topic, request.caller_id, request.headers
    )
    return {
        "outcome": OUTCOME_OK,
        "due_ms": request.due_ms,
        "bucket_start_ms": bucket_start_ms(request.due_ms),
        "member": member.decode(),
        "caller_id": request.caller_id,
        "raw": None,
        "reason": None,
    }


@pytest.fixture(scope="module")
def judged(spark: SparkSession) -> dict[str, Row]:
    rows = line_rows(spark, [_file_of(token, case) for token, case in zip(_TOKENS, CASES, strict=True)])
    return {row.file_token: row for row in rows if row.line_no == 2}


@pytest.mark.parametrize(("token", "case"), list(zip(_TOKENS, CASES, strict=True)), ids=[case.name for case in CASES])
def test_the_column_form_judges_every_line_of_the_table_as_written(
    judged: dict[str, Row], token: str, case: Case
) -> None:
    row = judged[token]
    if case.expected is None:
        assert row.outcome == OUTCOME_BLANK
    elif isinstance(case.expected, Reason):
        assert row.outcome == OUTCOME_REJECTED
        assert row.raw == case.line.decode(errors="replace")
        assert reject_record(row.asDict())["reason"] == case.expected
        assert (row.due_ms, row.bucket_start_ms, row.member, row.caller_id) == (None, None, None, None)
    else:
        found = {name: row[name] for name in _expected(case.expected, row)}
        assert found == _expected(case.expected, row)


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


@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_both_forms_agree_on_lines_that_nobody_thought_of(spark: SparkSession, data: st.DataObject) -> None:
    # One Spark job for many lines; Hypothesis would not make that many in one example.
    cases: list[Any] = [data.draw(_LINE_CASES) for _ in range(60)]
    tokens = [encode_token(number, 8) for number in range(len(cases))]
    files = [
        (token, 2 if kind == "csv" else 1, kind, header.encode() + b"\n" + line + b"\n")
        for token, (kind, header, line) in zip(tokens, cases, strict=True)
    ]
    rows = {row.file_token: row for row in line_rows(spark, files) if row.line_no == 2}
    for token, (kind, header, line) in zip(tokens, cases, strict=True):
        row = rows[token]
        wanted = validate_line(line, kind, ARRIVAL_MS, header)
        if wanted is None:
            assert row.outcome == OUTCOME_BLANK, (kind, header, line)
        elif isinstance(wanted, MessageRequest):
            found = {name: row[name] for name in _expected(wanted, row)}
            assert found == _expected(wanted, row), (kind, header, line)
        else:
            assert row.outcome == OUTCOME_REJECTED, (kind, header, line, wanted)
            assert reject_record(row.asDict())["reason"] != Reason.UNEXPLAINED, (kind, header, line, wanted)
