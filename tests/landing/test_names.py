"""Names read back as they were built, sort as they must, and hold nothing that Spark or a terminal would act on."""

import os
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.landing.names import (
    LandingName,
    Token,
    TokenMaker,
    WorkName,
    is_unfinished,
    kind_of,
    landing_name,
    parse_landing_name,
    parse_token,
    parse_work_name,
    printable_name,
    quote_name,
    rejects_name,
    repeated_name,
    unquote_name,
)

file_names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1)
tokens = st.builds(Token, st.integers(0, 2**42 - 2**20), st.integers(0, 2**42 - 1))


@given(tokens, st.integers(1, 2**40), st.sampled_from(["json", "csv", "sock"]), file_names)
def test_a_landing_name_reads_back_as_it_was_built(token: Token, first_line: int, kind: str, original: str) -> None:
    name = landing_name(token, first_line, kind, quote_name(original))
    parsed = parse_landing_name(name)
    assert parsed is not None
    assert len(name.encode()) <= 255 and "/" not in name and "%" not in name
    assert (parsed.token, parsed.first_line, parsed.kind) == (str(token), first_line, kind)
    assert original.startswith(parsed.original_name)
    if len(quote_name(original)) < 140:
        assert parsed.original_name == original


def test_a_landing_name_whose_dots_are_dots_is_read_too() -> None:
    name = f"{Token(1, 2)}.1.sock.127.0.0.1=3A9999"
    assert parse_landing_name(name) == LandingName(str(Token(1, 2)), 1, "sock", "127.0.0.1:9999")


@given(tokens, st.integers(0, 2**42), st.sampled_from(["json", "csv"]), file_names, st.integers(1, 20))
def test_a_name_to_be_read_again_says_the_same_and_is_another_each_time(
    token: Token, line: int, kind: str, original: str, times: int
) -> None:
    name = landing_name(token, line, kind, quote_name(original))
    names = [name]
    for number in range(times):
        names.append(repeated_name(names[-1], has_waited=number % 2 == 1))
    assert len({*names}) == times + 1
    first, *others = map(parse_landing_name, names)
    assert first is not None and not first.is_repeated
    assert others == [replace(first, is_repeated=True, has_waited=number % 2 == 1) for number in range(times)]
    assert max(map(len, names)) <= 255


@given(tokens, st.integers(0, 2**42), st.sampled_from(["json", "csv"]), st.booleans(), file_names)
def test_a_work_name_reads_back_as_it_was_built(
    token: Token, arrival_ms: int, kind: str, gzipped: bool, original: str
) -> None:
    work = WorkName(token, arrival_ms, kind, gzipped, quote_name(original))
    assert len(str(work)) <= 255
    assert parse_work_name(str(work)) == work
    assert parse_landing_name(str(work)) is None


@given(tokens, st.integers(-(2**63), 2**63), file_names)
def test_the_name_of_rejects_is_safe_and_fits_a_file_name(token: Token, arrival_ms: int, original: str) -> None:
    name = rejects_name(arrival_ms, original, str(token))
    assert len(name.encode()) <= 255
    assert re.fullmatch(r"[\w.-]+", name) and name[0].isdigit()


@pytest.mark.parametrize(
    ("original", "safe"),
    [
        ("bad.jsonl", "bad.jsonl"),
        ("127.0.0.1:9999", "127.0.0.1_9999"),
        ("größe 2.csv", "größe_2.csv"),
        ("../\x1b\n", ".._"),
    ],
)
def test_rejects_are_found_by_the_date_and_the_original_name(original: str, safe: str) -> None:
    assert rejects_name(1_795_305_599_999, original, "TOKEN") == f"2026-11-21-{safe}-TOKEN.jsonl"


@given(tokens, tokens)
def test_tokens_sort_as_their_times_do(one: Token, other: Token) -> None:
    assert parse_token(str(one)) == one
    if one.epoch_ms < other.epoch_ms:
        assert str(one) < str(other)


def test_a_token_of_today_does_not_begin_with_a_character_that_spark_ignores() -> None:
    assert str(Token(1_800_000_000_000, 0))[0] not in "._"


def test_a_long_name_is_cut_between_characters() -> None:
    assert unquote_name(quote_name("\N{SNOWMAN}" * 100)) == "\N{SNOWMAN}" * 16
    assert quote_name("a" * 300) == "a" * 150


def test_a_name_that_is_not_utf8_can_be_printed() -> None:
    name = os.fsdecode(b"\xff.json")
    assert unquote_name(quote_name(name)) == printable_name(name) == "\ufffd.json"


@pytest.mark.parametrize(
    "name", ["", ".lock", "x", "x.1.json.y", "-" * 14 + ".x.json.y", "-" * 14 + ".1.xml.y", "part-00000.json"]
)
def test_other_names_are_not_landing_names(name: str) -> None:
    assert parse_landing_name(name) is None
    assert parse_work_name(".work-" + name) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.json", ("json", False)), ("a.JSONL", ("json", False)), ("a.csv", ("csv", False)), ("a.json.gz", ("json", True)),
        ("A.CSV.GZ", ("csv", True)), ("a.b.json", ("json", False)), ("a.txt", None), ("a.gz", None), ("json", None),
        ("a.json.bak", None), (".json", None), ("a.gz.json", ("json", False)),
    ],
)  # fmt: skip
def test_the_suffix_decides_the_kind(name: str, kind: tuple[str, bool] | None) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    "name",
    [
        ".x.json",
        "_x.json",
        "x.json~",
        "x.json.tmp",
        "x.part",
        "x.partial",
        "x.crdownload",
        ".x.swp",
        "x.json._COPYING_",
    ],
)
def test_names_of_unfinished_files_are_known(name: str) -> None:
    assert is_unfinished(name)
    assert not is_unfinished("x.json")


def test_token_times_rise_when_the_clock_stands_still_or_goes_back() -> None:
    maker = TokenMaker(last_epoch_ms=1000)
    times = [maker.make(now).epoch_ms for now in (5, 2000, 2000, 1999, 3000)]
    assert times == [1001, 2000, 2001, 2002, 3000]
    maker.reserve(Token(9000, 0))
    assert maker.make(3000).epoch_ms == 9001


@pytest.mark.parametrize("original", ["a.json.gz", "a+b.json", "a=b.bz2", "..json"])
def test_a_landing_file_has_no_suffix_that_spark_would_act_on(original: str) -> None:
    name = landing_name(Token(1, 2), 1, "json", quote_name(original))
    assert name.count(".") == 3
    assert parse_landing_name(name) == LandingName(str(Token(1, 2)), 1, "json", original)
