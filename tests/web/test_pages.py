"""The pages: what they show, what hostile data can't do to them, and how much they show."""

import html
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.config import ALL_TOPICS, ROOT, TopicSettings
from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.core.errors import ConfigError
from pipeline.core.lateness import Lateness
from pipeline.store.heartbeats import IngestProgress, LoopProgress, LoopStats, TopicStats, write_ingest, write_loop
from pipeline.web.app import PAGES
from pipeline.web.bodies import content_of
from tests.client.builders import KEYS, deliver_due
from tests.servers import RealServer
from tests.store.builders import set_topic
from tests.waiting import wait_until
from tests.web.html import check
from tests.web.running import Api, running, settings_of

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "\"'><svg onload=alert(1)>",
    "</bdi></pre></main><form action=https://evil.example><button>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "\u202egpj.exe\u2066\u200b\x1b[31m\x07\r\n\tend",
    "<style>*{display:none}</style><base href=//evil.example>",
    "\N{BYTE ORDER MARK}&lt;b&gt;&#60;b&#62;",
)
PATHS = (
    "/",
    "/?hours=6",
    "/?hours=168",
    "/messages",
    "/messages/tea",
    "/messages/none",
    "/topics",
    "/topics/mail",
    "/dead",
)
PATHS += (
    "/loops",
    "/try",
    "/change/messages?verb=cancel",
    "/change/messages?verb=move&topic=mail",
    "/change/dead?verb=purge",
)


def loop_of(name: str, error: str = "lost") -> LoopProgress:
    lateness = Lateness()
    for ms in (1, 3, 20_000):
        lateness.add(ms)
    stats = LoopStats(delivered=3, claimed=3, errors={error: 1}, topics={"mail": TopicStats(3, lateness)})
    return LoopProgress(loop_id=name, started_ms=1_700_000_000_000, has_ended=False, stats=stats)


def ingest_of(reads: str) -> IngestProgress:
    numbers = dict.fromkeys(("batches", "files", "lines", "stored", "duplicates", "rejected", "blank"), 7)
    lasts = dict.fromkeys(("last_lines", "last_lines_per_sec", "last_took_ms", "last_oldest_waiting_ms"), 9)
    now_ms = 1_700_000_000_000
    return IngestProgress(
        source_id="s", reads=reads, started_ms=now_ms, last_batch_ms=now_ms, last_phases_ms={reads: 3}, **numbers, **lasts
    )  # fmt: skip


def die(server: RealServer, api: Api, text: str, topic: str = "mail") -> str:
    """Have a message become a dead letter; returns its name."""
    api.schedule(text, delay_sec=0, topic=topic, headers={"name": text}).raise_for_status()
    with server.client() as client:
        set_topic(client, KEYS, ALL_TOPICS, TopicSettings(sink="stream"))
        key = KEYS.dead(topic)
        fields = {
            "message": text,
            "topic": topic,
            "headers": json.dumps({"name": text}),
            "reason": text[:40],
            "detail": text,
        }
        entry = client.xadd(key, {**fields, "group": text, "died_ms": "1700000000000", "id": "dead-1", "due_ms": "1"})
        client.sadd(KEYS.topics(), topic)
        client.sadd(KEYS.dead_topics(), topic)
    return f"{topic}/0/{entry.decode()}"


def fill(server: RealServer, api: Api, text: str) -> list[str]:
    """Have data everywhere; returns the addresses of what is about it."""
    api.schedule(text, id="tea", topic="mail", headers={"name": text}).raise_for_status()
    name = die(server, api, text)
    deliver_due(server)
    with server.client() as client:
        client.xgroup_create(KEYS.stream("mail"), f"g{text}", "0")
        client.xreadgroup(f"g{text}", f"c{text}", {KEYS.stream("mail"): ">"}, 10)
        client.sadd(KEYS.topics(), f"t{text}")
        write_loop(client, KEYS, loop_of(f"l{text}", text))
        write_ingest(client, KEYS, ingest_of(text))
    return [f"/letter?name={name}"]


def test_every_page_is_whole_and_safe(api: Api, server: RealServer) -> None:
    for path in (*PATHS, *fill(server, api, "plain text")):
        found = api.get(path)
        assert found.status_code == (404 if path.endswith("none") else 200), (path, found.text)
        check(found.text)
        policy = found.headers["content-security-policy"]
        assert "unsafe" not in policy and policy.startswith("default-src 'none'; ")
        assert {"form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'"} <= {*policy.split("; ")}
        assert (found.headers["cache-control"], found.headers["x-content-type-options"]) == ("no-store", "nosniff")
        assert found.headers["content-type"] == "text/html; charset=utf-8"
        assert not re.search(r"https?://(?!127\.0\.0\.1|HOST|www\.w3\.org)", found.text)
    for path in re.findall(r'(?:href|src)="(/static/[^"]+)"', api.get("/").text):
        found = api.get(path)
        assert "immutable" in found.headers["cache-control"], path
        assert api.get(path.partition("?")[0]).headers["cache-control"] == "no-store"
    assert api.get("/static/..%2fsite.py").status_code == api.get("/static/site.py").status_code == 404


def test_pages_of_an_empty_namespace_say_what_to_do_next(api: Api) -> None:
    said = {path: check(api.get(path).text).text() for path in ("/", "/messages", "/topics", "/dead", "/loops")}
    assert "jobs/schedule.py" in said["/"] and "jobs/schedule.py" in said["/messages"]
    assert "jobs/topics.py set TOPIC sink=stream" in said["/topics"]
    assert "nothing was given up" in said["/dead"]
    assert "jobs/drain.py" in said["/loops"] and "jobs/ingest.py" in said["/loops"]


@pytest.fixture(scope="module")
def plain_shapes() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("text", HOSTILE)
def test_no_element_and_no_attribute_comes_from_data(
    server: RealServer, plain_shapes: dict[str, Any], text: str
) -> None:
    if not plain_shapes:
        with running(settings_of(server.url)) as api:
            others = fill(server, api, "plain")
            for number, path in enumerate((*PATHS, *others)):
                plain_shapes[str(number)] = check(api.get(path).text).shape()
        with server.client() as client:
            client.flushall()
    with running(settings_of(server.url)) as api:
        others = fill(server, api, text)
        shown = ""
        for number, path in enumerate((*PATHS, *others)):
            found = api.get(path).text
            assert check(found).shape() == plain_shapes[str(number)], path
            assert not re.search("[\u202e\u2066\u200b\x1b\x07]", found), path
            shown += check(found).text()
        if text.isprintable():
            assert shown.count(text) >= 8, "it is not shown as it is"
        # The same texts in an address.
        for path in (
            "/messages?topic={}",
            "/messages?from={}",
            "/find?id={}",
            "/dead?group={}&reason={}",
            "/nothing/{}",
        ):
            found = api.get(path.replace("{}", "%00" + re.sub("[^a-z]", lambda each: f"%{ord(each[0]):02x}"[:3], text)))
            if found.headers["content-type"].startswith("text/html"):
                check(found.text)


def test_the_overview_shows_what_waits_and_when_it_is_due(api: Api, server: RealServer) -> None:
    now_ms = api.get("/v1/load").json()["now_ms"]
    start_ms = (now_ms // BUCKET_WIDTH_MS + 2) * BUCKET_WIDTH_MS
    api.batch([{"message": "m", "due": start_ms + n, "topic": "mail"} for n in range(1_234)]).raise_for_status()
    with server.client() as client:
        write_loop(client, KEYS, loop_of("l"))
    page = check(api.get("/?hours=6").text)
    said = page.text()
    assert "1,234" in said and "OK: no ingest job and 1 drain loop running" in said
    [bar] = [link for link in page.all("a") if link.get("tabindex") == "-1"]
    assert re.search("to [0-9:]+ UTC: 1,234", said), "the title of the bar"
    rows = [link for link in page.all("a") if link["href"] == bar["href"]]
    assert len(rows) == 2, "the bar, and the row of the table"
    listed = check(api.get(bar["href"]).text)
    assert len([link for link in listed.all("a") if link["href"].startswith("/messages/~")]) == 50
    assert "20.0 s" in said, "p99"


def test_messages_are_found_listed_and_paged(api: Api) -> None:
    api.batch([{"message": f"m {n}", "delay_sec": 60 + n, "id": f"m-{n}", "topic": "mail"} for n in range(120)])
    api.schedule("other", id="other", topic="sms", delay_sec=30)
    assert api.get("/find", params={"id": " m-7 "}).headers["location"] == "/messages/m-7"
    assert api.get("/find?id=a%2Fb").status_code == 404
    seen: list[str] = []
    path = "/messages?topic=mail"
    while path:
        page = check(api.get(path).text)
        seen += [link["href"].removeprefix("/messages/") for link in page.all("a") if "/messages/m-" in link["href"]]
        path = next((link["href"] for link in page.all("a") if link.get("rel") == "next"), "")
    assert seen == [f"m-{n}" for n in range(120)]
    from_time = api.get("/v1/messages/m-100").json()["due"][:19]
    page = check(api.get("/messages", params={"from": from_time, "to": ""}).text)
    assert "m-100" in page.text() and "m-98" not in page.text()
    for wrong in ("from=yesterday", "topic=a+b", "from=2027-01-01T00:00&to=2026-01-01T00:00", "what=1"):
        assert api.get(f"/messages?{wrong}").status_code == 422, wrong


def test_a_body_is_shown_as_what_it_is() -> None:
    shown = content_of('{"a":[1.10,1e999],"a":"\u202e"}', {})
    assert (shown.kind, shown.text) == ("JSON", '{\n  "a": [\n    1.10,\n    1e999\n  ],\n  "a": "\\u202e"\n}'), (
        "as it came"
    )
    assert content_of("{no json", {}).kind == "text"
    assert content_of("a\nb\tc\x00", {}).text == "a\nb\\tc\\x00"
    shown = content_of("AAECQUJD/w==", {"duetime-encoding": "base64"})
    assert shown.text.split("  ")[0] == "000000" and "00 01 02 41 42 43 ff" in shown.text and "...ABC." in shown.text
    assert content_of("no base64!", {"duetime-encoding": "base64"}).text == "no base64!"
    assert "20,000 of 200,000" in content_of("x" * 200_000, {}).note
    assert content_of("[" * 15_000, {}).kind == "text", "depth is no reason to fail"


@pytest.fixture
def hiding(server: RealServer) -> Iterator[Api]:
    with running(settings_of(server.url, show_messages=False)) as api:
        yield api


def test_what_is_hidden_is_in_no_answer(hiding: Api, server: RealServer) -> None:
    api, secret = hiding, "s3cret-text"
    others = fill(server, api, "plain")
    api.schedule(secret, id="hidden", topic="mail", headers={"name": secret}).raise_for_status()
    with server.client() as client:
        fields = {
            "message": secret,
            "headers": json.dumps({"name": secret}),
            "reason": "failed",
            "detail": secret,
            "id": "d",
        }
        name = f"mail/0/{client.xadd(KEYS.dead('mail'), fields).decode()}"
        client.sadd(KEYS.dead_topics(), "mail")
    paths = [
        template
        for template, methods in PAGES.items()
        if "GET" in methods and "{" not in template and template != "/live"
    ]
    paths += ["/messages/hidden", f"/letter?name={name}", "/v1/messages", "/v1/messages/hidden", "/v1/dead", *others]
    paths += ["/change/messages?verb=cancel", "/change/dead?verb=purge", "/find?id=hidden"]
    for path in paths:
        assert secret not in api.get(path).text, path
    assert "hidden" in api.get("/messages").text and "hidden" in api.get("/v1/messages").text
    again = api.post("/v1/messages", json={"message": "other", "delay_sec": 1, "id": "hidden"})
    moved = api.patch("/v1/messages/hidden", json={"delay_sec": 90})
    gone = api.delete("/v1/messages/hidden")
    assert (again.status_code, moved.status_code, gone.status_code) == (409, 200, 200)
    assert secret not in again.text + moved.text + gone.text


def test_a_problem_of_a_page_is_a_page(api: Api, server: RealServer) -> None:
    for path in (
        "/messages?from=x",
        "/find?id=%3Cb%3E",
        "/letter?name=x",
        "/topics/%3Cb%3E",
        "/dead?older_than=x",
        "/?hours=7",
    ):
        found = api.get(path)
        assert found.status_code in (404, 422), path
        assert found.headers["content-type"].startswith("text/html")
        check(found.text)
    found = api.put("/messages")
    assert (found.status_code, found.headers["allow"]) == (405, "GET, POST, HEAD")
    server.kill()
    found = api.get("/")
    assert found.status_code == 503 and int(found.headers["retry-after"]) > 0
    assert "does not answer" in check(found.text).text()
    server.start()


def test_a_browser_that_asks_for_what_is_not_there_gets_a_page(api: Api) -> None:
    asked = {"Accept": "text/html,application/xhtml+xml"}
    found = api.get("/nothing/here", headers=asked)
    assert (found.status_code, found.headers["content-type"]) == (404, "text/html; charset=utf-8")
    check(found.text)
    found = api.get("/nothing/here")
    assert (found.status_code, found.headers["content-type"]) == (404, "application/problem+json")


def test_each_command_that_a_page_shows_is_one_that_its_job_takes(api: Api, server: RealServer) -> None:
    shown = set()

    def collect() -> None:
        for path in PATHS:
            shown.update(re.findall(r"<code>\./spark-submit\.sh jobs/(\w+)\.py ?(.*?)</code>", api.get(path).text))

    collect()
    api.schedule(id="tea", topic="mail")
    collect()
    assert {job for job, _ in shown} == {"consume", "drain", "ingest", "schedule", "topics"}
    for job, arguments in shown:
        parse = runpy.run_path(str(ROOT / "jobs" / f"{job}.py"))["parse_arguments"]
        filled = html.unescape(arguments).replace("KEY=VALUE", "max_rate=1")
        parse(["--redis", server.url, *shlex.split(filled)])
    with pytest.raises((SystemExit, ConfigError)):
        runpy.run_path(str(ROOT / "jobs" / "consume.py"))["parse_arguments"](["mail", "--group", "GROUP"])


def test_a_topic_that_nobody_knows_is_said_to_be_none(api: Api, server: RealServer) -> None:
    note = "Nothing is known of a topic of this name"
    assert note in api.get("/topics/mial").text
    api.put("/v1/topics/mail/pause")
    assert note not in api.get("/topics/mail").text


def test_without_a_drain_loop_nothing_is_green(api: Api, server: RealServer) -> None:
    page = api.get("/").text
    assert "no drain loop running" in page and 'class="notice good"' not in page
    write_loop(server.client(), KEYS, loop_of("one"))
    wait_until(lambda: 'class="notice good"' in api.get("/").text)


def test_a_page_that_is_reloaded_after_the_delivery_does_not_say_scheduled(api: Api, server: RealServer) -> None:
    form = {
        "message": "tea",
        "delay_sec": "0",
        "due": "",
        "id": "",
        "topic": "default",
        "headers": "",
        "do": "schedule",
    }
    fields = check(api.get("/try").text).fields("/try")
    own = {"Origin": f"http://127.0.0.1:{api.port}"}
    where = api.post("/try", data=fields | form, headers=own).headers["location"]
    assert "The message is scheduled." in api.get(where).text
    deliver_due(server)
    page = api.get(where)
    assert page.status_code == 200 and "The message is scheduled." not in page.text and "It was scheduled" in page.text
    assert api.get(where.partition("?")[0]).status_code == 404
