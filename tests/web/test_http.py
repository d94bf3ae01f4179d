"""HTTP that no decent client sends: slow, huge, broken. Afterwards the server still answers."""

import random
import re
import socket
from collections.abc import Iterator

import pytest

from pipeline.web import protocol
from tests.servers import RealServer
from tests.waiting import wait_until
from tests.web.running import Api, running, settings_of

HEAD = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"message":"m","delay_sec":60}'
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def strict(server: RealServer) -> Iterator[Api]:
    """An API that waits for little and takes little."""
    limits = {"head_timeout_sec": 0.5, "body_timeout_sec": 0.5, "connections_max": 20, "batch_bytes_max": 10_000}
    with running(settings_of(server.url, **limits)) as api:
        yield api
        assert api.schedule().status_code == 201, "the server still answers"


def exchange(api: Api, *sent: bytes) -> bytes:
    """Send bytes, and return all that comes until the server ends the connection."""
    with api.raw() as connection:
        for part in sent:
            try:
                connection.sendall(part)
            except OSError:
                break
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while chunk := connection.recv(65_536):
            found += chunk
    except ConnectionResetError:
        pass
    return found


def read_answers(connection: socket.socket, count: int) -> bytes:
    """Return what comes, until it holds so many answers."""
    found = b""
    while found.count(b"HTTP/1.1 ") < count or not found.endswith(b"}"):
        chunk = connection.recv(65_536)
        assert chunk, found
        found += chunk
    return found


def connections(api: Api) -> int:
    """Return how many connections are open."""
    [count] = re.findall(r"^duetime_api_connections\S+ (\S+)$", api.get("/metrics").text, re.M)
    return int(float(count))


def status(answer: bytes) -> int:
    assert b"application/problem+json" in answer or answer.startswith(b"HTTP/1.1 2"), answer[:300]
    return int(answer[9:12])


def test_a_head_that_does_not_come_is_not_waited_for(strict: Api) -> None:
    for part in (b"", b"GET", HEAD, GET[:-1]):
        assert status(exchange(strict, part)) == 408, part


def test_a_body_that_does_not_come_is_not_waited_for(strict: Api) -> None:
    assert status(exchange(strict, HEAD + b"Content-Length: 30\r\n\r\n{")) == 408
    assert status(exchange(strict, HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")) == 408
    assert strict.listed() == []


def test_bytes_that_trickle_keep_no_connection(strict: Api) -> None:
    with strict.raw() as connection:
        connection.settimeout(0.05)
        sent = 0
        found = b""
        while not found:
            connection.sendall(HEAD[sent : sent + 1] or b"x")
            sent += 1
            try:
                found = connection.recv(65_536)
            except TimeoutError:
                pass
        assert status(found) == 408
        assert sent < len(HEAD)


def test_a_long_head_is_refused(strict: Api) -> None:
    for long in (
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 5_000 + b"\r\n",
    ):
        assert status(exchange(strict, long)) == 431
    endless = [b"GET / HTTP/1.1\r\nX: ", *[b"a" * 65_536] * 400]
    assert b" 431 " in exchange(strict, *endless)
    trailers = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: "
    assert status(exchange(strict, trailers, *[b"a" * 65_536] * 400)) in (408, 413, 431)


def test_a_body_is_as_long_as_it_may_be_whatever_it_says(strict: Api) -> None:
    batch = HEAD.replace(b"messages", b"batches").replace(b"json", b"x-ndjson")
    assert status(exchange(strict, batch + b"Content-Length: 10001\r\n\r\n")) == 413
    assert status(exchange(strict, batch + b"Content-Length: 99999999999999999999\r\n\r\n")) in (400, 413)
    assert status(exchange(strict, batch + b"Content-Length: -1\r\n\r\n")) == 400
    chunked = batch + b"Transfer-Encoding: chunked\r\n\r\n"
    assert status(exchange(strict, chunked, *[b"1000\r\n" + b" " * 4_096 + b"\r\n"] * 2_000)) == 413
    assert status(exchange(strict, chunked, *[b"1\r\n \r\n" * 1_000] * 20)) == 413
    twice = batch + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"
    assert status(exchange(strict, twice)) == 400
    both = batch + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n \r\n0\r\n\r\n"
    assert status(exchange(strict, both)) == 400


def test_what_lies_about_its_length_ends_alone(strict: Api) -> None:
    lying = HEAD + b"Content-Length: 100\r\n\r\n" + BODY
    with strict.raw() as connection:
        connection.sendall(lying)
        connection.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1 2" not in read_all(connection)
    more = HEAD + b"Content-Length: 30\r\n\r\n" + BODY + b"GARBAGE\r\n\r\n"
    answers = exchange(strict, more)
    assert answers.startswith(b"HTTP/1.1 201")
    assert len(strict.listed()) == 1


def test_requests_that_come_together_are_answered_in_order(strict: Api) -> None:
    posts = [b'{"message":"%d","delay_sec":60,"id":"%d"}' % (n, n) for n in range(8)]
    with strict.raw() as connection:
        connection.sendall(b"".join(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in posts) + GET)
        answers = read_answers(connection, 9)
        places = [answers.index(b"location: /v1/messages/%d\r" % n) for n in range(8)]
        assert places == sorted(places)
        connection.sendall(GET * 3)
        assert read_answers(connection, 3).count(b"HTTP/1.1 200") == 3, "the connection goes on"


@pytest.mark.parametrize("request_", [GET, b"GET /livez HTTP/1.1\r\n\r\n", GET.replace(b"livez", b"openapi.json")])
def test_requests_that_do_not_wait_for_answers_fill_no_memory(
    strict: Api, request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    begin = protocol.BoundedProtocol.on_headers_complete

    def count(self: protocol.BoundedProtocol) -> None:
        begin(self)
        held.append(len(self.pipeline))

    monkeypatch.setattr(protocol.BoundedProtocol, "on_headers_complete", count)
    for _ in range(3):
        answers = exchange(strict, request_ * 5_000)
        assert 1 <= answers.count(b"HTTP/1.1 ") <= protocol.PIPELINED_MAX + 1
    assert max(held) <= protocol.PIPELINED_MAX
    assert len(held) <= 3 * (protocol.PIPELINED_MAX + 1), "the rest is not even made into requests"


def test_more_connections_than_allowed_are_answered_and_closed(strict: Api) -> None:
    open_ones = [strict.raw() for _ in range(25)]
    try:
        found = [read_all(connection) for connection in open_ones]
        assert sum(answer.startswith(b"HTTP/1.1 503") for answer in found) >= 5
        assert {status(answer) for answer in found} == {503, 408}
    finally:
        for connection in open_ones:
            connection.close()


def test_what_is_no_http_is_a_problem(strict: Api) -> None:
    for garbage in (
        b"\0\1\2\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        assert status(exchange(strict, garbage)) in (400, 408), garbage
    for unusual, expected in (
        (b"GET http://localhost/livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", {200, 400, 404}),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", {400, 404}),
        (b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404, 405, 408}),
        (b"GET /livez HTTP/1.0\r\nHost: localhost\r\n\r\n", {200}),
        (b"GET /livez HTTP/1.1\r\n\r\n", {421}),
        (GET.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"), {200, 400}),
    ):
        assert status(exchange(strict, unusual)) in expected, unusual


def test_what_a_proxy_may_read_differently_is_refused(strict: Api) -> None:
    def answer(first: bytes, *headers: bytes, body: bytes = b"") -> int:
        return status(exchange(strict, b"\r\n".join([first, *headers, b"Connection: close", b"", b""]) + body))

    host, post = b"Host: localhost", b"POST /v1/messages HTTP/1.1"
    own = b"Origin: http://localhost"
    for header in (host, own, b"Authorization: Bearer a", b'If-Match: "a"', b"Idempotency-Key: a"):
        once = [host] if header != host else []
        assert answer(b"GET /livez HTTP/1.1", *once, header) == 200, header
        assert answer(b"GET /livez HTTP/1.1", *once, header, header) == 400, header
    for first, second in ((b"evil.example", b"localhost"), (b"localhost", b"evil.example")):
        assert answer(b"GET /livez HTTP/1.1", b"Host: " + first, b"Host: " + second) == 400
        assert answer(b"GET http://%b/livez HTTP/1.1" % first, b"Host: " + second) == 400
    assert answer(b"GET http://localhost@evil.example/livez HTTP/1.1", host) == 400
    assert answer(b"GET http://evil.example/livez HTTP/1.1", b"Host: evil.example") == 421
    assert answer(b"GET http://LOCALHOST/livez HTTP/1.1", host) == 200
    chunked, kind = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY), b"Content-Type: application/json"
    coded = b"Transfer-Encoding: "
    assert answer(post, host, kind, coded + b"chunked", body=chunked) == 201
    assert answer(post.replace(b"1.1", b"1.0"), host, kind, coded + b"chunked", body=chunked) == 400
    for coding in (b"identity, chunked", b"gzip, chunked", b"identity", b"chunked, chunked"):
        assert answer(post, host, kind, coded + coding, body=chunked) == 400, coding
    assert len(strict.listed()) == 1


def test_random_bytes_do_no_harm(strict: Api) -> None:
    seed = random.Random(42)
    whole = HEAD + b"Content-Length: 30\r\n\r\n" + BODY
    for _ in range(60):
        broken = bytearray(whole)
        for _ in range(seed.randint(1, 8)):
            broken[seed.randrange(len(broken))] = seed.randrange(256)
        with strict.raw() as connection:
            connection.sendall(bytes(broken[: seed.randint(1, len(broken))]))
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
            assert answer == b"" or status(answer) < 500, (bytes(broken), answer)


def test_a_reader_that_reads_nothing_holds_nobody_up(strict: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "WRITE_STALL_SEC", 0.5)
    lines = [{"message": "m" * 900, "delay_sec": 60} for _ in range(10)]
    for _ in range(50):
        assert strict.batch(lines).json()["stored"] == 10
    with strict.raw() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        request = b"GET /v1/messages?limit=500 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(request * 9)
        assert strict.get("/livez").status_code == 200
        assert connections(strict) == 2
        wait_until(lambda: connections(strict) == 1)
