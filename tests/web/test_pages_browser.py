"""The pages in a real browser, under their own policy: what people see and do, whatever the data are and whoever else is there."""

import hashlib
import json
import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.core.text import JOINERS, UNSAFE_CATEGORIES
from tests.client.builders import deliver_due
from tests.servers import RealServer
from tests.web import axe, scenery
from tests.web.browsing import DESKTOP, PHONE, Visitor, launched, needs_chromium, visiting, wait_for_looks
from tests.web.running import Api, running, settings_of
from tests.web.test_browser import foreign_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request, Route

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("browser"), needs_chromium]

BAD_PAGE = """<!doctype html><title>bad</title><img src=x><p style="color: #ccc">pale</p>
<script>console.error("it says"); alert(1); fetch("http://127.0.0.1:1/"); throw new Error("broken");</script>"""
# What only data could have brought into a page.
STRANGERS = """() => {
  const found = [...document.querySelectorAll(
    "script:not([src^='/static/']), style, img, iframe, base, object, embed, math, [style], [srcdoc], "
    + "link:not([href^='/static/']), meta[http-equiv], form:not([action^='/']), a:not([href^='/']):not([href='#main'])")];
  for (const each of document.querySelectorAll("*"))
    if (each.getAttributeNames().some((name) => name.startsWith("on"))) found.push(each);
  return found.map((each) => each.outerHTML.slice(0, 200));
}"""
# What takes a text from whoever made a link.
ADDRESSES = (
    *("/?hours=", "/?done=", "/?done=cancelled&count=", "/?token=", "/find?id=", "/messages?topic=", "/messages?from="),
    *(
        "/messages?cursor=",
        "/messages/",
        "/dead?reason=",
        "/dead?cursor=",
        "/letter?name=",
        "/topics?after=",
        "/topics/",
    ),
    *("/change/messages?verb=", "/change/dead?topic=", "/live?page=", "/static/"),
)
HAS_RING = """() => {
  const style = getComputedStyle(document.activeElement);
  return style.outlineStyle !== "none" || style.boxShadow !== "none";
}"""
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with launched() as browser:
        yield browser


def base_of(api: Api) -> str:
    return f"http://127.0.0.1:{api.port}"


def letter_paths(api: Api) -> list[str]:
    letters = api.get("/v1/dead", params={"limit": 100}).raise_for_status().json()["letters"]
    return [f"/letter?name={letter['name'].replace('/', '%2F')}" for letter in letters]


def all_paths(api: Api) -> list[str]:
    """Return an address of each page, with ``have_little``, and of some that have nothing to show."""
    [first, *_] = api.get("/v1/messages?limit=1&topic=invoices").json()["messages"]
    return [
        *("/", "/?hours=6", "/?hours=168", "/messages", "/messages?topic=mail", f"/messages/{first['id']}"),
        *("/find?id=nobody", "/find?id=no%20id", "/topics", "/topics/invoices", "/topics/sms", "/topics/none"),
        *("/dead", "/dead?topic=none", letter_paths(api)[0], "/loops", "/try"),
        *(f"/change/messages?verb={verb}&topic=mail" for verb in ("cancel", "move", "now")),
        *("/change/dead?verb=purge&topic=sms", "/change/dead?verb=redrive", "/change/messages?verb=cancel&topic=none"),
    ]


def answer(headers: dict[str, str], route: "Route", _: "Request") -> None:
    route.fulfill(headers=headers, body=BAD_PAGE)


def test_whoever_watches_sees_what_a_bad_page_does(browser: "Browser") -> None:
    base = "http://127.0.0.1:9"
    for policy, wanted in (
        ("default-src *; script-src 'unsafe-inline'; style-src 'unsafe-inline'",
         ("it says", "dialog: 1", "request: GET http://127.0.0.1:1/", "error: broken")),
        ("default-src 'none'", ("policy script-src", "policy style-src", "policy img-src")),
    ):  # fmt: skip
        visitor = Visitor(browser, base)
        headers = {"Content-Type": "text/html", "Content-Security-Policy": policy}
        visitor.context.route(f"{base}/", partial(answer, headers))
        page = visitor.open("/")
        page.wait_for_load_state("networkidle")
        said = "\n".join(visitor.complaints)
        assert [each for each in wanted if each not in said] == [], said
        assert len(page.evaluate(STRANGERS)) == 3
        if axe.why_unavailable() is None:
            barriers = axe.find_barriers(page)
            assert any("image-alt" in each for each in barriers) and any("html-has-lang" in each for each in barriers)
        visitor.context.close()


def test_every_page_is_whole_and_fits_and_shuts_nobody_out(browser: "Browser", server: RealServer, api: Api) -> None:
    scenery.have_little(server, api)
    has_axe = axe.why_unavailable() is None
    asked: set[str] = set()
    wrong: list[Any] = []
    with visiting(browser, base_of(api)) as visitor:
        for path in all_paths(api):
            page = visitor.open(path)
            parts = [page.locator(part).count() for part in ("h1", "main", "header", "footer")]
            if parts != [1, 1, 1, 1] or not page.title().endswith(" · Duetime"):
                wrong.append((path, parts, page.title()))
            is_new = path.partition("?")[0] not in asked
            asked.add(path.partition("?")[0])
            for size, theme in ((DESKTOP, "light"), (PHONE, "dark")):
                visitor.look(size, theme)
                if (pixels := page.evaluate(OVERFLOW)) > 0:
                    wrong.append((path, size, f"{pixels} px too wide"))
                if has_axe and is_new:
                    wrong += [(path, theme, barrier) for barrier in axe.find_barriers(page)]
            wrong += [(path, complaint) for complaint in visitor.taken()]
    assert wrong == []
    if not has_axe:
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"all but axe-core: {axe.why_unavailable()}")


def test_everything_is_done_by_clicking(browser: "Browser", server: RealServer, api: Api) -> None:
    with visiting(browser, base_of(api)) as visitor:
        do_everything(visitor, server, api)


def test_everything_is_done_without_javascript(browser: "Browser", server: RealServer, api: Api) -> None:
    with visiting(browser, base_of(api), java_script_enabled=False) as visitor:
        do_everything(visitor, server, api)


def do_everything(visitor: Visitor, server: RealServer, api: Api) -> None:
    """Schedule, find, move, deliver now, cancel, many at once, pause, resume, redrive and purge, as a person does."""
    page = visitor.open("/")
    click = partial(click_button, page)
    page.get_by_role("link", name="Try it").click()
    page.get_by_label("Message", exact=True).fill("soup is ready\nand hot")
    page.get_by_label("Due in so many seconds").fill("3600")
    page.get_by_label("Topic").fill("kitchen")
    page.get_by_label("Id", exact=True).fill("soup")
    page.get_by_label("Headers").fill("lang: en\nwho: Ada: cook")
    click("Show the curl line")
    assert '"id": "soup"' in page.locator("#curl").inner_text() or '"id":"soup"' in page.locator("#curl").inner_text()
    assert api.listed() == []
    click("Schedule")
    assert notice(page) == "The message is scheduled."
    found = api.get("/v1/messages/soup").json()
    assert (found["message"], found["topic"], found["headers"]) == (
        *("soup is ready\nand hot", "kitchen"),
        {"lang": "en", "who": "Ada: cook"},
    )
    assert page.locator("#body").inner_text() == "soup is ready\nand hot"

    page.get_by_text("Move…").click()
    page.get_by_label("In so many seconds").fill("7200")
    click("Move", exact=True)
    assert notice(page) == "Moved: 1 message."
    assert 7_100_000 < api.get("/v1/messages/soup").json()["due_ms"] - found["due_ms"] + 3_600_000 < 7_300_000
    page.get_by_label("Find a message by its id").fill("soup")
    click("Find")
    page.get_by_text("Cancel…").click()
    click("Cancel the message")
    assert notice(page) == "Cancelled: 1 message."
    assert api.get("/v1/messages/soup").json()["state"] == "cancelled"

    api.schedule("tea", 3_600, id="tea", topic="mail").raise_for_status()
    visitor.open("/messages/tea")
    click("Deliver now")
    assert notice(page) == "Due now: 1 message."
    deliver_due(server)
    assert api.get("/v1/topics/mail").json()["in_stream"] == 1

    api.batch([{"message": f"m{n}", "topic": topic, "delay_sec": 600} for n in range(30) for topic in ("mail", "sms")])
    page.get_by_role("link", name="Messages", exact=True).click()
    page.get_by_label("Topic").fill("sms")
    click("Show")
    page.get_by_role("link", name="Cancel…").click()
    assert page.locator("#count").inner_text() == "30 messages"
    api.schedule("one more", 600, topic="sms")
    click("Cancel messages")
    assert "Nothing was changed" in page.get_by_role("alert").inner_text()
    assert (page.locator("#count").inner_text(), len(api.listed())) == ("31 messages", 61)
    click("Cancel messages")
    assert notice(page) == "Cancelled: 31 messages."
    assert {each["topic"] for each in api.listed()} == {"mail"}

    visitor.open("/topics")
    page.get_by_role("link", name="mail").click()
    click("Pause")
    assert "paused" in notice(page) and api.get("/v1/topics/mail").json()["paused_ms"]
    click("Resume")
    assert "goes on" in notice(page) and api.get("/v1/topics/mail").json()["paused_ms"] is None

    scenery.have_streams(server, api)  # three letters of sms, six of invoices
    visitor.open("/")
    page.locator("#tile-dead a").click()
    page.locator("#letters a").first.click()
    topic = "invoices"
    click("Schedule again")
    assert notice(page) == "Scheduled again: 1 message."
    assert api.get(f"/v1/topics/{topic}").json()["dead"] == 5
    visitor.open("/dead?topic=sms")
    page.get_by_role("link", name="Drop…").click()
    assert page.locator("#count").inner_text() == "3 dead letters"
    click("Drop dead letters")  # the browser wants the name
    page.get_by_label("Type sms to go on").fill("smt")
    click("Drop dead letters")
    assert "nothing is dropped" in page.get_by_role("alert").inner_text()
    assert api.get("/v1/topics/sms").json()["dead"] == 3
    page.go_back()
    page.get_by_label("Type sms to go on").fill("sms")
    click("Drop dead letters")
    assert notice(page) == "Dropped for good: 3 messages."
    assert api.get("/v1/topics/sms").json()["dead"] == 0


def click_button(page: "Page", name: str, exact: bool = False) -> None:
    page.get_by_role("button", name=name, exact=exact).click()


def notice(page: "Page") -> str:
    return page.locator("#notice").inner_text()


def test_pages_show_by_themselves_what_happens(browser: "Browser", server: RealServer, api: Api) -> None:
    with visiting(browser, base_of(api)) as visitor:
        page = visitor.open("/")
        wait_for_looks(page, 2)
        assert page.locator("#tile-waiting .value").inner_text() == "0"
        assert page.get_by_text("Nothing has been scheduled yet").count() == 1
        api.schedule("tea", topic="mail").raise_for_status()
        page.locator("#tile-waiting .value", has_text="1").wait_for()
        page.locator("svg.bars.load rect, .load rect").first.wait_for(state="attached")
        scenery.have_streams(server, api)
        page.locator("#tile-dead .value", has_text="9").wait_for()
        topic = visitor.open("/topics/mail")
        wait_for_looks(topic, 2)
        api.put("/v1/topics/mail/pause").raise_for_status()
        topic.locator("#topic-now", has_text="paused").wait_for()


def test_what_somebody_uses_does_not_change_under_them(browser: "Browser", server: RealServer, api: Api) -> None:
    scenery.have_streams(server, api)
    with visiting(browser, base_of(api)) as visitor:
        page = visitor.open("/")
        wait_for_looks(page, 2)
        page.locator("#tile-dead a").focus()
        api.schedule("tea").raise_for_status()
        page.locator("#load", has_text="1 message in this time").wait_for()
        assert page.locator("#tile-waiting .value").inner_text() == "0"
        page.locator("#find").focus()
        page.locator("#tile-waiting .value", has_text="1").wait_for()


def test_the_keyboard_is_enough(browser: "Browser", server: RealServer, api: Api) -> None:
    scenery.have_little(server, api)
    with visiting(browser, base_of(api)) as visitor:
        page = visitor.open("/messages")
        keys = page.keyboard
        keys.press("Tab")
        assert focused(page) == "Skip to the content"
        keys.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        keys.press("/")
        assert page.evaluate("document.activeElement.id") == "find"
        keys.type("a/b")  # in a field it is a letter
        assert page.locator("#find").input_value() == "a/b"
        page.locator("#find").fill("")
        visitor.open("/messages")
        order = []
        for _ in range(40):
            keys.press("Tab")
            order.append(focused(page))
            visible = page.evaluate(HAS_RING)
            assert visible, f"nobody sees that {order[-1]} has the focus"
        wanted = ["Overview", "Messages", "Dead letters", "find", "Find", "from", "topic", "Show", "Cancel…"]
        places = [order.index(name) for name in wanted]
        assert places == sorted(places), order
        [path] = [f"/messages/{each['id']}" for each in api.get("/v1/messages?limit=1").json()["messages"]]
        visitor.open(path)
        while focused(page) != "Cancel…":
            keys.press("Tab")
        keys.press("Enter")
        keys.press("Tab")
        assert focused(page) == "Cancel the message"
        keys.press("Enter")
        page.locator("#notice").wait_for()
        assert notice(page) == "Cancelled: 1 message."


def focused(page: "Page") -> str:
    """Return the id of what has the focus, or its text."""
    return page.evaluate("() => document.activeElement.id || document.activeElement.innerText.trim()")


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    lines = [("boss", "secret-of-boss", "read schedule operate"), ("guest", "secret-of-guest", "read")]
    path = tmp_path / "tokens"
    path.write_text("".join(f"{name} {hashlib.sha256(t.encode()).hexdigest()} {rights}\n" for name, t, rights in lines))
    return str(path)


def test_a_token_opens_the_pages_for_one_browser(browser: "Browser", server: RealServer, tokens: str) -> None:
    boss = {"Authorization": "Bearer secret-of-boss"}
    with running(settings_of(server.url, tokens=tokens)) as api:
        api.headers.update(boss)
        api.schedule("kept", id="kept").raise_for_status()
        with visiting(browser, base_of(api)) as visitor:
            page = visitor.open("/?token=secret-of-boss")
            assert "secret" not in page.url and "secret" not in page.content()
            assert page.locator("h1").inner_text() == "Overview"
            wait_for_looks(page, 2)
            for cookie in visitor.context.cookies():
                assert (cookie["httpOnly"], cookie["sameSite"], str(api.port) in cookie["name"]) == (
                    True,
                    "Strict",
                    True,
                )
                assert "secret" not in cookie["value"]
            assert page.evaluate("() => document.cookie") == ""
            # A link elsewhere leads to a page, though the browser keeps the cookie back at first.
            with linking_page(f"{base_of(api)}/messages/kept") as address:
                page.goto(address)
                visitor.taken()
                page.get_by_role("link").click()
                page.locator("#body", has_text="kept").wait_for()
                page.go_back()
                visitor.taken()
            with visiting(browser, base_of(api)) as other:
                for path in ("/", "/messages", "/messages/kept", "/topics", "/dead", "/loops", "/try"):
                    seen = other.open(path)
                    assert seen.locator("#token").count() == 1 and "kept" not in seen.locator("main").inner_text(), path
                statuses = other.page.evaluate(
                    """async () => { const found = [];
                    for (const path of ["/messages/kept", "/try", "/change/messages", "/topics/mail", "/change/dead"])
                      found.push((await fetch(path, {method: "POST", body: new URLSearchParams({verb: "cancel"})})).status);
                    found.push((await fetch("/live?page=overview&about=24")).status, (await fetch("/v1/messages")).status);
                    return found; }"""
                )
                assert all(status in (401, 403) for status in statuses), statuses
                other.taken()
                if axe.why_unavailable() is None:
                    assert axe.find_barriers(other.page) == []
                sign_in(other, "/messages/kept", "wrong")
                assert other.page.get_by_role("alert").inner_text() == "This token is not known."
                sign_in(other, "/messages/kept", "secret-of-guest")
                assert other.page.url == f"{base_of(api)}/messages/kept"
                assert other.page.locator("#body").inner_text() == "kept"
                assert other.page.get_by_role("button", name="Deliver now").count() == 0
                assert other.page.get_by_role("link", name="Try it").count() == 0
                click_button(other.page, "Sign out")
                assert other.open("/messages/kept").locator("#token").count() == 1
        assert api.get("/v1/messages/kept").json()["state"] == "scheduled"


def sign_in(visitor: Visitor, path: str, token: str) -> None:
    page = visitor.open(path)
    page.get_by_label("Token").fill(token)
    click_button(page, "Sign in")


FORMS = """<!doctype html><title>foreign</title>
{frames}
{forms}
<script>
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
(async () => {{
  const seen = {{}};
  for (const form of document.forms) {{
    const landed = new Promise((done) => document.getElementById(form.target).addEventListener("load", done, {{once: true}}));
    form.submit();
    await Promise.race([landed, wait(3000)]);
  }}
  for (const [name, path, init] of {fetches}) {{
    try {{ seen[name] = (await (await fetch("{base}" + path, {{credentials: "include", ...init}})).text()) || "opaque"; }}
    catch (error) {{ seen[name] = "refused"; }}
  }}
  await fetch("/done", {{method: "POST", body: JSON.stringify(seen)}});
}})();
</script>"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])  # the foreign page is on another port of localhost
def test_a_foreign_page_can_do_nothing_by_the_pages(
    browser: "Browser", server: RealServer, tokens: str, host: str
) -> None:
    with running(settings_of(server.url, tokens=tokens)) as api:
        api.headers["Authorization"] = "Bearer secret-of-boss"
        for name in ("kept", "also-kept"):
            api.schedule("kept", id=name, topic="mail").raise_for_status()
        base = f"http://{host}:{api.port}"
        posts = [
            ("/messages/kept", {"verb": "cancel", "version": "1"}),
            ("/messages/kept", {"verb": "now", "version": "1"}),
            ("/change/messages", {"verb": "cancel", "expect": "2", "topic": "mail"}),
            ("/try", {"message": "stolen", "delay_sec": "3600", "topic": "mail", "do": "schedule"}),
            ("/topics/mail", {"verb": "pause"}),
            ("/login", {"token": "secret-of-guest", "next": "/"}),
            ("/logout", {}),
        ]
        fields = [(path, "".join(f"<input name={n} value={v}>" for n, v in given.items())) for path, given in posts]
        text = FORMS.format(
            base=base,
            frames="".join(f"<iframe id=f{n} name=f{n}></iframe>" for n in range(len(posts)))
            + f"<iframe id=framed src='{base}/messages/kept'></iframe>",
            forms="".join(
                f"<form method=post target=f{n} action='{base}{path}'>{inputs}<input name=proof value=x></form>"
                for n, (path, inputs) in enumerate(fields)
            ),
            fetches=json.dumps(
                [
                    ["read", "/messages/kept", {}],
                    ["live", "/live?page=overview&about=24", {}],
                    ["post", "/messages/kept", {"method": "POST", "body": "verb=cancel&version=1&proof=x", "mode": "no-cors"}],
                ]
            ),
        )  # fmt: skip
        visitor = Visitor(browser, base)
        visitor.open("/?token=secret-of-boss")
        with foreign_page(text) as (url, reports):
            page = visitor.page
            page.goto(url, wait_until="commit")
            page.wait_for_event("requestfinished", lambda request: request.url.endswith("/done"), timeout=60_000)
            framed = [
                frame for frame in page.frames if frame.name == "framed" or frame.url.startswith(f"{base}/messages")
            ]
            assert all("kept" not in frame.content() for frame in framed)
        assert len(reports) == 1
        assert {name: seen for name, seen in reports[0].items() if "kept" in seen} == {}
        assert (reports[0]["read"], reports[0]["live"]) == ("refused", "refused")
        assert {each["id"]: each["message"] for each in api.listed()} == {"kept": "kept", "also-kept": "kept"}
        assert api.get("/v1/topics/mail").json()["paused_ms"] is None
        page = visitor.open("/messages/kept")  # and who was signed in still is
        assert "boss" in page.locator(".who").inner_text()
        visitor.context.close()


@contextmanager
def linking_page(target: str) -> Iterator[str]:
    """Serve a page of another site that has a link. It reports once: nobody waits for it when the browser goes back."""
    report = "sessionStorage.told = fetch('/done', {method: 'POST', body: '{}'})"
    done = f"<script>sessionStorage.told || ({report})</script>"
    with foreign_page(f"<!doctype html><title>elsewhere</title><a href='{target}'>there</a>{done}") as (url, _):
        yield url


def test_hostile_data_do_nothing(browser: "Browser", server: RealServer, api: Api) -> None:
    ids = scenery.have_hostile(server, api)
    listed = [each["id"] for each in api.listed()]
    strange = sorted({each for each in listed if each not in ids})
    paths = [
        *("/", "/?hours=168", "/messages", "/topics", "/topics/hostile", "/topics/expired", "/dead", "/loops", "/try"),
        *(f"/messages/{name}" for name in (*ids, *strange) if name not in (".", "..")),
        *letter_paths(api)[::3],
        *(f"/topics/{name}" for name in scenery.NAMES if name not in (".", "..")),
        "/change/dead?verb=purge", "/change/messages?verb=cancel",
    ]  # fmt: skip
    wrong: list[Any] = []
    with visiting(browser, base_of(api)) as visitor:
        for path in paths:
            page = visitor.open(path)
            if path in ("/", "/topics", "/topics/hostile", "/loops"):
                wait_for_looks(page, 1)
            wrong += judge(path, visitor)
        page = visitor.open("/messages/hostile-0")
        shown = page.locator("#body").inner_text() + page.locator("table").inner_text()
        assert scenery.HOSTILE[0] in shown and "\\u202e" not in shown
    assert wrong == []


def test_hostile_parameters_and_forms_do_nothing(browser: "Browser", api: Api) -> None:
    wrong: list[Any] = []
    with visiting(browser, base_of(api)) as visitor:
        for text in scenery.together(8):
            for address in ADDRESSES:
                quoted = "".join(f"%{byte:02X}" for byte in text.encode())
                visitor.open(address + quoted)
                wrong += judge(address + text, visitor)
            page = visitor.open("/try")
            for label in ("Message", "Id"):
                page.get_by_label(label, exact=True).fill(text)
            click_button(page, "Show the curl line")
            assert page.locator("#curl").count() == 1
            wrong += judge(f"curl {text}", visitor)
            page.get_by_label("Headers").fill(f"{text}: {text}")
            click_button(page, "Schedule")
            wrong += judge(f"schedule {text}", visitor)
    assert wrong == []


def judge(where: str, visitor: Visitor) -> list[Any]:
    """Return what data have done to a page, if anything."""
    page = visitor.page
    text = page.evaluate("() => document.documentElement.innerText")
    unsafe = {c for c in text if unicodedata.category(c) in UNSAFE_CATEGORIES and c not in "\n\t" and c not in JOINERS}
    found = [*page.evaluate(STRANGERS), *visitor.taken(), *([ascii(unsafe)] if unsafe else [])]
    if not page.url.startswith(visitor.base):
        found.append(f"it led to {page.url}")
    return [(where, each) for each in found]
