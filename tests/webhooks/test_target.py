"""What a target sees of a message, and what its answers mean."""

import base64
import hashlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import TopicSettings
from pipeline.consume.handling import Gone, RetryLater, TargetDown
from pipeline.core.clock import SystemClock
from pipeline.core.errors import ConfigError
from pipeline.core.messages import Message
from pipeline.webhooks.requests import headers_of
from pipeline.webhooks.signing import read_secrets, secrets_of, signature
from pipeline.webhooks.target import READ_BYTES_MAX, Target, wait_sec_of
from tests.clock import ManualClock
from tests.webhooks.receiver import Answer, Posted, Receiver, receiving

SECRET, OTHER = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"), bytes(range(32))
EVENING = "Tue, 20 Jan 1970 20:00:10 GMT"


def message(body: str = "hello", **fields: Any) -> Message:
    return Message(1_000, body, "mail", **{"id": "order-1", **fields})


def target_of(receiver: Receiver, secrets: tuple[bytes, ...] = (), path: str = "", **settings: Any) -> Target:
    return Target(TopicSettings(webhook=receiver.url + path, **settings), secrets, SystemClock())


def outcome(target: Target, sent: Message | None = None) -> tuple[str, float | None, str]:
    """What becomes of a message: the kind, after how many seconds, and what is said of it."""
    try:
        target.post(sent or message())
    except (Gone, RetryLater, TargetDown) as exc:
        return type(exc).__name__, getattr(exc, "after_sec", None), str(exc)
    return "taken", None, ""


def hmac_by_hand(secret: bytes, content: bytes) -> str:
    """RFC 2104, written out."""
    block = secret.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block) + content).digest()
    return base64.b64encode(hashlib.sha256(bytes(byte ^ 0x5C for byte in block) + inner).digest()).decode()


def test_each_answer_has_its_meaning(receiver: Receiver) -> None:
    target = target_of(receiver)
    wanted = (
        dict.fromkeys((200, 201, 202, 204, 299), ("taken", None))
        | dict.fromkeys((400, 401, 403, 404, 408, 409, 413, 422, 425, 499), ("RetryLater", None))
        | dict.fromkeys((300, 301, 302, 307, 308, 500, 501, 502, 503, 504, 599), ("RetryLater", None))
        | {410: ("Gone", None), 429: ("TargetDown", None)}
    )
    found = {}
    for status in wanted:
        receiver.answer = lambda posted, status=status: Answer(status)  # type: ignore[misc]
        found[status] = outcome(target)[:2]
    assert found == wanted
    assert len(receiver.posted) == len(wanted)


def test_a_target_says_when_it_wants_to_be_asked_again_but_not_for_ever(receiver: Receiver) -> None:
    target = target_of(receiver, backoff_ms_max=90_000)
    wanted = {
        (503, "7"): ("TargetDown", 7.0),
        (429, "7"): ("TargetDown", 7.0),
        (500, "7"): ("RetryLater", 7.0),
        (408, "7"): ("RetryLater", 7.0),
        (404, "7"): ("RetryLater", 7.0),
        (410, "7"): ("Gone", None),
        (503, "86400"): ("TargetDown", 90.0),
        (500, "9" * 5_000): ("RetryLater", 90.0),
        (503, EVENING): ("TargetDown", 0.0),
        (503, "soon"): ("RetryLater", None),
        (503, "-1"): ("RetryLater", None),
        (503, "nan"): ("RetryLater", None),
    }
    found = {}
    for status, said in wanted:
        receiver.answer = lambda posted, status=status, said=said: Answer(status, headers={"Retry-After": said})  # type: ignore[misc]
        found[status, said] = outcome(target)[:2]
    assert found == wanted


def test_a_time_to_ask_again_counts_from_now() -> None:
    ten_sec_before = 1_713_600_000
    assert wait_sec_of(EVENING, ten_sec_before) == 10.0
    assert wait_sec_of("Tuesday, 20-Jan-70 20:00:10 GMT", ten_sec_before) == 10.0
    assert wait_sec_of("Tue, 99 Jan 1970 20:00:10 GMT", ten_sec_before) is None
    assert wait_sec_of("٣", 0) is None


def test_a_request_carries_the_text_and_says_what_it_is(receiver: Receiver) -> None:
    target = target_of(receiver, path="?key=hidden")
    for text in ("grüße 🎉", '{"a": 1}', " [1]", '"a"', "{no", "[" * 100_000, "[NaN]"):
        target.post(message(text))
    target.post(message("<a/>", headers={"Content-Type": "application/xml"}))
    target.post(message("[]", headers={"content-type": "a/b\r\nx-forged: 1"}))
    assert [posted.body for posted in receiver.posted][:2] == ["grüße 🎉".encode(), b'{"a": 1}']
    text, json = "text/plain; charset=utf-8", "application/json"
    assert [posted.header("content-type") for posted in receiver.posted] == [
        *(text, json, json, text, text, text, text),
        *("application/xml", json),
    ]
    first = receiver.posted[0]
    assert first.path == "/hook?key=hidden"
    about = {name: first.header(f"duetime-{name}") for name in ("topic", "due-ms", "attempt")}
    assert about == {"topic": "mail", "due-ms": "1000", "attempt": "1"}
    assert len({posted.connection for posted in receiver.posted}) == 1, "the connection is not kept"


def test_a_signature_is_that_of_the_standard(receiver: Receiver) -> None:
    body = b'{"test": 2432232314}'
    given = signature([SECRET], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert given == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    target_of(receiver, (SECRET, OTHER)).post(message("grüße"))
    target_of(receiver).post(message())
    signed, plain = receiver.posted
    assert signed.header("webhook-id") == "order-1"
    content = f"order-1.{signed.header('webhook-timestamp')}.grüße".encode()
    assert abs(int(signed.header("webhook-timestamp")) * 1000 - SystemClock().wall_ms()) < 60_000
    assert signed.header("webhook-signature").split(" ") == [f"v1,{hmac_by_hand(s, content)}" for s in (SECRET, OTHER)]
    assert "webhook-signature" not in dict(plain.headers)


def verify(secret: bytes, posted: Posted) -> dict[str, Any]:
    """What the libraries of Standard Webhooks do: check the signature over the body as it came, then read it as JSON."""
    signed = b"%s.%s." % (posted.header("webhook-id").encode(), posted.header("webhook-timestamp").encode())
    assert f"v1,{hmac_by_hand(secret, signed + posted.body)}" in posted.header("webhook-signature").split(" ")
    return json.loads(posted.body)  # type: ignore[no-any-return]


def test_a_text_in_an_envelope_is_verified_and_read_as_the_standard_has_it(receiver: Receiver) -> None:
    target = target_of(receiver, (SECRET,), webhook_format="json")
    headers = {"Content-Type": "text/html", "trace": "ü"}
    target.post(message("grüße 🎉 \u2028\n", headers=headers))
    target.post(message('{"a": 1}', id=""))
    first, second = receiver.posted
    due = "1970-01-01T00:00:01.000Z"
    assert verify(SECRET, first) == {
        "type": "message.due",
        "timestamp": due,
        "data": {"id": "order-1", "topic": "mail", "due": due, "message": "grüße 🎉 \u2028\n", "headers": headers},
    }
    assert verify(SECRET, second)["data"]["message"] == '{"a": 1}', "a message is a text, whatever is in it"
    assert {posted.header("content-type") for posted in receiver.posted} == {"application/json"}
    assert first.header("duetime-header-trace") == "%C3%BC"


def test_the_id_that_is_signed_has_no_dots_and_two_ids_are_never_the_same() -> None:
    ids = ("a", "a.1614265330", "a%2E1614265330", "a:b_c-d", "é\r\nx: y", "a b")
    sent = [headers_of(message(id=each), b"", 1, [])["webhook-id"] for each in ids]
    assert sent == ["a", "a%2E1614265330", "a%252E1614265330", "a:b_c-d", "%C3%A9%0D%0Ax:%20y", "a%20b"]


def test_no_header_of_a_message_is_one_of_the_request(receiver: Receiver) -> None:
    own = ["Host", "Content-Length", "Transfer-Encoding", "Connection", "Authorization", "Cookie", "X-Forwarded-For"]
    own += ["webhook-id", "webhook-signature", "duetime-topic", "user-agent", "expect"]
    odd = {
        "a b": "é 100% 🎉",
        "x\r\nforged": "1\r\nforged: 2\r\n\r\nPOST /",
        "": "none",
        "ü:": "\x00\x7f",
        "tok_en!": "\t",
    }
    target = target_of(receiver)
    target.post(message(headers=dict.fromkeys(own, "evil") | odd))
    target.post(message("second"))
    first, second = receiver.posted
    assert second.body == b"second"
    found = {name.lower(): value for name, value in first.headers if name.lower().startswith("duetime-header-")}
    assert found == {f"duetime-header-{name.lower()}": "evil" for name in own} | {
        "duetime-header-a%20b": "%C3%A9 100%25 %F0%9F%8E%89",
        "duetime-header-x%0d%0aforged": "1%0D%0Aforged: 2%0D%0A%0D%0APOST /",
        "duetime-header-": "none",
        "duetime-header-%c3%bc%3a": "%00%7F",
        "duetime-header-tok_en!": "%09",
    }
    others = {name.lower() for name, _ in first.headers} - found.keys()
    assert others == {name.lower() for name, _ in second.headers}
    assert first.header("host") == receiver.url.split("/")[2]
    assert first.header("webhook-id") == "order-1"


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    with receiving(Receiver()) as elsewhere:
        receiver.answer = lambda posted: Answer(307, headers={"Location": elsewhere.url})
        assert outcome(target_of(receiver)) == ("RetryLater", None, f"HTTP 307 from {receiver.url}")
        assert elsewhere.posted == []


def test_what_is_kept_of_an_answer_is_short_and_shows_neither_controls_nor_the_secret_part_of_the_url(
    receiver: Receiver,
) -> None:
    receiver.answer = lambda posted: Answer(404, b"gone\x1b[2J\n" + b"x" * 1_000)
    kind, _, said = outcome(target_of(receiver, path="?key=hidden"))
    assert kind == "RetryLater"
    assert said.startswith(f"HTTP 404 from {receiver.url}: gone\\x1b[2J\\nxxx")
    assert len(said) < 500


def test_a_huge_answer_is_not_read_to_its_end(receiver: Receiver) -> None:
    target = target_of(receiver)
    receiver.answer = lambda posted: Answer(200, b"x" * 50 * READ_BYTES_MAX)
    assert outcome(target)[0] == "taken"
    receiver.answer = lambda posted: Answer(200, b"x" * (READ_BYTES_MAX - 1))
    assert outcome(target)[0] == "taken"
    assert outcome(target)[0] == "taken"
    first, second, third = (posted.connection for posted in receiver.posted)
    assert first != second, "a connection with the rest of an answer was used again"
    assert second == third


def test_a_status_counts_even_if_the_rest_of_its_answer_does_not_come(receiver: Receiver) -> None:
    target = target_of(receiver)
    for status, kind in ((200, "taken"), (410, "Gone"), (500, "RetryLater")):
        receiver.answer = lambda posted, status=status: Answer(status, b"short", length=100)  # type: ignore[misc]
        assert outcome(target)[0] == kind


def test_no_answer_is_a_failure_and_no_connection_means_that_the_target_is_down(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    target = target_of(receiver, webhook_timeout_sec=0.1)
    receiver.answer = lambda posted: Answer(until=never)
    kind, after_sec, said = outcome(target)
    assert (kind, after_sec, said) == ("RetryLater", None, f"no answer from {receiver.url}: timed out")
    never.set()
    receiver.answer = lambda posted: Answer(hangs_up=True)
    kind, _, said = outcome(target)
    assert (kind, said.startswith(f"no answer from {receiver.url}: ")) == ("RetryLater", True)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    closed = Receiver()
    closed.url = f"http://127.0.0.1:{port}/"
    assert outcome(target_of(closed)) == (
        "TargetDown",
        None,
        f"no connection to {closed.url}: [Errno 111] Connection refused",
    )
    closed.url = "http://127.0.0.1:99999/"
    assert outcome(target_of(closed))[0] == "TargetDown"

    def fail(*arguments: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    closed.url = "http://nowhere.example/"
    assert outcome(target_of(closed))[0] == "TargetDown"


@pytest.fixture
def certificate(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "both.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", str(tmp_path / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + (tmp_path / "cert.pem").read_text())
    yield path


@pytest.mark.skipif(not shutil.which("openssl"), reason="there is no openssl here")
def test_a_certificate_that_nobody_trusts_gets_nothing(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with receiving(Receiver(), context=context) as receiver:
        kind, _, said = outcome(target_of(receiver))
        assert kind == "TargetDown" and "CERTIFICATE_VERIFY_FAILED" in said
        assert receiver.posted == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert outcome(target_of(receiver))[0] == "taken"


def test_secrets_are_read_by_topic_and_a_wrong_line_is_told_without_showing_it(tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    first, second = (f"whsec_{base64.b64encode(secret).decode()}" for secret in (SECRET, OTHER))
    path.write_text(f"# of March\n\nmail {first}\nmail   {second}\n* {second}\n")
    secrets = read_secrets(path)
    assert [secrets_of(secrets, topic) for topic in ("mail", "news")] == [[SECRET, OTHER], [OTHER]]
    assert secrets_of({}, "mail") == ()
    for line in (
        "mail",
        f"a:b {first}",
        "mail MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "mail whsec_c2hvcnQ=",
        "mail whsec_?",
    ):
        path.write_text(f"* {second}\n{line}\n")
        with pytest.raises(ConfigError, match="secrets, line 2 must be a topic or") as refused:
            read_secrets(path)
        assert "whsec_" not in str(refused.value).replace("whsec_ with the base64", "")
    with pytest.raises(ConfigError, match="can't be read"):
        read_secrets(tmp_path / "none")


def test_the_time_in_a_request_is_that_of_the_attempt(receiver: Receiver) -> None:
    clock = ManualClock(epoch_ms=1_700_000_000_999)
    Target(TopicSettings(webhook=receiver.url), (), clock).post(message())
    assert receiver.posted[0].header("webhook-timestamp") == "1700000000"
