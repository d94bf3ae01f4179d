"""Batches: line by line, all at once, and once for each key."""

import gzip
import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.messages import Message, Rejection
from pipeline.core.validation import validate_line
from pipeline.store.keys import Keys, keys_of
from pipeline.web.gunzip import MEMBERS_MAX, gunzip
from pipeline.web.keyed import SOURCE_ID
from pipeline.web.lines import judge_lines, split
from pipeline.web.problems import Problem
from tests.cases.requests import CASES
from tests.chaos.proxy import Proxy, lose_reply
from tests.chaos.proxy import running as running_script
from tests.servers import RealServer
from tests.web.running import LINES, Api, running, settings_of, with_marker_keep

THREE: list[Any] = [{"message": "a", "delay_sec": 60}, {"message": "b", "due": "2100-01-01T00:00:00Z", "id": "b"}, "{"]


def bodies(api: Api) -> Counter[str]:
    return Counter(found["message"] for found in api.listed())


def reason(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json().get("reason", "")


@given(
    st.lists(
        st.sampled_from([case.line for case in CASES if case.kind == "json" and len(case.line) < 5_000]), max_size=9
    )
)
def test_lines_are_judged_as_the_reference_does(lines: list[bytes]) -> None:
    body = b"\n".join(lines)
    judged = judge_lines(split(body), 1_700_000_000_123, False)
    expected = [validate_line(line, "json", 1_700_000_000_123) for line in body.split(b"\n")]
    assert judged.messages == [each for each in expected if isinstance(each, Message)]
    assert [(place, message) for place, message in zip(judged.places, judged.messages, strict=True)] == [
        (place, each) for place, each in enumerate(expected) if isinstance(each, Message)
    ]
    refused = [(place + 1, each.reason) for place, each in enumerate(expected) if isinstance(each, Rejection)]
    assert [(each["line"], each["reason"]) for each in judged.rejected] == refused


def test_lines_are_stored_and_wrong_ones_told(api: Api) -> None:
    done = api.batch([*THREE, "", '{"message":"c","delay_sec":1}\r'], "?ids=1").json()
    assert (done["stored"], done["known"]) == (3, 0)
    assert [(each["line"], each["reason"]) for each in done["rejected"]] == [(3, "not_json")]
    first, second, *nothing, last = done["ids"]
    assert (second, nothing) == ("b", [None, None])
    assert api.get(f"/v1/messages/{first}").json()["message"] == "a"
    assert api.get(f"/v1/messages/{last}").json()["message"] == "c"
    again = api.batch(THREE).json()
    assert (again["stored"], again["known"], len(again["rejected"])) == (1, 1, 1)
    assert "ids" not in again


@pytest.mark.parametrize("key", ["", "k"])
def test_lines_cancel_and_replace(api: Api, key: str) -> None:
    headers = {"Idempotency-Key": key} if key else {}
    api.batch([{"message": "a", "delay_sec": 60, "id": "a"}, {"message": "b", "delay_sec": 60, "id": "b"}])
    lines = [
        {"cancel": "a"},
        {"message": "B", "delay_sec": 60, "id": "b", "replace": True},
        {"message": "c", "delay_sec": 60},
    ]
    done = api.batch(lines, "?ids=1", **headers).json()
    assert (done["stored"], done["known"], done["cancelled"], done["replaced"], done["late"]) == (1, 0, 1, 1, 0)
    assert done["ids"][:2] == ["a", "b"]
    assert bodies(api) == {"B": 1, "c": 1}
    if key:
        api.put("/v1/messages/b", json={"message": "latest", "delay_sec": 60})
        again = api.batch(lines, "?ids=1", **headers).json()
        assert (again["stored"], again["known"], again["cancelled"], again["replaced"]) == (0, 3, 0, 0)
        assert again["ids"] == done["ids"]
        assert bodies(api) == {"latest": 1, "c": 1}, "a repetition undoes nothing"


def test_a_strict_batch_is_all_or_nothing(api: Api) -> None:
    refused = api.batch(THREE, "?strict=1")
    assert reason(refused) == (422, "lines_refused")
    assert [each["line"] for each in refused.json()["rejected"]] == [3]
    assert api.listed() == []
    assert api.batch(THREE[:2], "?strict=1").json() == {"stored": 2, "known": 0, "rejected": []}


def test_empty_and_blank_bodies_are_batches(api: Api) -> None:
    for content in (b"", b"\n", b"\r\n \n"):
        done = api.post("/v1/batches", content=content, headers=LINES | {"Idempotency-Key": f"k{len(content)}"})
        assert done.json() == {"stored": 0, "known": 0, "rejected": []}
    assert reason(api.batch([], "?strict=2")) == reason(api.batch([], "?strickt=1")) == (422, "bad_parameter")


def test_a_gzipped_batch_is_unpacked_within_bounds(server: RealServer) -> None:
    with running(settings_of(server.url, batch_bytes_max=1_000, batch_lines_max=10)) as api:

        def post(content: bytes) -> httpx.Response:
            return api.post("/v1/batches", content=content, headers=LINES | {"Content-Encoding": "gzip"})

        line = json.dumps(THREE[0]).encode() + b"\n"
        packed = gzip.compress(line)
        assert post(packed).json()["stored"] == 1
        assert post(packed * 3).json()["stored"] == 3, "as cat makes of several files"
        assert reason(post(gzip.compress(b" " * 999))) == (200, "")
        assert reason(post(gzip.compress(b" " * 1_001))) == (413, "body_too_long")
        assert reason(post(gzip.compress(b" " * 100_000_000))) == (413, "body_too_long")
        assert reason(post(packed[:-1])) == reason(post(b"x")) == reason(post(b"")) == (422, "bad_gzip")
        assert reason(post(packed + b"x")) == (422, "bad_gzip")
        assert reason(post(gzip.compress(b"") * 60)) == (413, "body_too_long"), "as it comes"
        assert reason(api.batch(["{}"] * 11)) == (413, "body_too_long")
        assert reason(api.post("/v1/batches", content=b" " * 1_001, headers=LINES)) == (413, "body_too_long")
        assert reason(api.batch([], **{"Content-Encoding": "br"})) == (415, "wrong_content_type")


def test_many_small_parts_are_not_unpacked() -> None:
    assert gunzip(gzip.compress(b"a") * MEMBERS_MAX, 1_000) == b"a" * MEMBERS_MAX
    with pytest.raises(Problem, match="too many parts"):
        gunzip(gzip.compress(b"") * (MEMBERS_MAX + 1), 1_000)


def test_a_batch_with_a_key_is_stored_once(api: Api) -> None:
    key = {"Idempotency-Key": "batch-1"}
    first = api.batch(THREE, "?ids=1", **key).json()
    again = api.batch(THREE, "?ids=1", **key).json()
    assert (first["stored"], first["known"], again["stored"], again["known"]) == (2, 0, 0, 2)
    assert (first["ids"], first["rejected"]) == (again["ids"], again["rejected"])
    assert bodies(api) == {"a": 1, "b": 1}
    assert reason(api.batch(THREE[:2], **key)) == (422, "key_reused")
    assert api.batch(THREE[:1], **{"Idempotency-Key": "batch-2"}).json()["stored"] == 1


@pytest.mark.parametrize("shards", [1, 3])
def test_a_batch_that_comes_several_times_at_once_is_stored_once(server: RealServer, shards: int) -> None:
    single = settings_of(server.url)
    sharded = replace(single, redis=replace(single.redis, shards=shards))
    lines = [{"message": f"{n}", "delay_sec": 60, **({"id": f"{n}"} if n % 2 else {})} for n in range(300)]
    answers: list[dict[str, Any]] = []
    with running(sharded) as api:
        gate = threading.Barrier(8)

        def work() -> None:
            with Api(api.port) as own:
                own.get("/livez")
                gate.wait()
                answers.append(own.batch(lines, "?ids=1", **{"Idempotency-Key": "k"}).json())

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(each["stored"] for each in answers) == 300
        assert {each["stored"] + each["known"] for each in answers} == {300}
        assert all(each["ids"] == answers[0]["ids"] for each in answers)
        assert [*bodies(api).values()] == [1] * 300


@pytest.mark.parametrize("key", ["", "k"])
def test_lost_replies_store_no_batch_twice(server: RealServer, tmp_path: Path, key: str) -> None:
    proxy = Proxy(server.folder / "s", tmp_path / "p")
    url = server.url.replace(f"{server.folder}/s", f"{tmp_path}/p")
    headers = {"Idempotency-Key": key} if key else {}
    try:
        with running(settings_of(url)) as api:
            trap = proxy.trap(running_script("schedule"), lose_reply, first=1, last=3)
            done = api.batch([*THREE[:2], {"message": "c", "delay_sec": 60, "id": "c"}], **headers).json()
            assert (done["stored"], done["known"], done["rejected"]) == (3, 0, [])
            assert trap.was_sprung
            assert bodies(api) == {"a": 1, "b": 1, "c": 1}
    finally:
        proxy.close()


def test_the_markers_of_old_batches_are_dropped(server: RealServer) -> None:
    keys = keys_of(settings_of(server.url).redis)[0]

    def markers() -> int:
        with server.client() as client:
            return int(client.zcard(keys.markers(SOURCE_ID)))  # type: ignore[arg-type]

    kept = with_marker_keep(settings_of(server.url), 3_600)
    with running(kept) as api:
        api.batch(THREE, **{"Idempotency-Key": "old"})
        api.batch(THREE, **{"Idempotency-Key": "new"})
        assert markers() == 2
    _age_one_marker(server, keys)
    with running(kept) as api:
        api.batch(THREE, **{"Idempotency-Key": "newest"})
        assert markers() == 2


def _age_one_marker(server: RealServer, keys: Keys) -> None:
    with server.client() as client:
        [[part_id, moved_ms]] = client.zrange(keys.markers(SOURCE_ID), 0, 0, withscores=True)  # type: ignore[misc]
        client.zadd(keys.markers(SOURCE_ID), {part_id: moved_ms - 3_601_000})
