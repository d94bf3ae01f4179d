"""Who may use the pages: sessions, rights, and forms that come from nowhere else."""

import logging
import re
from pathlib import Path

import httpx
import pytest

from pipeline.config import ApiSettings, Settings
from pipeline.core.errors import ConfigError
from pipeline.web.access import Access
from pipeline.web.app import PAGES
from pipeline.web.sessions import SESSION_SEC
from tests.servers import RealServer
from tests.web.html import check
from tests.web.running import Api, running, settings_of
from tests.web.test_access import digest

FROM_US = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    lines = [("shop", "s3cret", "schedule"), ("watch", "look", "read"), ("admin", "all", "schedule read operate")]
    path.write_text("".join(f"{name} {digest(token)} {rights}\n" for name, token, rights in lines))
    return path


def cookie_of(found: httpx.Response) -> str:
    return found.headers.get("set-cookie", "")


def send(api: Api, path: str, form: dict[str, str], page: str = "", **headers: str) -> httpx.Response:
    """Send the form of a page as a browser does."""
    fields = check(api.get(page or path).text).fields(path)
    return api.post(path, data=fields | form, headers=FROM_US | headers)


def test_a_token_in_the_address_begins_a_session_and_leaves_the_address(server: RealServer, tokens: Path) -> None:
    with running(settings_of(server.url, tokens=str(tokens))) as api:
        found = api.get("/?token=look")
        assert (found.status_code, found.headers["location"]) == (303, "/")
        cookie = cookie_of(found)
        assert cookie.startswith(f"duetime-{api.port}="), "cookies of a host are shared by its ports"
        assert {"HttpOnly", "SameSite=strict", "Path=/", f"Max-Age={SESSION_SEC}"} <= {*cookie.split("; ")}
        assert "look" not in cookie
        page = check(api.get("/").text)
        assert "Signed in as watch" in page.text()
        assert api.get("/v1/status").status_code == 401, "the cookie is for pages alone"
        assert send(api, "/logout", {}, "/").headers["location"] == "/"
        assert api.get("/").status_code == 401


def test_who_has_no_session_can_sign_in_at_any_page(server: RealServer, tokens: Path) -> None:
    with running(settings_of(server.url, tokens=str(tokens))) as api:
        for template, methods in PAGES.items():
            path = re.sub(r"\{\w+\}", "x", template)
            for method, page in methods.items():
                found = api.request(method, path, headers=FROM_US | FORM)
                assert (page.right is None) == (found.status_code != 401), (method, path)
                if found.status_code == 401:
                    check(found.text)
                    assert "www-authenticate" not in found.headers, "a browser would ask for a password"
        wanted = "/messages?topic=mail&from=2026-01-01T00:00"
        wrong = send(api, "/login", {"token": "wrong"}, wanted)
        assert wrong.status_code == 401 and "not known" in wrong.text
        done = send(api, "/login", {"token": " look "}, wanted)
        assert (done.status_code, done.headers["location"]) == (303, wanted)
        assert api.get(wanted).status_code == 200


@pytest.mark.parametrize(
    "where", ["//evil.example", "/\\evil.example", "https://evil.example", "/a\r\nX: y", "/\u2028"]
)
def test_after_signing_in_nobody_is_led_elsewhere(server: RealServer, tokens: Path, where: str) -> None:
    with running(settings_of(server.url, tokens=str(tokens))) as api:
        assert send(api, "/login", {"token": "look", "next": where}, "/").headers["location"] == "/"


def test_pages_have_the_rights_of_the_token(server: RealServer, tokens: Path) -> None:
    rights = {"s3cret": {"schedule"}, "look": {"read"}, "all": {"schedule", "read", "operate"}}
    with running(settings_of(server.url, tokens=str(tokens))) as api:
        api.schedule(id="tea")
        for token, has in rights.items():
            api.cookies.clear()
            entered = api.get("/", params={"token": token})
            assert entered.headers["location"] == ("/" if "read" in has else "/try")
            for template, methods in PAGES.items():
                if template == "/live":
                    continue
                path = re.sub(r"\{\w+\}", "x", template)
                for method, page in methods.items():
                    found = api.request(method, path, headers=FROM_US | FORM)
                    is_refused = "not_allowed" in found.text
                    assert is_refused == (page.right is not None and page.right not in has), (method, path, token)
        api.cookies.clear()
        api.get("/?token=look")
        for path in ("/messages/tea", "/messages", "/topics/mail", "/dead"):
            page = check(api.get(path).text)
            actions = {form["action"] for form in page.all("form")} - {"/find", "/logout", "/messages", "/dead"}
            assert actions == set(), f"{path} has a button that the token has no right for"
            assert not [link for link in page.all("a") if link["href"].startswith(("/change", "/try"))], path


def test_a_form_counts_only_from_our_page_and_this_session(api: Api) -> None:
    api.schedule(id="tea")
    fields = check(api.get("/messages/tea").text).fields("/messages/tea")
    cookie = dict(api.cookies)

    def cancel(form: dict[str, str], headers: dict[str, str]) -> int:
        found = api.post("/messages/tea", data=form, headers=headers)
        assert api.get("/v1/messages/tea").json()["state"] == ("cancelled" if found.status_code == 303 else "scheduled")
        return found.status_code

    form = fields | {"verb": "cancel"}
    own = f"http://127.0.0.1:{api.port}"
    foreign: list[dict[str, str]] = [
        {},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": f"http://127.0.0.1:{api.port + 1}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": own, "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
    ]
    for headers in foreign:
        assert cancel(form, headers) == 403, headers
    for wrong in ({"proof": ""}, {"proof": "0" * 40}, {"proof": fields["proof"].upper()}):
        assert cancel(form | wrong, FROM_US) == 403, wrong
    with Api(api.port) as other:
        theirs = check(other.get("/messages/tea").text).fields("/messages/tea")
        assert theirs["proof"] != fields["proof"]
        assert cancel(form | {"proof": theirs["proof"]}, FROM_US) == 403, "of another session"
    api.cookies.clear()
    assert cancel(form, FROM_US) == 403, "without a session"
    api.cookies.update(cookie)
    assert cancel(form, {"Origin": own}) == 303


def test_a_link_from_elsewhere_leads_to_the_page_and_nothing_else_reaches_one(server: RealServer, tokens: Path) -> None:
    with running(settings_of(server.url, tokens=str(tokens))) as api:
        api.get("/?token=look")
        session = dict(api.cookies)
        for site in ("cross-site", "same-site"):
            link = FROM_US | {"Sec-Fetch-Site": site}
            api.cookies.clear()  # which a browser keeps back then
            found = api.get("/messages?topic=a%22%3E%3Cb", headers=link)
            assert found.status_code == 200 and "set-cookie" not in found.headers, "our session must not end by that"
            [refresh] = [meta for meta in check(found.text).all("meta") if "http-equiv" in meta]
            assert refresh["content"] == "0; url=/messages?topic=a%22%3E%3Cb"
            for headers in (
                link | {"Sec-Fetch-Dest": "iframe"},
                link | {"Sec-Fetch-Mode": "cors"},
                {"Sec-Fetch-Site": site},
            ):
                for path in ("/", "/live?page=loops&about=", "/static/style.css"):
                    found = api.get(path, headers=headers)
                    assert found.status_code == 403 and "set-cookie" not in found.headers, (path, headers)
        api.cookies.update(session)
        assert api.get("/messages", headers=FROM_US).status_code == 200
        assert api.get("/", headers={"Host": "evil.example"}).status_code == 421


def test_signing_out_ends_the_session_for_whoever_has_its_cookie(server: RealServer, tokens: Path) -> None:
    with running(settings_of(server.url, tokens=str(tokens))) as api:
        api.get("/?token=look")
        session = dict(api.cookies)
        assert api.get("/messages").status_code == 200
        assert send(api, "/logout", {}, "/").status_code == 303
        api.cookies.clear()
        api.cookies.update(session)
        assert api.get("/messages").status_code == 401, "the old cookie"


def test_sessions_are_those_of_all_processes_and_end_with_their_token(server: RealServer, tokens: Path) -> None:
    with running(settings_of(server.url, tokens=str(tokens))) as one, running(one_more(server, tokens)) as other:
        one.get("/?token=look")
        host = {"Host": f"localhost:{one.port}"}  # as a balancer in front of both passes it on
        cookies = {f"duetime-{one.port}": one.cookies[f"duetime-{one.port}"]}
        other.cookies.update(cookies)
        assert other.get("/messages", headers=host).status_code == 200
    with running(one_more(server, tokens)) as later:
        later.cookies.update(cookies)
        assert later.get("/messages", headers=host).status_code == 200, "after a restart"
    kept = [line for line in tokens.read_text().splitlines() if not line.startswith("watch")]
    tokens.write_text("\n".join([*kept, f"watch {digest('another')} read"]))
    with running(one_more(server, tokens)) as later:
        later.cookies.update(cookies)
        assert later.get("/messages", headers=host).status_code == 401, "its token is not in the file any more"


def one_more(server: RealServer, tokens: Path) -> Settings:
    return settings_of(server.url, tokens=str(tokens))


def test_redis_has_of_a_session_what_nobody_can_use_and_for_twelve_hours(server: RealServer, tokens: Path) -> None:
    with running(settings_of(server.url, tokens=str(tokens))) as api:
        for _ in range(3):
            api.get("/")  # who has no token leaves nothing
        assert not [*server.client().scan_iter("*session*")]
        api.get("/?token=look")
        cookie = api.cookies[f"duetime-{api.port}"]
        assert len(cookie) == 43, "256 bits"
        [key] = server.client().scan_iter("*session*")
        assert SESSION_SEC - 60 < server.client().ttl(key) <= SESSION_SEC
        held = key + server.client().get(key)
        assert not [text for text in (cookie, "look", digest("look"), "watch") if text.encode() in held]
        for wrong in (cookie[:-1], cookie.swapcase(), "", "~", key.decode().rpartition(":")[2][:43]):
            api.cookies.set(f"duetime-{api.port}", wrong, domain="127.0.0.1")
            assert api.get("/messages", headers={"Cookie": f"duetime-{api.port}={wrong}"}).status_code == 401, wrong
        server.client().delete(key)
        assert api.get("/messages", headers={"Cookie": f"duetime-{api.port}={cookie}"}).status_code == 401


def test_behind_tls_cookies_are_secure_and_commands_say_https(server: RealServer, tokens: Path) -> None:
    settings = settings_of(server.url, tokens=str(tokens), public_url="https://duetime.example.org/")
    with running(settings) as api:
        host = {"Host": "duetime.example.org"}
        found = api.get("/?token=all", headers=host)
        cookie = cookie_of(found).split("; ")
        assert found.status_code == 303 and "Secure" in cookie and cookie[0].startswith("duetime="), cookie
        session = host | {"Cookie": cookie[0]}
        for path in ("/try", "/messages/tea"):
            page = check(api.get(path, headers=session).text).text()
            assert "https://duetime.example.org/v1/messages" in page and "http://" not in page, path
        fields = check(api.get("/", headers=session).text).fields("/logout")
        own = session | {"Origin": "https://duetime.example.org"}
        assert api.post("/logout", data=fields, headers=own).status_code == 303
    with running(settings_of(server.url)) as api:
        assert "Secure" not in cookie_of(api.get("/"))
    for wrong in ("duetime.example.org", "https://", "https://a/b", "ftp://a"):
        with pytest.raises(ConfigError, match=r"api\.public_url"):
            Access(ApiSettings(public_url=wrong), [], lambda: 0.0)


def test_a_read_only_dashboard_has_nothing_that_changes(server: RealServer) -> None:
    with running(settings_of(server.url)) as api:
        api.schedule(id="tea", topic="mail")
    with running(settings_of(server.url, read_only=True)) as api:
        for template, methods in PAGES.items():
            path = template.replace("{id}", "tea").replace("{topic}", "mail").replace("{name}", "style.css")
            for method, page in methods.items():
                if page.changes:
                    found = api.request(method, path, headers=FROM_US | FORM)
                    assert found.status_code in (404, 405), (method, path)
        for path in ("/", "/messages", "/messages/tea", "/topics/mail", "/dead"):
            page = check(api.get(path).text)
            assert "Read-only" in page.text()
            assert not [form for form in page.all("form") if form.get("method") == "post"], path
            assert not [link for link in page.all("a") if link["href"].startswith(("/change", "/try"))], path
        assert api.get("/v1/messages/tea").json()["state"] == "scheduled"


def test_each_change_is_a_line_with_who_did_it_and_no_id(
    server: RealServer, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pipeline.web")
    with running(settings_of(server.url, tokens=str(tokens))) as api:
        api.get("/?token=all")
        form = {"message": "s3cret body", "delay_sec": "60", "id": "s3cret-id", "topic": "mail", "do": "schedule"}
        assert send(api, "/try", form).status_code == 303
        assert send(api, "/messages/s3cret-id", {"verb": "cancel"}).status_code == 303
        assert send(api, "/topics/mail", {"verb": "pause"}).status_code == 303
    said = [record.getMessage() for record in caplog.records if record.name == "pipeline.web.actions"]
    assert said == [
        "pages: scheduled: 1 of topic mail, by admin",
        "pages: cancelled: 1 of topic mail, by admin",
        "pages: pause: 1 of topic mail, by admin",
    ]
    assert "s3cret" not in caplog.text and "token=" not in caplog.text
