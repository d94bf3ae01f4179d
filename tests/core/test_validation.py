"""The reference of the rules, against the table that the parsing of files also has to pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.messages import Message, Reason, Rejection
from pipeline.core.validation import validate_line
from tests.cases.requests import CASES, Case


def judge(case: Case) -> Message | Rejection | None:
    return validate_line(case.line, case.kind, case.arrival_ms, case.header)


def test_the_python_form_judges_every_line_of_the_table_as_written() -> None:
    found = {case.name: judge(case) for case in CASES}
    reasons = {name: one.reason if isinstance(one, Rejection) else one for name, one in found.items()}
    assert reasons == {case.name: case.expected for case in CASES}


def test_the_names_of_the_cases_are_unique() -> None:
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


def test_every_reason_has_a_case() -> None:
    # These two are found around the rules; tests/ingest has cases for them.
    elsewhere = {Reason.LINE_NO_TOO_HIGH, Reason.BAD_SOCKET_LINE}
    assert {case.expected for case in CASES if isinstance(case.expected, Reason)} == set(Reason) - elsewhere


def test_a_rejection_is_told_in_one_short_sentence() -> None:
    found = {case.name: judge(case) for case in CASES if isinstance(case.expected, Reason)}
    details = {name: one.detail if isinstance(one, Rejection) else "no rejection" for name, one in found.items()}
    odd = {
        n: text for n, text in details.items() if not (text.endswith(".") and len(text) < 400 and text.isprintable())
    }
    assert len(found) > 200
    assert odd == {}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            '"message":"m","due":1795291276',
            "The due time 1795291276 looks like seconds; epoch milliseconds have 13 digits.",
        ),
        (
            '"message":{"a":1},"delay_sec":1',
            "The field message takes a string, not an object; write JSON as a string, for example with to_json.",
        ),
        ('"message":5,"delay_sec":1', "The field message takes a string, not this number."),
    ],
)
def test_a_rejection_says_what_to_write_instead(fields: str, sentence: str) -> None:
    found = validate_line(f"{{{fields}}}", "json", 0)
    assert isinstance(found, Rejection)
    assert found.detail == sentence


@given(
    st.one_of(st.binary(), st.text(st.characters()), st.text('{}[]":,\\ud8message due51.e-')),
    st.sampled_from(["json", "csv", "sock"]),
    st.one_of(st.none(), st.text('",measgdu')),
)
def test_no_line_of_any_kind_raises(raw: bytes | str, kind: str, header: str | None) -> None:
    found = validate_line(raw, kind, 0, header)  # type: ignore[arg-type]
    assert found is None or isinstance(found, Message | Rejection)


def test_a_text_with_half_a_surrogate_pair_is_not_utf8() -> None:
    found = validate_line('{"message":"\ud800","due":1700000000005}', "json", 0)
    assert isinstance(found, Rejection)
    assert found.reason is Reason.NOT_UTF8


def test_a_line_of_very_many_fields_is_judged_quickly() -> None:
    fields = ",".join(f'"k{number}":1' for number in range(200_000))
    found = validate_line(f'{{{fields},"k199999":1}}', "json", 0)
    assert isinstance(found, Rejection)
    assert found.reason is Reason.DUPLICATE_KEY
