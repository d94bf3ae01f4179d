"""Single messages over HTTP: schedule, find, move, cancel, list."""

import re
import threading
from datetime import datetime
from typing import Any

import httpx
import pytest

from pipeline.core.messages import Cancellation, Message, Reason, Replacement
from tests.cases.requests import CASES
from tests.client.builders import deliver_due
from tests.servers import RealServer
from tests.web.running import Api

JSON = {"Content-Type": "application/json"}


def reason(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json().get("reason", "")


def test_a_message_is_answered_with_its_due_time_and_found(api: Api) -> None:
    answer = api.schedule("tea is ready", 3_600, id="tea", topic="mail", headers={"lang": "en"})
    receipt = answer.json()
    assert (answer.status_code, answer.headers["location"]) == (201, "/v1/messages/tea")
    assert (receipt["id"], receipt["topic"], receipt["state"]) == ("tea", "mail", "scheduled")
    assert receipt["scheduled_for"] == receipt["due_ms"] / 1000
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", receipt["due"])
    assert datetime.fromisoformat(receipt["due"]).timestamp() == receipt["scheduled_for"]
    found = api.get(answer.headers["location"]).json()
    assert found == receipt | {"message": "tea is ready", "headers": {"lang": "en"}}


@pytest.mark.parametrize("name", ["tea", None])
def test_a_message_is_moved_and_cancelled_by_its_id_or_handle(api: Api, name: str | None) -> None:
    first = api.schedule(**({"id": name} if name else {})).json()
    assert first["id"].startswith(name or "~")
    moved = api.patch(f"/v1/messages/{first['id']}", json={"due": first["due_ms"] + 5})
    assert (moved.status_code, moved.json()["due_ms"]) == (200, first["due_ms"] + 5)
    path = f"/v1/messages/{moved.json()['id']}"
    cancelled = api.delete(path)
    assert (cancelled.status_code, cancelled.json()["state"], cancelled.json()["message"]) == (200, "cancelled", "tea")
    again, after = api.delete(path), api.patch(path, json={"delay_sec": 1})
    assert again.status_code == 200
    assert again.json() == api.get(path).json() == {"id": moved.json()["id"], "state": "cancelled"}
    assert (reason(after), after.json()["state"]) == ((409, "too_late"), "cancelled")


def test_what_was_delivered_is_too_late(api: Api, server: RealServer) -> None:
    assert api.schedule(delay_sec=0, id="tea").status_code == 201
    deliver_due(server)
    for answer in (api.delete("/v1/messages/tea"), api.patch("/v1/messages/tea", json={"delay_sec": 1})):
        assert (reason(answer), answer.json()["state"]) == ((409, "too_late"), "delivered")
    known = api.schedule(id="tea")
    assert (known.status_code, known.json()) == (
        200,
        {"id": "tea", "topic": "default", "state": "delivered", "known": True},
    )


def test_an_unknown_id_is_not_remembered(api: Api) -> None:
    for name in ("tea", "~", "~x~1", "a%00b", "%ff", "a" * 200):
        assert reason(api.delete(f"/v1/messages/{name}")) == (404, "unknown_id"), name
    assert api.schedule(id="tea").status_code == 201


def test_a_known_id_is_200_and_409_with_other_content(api: Api) -> None:
    first = api.schedule(id="tea").json()
    again = api.schedule(delay_sec=60, id="tea")
    assert (again.status_code, again.json()) == (200, first | {"known": True})
    others: list[dict[str, Any]] = [{"message": "coffee"}, {"topic": "mail"}, {"headers": {"a": "b"}}]
    for other in others:
        assert reason(api.schedule(**{"id": "tea", **other})) == (409, "id_in_use"), other
    assert len(api.listed()) == 1


def test_the_key_of_the_header_is_the_id(api: Api) -> None:
    def post(key: str, **fields: str) -> httpx.Response:
        body = {"message": "tea", "delay_sec": 60, **fields}
        return api.post("/v1/messages", json=body, headers={"Idempotency-Key": key})

    assert post("tea").json()["id"] == "tea"
    assert (post('"tea"').status_code, post("tea", id="tea").status_code) == (200, 200)
    assert reason(post("tea", id="coffee")) == (422, "bad_parameter")
    assert reason(post("no blanks")) == reason(post("")) == (422, "bad_id")


def test_each_rule_has_its_reason(api: Api) -> None:
    different = {}
    for case in CASES:
        if case.kind != "json" or case.expected is None:
            continue
        found = api.post("/v1/messages", content=case.line, headers=JSON)
        if isinstance(case.expected, Message):
            expected: tuple[int, str] = (201, "")
            found = reason(found) if found.status_code not in (200, 409) else expected
        elif isinstance(case.expected, Cancellation | Replacement):
            expected, found = (422, "bad_parameter"), reason(found)
        else:
            is_long = case.expected in (Reason.LINE_TOO_LONG, Reason.MESSAGE_TOO_LONG)
            expected, found = (413 if is_long else 422, case.expected), reason(found)
        if found != expected:
            different[case.name] = (found, expected)
    assert different == {}
    assert reason(api.post("/v1/messages", content=b" ", headers=JSON)) == (422, "not_json")


def test_of_many_that_post_one_id_at_once_one_creates_it(api: Api) -> None:
    statuses: list[int] = []
    gate = threading.Barrier(32)

    def work() -> None:
        with Api(api.port) as own:
            own.get("/livez")
            gate.wait()
            statuses.append(own.schedule(id="tea").status_code)

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] * 31 + [201]


def test_an_id_means_what_was_put_last(api: Api, server: RealServer) -> None:
    def put(message: str, name: str = "tea", **fields: Any) -> httpx.Response:
        return api.put(f"/v1/messages/{name}", json={"message": message, "delay_sec": 60, **fields})

    first = put("green", topic="mail")
    assert (first.status_code, first.json()["topic"], first.json()["state"]) == (201, "mail", "scheduled")
    assert first.headers["location"] == "/v1/messages/tea"
    for message in ("black", "black", "white"):
        answer = put(message)
        assert (answer.status_code, answer.json()["message"]) == (200, message)
        assert "location" not in answer.headers
        assert [found["message"] for found in api.listed()] == [message]
    api.delete("/v1/messages/tea")
    again = put("again")
    assert (again.status_code, again.json()) == (201, api.get("/v1/messages/tea").json())
    assert reason(put("m", id="coffee")) == (422, "bad_parameter")
    assert put("again", id="tea").status_code == 200
    assert reason(put("m", "~x~1")) == reason(put("m", "a b")) == (422, "bad_id")
    assert reason(put("")) == (422, "empty_message")
    put("now", delay_sec=0)
    deliver_due(server)
    late = put("too late")
    assert (reason(late), late.json()["state"]) == ((409, "too_late"), "delivered")


def test_what_was_changed_meanwhile_is_not_changed_by_whoever_says_so(api: Api) -> None:
    api.schedule("tea is ready", 60, id="tea")

    def change(method: str, *tags: str, message: str = "") -> httpx.Response:
        body = {"message": message} if message else {}
        body = {} if method == "DELETE" else {"json": {**body, "delay_sec": 60}}
        return api.request(method, "/v1/messages/tea", headers={"If-Match": ", ".join(tags)}, **body)

    def tag() -> str:
        return api.get("/v1/messages/tea").headers["etag"]

    first = tag()
    assert re.fullmatch(r'"[\w-]+"', first)
    moved = api.patch("/v1/messages/tea", json={"delay_sec": 120})
    assert moved.headers["etag"] == tag() != first
    for method, message in (("PATCH", ""), ("PUT", "green"), ("DELETE", "")):
        for tags in ([first], [f"W/{tag()}"], ['"*"'], ['""', first]):
            assert reason(change(method, *tags, message=message)) == (412, "version_differs")
        for tags in ([], ["*", first], [first[1:-1]], ['"']):
            assert reason(change(method, *tags, message=message)) == (422, "bad_parameter")
    assert api.get("/v1/messages/tea").json() == moved.json()
    replaced = change("PUT", first, tag(), message="green")
    assert (replaced.status_code, replaced.headers["etag"]) == (200, tag())
    assert change("PATCH", "*").status_code == 200
    last = tag()
    for _ in range(2):
        assert change("DELETE", last).json()["state"] == "cancelled", "also when it comes again"
    assert "etag" not in api.get("/v1/messages/tea").headers
    assert reason(change("PATCH", last)) == (409, "too_late")
    for tags in ("*", last):
        assert reason(change("PUT", tags, message="green")) == (412, "version_differs")
    nothing = api.put("/v1/messages/tea", json={"message": "m", "delay_sec": 1}, headers={"If-None-Match": "*"})
    assert reason(nothing) == (422, "bad_parameter")


def test_what_comes_at_once_by_id_is_answered_each_for_itself(api: Api) -> None:
    ids = [f"id-{number}" for number in range(40)]
    api.batch([{"message": name, "delay_sec": 60, "id": name} for name in ids])
    answers: dict[str, httpx.Response] = {}

    def work(name: str) -> None:
        with Api(api.port) as own:
            answers[name] = own.get(f"/v1/messages/{name}")
            assert own.delete(f"/v1/messages/{name}").status_code == (200 if name in ids else 404)

    threads = [threading.Thread(target=work, args=(name,)) for name in (*ids, "never", "~")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: answer.json().get("message") for name, answer in answers.items() if name in ids} == {
        n: n for n in ids
    }
    assert answers["never"].status_code == answers["~"].status_code == 404
    assert api.listed() == []


def test_many_are_cancelled_at_once(api: Api) -> None:
    ids = [f"id-{number}" for number in range(100)]
    assert api.batch([{"message": "m", "delay_sec": 60, "id": name} for name in ids]).json()["stored"] == 100
    states = api.post("/v1/cancellations", json={"ids": [*ids[:50], "never"]}).json()["states"]
    assert states == dict.fromkeys(ids[:50], "cancelled") | {"never": "unknown"}
    assert sorted(found["id"] for found in api.listed()) == sorted(ids[50:])
    for wrong in ({}, {"ids": []}, {"ids": "a"}, {"ids": [1]}, {"ids": ["a b"]}, {"ids": ["a"] * 1_001}):
        assert reason(api.post("/v1/cancellations", json=wrong)) == (422, "bad_parameter")
    assert reason(api.post("/v1/cancellations", json={"ids": ["a"], "b": 1})) == (422, "unknown_field")


def test_a_listing_has_pages_a_range_and_a_topic(api: Api) -> None:
    due_ms = 1_900_000_000_000
    lines = [{"message": f"{n}", "due": due_ms + n // 3, "topic": "even" if n % 2 == 0 else "odd"} for n in range(30)]
    assert api.batch(lines).json()["stored"] == 30
    everything = api.listed(limit=7)
    assert [found["message"] for found in everything] == [f"{n}" for n in range(30)]
    assert [found["message"] for found in api.listed(limit=4, topic="odd")] == [f"{n}" for n in range(1, 30, 2)]
    ranged = api.listed(**{"from": due_ms + 2, "to": "2030-03-17T17:46:40.004Z"})
    assert [found["message"] for found in ranged] == [f"{n}" for n in range(6, 12)]
    for found in everything[:3]:
        assert api.get(f"/v1/messages/{found['id']}").json() == found
    for wrong in (
        "limit=0",
        "limit=501",
        "limit=x",
        "cursor=x",
        "from=soon",
        "topic=a+b",
        "where=1",
        "limit=1&limit=2",
    ):
        assert reason(api.get(f"/v1/messages?{wrong}")) == (422, "bad_parameter"), wrong


def test_a_move_takes_a_due_time_and_nothing_else(api: Api) -> None:
    api.schedule(id="tea")
    cases = {
        "{}": "missing_due",
        '{"delay_sec": -1}': "delay_out_of_range",
        '{"due": 1795291276}': "due_in_seconds",
        '{"due": "2030-01-01T00:00:00"}': "due_without_zone",
        '{"delay_sec": 1, "due": 1}': "both_due",
        '{"message": "m", "delay_sec": 1}': "unknown_field",
        '{"delay_sec": true}': "wrong_type",
        "[]": "not_an_object",
        "{": "not_json",
    }
    for body, word in cases.items():
        assert reason(api.patch("/v1/messages/tea", content=body, headers=JSON)) == (422, word), body
    moved = api.patch("/v1/messages/tea", json={"due": "1971-01-01T00:00:00.0001Z"})
    assert moved.json()["due_ms"] == 31_536_000_001
