"""Looking after a namespace over HTTP: topics, dead letters, status, load, metrics."""

import re
from typing import Any

import httpx
import pytest

from pipeline.config import ALL_TOPICS, TopicSettings
from pipeline.core.buckets import BUCKET_WIDTH_MS
from pipeline.store.redis_store import RedisStore
from tests.client.builders import KEYS, deliver_due
from tests.servers import RealServer
from tests.store.builders import set_topic
from tests.web.running import Api


def reason(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json().get("reason", "")


@pytest.fixture
def letters(api: Api, server: RealServer) -> list[dict[str, Any]]:
    """Six dead letters, of two topics: messages that expired before they were claimed."""
    old_ms = 1_500_000_000_000
    for topic in ("mail", "sms"):
        assert (
            api.batch([{"message": f"{topic} {n}", "due": old_ms + n, "topic": topic} for n in range(3)]).json()[
                "stored"
            ]
            == 3
        )
    with server.client() as client:
        set_topic(client, KEYS, ALL_TOPICS, TopicSettings(sink="stream", expire_after_sec=60))
        store = RedisStore(client, KEYS)
        while store.claim("test").moved:
            pass
        while store.claim("test").claim:
            pass
    found: list[dict[str, Any]] = api.get("/v1/dead").json()["letters"]
    assert len(found) == 6
    return found


def messages(found: httpx.Response) -> list[str]:
    return [letter["message"] for letter in found.json()["letters"]]


def test_dead_letters_are_listed_by_filter_and_page(api: Api, letters: list[dict[str, Any]]) -> None:
    assert [letter["message"] for letter in letters] == [f"{topic} {n}" for topic in ("mail", "sms") for n in range(3)]
    assert {letter["reason"] for letter in letters} == {"expired"}
    assert messages(api.get("/v1/dead?topic=sms")) == ["sms 0", "sms 1", "sms 2"]
    assert messages(api.get("/v1/dead?reason=failed")) == messages(api.get("/v1/dead?older_than=1h")) == []
    assert messages(api.get("/v1/dead?group=g")) == []
    found: list[str] = []
    cursor = ""
    while True:
        page = api.get("/v1/dead", params={"limit": 2, "cursor": cursor})
        found += messages(page)
        if "cursor" not in page.json():
            break
        cursor = page.json()["cursor"]
    assert found == [letter["message"] for letter in letters]
    for wrong in ("older_than=x", "limit=0", "cursor=x", "topic=a+b", "why=1"):
        assert reason(api.get(f"/v1/dead?{wrong}")) == (422, "bad_parameter"), wrong


def test_dead_letters_are_redriven_and_purged(api: Api, letters: list[dict[str, Any]]) -> None:
    names = [letter["name"] for letter in letters]
    differs = api.post("/v1/dead/purge", json={"topic": "mail", "expect": 2})
    assert (reason(differs), differs.json()["count"]) == ((412, "count_differs"), 3)
    assert api.post("/v1/dead/redrive", json={"names": [names[0], "mail/0/1-1", "x"]}).json() == {
        "redriven": 1,
        "has_more": False,
    }
    assert [found["message"] for found in api.listed()] == ["mail 0"]
    assert api.post("/v1/dead/purge", json={"topic": "mail", "expect": 2}).json()["purged"] == 2
    assert api.post("/v1/dead/purge", json={"names": names}).json()["purged"] == 3
    assert api.post("/v1/dead/purge", json={"all": True}).json()["purged"] == 0
    wrong: list[dict[str, Any]] = [
        {},
        {"all": False},
        {"names": "x"},
        {"names": [1]},
        {"names": [], "topic": "mail"},
        {"topic": 1},
        {"all": 1},
        {"all": True, "expect": -1},
        {"all": True, "expect": True},
        {"older_than": "x"},
    ]
    for body in wrong:
        assert reason(api.post("/v1/dead/purge", json=body)) == (422, "bad_parameter"), body
    assert reason(api.post("/v1/dead/purge", json={"al": True})) == (422, "unknown_field")


def test_a_topic_is_paused_and_resumed(api: Api, server: RealServer) -> None:
    assert api.put("/v1/topics/mail/pause").json()["paused_ms"] > 0
    assert api.schedule(delay_sec=0, topic="mail", id="tea").status_code == 201
    deliver_due(server)
    assert api.get("/v1/messages/tea").json()["state"] == "held"
    assert [topic["held"] for topic in api.get("/v1/topics").json()["topics"]] == [1]
    resumed = api.delete("/v1/topics/mail/pause").json()
    assert (resumed["held"], resumed["paused_ms"]) == (1, None)
    deliver_due(server)
    found = api.get("/v1/topics/mail").json()
    assert (found["in_stream"], found["groups"], found["settings"]["sink"]) == (1, [], "stream")
    assert reason(api.put("/v1/topics/a%20b/pause")) == (422, "bad_parameter")


def test_topics_have_pages(api: Api, server: RealServer) -> None:
    names = [f"t{n}" for n in range(5)]
    for name in names:
        api.schedule(delay_sec=0, topic=name)
    deliver_due(server)
    page = api.get("/v1/topics?limit=3").json()
    rest = api.get("/v1/topics", params={"limit": 3, "cursor": page["cursor"]}).json()
    assert [topic["name"] for topic in (*page["topics"], *rest["topics"])] == names
    assert "cursor" not in rest


def test_the_load_counts_what_is_scheduled(api: Api) -> None:
    now_ms = api.get("/v1/load").json()["now_ms"]
    api.batch([{"message": "m", "due": now_ms + BUCKET_WIDTH_MS}] * 3 + [{"message": "m", "due": now_ms - 3_600_000}])
    found = api.get("/v1/load?hours=1").json()
    assert (len(found["ahead"]), len(api.get("/v1/load").json()["ahead"])) == (6, 144)
    assert (found["past"], sum(each["messages"] for each in found["ahead"])) == (1, 3)
    assert api.get("/v1/load?hours=169").status_code == 422


def test_the_status_and_the_metrics_count(api: Api) -> None:
    api.schedule(id="tea")
    api.schedule(id="tea")
    status = api.get("/v1/status").json()
    assert (status["scheduled"], status["stored"], status["duplicates"]) == (1, 1, 1)
    assert status["verdict"].startswith("PROBLEM: no drain loop")
    api.get("/nothing")
    text = api.get("/metrics").text
    assert "_created{" not in text, "which would be one series in eight"

    def value(pattern: str) -> float:
        [found] = re.findall(rf"^{pattern} (\S+)$", text, re.M)
        return float(found)

    assert value(r'duetime_api_stored_total\{namespace="duetime"\}') == 1
    assert value(r'duetime_api_duplicates_total\{namespace="duetime"\}') == 1
    post = r'method="POST",namespace="duetime",route="/v1/messages"'
    assert value(rf'duetime_api_requests_total\{{{post},status="201"\}}') == 1
    assert value(rf"duetime_api_request_seconds_count\{{{post}\}}") == 2
    assert value(r'duetime_api_requests_total\{method="GET",namespace="duetime",route="-",status="404"\}') == 1
    assert value(r'duetime_api_waiting\{namespace="duetime"\}') == 0
    assert value(r'duetime_api_reading_bytes\{namespace="duetime"\}') == 0


def test_the_head_of_an_answer_can_be_asked_for(api: Api) -> None:
    head = api.head("/v1/messages")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["cache-control"] == "no-store"
    assert head.headers["x-content-type-options"] == "nosniff"
    assert "server" not in head.headers
