"""Pages that follow what happens: one look for all, none for nobody, and an end."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from pipeline.core.clock import SystemClock
from pipeline.web.views import GAP_MS, Rates
from tests.servers import RealServer
from tests.waiting import wait_until
from tests.web.html import check
from tests.web.running import WAIT_SEC, Api, running, settings_of

OVERVIEW = "/live?page=overview&about=24"


class Events:
    """The events of a stream, read one after the other."""

    def __init__(self, stream: httpx.Response) -> None:
        assert stream.headers["content-type"].startswith("text/event-stream")
        self._lines = stream.iter_lines()

    def next(self) -> tuple[str, dict[str, Any]]:
        name = ""
        for line in self._lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                return name, json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream has ended")

    def until(self, name: str, part: str = "", text: str = "") -> dict[str, Any]:
        while True:
            found, parts = self.next()
            if found == name and text in parts.get(part, ""):
                return parts


@contextmanager
def following(api: Api, path: str = OVERVIEW) -> Iterator[Events]:
    with api.stream("GET", path) as stream:
        assert stream.status_code == 200
        yield Events(stream)


def commands(client: Any) -> int:
    """Return how many commands others have sent, and this."""
    return int(client.info("stats")["total_commands_processed"])


def test_each_part_that_changes_is_sent_as_the_page_has_it(api: Api) -> None:
    with following(api) as events:
        first = events.until("look")
        page = api.get("/").text
        ids = {attributes.get("id") for _, attributes in check(page).elements}
        assert first.keys() <= ids and {"tiles", "load", "verdict", "as-of"} <= first.keys()
        assert first["load"].strip() in page, "the same template"
        api.batch([{"message": "m", "delay_sec": 3_600}] * 777)
        changed = events.until("look", "tiles", "777")
        assert "777 messages" in changed["load"]
        assert "lateness" not in changed, "it is as it was"
    for path, part in (
        ("page=topics&about=", "topic-list"),
        ("page=topic&about=mail", "groups"),
        ("page=loops&about=", "loop-list"),
    ):
        with following(api, f"/live?{path}") as events:
            assert part in events.until("look")
    for wrong in ("page=overview&about=7", "page=x&about=", "page=topic&about=a/b", "", "page=loops&x=1"):
        assert api.get(f"/live?{wrong}").status_code == 422, wrong


@pytest.mark.slow
def test_all_who_watch_share_a_look_and_nothing_is_asked_for_nobody(api: Api, server: RealServer) -> None:
    def cost(viewers: int, looks: int) -> float:
        """Return the commands of a look while so many watch."""
        with Api(api.port) as other:
            streams = [following(other) for _ in range(viewers)]
            events = [stream.__enter__() for stream in streams]
            for each in events:
                each.until("look")
            before = commands(client)
            for _ in range(looks):
                for each in events:
                    each.until("look")
            spent = commands(client) - before
            for stream in streams:
                stream.__exit__(None, None, None)
        return spent / looks

    def is_silent() -> bool:
        before, since_ms = commands(client), clock.monotonic_ms()
        wait_until(lambda: clock.monotonic_ms() - since_ms > 2_500)
        return commands(client) - before == 1  # our own

    clock = SystemClock()
    with server.client() as client:
        one, five = cost(1, 4), cost(5, 4)
        assert one > 3 and five < 1.6 * one + 3, (one, five)
        wait_until(is_silent)


def test_viewers_are_bounded_and_leave_room_when_they_go(server: RealServer) -> None:
    with running(settings_of(server.url, viewers_max=2)) as api:
        with following(api) as one, following(api) as two:
            one.until("look")
            two.until("look")
            found = api.get(OVERVIEW)
            assert found.status_code == 503 and "retry-after" in found.headers
            assert api.get("/").status_code == 200, "the page is there, as it was when it was opened"

        def has_room() -> bool:
            with api.stream("GET", OVERVIEW) as stream:
                return stream.status_code == 200

        wait_until(has_room)


def test_streams_end_at_once_when_the_server_stops(server: RealServer) -> None:
    stopping = threading.Event()
    clock = SystemClock()
    ended: list[float] = []
    with running(settings_of(server.url), stopping.is_set) as api:

        def watch() -> None:
            with pytest.raises(AssertionError, match="ended"), Api(api.port) as other, following(other) as events:
                seen.release()
                events.until("never")
            ended.append(clock.monotonic_ms())

        seen = threading.Semaphore(0)
        threads = [threading.Thread(target=watch) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert seen.acquire(timeout=WAIT_SEC)
        since_ms = clock.monotonic_ms()
        stopping.set()
        for thread in threads:
            thread.join(WAIT_SEC)
    assert len(ended) == 3 and max(ended) - since_ms < 2_000


def test_a_server_that_is_away_is_said_and_followed_again(server: RealServer) -> None:
    with running(settings_of(server.url, patience_sec=0.5)) as api, following(api) as events:
        events.until("look")
        server.kill()
        assert events.until("away") == {}
        server.start()
        assert "as-of" in events.until("look")


def test_rates_are_those_of_the_last_seconds() -> None:
    rates = Rates()
    rates.add(0, {"stored": 0})
    assert rates.per_sec("stored") is None, "one look tells nothing"
    rates.add(1_000, {"stored": 50})
    assert rates.per_sec("stored") == 50
    for second in range(2, 30):
        rates.add(second * 1_000, {"stored": 50, "new": second})
    assert rates.per_sec("stored") == 0, "long ago does not count"
    assert rates.per_sec("new") == 1 and rates.per_sec("unknown") is None
    rates.add(30_000, {"stored": 0})
    assert rates.per_sec("stored") == 0, "a counter that began again"
    rates.add(31_000 + GAP_MS, {"stored": 500})
    assert rates.per_sec("stored") is None, "nobody has looked for a while"
