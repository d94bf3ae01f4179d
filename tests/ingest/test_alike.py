"""Lines that are alike, read as columns: what is taken is as the reference takes it, and what programs write is taken."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from itertools import combinations, product

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.due import due_ms_of_text
from pipeline.core.ids import message_id
from pipeline.core.messages import Message
from pipeline.core.validation import Kind, validate_line
from pipeline.ingest import alike_lines
from pipeline.ingest.alike_lines import read_alike_lines, read_csv_rows
from pipeline.ingest.columns import IdParts, accept, times
from pipeline.ingest.plain_lines import Ints, Lines
from tests.examples import scaled
from tests.ingest.files import ARRIVAL_MS, TOKEN, dues, keys, members, parsed

Row = tuple[int, bytes, str]


@pytest.fixture(autouse=True, scope="module")
def few_are_enough() -> Iterator[None]:
    """Let a few lines be read as many are, and each be the first of its kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike_lines, "ALIKE_FROM_LINES", 1)
        patch.setattr(alike_lines, "SHAPES_MAX", 1_000_000)
        yield


def message_ids(indexes: Ints) -> IdParts:
    return (pa.array([message_id(TOKEN, index + 1).encode() for index in indexes.tolist()], pa.binary()),)


def taken(sent: list[bytes], kind: Kind = "json", header: str = "", arrival_ms: int = ARRIVAL_MS) -> dict[int, Row]:
    """The messages of the lines that are taken, by index: due time, member and key."""
    lines = Lines.of(b"".join(line + b"\n" for line in sent))
    assert len(lines) == len(sent)
    alike = read_csv_rows(lines, header) if kind == "csv" else read_alike_lines(lines, np.ones(len(lines), np.bool_))
    found: dict[int, Row] = {}
    for columns in alike:
        for accepted in accept(columns, arrival_ms, message_ids):
            keys = accepted.keys.to_pylist() if accepted.keys is not None else [b""] * len(accepted.indexes)
            rows = zip(accepted.due_ms.tolist(), accepted.members.to_pylist(), map(bytes.decode, keys), strict=True)
            indexes = accepted.indexes.tolist()
            assert not found.keys() & {*indexes}
            found |= dict(zip(indexes, rows, strict=True))
    return found


def wanted(line: bytes, index: int, kind: Kind = "json", header: str = "", arrival_ms: int = ARRIVAL_MS) -> Row | None:
    """What the reference makes of a line; None if that is no message."""
    judged = validate_line(line.removesuffix(b"\r"), kind, arrival_ms, header)
    if not isinstance(judged, Message):
        return None
    return judged.due_ms, judged.to_member(message_id(TOKEN, index + 1)), judged.id


def assert_right(found: dict[int, Row], sent: list[bytes], *how: object) -> None:
    for index, row in found.items():
        assert row == wanted(sent[index], index, *how), (sent[index][:300], how)  # type: ignore[arg-type]


# Forms as programs write them, with what differs from line to line.
EVERYTHING = '{"message":"{\\"n\\":%d,\\"text\\":\\"a\\\\\\\\b\\"}","due":"2026-01-01T00:00:%02dZ","id":"order-%d","topic":"t.%d","headers":{"b":"%d","a":"x"}}'  # noqa: E501
USUAL_FORMS = {
    "with a topic": lambda n: f'{{"message":"m{n}","delay_sec":{n},"topic":"reminders"}}',
    "with the default topic": lambda n: f'{{"message":"m{n}","delay_sec":{n},"topic":"default"}}',
    "with an ISO time": lambda n: f'{{"message":"m{n}","due":"2026-01-01T00:00:{n % 60:02}Z"}}',
    "with an offset": lambda n: f'{{"due":"2026-01-01T00:00:{n % 60:02}.{n:03}+02:00","message":"m{n}"}}',
    "with an id": lambda n: f'{{"id":"order-{n}","message":"m{n}","countdown":{n}}}',
    "as json.dumps writes": lambda n: json.dumps({"id": f"a{n}", "message": "m", "due": 1_700_000_000_000 + n, "headers": {}}),
    "with JSON in the message": lambda n: json.dumps({"message": json.dumps({"n": n, "text": "a\n\\b"}), "delay_sec": n}),
    "with everything": lambda n: EVERYTHING % (n, n % 60, n, n % 7, n),
    "with the number in the middle": lambda n: f'{{"id":"a{n}", "delay_sec" : {n} , "message":"é{n}" }}',
    "with an empty header": lambda n: f'{{"message":"m","delay_sec":{n},"headers":{{"a":"{n % 2 or ""}"}}}}',
}  # fmt: skip
USUAL_CSV = {
    "message,delay_sec": lambda n: f"m{n},{n}",
    "id, topic ,due,message": lambda n: f'a{n},t,2026-01-01T00:00:{n % 60:02}Z,"m, ""{n}"""',
    "due,message,topic": lambda n: f'{1_700_000_000_000 + n},"m\\{n}",{"default" if n % 2 else "t"}',
    "message,due,delay_sec,headers,cancel": lambda n: f"m,,{n},," if n % 2 else 'm,"2026-01-01T00:00:00.5-11:30","",,',
    '"message",countdown,id,replace': lambda n: f'"""",{n},{"" if n % 3 else n},',
}


@pytest.mark.parametrize("form", USUAL_FORMS)
def test_lines_of_a_usual_form_are_all_taken(form: str) -> None:
    sent = [USUAL_FORMS[form](n).encode() for n in range(120)]
    found = taken(sent)
    assert len(found) == 120
    assert_right(found, sent)


@pytest.mark.parametrize("header", USUAL_CSV)
def test_rows_of_a_usual_form_are_all_taken(header: str) -> None:
    sent = [USUAL_CSV[header](n).encode() for n in range(120)]
    found = taken(sent, "csv", header)
    assert len(found) == 120
    assert_right(found, sent, "csv", header)


def test_many_forms_in_one_part_are_told_apart() -> None:
    sent = [make(n).encode() for n in range(120) for make in USUAL_FORMS.values()]
    found = taken(sent)
    assert len(found) == len(sent)
    assert_right(found, sent)


def test_a_file_that_is_not_utf8_is_left_to_others() -> None:
    bad = [b'{"message":"\xff","delay_sec":1,"topic":"t"}'] * 3
    assert taken(bad) == taken([b"\xff,1"] * 3, "csv", "message,delay_sec") == {}


def test_a_line_whose_id_is_its_message_id_is_left_to_others() -> None:
    sent = [b'{"message":"m","delay_sec":1,"id":"%b"}' % name for name in (b"a" * 22, message_id(TOKEN, 2).encode())]
    assert [*taken(sent)] == [0]


_WILD = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "a", "default", "A.b-c_d:1", "é😀", "\\", '"', '\\"', "\x7f", "x" * 64, "x" * 65, "x" * 128,
                     "x" * 129, "a\x00b", "\ud800"]),
)  # fmt: skip
_NAMES = st.sampled_from(["a", "b", "é", "😀", "\uffff", "message", "id", "due", ""])
_TIMES = st.one_of(
    st.from_regex(
        r"(19[67]|20[0-9]|99[0-9])[0-9]-(0[0-9]|1[0-3])-[0-3][0-9][Tt ][0-2][0-9]:[0-6][0-9]:[0-6][0-9]"
        r"([.,][0-9]{1,10})?(Z|z|[+-][01][0-9](:?[0-6][0-9])?)?",
        fullmatch=True,
    ).filter(str.isascii),
    st.datetimes(
        datetime(1970, 1, 1),  # noqa: DTZ001
        timezones=st.sampled_from([UTC, timezone(timedelta(hours=-5, minutes=-30))]),
    ).map(datetime.isoformat),
    st.just("2026-01-01T00:00:00Z"),
)
_DUES = st.one_of(
    st.integers(-1, 31_622_401),
    st.integers(99_999_999_999, 253_402_300_800_000),
    _TIMES,
    st.sampled_from(["5", 1.5, None]),
)
_JSON_ROWS = st.fixed_dictionaries(
    {"message": st.one_of(st.just("m"), _WILD), "due": _DUES, "id": st.one_of(st.just("a"), _WILD),
     "topic": st.one_of(st.sampled_from(["t", "default"]), _WILD), "value": _WILD}
)  # fmt: skip


@st.composite
def _alike(draw: st.DrawFn) -> list[bytes]:
    """Lines of one shape, as far as their values allow."""
    due = draw(st.sampled_from(["delay_sec", "countdown", "due", "due"]))
    names = draw(
        st.permutations(["message", due, *draw(st.lists(st.sampled_from(["id", "topic", "headers"]), unique=True))])
    )
    headers = draw(st.lists(_NAMES, unique=True, max_size=3))
    colon, comma, end = (
        draw(st.sampled_from([":", ": ", " :"])),
        draw(st.sampled_from([",", ", "])),
        draw(st.sampled_from(["", " ", "\r"])),
    )
    is_ascii = draw(st.booleans())
    lines = []
    for row in draw(st.lists(_JSON_ROWS, min_size=1, max_size=8)):
        values = {**row, due: row["due"], "headers": dict.fromkeys(headers, row["value"])}
        text = json.dumps({name: values[name] for name in names}, ensure_ascii=is_ascii, separators=(comma, colon))
        lines.append((text + end).encode(errors="surrogatepass"))
    return lines


@settings(max_examples=scaled(400))
@given(_alike())
def test_what_is_taken_of_lines_that_are_alike_is_what_the_reference_takes(sent: list[bytes]) -> None:
    assert_right(taken(sent), sent)


_SPECIAL = st.sampled_from(
    [b'"', b"\\", b'\\"', b"\\\\", b"\x1f", b",", b":", b"{", b"}", b"0", b" ", b"\xc3\xa9", b"\\u0041", b""]
)


@settings(max_examples=scaled(400))
@given(
    st.sampled_from([*USUAL_FORMS.values()]),
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 2), _SPECIAL), max_size=6),
)
def test_what_is_taken_of_lines_that_are_nearly_alike_is_what_the_reference_takes(
    make: object, patches: list[tuple[int, int, bytes]]
) -> None:
    sent = [make(n).encode() for n in range(len(patches) + 2)]  # type: ignore[operator]
    for n, (at, length, patch) in enumerate(patches, start=2):
        at %= len(sent[n]) + 1
        sent[n] = sent[n][:at] + patch + sent[n][at + length :]
    found = taken(sent)
    assert found.keys() >= {0, 1} or not Lines.of(b"".join(sent)).is_utf8
    assert_right(found, sent)


_CELLS = st.one_of(
    _WILD, _TIMES, st.integers(-1, 10**12).map(str), st.sampled_from(["", "", "5", "05", "true", "{}", '{"a":"b"}'])
)
_RAW_CELLS = st.one_of(
    _CELLS.map(lambda cell: '"' + cell.replace('"', '""') + '"'),
    _CELLS,
    st.sampled_from(['"', '""', '"""', '""""', 'a""b', '"a"b']),
)


@settings(max_examples=scaled(400))
@given(
    st.lists(
        st.sampled_from(["message", "delay_sec", "due", "id", "topic", "headers", "countdown", "cancel"]),
        min_size=2,
        unique=True,
    ),
    st.lists(st.lists(_RAW_CELLS, min_size=1, max_size=6), min_size=1, max_size=8),
    st.booleans(),
)
def test_what_is_taken_of_rows_is_what_the_reference_takes(
    names: list[str], rows: list[list[str]], is_whole: bool
) -> None:
    header = ",".join(names)
    if is_whole:  # the reference takes few of the others
        usual = {"message": '"m,"', "delay_sec": "5", "due": "2026-01-01T00:00:00Z"}
        rows = [
            [cell if n % len(names) == at else usual.get(name, "") for at, name in enumerate(names)]
            for n, row in enumerate(rows)
            for cell in row
        ]
    sent = [",".join(row).replace("\n", " ").encode(errors="surrogatepass") for row in rows]
    assert_right(taken(sent, "csv", header), sent, "csv", header)


_PARTS = [
    ["{", " {", "", "[", "{{"],
    ['"message":', '"message" :', '"massage":', '"mess\\u0061ge":', '"topic":', ":"],
    ['"m"', '""', '"é"', '"a\\"b"', '"a\\\\"', '"a\\u0062"', '"a\\/b"', '"a\x1fb"', '"a\x7fb"', '"m" ', "5", "null", "{}", '"\\'],
    [",", ", ", ";", "", ",,", ","],
    ['"id":', '"topic":', '"headers":', '"cancel":', '"id" '],
    ['"a"', '""', '"é"', '"a b"', f'"{"x" * 128}"', f'"{"x" * 129}"', f'"{TOKEN}00000003"',
     '"\\u0061"', '"a\\"', "1", "null", "true"],
    [",", ", ", ":", "", "}"],
    ['"topic":', '"id":', '"replace":', '"message":', '"headers":{"a":'],
    ['"t"', '"default"', '""', f'"{"x" * 64}"', f'"{"x" * 65}"', '"t:"', '"t"}', "true", "false"],
    [",", "", "},", ',"countdown":5,'],
    ['"headers":', '"header":', '"due":', '"id":'],
    ['{"b":"x","a":"y"}', '{"b":"x","b":"y"}', '{"b":"x"}', "{}", '{"b":"x","a":5}', '{"b":"x","a":{}}',
     '{"b":"","a":"\\\\\\""}', '"x"',
     '{"\\u0062":"x","a":"y"}', '{"b":"x" , "a":"y"}', '{"b":"x","a":"y"', "null"],
    [",", ",,", "},"],
    ['"delay_sec":', '"due":', '"delay":', '"message":'],
    ["5", "0", "00", "05", "-1", "1.0", "1e3", "", "31622400", "31622401", "1700000000005", "253402300799999",
     "253402300800000", "99999999999", '"2026-02-28T23:59:59Z"', '"2026-02-29T00:00:00Z"', '"1969-12-31T23:59:59Z"',
     '"5"', "true", " 5", "5 ", "1" * 16],
    ["}", "}}", "", "} ", "},", "]"],
]  # fmt: skip
_LINE = ["{", '"message":', '"m"', ",", '"id":', '"a"', ",", '"topic":', '"t"', ",", '"headers":', '{"b":"x","a":"y"}', ",",
         '"delay_sec":', "5", "}"]  # fmt: skip


@pytest.mark.parametrize("arrival_ms", [ARRIVAL_MS, -1, 253_402_300_800_000])
def test_nothing_but_the_right_parts_make_a_line_that_is_taken(arrival_ms: int) -> None:
    """Two parts at a time are others than in the first line, and each line is judged by the reference."""
    sent = set()
    for (one, ones), (other, others) in combinations(enumerate(_PARTS), 2):
        for in_one, in_other in product(ones, others):
            parts = [in_one if n == one else in_other if n == other else part for n, part in enumerate(_LINE)]
            sent.add("".join(parts).encode())
    lines = ["".join(_LINE).encode(), *sorted(sent, key=lambda line: line.count(b'"'))]
    found = taken(lines, arrival_ms=arrival_ms)
    assert len(found) > (150 if arrival_ms == ARRIVAL_MS else 2)
    assert_right(found, lines, "json", "", arrival_ms)


@settings(max_examples=scaled(500))
@given(st.lists(_TIMES, min_size=1, max_size=8))
def test_times_are_read_as_the_reference_reads_them(sent: list[str]) -> None:
    text = "".join(sent).encode()
    ends = np.cumsum([len(time) for time in sent])
    is_time, due_ms = times(text, ends - [len(time) for time in sent], ends)
    for time, is_taken, ms in zip(sent, is_time.tolist(), due_ms.tolist(), strict=True):
        if is_taken and ms >= 0:
            assert ms == due_ms_of_text(time), time


@settings(max_examples=scaled(400))
@given(
    st.datetimes(datetime(1971, 1, 1)),  # noqa: DTZ001
    st.sampled_from(["seconds", "milliseconds", "microseconds"]),
    st.integers(-1000, 1000),
)
def test_times_as_programs_write_them_are_all_taken(moment: datetime, precision: str, offset: int) -> None:
    zoned = moment.replace(tzinfo=timezone(timedelta(minutes=offset)))
    for written in (zoned.isoformat(timespec=precision), moment.isoformat(timespec=precision) + "Z"):
        [is_time], [ms] = (found.tolist() for found in times(written.encode(), np.array([0]), np.array([len(written)])))
        assert (is_time, ms) == (True, due_ms_of_text(written)), written


@pytest.mark.parametrize("form", USUAL_FORMS)
def test_a_file_gives_the_same_messages_whatever_stands_between_its_lines(form: str) -> None:
    """Also in parts, and where too few are alike."""
    usual = [USUAL_FORMS[form](n).encode() for n in range(150)]
    mixed = [each for line in usual for each in (line, b"x", b"", line[:-1], b'{"message":"\\u0061","delay_sec":1}')]
    for sent in (usual, mixed, usual[:5]):
        part = parsed(b"\r\n".join(sent))
        expected = [row for n, line in enumerate(sent) if (row := wanted(line, n)) is not None]
        assert [*zip(dues(part), members(part), keys(part), strict=True)] == expected


def test_an_empty_file_and_one_of_blank_lines_have_no_messages() -> None:
    for kind in ("json", "csv"):
        for content in (b"", b"message,delay_sec\n", b"\n" * 300):
            assert members(parsed(content, kind)) == []
