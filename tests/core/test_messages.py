import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.messages import DEFAULT_TOPIC, Message

ID = "OZ0aaaabbbbbbb0000000a"

_TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


_HEADERS = st.dictionaries(_TEXTS, _TEXTS)


@given(_TEXTS, st.one_of(st.just(DEFAULT_TOPIC), _TEXTS), _TEXTS, _HEADERS)
def test_a_member_gives_back_what_was_put_in(body: str, topic: str, id: str, headers: dict[str, str]) -> None:
    member = Message(7, body, topic, id, headers).to_member(ID)
    found = Message.from_member(member, 7, attempt=2)
    assert found == Message(7, body, topic, id or ID, headers, ID, attempt=2)
    assert found.to_member() == member


@given(_TEXTS, _TEXTS, _TEXTS, _HEADERS, st.integers(-(10**15), 10**15), st.text(min_size=1), st.integers(1, 10**9))
def test_a_rescheduled_member_gives_back_what_was_put_in(
    body: str, topic: str, id: str, headers: dict[str, str], due_ms: int, group: str, attempt: int
) -> None:
    message = Message(due_ms, body, topic, id, headers, ID, attempt, group)
    assert Message.from_member(message.to_member(is_rescheduled=True), due_ms=1) == message


def test_a_rescheduled_member_without_a_group_does_not_say_which_attempt_it_is() -> None:
    member = Message(5, "m", id=ID, message_id=ID, attempt=3).to_member(is_rescheduled=True)
    assert member == ID.encode() + f'r{{"message":"m","id":"{ID}","due_ms":"5"}}'.encode()
    assert Message.from_member(member, due_ms=1, attempt=4).attempt == 4


@given(_TEXTS, _TEXTS, _TEXTS.filter(bool), _HEADERS, st.integers(-(10**15), 10**15), st.integers(1, 10**9), _TEXTS)
def test_the_fields_of_an_entry_give_back_what_was_put_in(
    body: str, topic: str, id: str, headers: dict[str, str], due_ms: int, attempt: int, group: str
) -> None:
    message = Message(due_ms, body, topic, id, headers, "1795176000000000000003", attempt, group)
    fields = {name.encode(): str(value).encode() for name, value in message.to_fields().items()}
    assert Message.from_fields(fields, "1795176000000-3", group=group) == message
    assert Message.from_fields(fields, "1795176000000-3", 4, group=group).attempt == attempt + 3


@given(st.dictionaries(st.sampled_from([b"message", b"due_ms", b"attempt", b"headers", b"id", b"group"]), st.binary()))
def test_any_entry_is_read(fields: dict[bytes, bytes]) -> None:
    message = Message.from_fields(fields, "1795176000000-3")
    message.to_member(is_rescheduled=True)
    assert message.attempt >= 1


@given(_HEADERS)
def test_equal_messages_give_equal_bytes(headers: dict[str, str]) -> None:
    turned = dict(reversed(headers.items()))
    one, other = Message(1, "m", headers=headers, message_id=ID), Message(1, "m", headers=turned, message_id=ID)
    assert one.to_member() == other.to_member()
    assert one.to_member(is_rescheduled=True) == other.to_member(is_rescheduled=True)


def test_the_usual_message_costs_one_byte_more_than_its_id() -> None:
    assert Message(1, "hello").to_member(ID) == ID.encode() + b"mhello"


def test_what_is_absent_is_left_out() -> None:
    def member(*fields: object, **more: object) -> bytes:
        return Message(1, *fields, **more).to_member(ID)  # type: ignore[arg-type]

    assert member('a"\x01é', "t") == ID.encode() + 'j{"message":"a\\"\\u0001é","topic":"t"}'.encode()
    assert member("m", id="i") == ID.encode() + b'j{"message":"m","id":"i"}'
    assert member("m", headers={"a": "b"}) == ID.encode() + b'j{"message":"m","headers":{"a":"b"}}'


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
        (ID.encode() + b'r{"message":"m"}', "does not say its due_ms"),
        (ID.encode() + b'r{"message":"m","due_ms":"soon"}', "does not say its due_ms"),
        (ID.encode() + b'r{"message":"m","due_ms":1}', "wrong type"),
        (ID.encode() + b'r{"message":"m","due_ms":"1","attempt":2}', "wrong type"),
        (ID.encode() + b'r{"message":"m","due_ms":"1","attempt":"two"}', "does not say its attempt"),
    ],
)
def test_a_foreign_member_is_refused_with_a_sentence(member: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        Message.from_member(member, 1)
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
        assert isinstance(Message.from_member(member, 1), Message)
    except ValueError as error:
        assert type(error) is ValueError


@pytest.mark.parametrize("message_id", ["", ID[:-1], ID + "0", ID[:-1] + "G"])
def test_a_member_needs_a_message_id(message_id: str) -> None:
    with pytest.raises(ValueError, match="not a message id"):
        Message(1, "m").to_member(message_id)
