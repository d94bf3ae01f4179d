import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.ids import LINE_NO_MAX, TOKEN_ALPHABET, decode_token, encode_token, message_id, token_epoch_ms

_HALVES = st.integers(0, 2**42 - 1)


def test_the_alphabet_has_64_characters_in_ascii_order() -> None:
    assert len(TOKEN_ALPHABET) == 64
    assert "".join(sorted(TOKEN_ALPHABET)) == TOKEN_ALPHABET


@given(_HALVES, _HALVES)
def test_a_token_keeps_its_time(epoch_ms: int, random_bits: int) -> None:
    token = encode_token(epoch_ms, random_bits)
    assert len(token) == 14
    assert token_epoch_ms(token) == epoch_ms
    assert decode_token(token) == (epoch_ms, random_bits)


@given(st.tuples(_HALVES, _HALVES), st.tuples(_HALVES, _HALVES))
def test_tokens_sort_by_time_and_then_by_chance(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (encode_token(*one) < encode_token(*other)) == (one < other)


@pytest.mark.parametrize(("epoch_ms", "random_bits"), [(-1, 0), (2**42, 0), (0, -1), (0, 2**42)])
def test_what_needs_more_than_42_bits_is_refused(epoch_ms: int, random_bits: int) -> None:
    with pytest.raises(ValueError, match="a token holds"):
        encode_token(epoch_ms, random_bits)


@pytest.mark.parametrize("token", ["", "short", "a" * 13 + "!", "a" * 15])
def test_what_is_no_token_has_no_time(token: str) -> None:
    with pytest.raises(ValueError, match="is not a token"):
        token_epoch_ms(token)


def test_a_message_id_is_the_token_and_the_line_in_hex() -> None:
    assert message_id("a" * 14, 1) == "a" * 14 + "00000001"
    assert message_id("a" * 14, LINE_NO_MAX) == "a" * 14 + "ffffffff"


@pytest.mark.parametrize("line_no", [-1, LINE_NO_MAX + 1])
def test_a_line_number_that_does_not_fit_is_refused(line_no: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        message_id("a" * 14, line_no)


@given(st.integers(0, 253_402_300_799_999))
def test_a_due_time_lies_in_its_bucket(due_ms: int) -> None:
    start_ms = bucket_start_ms(due_ms)
    assert start_ms % BUCKET_WIDTH_MS == 0
    assert start_ms <= due_ms < start_ms + BUCKET_WIDTH_MS
