"""Who may ask: tokens and rights, hosts, origins, content types."""

import hashlib
import logging
import re
import socket
from pathlib import Path

import httpx
import pytest

from pipeline.config import ApiSettings
from pipeline.core.errors import ConfigError
from pipeline.web import access as access_module
from pipeline.web.access import Access, read_tokens
from pipeline.web.app import OPERATIONS
from pipeline.web.problems import Problem
from pipeline.web.server import listen
from tests.servers import RealServer
from tests.web.running import Api, running, settings_of


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(
        f"# who may ask\n\nshop {digest('s3cret')} schedule\nwatch {digest('look')} read\n"
        f"admin {digest('all')} schedule read operate\n"
    )
    return path


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def reason(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json().get("reason", "")


def test_each_operation_takes_its_right_and_no_more(server: RealServer, tokens: Path) -> None:
    rights = {"s3cret": {"schedule"}, "look": {"read"}, "all": {"schedule", "read", "operate"}}
    with running(settings_of(server.url, tokens=str(tokens))) as api:
        for template, operations in OPERATIONS.items():
            path = re.sub(r"\{\w+\}", "x", template)
            for method, operation in operations.items():
                for token, has in rights.items():
                    found = api.request(method, path, headers=bearer(token))
                    is_refused = found.status_code in (401, 403)
                    assert is_refused == (operation.right is not None and operation.right not in has), (
                        method,
                        path,
                        token,
                    )
                if operation.right:
                    for wrong in ({}, bearer("wrong"), {"Authorization": "Basic x"}, bearer(digest("all"))):
                        found = api.request(method, path, headers=wrong)
                        assert reason(found) == (401, "no_token")
                        assert found.headers["www-authenticate"] == "Bearer"
        assert reason(api.get("/v1/status", headers=bearer("s3cret"))) == (403, "not_allowed")
        assert api.get("/v1/status", headers={"Authorization": "bEARER look"}).status_code == 200


@pytest.mark.parametrize(
    "text", ["", "# none\n", "name", "name abc read", f"name {'0' * 64}", f"name {'0' * 64} write"]
)
def test_a_file_without_a_token_or_with_a_wrong_line_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(ConfigError, match="tokens"):
        read_tokens(str(tmp_path / "tokens"))
    with pytest.raises(ConfigError, match="can't be read"):
        read_tokens(str(tmp_path / "none"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_without_tokens_only_this_machine_may_reach_it(host: str, tokens: Path) -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        Access(ApiSettings(host=host), [], lambda: 0.0)
    Access(ApiSettings(host=host), read_tokens(str(tokens)), lambda: 0.0)
    Access(ApiSettings(host=host, unix="/tmp/s"), [], lambda: 0.0)
    for loopback in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        Access(ApiSettings(host=loopback), [], lambda: 0.0)


def test_a_name_that_is_not_ours_is_refused(api: Api) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "", "localhost:x", "localhost:1:2", "[::1"):
        assert reason(api.get("/livez", headers={"Host": host})) == (421, "wrong_host"), host
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8600", "[::1]:8600"):
        assert api.get("/livez", headers={"Host": host}).status_code == 200, host


def test_answers_are_sent_without_delay() -> None:
    with listen(ApiSettings(port=0)) as (listener, _):
        assert listener.proto == socket.IPPROTO_TCP, "or asyncio would leave Nagle's algorithm on, at 40 ms an answer"


def test_the_hosts_of_the_settings_count(server: RealServer) -> None:
    with running(settings_of(server.url, hosts="api.example.org, other.example.org")) as api:
        assert api.get("/livez", headers={"Host": "API.example.org:443"}).status_code == 200
        assert reason(api.get("/livez")) == (421, "wrong_host")


def test_a_page_of_somebody_else_reaches_nothing(api: Api) -> None:
    own = f"http://127.0.0.1:{api.port}"
    foreign: list[dict[str, str]] = [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
    ]
    body = {"message": "m", "delay_sec": 60}
    for headers in foreign:
        assert reason(api.post("/v1/messages", json=body, headers=headers)) == (403, "foreign_origin"), headers
        assert reason(api.get("/v1/messages", headers=headers)) == (403, "foreign_origin"), headers
        assert reason(api.request("OPTIONS", "/v1/messages", headers=headers)) == (403, "foreign_origin"), headers
    allowed: list[dict[str, str]] = [{"Origin": own}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}]
    for headers in allowed:
        found = api.post("/v1/messages", json=body, headers=headers)
        assert found.status_code == 201, headers
        assert not [name for name in found.headers if name.startswith("access-control")]
    for form in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        found = api.post("/v1/messages", content=b'{"message":"m","delay_sec":1}', headers={"Content-Type": form})
        assert reason(found) == (415, "wrong_content_type")
    assert len(api.listed()) == len(allowed)


def test_a_token_has_a_rate(tokens: Path) -> None:
    now = 0.0
    access = Access(ApiSettings(rate_per_token=2), read_tokens(str(tokens)), lambda: now)
    one, other = ({b"authorization": f"Bearer {token}".encode()} for token in ("all", "look"))
    for _ in range(2):
        assert access.check_caller(one, "read", "unix").name == "admin"
    with pytest.raises(Problem, match="2 requests a second") as refused:
        access.check_caller(one, "read", "unix")
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "1")
    assert access.check_caller(other, "read", "unix").name == "watch"
    now = 0.5
    access.check_caller(one, "read", "unix")
    with pytest.raises(Problem):
        access.check_caller(one, "read", "unix")


def test_a_rate_that_is_exceeded_keeps_the_connection(server: RealServer, tokens: Path) -> None:
    with running(settings_of(server.url, tokens=str(tokens), rate_per_token=1)) as api:
        head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer all\r\nContent-Type: application/json\r\n"
        body = b'{"message": "m", "delay_sec": 60}'
        with api.raw() as connection:
            answers = b""
            for _ in range(4):
                connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
                answer = connection.recv(65_536)
                assert b"connection: close" not in answer.lower()
                answers += answer
        assert answers.count(b"HTTP/1.1 201") >= 1 and answers.count(b"HTTP/1.1 429") >= 1


def test_tokens_that_are_not_known_are_slowed_for_their_address_alone(server: RealServer, tokens: Path) -> None:
    settings = settings_of(server.url, tokens=str(tokens), trusted_proxies="127.0.0.0/8", failed_tokens_max=3)
    with running(settings) as api:

        def ask(token: str, address: str, path: str = "/v1/status") -> int:
            return api.get(path, headers=bearer(token) | {"X-Forwarded-For": address}).status_code

        assert [ask("wrong", "203.0.113.1") for _ in range(5)] == [401, 401, 401, 429, 429]
        assert ask("look", "203.0.113.1") == 429, "or a guess would be told by its answer"
        assert ask("x", "203.0.113.1", "/?token=look") == 429, "at the pages, too"
        refused = api.get("/v1/status", headers=bearer("look") | {"X-Forwarded-For": "203.0.113.1"})
        assert reason(refused)[1] == "rate_exceeded" and 1 <= int(refused.headers["retry-after"]) <= 60
        assert ask("look", "203.0.113.2") == 200
        assert ask("look", "203.0.113.1, 203.0.113.2") == 200, "what a client says of itself does not count"
        assert ask("look", "203.0.113.1, 127.0.0.5") == 429, "a proxy behind a proxy"
        assert [ask("wrong", f"2001:db8::{n}") for n in range(1, 5)] == [401, 401, 401, 429], "one network"
        assert [ask("wrong", "127.0.0.1") for _ in range(5)] == [401] * 5, "whom nobody can tell apart"
    with running(settings_of(server.url, tokens=str(tokens), failed_tokens_max=1)) as api:
        assert [ask("wrong", "203.0.113.1") for _ in range(3)] == [401] * 3, "the proxy is not trusted"


def test_failures_are_forgotten_after_a_minute_and_few_addresses_are_kept(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    access = Access(ApiSettings(failed_tokens_max=1), read_tokens(str(tokens)), lambda: now)
    monkeypatch.setattr(access_module, "ADDRESSES_MAX", 2)
    assert access.mark_of(b"wrong", "203.0.113.1") is None
    with pytest.raises(Problem, match="Too many tokens"):
        access.mark_of(b"look", "203.0.113.1")
    now = 60.0
    assert access.mark_of(b"look", "203.0.113.1")
    for last in range(1, 9):
        access.mark_of(b"wrong", f"203.0.113.{last}")
    assert len(access._failures) <= 2


@pytest.mark.parametrize("text", ["proxy.example.org", "10.0.0.1/8", "1.2.3", "*"])
def test_proxies_are_addresses_or_networks(text: str) -> None:
    with pytest.raises(ConfigError, match=r"api\.trusted_proxies"):
        Access(ApiSettings(trusted_proxies=text), [], lambda: 0.0)


def test_a_proxy_that_does_not_say_for_whom_it_asks_is_not_locked_out(tokens: Path) -> None:
    settings = ApiSettings(failed_tokens_max=1, trusted_proxies="10.0.0.0/8")
    access = Access(settings, read_tokens(str(tokens)), lambda: 0.0)
    assert access.address_of("10.1.1.1", "203.0.113.9:4711") == "10.1.1.1", "with a port it is no address"
    for _ in range(3):
        assert access.mark_of(b"wrong", "10.1.1.1") is None
    assert access.mark_of(b"look", "10.1.1.1")


def test_an_address_of_ipv4_that_a_proxy_writes_as_one_of_ipv6_is_the_same(tokens: Path) -> None:
    """Nginx does, where one socket listens for both: all clients would else be of one network, and locked out together."""
    settings = ApiSettings(failed_tokens_max=1, trusted_proxies="10.0.0.0/8")
    access = Access(settings, read_tokens(str(tokens)), lambda: 0.0)
    one, other = (access.address_of("10.1.1.1", f"::ffff:203.0.113.{n}, ::ffff:10.2.2.2") for n in (1, 2))
    assert (one, other) == ("203.0.113.1", "203.0.113.2")
    assert access.mark_of(b"wrong", one) is None
    with pytest.raises(Problem):
        access.mark_of(b"look", one)
    assert access.mark_of(b"look", other)


def test_the_unix_socket_may_be_that_of_a_proxy() -> None:
    trusting = Access(ApiSettings(trusted_proxies="unix, 10.0.0.0/8"), [], lambda: 0.0)
    assert trusting.address_of("", "203.0.113.9, 10.1.1.1") == "203.0.113.9"
    assert trusting.address_of("", "") == "unix"
    assert trusting.address_of("10.2.2.2", "nonsense") == "10.2.2.2"
    assert Access(ApiSettings(), [], lambda: 0.0).address_of("", "203.0.113.9") == "unix"


def test_a_request_has_an_id_and_an_address_in_the_log(
    server: RealServer, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pipeline.web")
    with running(settings_of(server.url, tokens=str(tokens), trusted_proxies="127.0.0.1")) as api:
        given = api.get(
            "/v1/status", headers=bearer("look") | {"X-Request-Id": "a-1", "X-Forwarded-For": "203.0.113.1"}
        )
        assert given.headers["x-request-id"] == "a-1"
        made = {api.get("/v1/status", headers=bearer("look")).headers["x-request-id"] for _ in range(2)}
        assert len(made) == 2
        for odd in ("a b", "a;b", "a" * 65, "", "é"):
            answer = api.get("/nothing", headers={"X-Request-Id": odd.encode("latin-1")})
            assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"]), odd
    said = [record.getMessage() for record in caplog.records if record.name == "pipeline.web.app"]
    assert re.fullmatch(r"GET /v1/status 200 \S+ ms watch 203\.0\.113\.1 a-1", said[0]), said[0]
    assert re.fullmatch(r"GET - 404 \S+ ms - 127\.0\.0\.1 [0-9a-f]{16}", said[-1]), said[-1]
