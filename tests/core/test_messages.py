import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.messages import DEFAULT_TOPIC, Message, decode_member, encode_again, encode_member

ID = "OZ0aaaabbbbbbb0000000a"

_TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


@given(_TEXTS, st.one_of(st.just(DEFAULT_TOPIC), _TEXTS), st.one_of(st.none(), _TEXTS), st.dictionaries(_TEXTS, _TEXTS))
def test_a_member_gives_back_what_was_put_in(
    message: str, topic: str, caller_id: str | None, headers: dict[str, str]
) -> None:
    member = encode_member(ID, message, topic, caller_id, headers)
    assert decode_member(member) == Message(ID, ID if caller_id is None else caller_id, topic, message, headers)


@given(_TEXTS, _TEXTS, _TEXTS, st.dictionaries(_TEXTS, _TEXTS), st.integers(-(10**15), 10**15), _TEXTS)
def test_a_rescheduled_member_gives_back_what_was_put_in(
    message: str, topic: str, id: str, headers: dict[str, str], due_ms: int, group: str
) -> None:
    member = encode_again(ID, message, topic, id, headers, due_ms, group, attempt=3)
    assert decode_member(member) == Message(ID, id, topic, message, headers, due_ms)


@given(st.dictionaries(_TEXTS, _TEXTS))
def test_the_order_of_headers_does_not_matter(headers: dict[str, str]) -> None:
    turned = dict(reversed(headers.items()))
    assert encode_member(ID, "m", headers=headers) == encode_member(ID, "m", headers=turned)


def test_the_usual_message_costs_one_byte_more_than_its_id() -> None:
    assert encode_member(ID, "hello") == ID.encode() + b"mhello"


def test_what_is_absent_is_left_out() -> None:
    assert encode_member(ID, 'a"\x01é', "t") == ID.encode() + 'j{"message":"a\\"\\u0001é","topic":"t"}'.encode()
    assert encode_member(ID, "m", caller_id="i") == ID.encode() + b'j{"message":"m","id":"i"}'
    assert encode_member(ID, "m", headers={"a": "b"}) == ID.encode() + b'j{"message":"m","headers":{"a":"b"}}'


@pytest.mark.parametrize(
    ("member", "sentence"),
    [
        (b"", "not a message id"),
        (b"hello", "not a message id"),
        (ID.upper().encode() + b"mx", "not a message id"),
        (ID.encode()[:-1] + b"\xc3\xa9mx", "not a message id"),
        (ID.encode(), "unknown form ''"),
        (ID.encode() + b"xhello", "unknown form 'x'"),
        (b"\xff" + ID.encode(), "not UTF-8 at byte 0"),
        (ID.encode() + b"m\xff", "not UTF-8 at byte 23"),
        (ID.encode() + b"j", "not JSON"),
        (ID.encode() + b"j{", "not JSON"),
        (ID.encode() + b"j" + b"[" * 100_000, "not JSON"),
        (ID.encode() + b"j[]", "not an object of"),
        (ID.encode() + b'j{"message":"m","more":1}', "not an object of"),
        (ID.encode() + b"j{}", "wrong type"),
        (ID.encode() + b'j{"message":1}', "wrong type"),
        (ID.encode() + b'j{"message":"m","topic":null}', "wrong type"),
        (ID.encode() + b'j{"message":"m","headers":[]}', "wrong type"),
        (ID.encode() + b'j{"message":"m","headers":{"a":1}}', "wrong type"),
        (ID.encode() + b'j{"message":"\\ud800"}', "lone surrogate"),
        (ID.encode() + b'j{"message":"m","due_ms":"1"}', "not an object of"),
        (ID.encode() + b'r{"message":"m"}', "when it was due"),
        (ID.encode() + b'r{"message":"m","due_ms":"soon"}', "when it was due"),
        (ID.encode() + b'r{"message":"m","due_ms":1}', "wrong type"),
        (ID.encode() + b'r{"message":"m","due_ms":"1","attempt":2}', "wrong type"),
    ],
)
def test_a_foreign_member_is_refused_with_a_sentence(member: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        decode_member(member)
    assert str(caught.value).endswith(".")


@given(
    st.one_of(
        st.binary(),
        st.binary().map(lambda tail: ID.encode() + b"j" + tail),
        st.binary().map(lambda tail: ID.encode() + b"r" + tail),
    )
)
def test_any_bytes_are_read_or_refused(member: bytes) -> None:
    try:
        assert isinstance(decode_member(member), Message)
    except ValueError as error:
        assert type(error) is ValueError


@pytest.mark.parametrize("message_id", ["", ID[:-1], ID + "0", ID[:-1] + "G"])
def test_a_member_needs_a_message_id(message_id: str) -> None:
    with pytest.raises(ValueError, match="not a message id"):
        encode_member(message_id, "m")
