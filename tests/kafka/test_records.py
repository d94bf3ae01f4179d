"""Records as requests, without a broker: the rules of lines, the headers of raw records, and nothing lost on the way."""

import base64
import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import ConfigError
from pipeline.core.ids import decode_token
from pipeline.core.messages import Cancellation, Message, Reason, Rejection, Replacement
from pipeline.core.records import Headers, Record, RecordFormat, Records, outgoing, request_of
from pipeline.ingest.kafka_parsing import OFFSET_BITS, parse_records, tokens_of
from pipeline.ingest.kafka_source import share_out
from pipeline.ingest.parsing import ParsedPart
from pipeline.kafka.cluster import Partition
from pipeline.kafka.properties import client_properties
from tests.cases.requests import CASES

SENT_MS = 1_700_000_000_000
PARTITION = Partition("t", "0123456789abcdef0123456789abcdef", 7)
JSON_CASES = [case for case in CASES if case.kind == "json"]

values = st.one_of(
    st.none(),
    st.binary(max_size=8),
    st.sampled_from([case.line for case in JSON_CASES if len(case.line) < 1_000]),
    st.builds(
        lambda text, delay: json.dumps({"message": text, "delay_sec": delay}, ensure_ascii=False).encode(),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5),
        st.integers(0, 9),
    ),
)
headers = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "kafka-key", "duetime-id"]), st.none() | st.binary(max_size=3)),
    max_size=4,
)


def parsed(records: Sequence[Record], record_format: RecordFormat = "json") -> list[tuple[object, ...]]:
    columns = Records(*map(list, zip(*records, strict=True))) if records else Records()
    part: ParsedPart = parse_records(PARTITION, columns, record_format)
    keys = [(key or b"").decode() for key in part.idempotency_keys.to_pylist()]
    kept = [*zip(part.line_nos.tolist(), part.due_ms.tolist(), part.members.to_pylist(), keys, strict=True)]
    refused = [(line.line_no, line.rejection.reason, line.raw) for line in part.rejected]
    assert part.lines == len(records) == len(kept) + len(refused) + part.blank + len(part.changes)
    return sorted(kept) + refused + [*part.changes]


def test_every_line_of_the_table_is_judged_as_in_a_file() -> None:
    wrong = {}
    for case in JSON_CASES:
        judged = request_of(Record(1, case.arrival_ms, case.line), "json")
        found = judged.reason if isinstance(judged, Rejection) else judged
        if found != case.expected:
            wrong[case.name] = (found, case.expected)
    assert wrong == {}


@given(
    st.lists(st.tuples(values, headers, st.none() | st.binary(max_size=2), st.integers(-1, 3))), st.integers(0, 2**33)
)
def test_many_records_at_once_are_read_as_one_by_one(
    rows: list[tuple[bytes | None, Headers, bytes | None, int]], first: int
) -> None:
    records = [
        Record(first + 2 * at, SENT_MS + late if late >= 0 else -1 if at % 2 else 1 << 42, value, key, sent)
        for at, (value, sent, key, late) in enumerate(rows)
    ]
    # So many that those that are only lines are read at once.
    plain = [
        Record(first + 2 * (len(rows) + at), SENT_MS + at, b'{"message":"%d","delay_sec":1}' % at) for at in range(120)
    ]
    one_by_one = [found for record in [*records, *plain] for found in parsed([record])]
    assert sorted(map(repr, parsed([*records, *plain]))) == sorted(map(repr, one_by_one))


@given(st.binary(max_size=9).filter(bool), st.none() | st.binary(max_size=3), headers)
def test_nothing_of_a_raw_record_is_lost(value: bytes, key: bytes | None, sent: list[tuple[str, bytes | None]]) -> None:
    sent = [(name, text) for name, text in sent if not name.startswith("duetime-")]
    judged = request_of(Record(1, SENT_MS, value, key, [("duetime-delay-sec", b"1"), *sent]), "raw")
    assert isinstance(judged, Message)
    message = Message.from_member(judged.to_member("P" * 14 + "00000001"), judged.due_ms)
    kept = dict(message.headers)
    is_binary = kept.pop("duetime-encoding", "") == "base64"
    assert (base64.b64decode(message.body) if is_binary else message.body.encode()) == value
    binary_key, text_key = kept.pop("kafka-key-base64", None), kept.pop("kafka-key", None)
    assert (base64.b64decode(binary_key) if binary_key is not None else text_key and text_key.encode()) == (
        key or text_key
    )
    assert (binary_key is None and text_key is None) == (key is None)
    exact = kept.pop("kafka-headers", None)
    back = (
        [(name, None if text is None else base64.b64decode(text)) for name, text in json.loads(exact)]
        if exact
        else [(name, text.encode()) for name, text in sorted(kept.items())]
    )
    assert back == sent


@given(st.binary(max_size=9).filter(bool), st.none() | st.binary(max_size=3), headers)
def test_a_raw_record_leaves_as_it_came(value: bytes, key: bytes | None, sent: list[tuple[str, bytes | None]]) -> None:
    sent = [(name, text) for name, text in sent if not name.startswith("duetime-")]
    judged = request_of(Record(1, SENT_MS, value, key, [("duetime-delay-sec", b"1"), *sent]), "raw")
    assert isinstance(judged, Message)
    own = [("duetime-id", b"x"), ("duetime-due-ms", b"5")]
    assert outgoing(judged.body.encode(), judged.headers, "x", 5) == (value, key, [*sent, *own])


def test_a_request_says_more_than_the_headers_of_its_record() -> None:
    value = b'{"message":"m","delay_sec":1,"headers":{"a":"own","kafka-key":"forged"}}'
    judged = request_of(Record(1, SENT_MS, value, b"k", [("a", b"sent"), ("duetime-id", b"x")]), "json")
    assert isinstance(judged, Message)
    assert dict(judged.headers) == {
        "a": "own",
        "duetime-id": "x",
        "kafka-key": "k",
        "kafka-headers": '[["a","c2VudA=="],["duetime-id","eA=="]]',
    }


@pytest.mark.parametrize(
    ("value", "sent", "reason"),
    [
        (b"m", [], Reason.MISSING_DUE),
        (None, [("duetime-delay-sec", b"1")], Reason.EMPTY_MESSAGE),
        (b"m", [("duetime-delay-sec", b"1"), ("duetime-due", b"2030-01-01T00:00:00Z")], Reason.BOTH_DUE),
        (b"m", [("duetime-delay-sec", b"1"), ("duetime-delay-sec", b"1")], Reason.DUPLICATE_KEY),
        (b"m", [("duetime-delay-sec", b"\xff")], Reason.BAD_HEADERS),
        (b"m", [("duetime-delay-sec", None)], Reason.WRONG_TYPE),
        (b"m", [("duetime-delay-sec", b"1"), ("duetime-topic", b"a b")], Reason.BAD_TOPIC),
        (b"\xff" * 200_000, [("duetime-delay-sec", b"1")], Reason.MESSAGE_TOO_LONG),
    ],
)
def test_a_raw_record_that_breaks_a_rule_is_refused(value: bytes | None, sent: Headers, reason: Reason) -> None:
    judged = request_of(Record(1, SENT_MS, value, None, sent), "raw")
    assert isinstance(judged, Rejection) and judged.reason is reason


def test_a_record_without_time_is_refused() -> None:
    for value in (b'{"message":"m","delay_sec":1}', b'{"message":"m","due":1800000000000}'):
        for time_ms in (-1, 1 << 42):
            judged = request_of(Record(1, time_ms, value), "json")
            assert isinstance(judged, Rejection) and "no timestamp" in judged.detail
            assert parsed([Record(1, time_ms, value)] * 120)[0] == (1, judged.reason, value.decode())


def test_changes_have_the_ids_of_their_records() -> None:
    records = [
        Record((1 << OFFSET_BITS) + 5, SENT_MS, b'{"message":"m","delay_sec":1,"id":"a","replace":true}', b"k"),
        Record((1 << OFFSET_BITS) + 6, SENT_MS, b'{"cancel":"b"}', b"k"),
    ]
    replacement, cancellation = parsed(records)
    assert isinstance(replacement, Replacement) and cancellation == Cancellation("b")
    [token] = tokens_of(PARTITION, np.array([1 << OFFSET_BITS]), np.array([SENT_MS])).to_pylist()
    assert replacement.message.message_id == f"{token.decode()}00000005"
    assert decode_token(token.decode()) == (SENT_MS, 0xBCDEF << 22 | 7 << 8 | 1)
    assert dict(replacement.message.headers) == {"kafka-key": "k"}


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 50)),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 50)),
    st.integers(1, 60),
)
def test_a_batch_is_shared_by_those_that_have_some(start: dict[str, int], ends: dict[str, int], budget: int) -> None:
    places = share_out(start, ends, budget)
    taken = {name: places[name] - start.get(name, 0) for name in ends}
    left = {name: max(0, end - start.get(name, 0)) for name, end in ends.items()}
    assert places.keys() == start.keys() | ends.keys(), "a partition that is away keeps its place"
    assert all(places[name] == start[name] for name in start.keys() - ends.keys())
    assert all(0 <= taken[name] <= left[name] for name in ends)
    # All that is there, or all that may be: but each that has some gets on.
    assert sum(taken.values()) >= min(budget, sum(left.values()))
    assert sum(taken.values()) <= max(budget, sum(1 for each in left.values() if each))
    assert all(taken[name] for name in ends if left[name])
    assert share_out(start, ends, None) == start | {name: start.get(name, 0) + left[name] for name in ends}


def test_client_properties_are_read_from_a_file(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "client.properties"
    file.write_text("# comment\n\nsecurity.protocol = SASL_SSL\nsasl.password=a=b c \n")
    assert client_properties("h:1", str(file)) == {
        "bootstrap.servers": "h:1",
        "security.protocol": "SASL_SSL",
        "sasl.password": "a=b c",
    }
    for text, said in (("nonsense", "line 1, is no property"), ("x=1\nenable.auto.commit=true", "line 2: enable.auto")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            client_properties("h:1", str(file))
    with pytest.raises(ConfigError, match="can't be read"):
        client_properties("h:1", str(tmp_path))


def test_headers_that_anybody_wrote_hold_no_name_that_would_crash_the_client() -> None:
    """Half a surrogate pair ends the process: ``kafka-headers`` may have it, as any text that is JSON."""
    for name in ('"\\ud800"', '"a\\udfff"'):
        said = outgoing(b"x", {"kafka-headers": f"[[{name}, null]]", "a": "b"}, "i", 1).headers
        assert said == [("a", b"b"), ("duetime-id", b"i"), ("duetime-due-ms", b"1")]
