"""What the forms of the pages do."""

import httpx
import pytest

from pipeline.web import actions
from tests.servers import RealServer
from tests.web.html import check
from tests.web.running import Api
from tests.web.test_pages import die
from tests.web.test_sessions import FROM_US, send

BULK = "/change/messages"


def ask(api: Api, query: str, path: str = BULK) -> dict[str, str]:
    """Return the fields of the page that asks before a change of all that match."""
    return check(api.get(f"{path}?{query}").text).fields(path)


def post(api: Api, form: dict[str, str], path: str = BULK) -> httpx.Response:
    return api.post(path, data=form, headers=FROM_US)


def notice(api: Api, found: httpx.Response) -> str:
    """Return what the page says to which a change has led."""
    assert found.status_code == 303, found.text
    text = check(api.get(found.headers["location"]).text).text()
    return " ".join(text[text.index("Try it") :].split())


def state(api: Api, name: str) -> str:
    return str(api.get(f"/v1/messages/{name}").json()["state"])


def test_a_message_is_cancelled_moved_and_delivered_now(api: Api) -> None:
    for name in ("a", "b", "c"):
        api.schedule(id=name, delay_sec=3_600).raise_for_status()
    assert "Cancelled: 1 message." in notice(api, send(api, "/messages/a", {"verb": "cancel"}))
    assert state(api, "a") == "cancelled"
    due = "2031-02-03T04:05:06"
    assert "Moved: 1 message." in notice(api, send(api, "/messages/b", {"verb": "move", "delay_sec": "", "due": due}))
    assert api.get("/v1/messages/b").json()["due"] == f"{due}.000Z"
    assert send(api, "/messages/b", {"verb": "move", "delay_sec": "", "due": ""}).status_code == 422
    assert send(api, "/messages/b", {"verb": "move", "delay_sec": "soon", "due": ""}).status_code == 422
    assert "Due now: 1 message." in notice(api, send(api, "/messages/c", {"verb": "now"}))
    assert api.get("/v1/messages/c").json()["due_ms"] <= api.get("/v1/load").json()["now_ms"] + 1_000


def test_a_message_without_an_id_is_found_by_its_new_handle_after_a_move(api: Api) -> None:
    name = api.schedule("no id").json()["id"]
    found = send(api, f"/messages/{name}", {"verb": "move", "delay_sec": "90", "due": ""})
    assert "Moved: 1 message." in notice(api, found)
    assert found.headers["location"].partition("?")[0] != f"/messages/{name}"


def test_what_has_changed_since_the_page_was_shown_is_left_alone(api: Api) -> None:
    api.schedule(id="tea")
    form = check(api.get("/messages/tea").text).fields("/messages/tea") | {"verb": "cancel"}
    api.patch("/v1/messages/tea", json={"delay_sec": 99})
    assert "Nothing was changed" in notice(api, post(api, form, "/messages/tea"))
    assert state(api, "tea") == "scheduled"
    form = check(api.get("/messages/tea").text).fields("/messages/tea") | {"verb": "now"}
    api.delete("/v1/messages/tea")
    assert "Nothing was changed" in notice(api, post(api, form, "/messages/tea"))
    assert post(api, form | {"version": ""}, "/messages/tea").status_code == 422
    assert post(api, form | {"verb": "x"}, "/messages/tea").status_code == 422


def test_all_that_match_are_cancelled_if_they_are_as_many_as_was_shown(api: Api) -> None:
    api.batch([{"message": "m", "delay_sec": 60 + n, "id": f"m-{n}", "topic": "mail"} for n in range(7)])
    api.batch([{"message": "m", "delay_sec": 60 + n, "id": f"s-{n}", "topic": "sms"} for n in range(3)])
    form = ask(api, "verb=cancel&topic=mail")
    assert form["expect"] == "7"
    api.schedule(id="one-more", topic="mail")
    differs = post(api, form)
    assert differs.status_code == 412 and "Nothing was changed" in differs.text and "8 messages" in differs.text
    assert len(api.listed()) == 11
    again = check(differs.text).fields(BULK)
    assert "Cancelled: 8 messages." in notice(api, post(api, again))
    assert {each["topic"] for each in api.listed()} == {"sms"}
    assert "0 messages" in api.get(f"{BULK}?verb=cancel&topic=mail").text
    for wrong in ("verb=drop", "verb=cancel&topic=a+b", "verb=cancel&from=x", "verb=cancel&x=1"):
        assert api.get(f"{BULK}?{wrong}").status_code == 422, wrong


def test_all_of_a_range_are_moved_and_delivered_now(api: Api) -> None:
    now_ms = api.get("/v1/load").json()["now_ms"]
    api.batch([{"message": "m", "due": now_ms + 100_000 + n * 1_000} for n in range(10)])
    query = f"from={now_ms + 102_000}&to={now_ms + 105_000}"
    moved = post(api, ask(api, f"verb=move&{query}") | {"due": "2031-01-01T00:00:00"})
    assert "Moved: 3 messages." in notice(api, moved)
    assert [each["due"] for each in api.listed()].count("2031-01-01T00:00:00.000Z") == 3
    assert "Due now: 7 messages." in notice(api, post(api, ask(api, f"verb=now&to={now_ms + 200_000}")))
    assert max(each["due_ms"] for each in api.listed()[:7]) < now_ms + 60_000


def test_a_change_of_many_is_bounded_and_says_if_there_are_more(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "CHANGED_MAX", 5)
    api.batch([{"message": "m", "delay_sec": 60 + n} for n in range(8)])
    assert "there may be more" in api.get(f"{BULK}?verb=cancel").text
    assert "Cancelled: 5 messages. There are more" in notice(api, post(api, ask(api, "verb=cancel")))
    assert "Cancelled: 3 messages." in notice(api, post(api, ask(api, "verb=cancel")))


def test_a_topic_is_paused_and_goes_on(api: Api) -> None:
    assert "The topic is paused" in notice(api, send(api, "/topics/mail", {"verb": "pause"}))
    assert api.get("/v1/topics/mail").json()["paused_ms"] > 0
    assert "paused" in api.get("/topics").text
    assert "The topic goes on" in notice(api, send(api, "/topics/mail", {"verb": "resume"}))
    assert api.get("/v1/topics/mail").json()["paused_ms"] is None
    assert send(api, "/topics/mail", {"verb": "drop"}).status_code == 422


def test_dead_letters_are_scheduled_again_and_dropped(api: Api, server: RealServer) -> None:
    names = [die(server, api, f"m {n}", topic) for n, topic in enumerate(("mail", "mail", "mail", "sms"))]
    path = "/change/dead"
    page = f"/letter?name={names[0]}"
    again = api.post(path, data=check(api.get(page).text).fields(path) | {"verb": "redrive"}, headers=FROM_US)
    assert "Scheduled again: 1 message." in notice(api, again)
    assert api.get(page).status_code == 404
    form = ask(api, "verb=purge&topic=mail", path)
    assert form["expect"] == "2"
    for typed in ("", "sms", "duetime"):
        assert post(api, form | {"typed": typed}, path).status_code == 422, typed
    assert post(api, form | {"typed": "mail", "expect": "3"}, path).status_code == 412
    assert len(api.get("/v1/dead").json()["letters"]) == 3
    assert "Dropped for good: 2 messages." in notice(api, post(api, form | {"typed": "mail"}, path))
    assert [letter["topic"] for letter in api.get("/v1/dead").json()["letters"]] == ["sms"]
    form = {**check(api.get(f"/letter?name={names[3]}").text).fields(path), "verb": "purge"}
    assert post(api, form | {"typed": "mail"}, path).status_code == 422
    assert "Dropped for good: 1 message." in notice(api, post(api, form | {"typed": "sms"}, path))
    assert "Nothing was changed" in notice(api, post(api, form | {"typed": "sms"}, path))
    assert post(api, form | {"name": "", "typed": "sms", "verb": "x"}, path).status_code == 422


def test_trying_it_schedules_a_message_or_shows_the_command(api: Api) -> None:
    form = {
        "message": "it's\r\n<b>",
        "delay_sec": "1.5",
        "due": "",
        "topic": "mail",
        "id": "tea",
        "headers": "a: b\r\nc:d",
    }
    shown = send(api, "/try", form | {"do": "curl"})
    assert shown.status_code == 200 and api.listed() == []
    [command] = [line for line in check(shown.text).text().splitlines() if line.strip().startswith("curl ")]
    assert '"delay_sec":1.5' in command and "/v1/messages" in command
    found = send(api, "/try", form | {"do": "schedule"})
    assert "The message is scheduled." in notice(api, found)
    [message] = api.listed()
    assert (message["id"], message["message"], message["headers"]) == ("tea", "it's\n<b>", {"a": "b", "c": "d"})
    assert "known already" in notice(api, send(api, "/try", form | {"do": "schedule"}))
    for wrong in (
        {"message": ""},
        {"delay_sec": ""},
        {"delay_sec": "x"},
        {"due": "x"},
        {"topic": "a b"},
        {"headers": "x"},
    ):
        refused = send(api, "/try", form | {"id": "other", "do": "schedule"} | wrong)
        assert refused.status_code == 422, wrong
        page = check(refused.text)
        assert "Nothing was stored" in page.text(), wrong
        assert "tea" in page.text() or "message" in wrong or page.fields("/try")["topic"], (
            "what was typed is still there"
        )
    assert len(api.listed()) == 1


def test_a_notice_is_one_of_ours(api: Api) -> None:
    for query in ("done=%3Cb%3E", "done=hello", "done=cancelled&count=%3Cb%3E", "done=cancelled&count=" + "9" * 50):
        page = check(api.get(f"/?{query}").text)
        assert not {"hello", "9" * 50} & {*page.text().split()}
    assert "Cancelled: 3 messages." in api.get("/?done=cancelled&count=3").text
