"""The contract: what it says is what is served."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pipeline.core.messages import REQUEST_FIELDS, Reason
from pipeline.web.app import OPERATIONS
from pipeline.web.problems import WORDS
from tests.servers import RealServer
from tests.web.running import Api, running, settings_of
from tests.web.test_access import digest

Schema = dict[str, Any]


@pytest.fixture
def contract(api: Api) -> Schema:
    found: Schema = api.get("/openapi.json").json()
    return found


def validate(value: Any, schema: Schema, contract: Schema) -> None:
    jsonschema.Draft202012Validator({**schema, "components": contract["components"]}).validate(value)


def test_the_contract_has_the_operations_that_are_served(contract: Schema) -> None:
    served = {(path, method.lower()) for path, operations in OPERATIONS.items() for method in operations}
    described = {
        (path, method) for path, each in contract["paths"].items() for method in each if method != "parameters"
    }
    assert described == served
    names = [contract["paths"][path][method]["operationId"] for path, method in described]
    assert len({*names}) == len(names)
    tags = {tag["name"] for tag in contract["tags"]}
    assert contract["servers"] and contract["info"]["license"] and contract["info"]["contact"]
    for path, method in described:
        operation = contract["paths"][path][method]
        assert operation["description"] and {*operation["tags"]} <= tags
        assert operation.get("x-right") == OPERATIONS[path][method.upper()].right
    assert contract["openapi"].startswith("3.1.")


def test_the_contract_has_every_reason_and_every_field(contract: Schema) -> None:
    schemas = contract["components"]["schemas"]
    assert {*schemas["Problem"]["properties"]["reason"]["enum"]} == {*Reason, *WORDS}
    assert {*schemas["Rejected"]["properties"]["reason"]["enum"]} == {*Reason}
    assert {*schemas["Request"]["properties"]} == {*REQUEST_FIELDS} - {"cancel", "replace"}, "these two are for batches"
    assert not {*Reason} & WORDS.keys()


def test_every_schema_is_one(contract: Schema) -> None:
    for name, schema in contract["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object", name
    referred = set(re.findall(r"#/components/schemas/(\w+)", str(contract)))
    assert referred == contract["components"]["schemas"].keys()


def test_each_example_is_answered_as_described(api: Api, contract: Schema) -> None:
    for path, operations in contract["paths"].items():
        for method, operation in operations.items():
            if method == "parameters":
                continue
            name = f"{method}-42"
            api.schedule(id=name)
            url = path.replace("{id}", name).replace("{topic}", "mail").replace("{word}", "busy")
            content = operation.get("requestBody", {}).get("content", {})
            options: Schema = {}
            for media_type, described in content.items():
                example = described["example"]
                if media_type.endswith("json") and media_type != "application/x-ndjson":
                    validate(example, described["schema"], contract)
                    options = {"json": example}
                else:
                    options = {"content": example, "headers": {"Content-Type": media_type}}
            answer = api.request(method, url, **options)
            described = operation["responses"][str(answer.status_code)]["content"]
            media_type = answer.headers["content-type"].partition(";")[0]
            assert answer.status_code < 300 and media_type in described, (method, path, answer.text)
            if media_type == "application/json":
                validate(answer.json(), described[media_type]["schema"], contract)


def test_problems_are_answered_as_described(api: Api, contract: Schema) -> None:
    answers = [
        api.get("/nothing"),
        api.put("/v1/messages"),
        api.get("/v1/messages?limit=0"),
        api.get("/v1/messages/never"),
        api.schedule(""),
        api.post("/v1/messages", content=b"a=b"),
        api.batch(["{"], "?strict=1"),
        api.get("/livez", headers={"Host": "x"}),
        api.post("/v1/dead/purge", json={"all": True, "expect": 3}),
    ]
    assert len({answer.status_code for answer in answers}) >= 6
    for answer in answers:
        problem = answer.json()
        assert answer.headers["content-type"] == "application/problem+json"
        validate(problem, contract["components"]["schemas"]["Problem"], contract)
        assert problem["status"] == answer.status_code
        page = api.get(problem["type"])
        assert page.status_code == 200
        assert problem["title"] in page.text
    assert answers[1].headers["allow"] == "POST, GET, HEAD"


def test_each_word_has_a_page(api: Api) -> None:
    for word in (*Reason, *WORDS):
        assert api.get(f"/problems/{word}").text.startswith(f"{word} (status ")
    assert api.get("/problems/nothing").status_code == 404


def test_a_read_only_api_has_nothing_that_changes(server: RealServer) -> None:
    with running(settings_of(server.url)) as api:
        api.schedule(id="tea")
    with running(settings_of(server.url, read_only=True)) as api:
        contract = api.get("/openapi.json").json()
        assert {method for each in contract["paths"].values() for method in each} == {"get", "parameters"}
        for path, operations in OPERATIONS.items():
            url = path.replace("{id}", "tea").replace("{topic}", "mail").replace("{word}", "busy")
            for method in operations.keys() - {"GET"}:
                answer = api.request(method, url, json={"message": "m", "delay_sec": 1})
                assert answer.status_code in (404, 405), (method, path)
        assert api.get("/v1/messages/tea").json()["state"] == "scheduled"


def test_what_is_refused_is_not_in_the_contract_and_what_is_taken_is(api: Api, contract: Schema) -> None:
    """Requests on both sides of each limit: the contract says of them what the server does."""

    def body_of(path: str, method: str) -> Schema:
        found: Schema = contract["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
        return found

    request = {"message": "m", "delay_sec": 60}
    bodies: list[tuple[str, str, list[Any], list[Any]]] = [
        (
            "/v1/messages",
            "post",
            [request, {"message": "m", "countdown": 1}],
            [{"message": "m"}, request | {"due": 1}, request | {"x": 1}],
        ),
        ("/messages", "post", [request], [{"message": "m"}, request | {"id": None}]),
        ("/v1/messages/{id}", "put", [request], [request | {"countdown": 1}, {"message": "m"}]),
        ("/v1/messages/{id}", "patch", [{"delay_sec": 5}], [{}, {"delay_sec": 5, "countdown": 5}, request]),
        ("/v1/cancellations", "post", [{"ids": ["a", "~a~1"]}], [{"ids": []}, {"ids": [""]}, {"ids": ["a b"]}, {}]),
        *(
            (f"/v1/dead/{verb}", "post", taken, refused)
            for taken, refused in [
                (
                    [{"all": True}, {"topic": "x"}, {"names": []}, {"all": True, "expect": 0}, {"older_than": "7d"}],
                    [
                        {},
                        {"all": False},
                        {"topic": ""},
                        {"names": [], "topic": "x"},
                        {"names": None, "all": True},
                        {"all": True, "expect": None},
                        {"all": True, "expect": -1},
                        {"topic": None},
                        {"older_than": "7"},
                    ],
                )
            ]
            for verb in ("purge", "redrive")
        ),
    ]
    differs = []
    for path, method, taken, refused in bodies:
        for body in [*taken, *refused]:
            api.put("/v1/messages/kept", json=request)
            answer = api.request(method, path.replace("{id}", "kept"), json=body)
            schema = body_of(path, method)
            is_valid = jsonschema.Draft202012Validator({**schema, "components": contract["components"]}).is_valid(body)
            if (answer.status_code < 300, is_valid) != ((body in taken), (body in taken)):
                differs.append((method, path, body, answer.status_code, is_valid))
    for path, name, taken_texts, refused_texts in (
        ("/v1/load", "hours", ["1", "168"], ["0", "169", "x"]),
        ("/v1/messages", "from", ["1800000000000", "2026-01-01T00:00:00Z"], ["", "9" * 5_000]),
        ("/v1/messages", "to", ["1800000000000"], ["", "9" * 5_000]),
        ("/v1/messages", "cursor", [""], ["x"]),
        ("/v1/messages", "topic", ["", "mail"], ["a b"]),
        ("/v1/dead", "topic", ["", "mail"], ["a b"]),
        ("/v1/dead", "older_than", ["", "7d"], ["7", "d"]),
    ):
        [schema] = [each["schema"] for each in contract["paths"][path]["get"]["parameters"] if each["name"] == name]
        for text in [*taken_texts, *refused_texts]:
            value: Any = int(text) if schema["type"] == "integer" and text.isdigit() else text
            is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
            status = api.get(path, params={name: text}).status_code
            if (status, is_valid) != ((200, True) if text in taken_texts else (422, False)):
                differs.append(("get", path, name, text[:40], status, is_valid))
    [schema] = [
        each["schema"]
        for each in contract["paths"]["/v1/messages/{id}"]["delete"]["parameters"]
        if each["name"] == "If-Match"
    ]
    for text in ("*", '"a"', '"a", W/"b"', "a", '"a', ""):
        api.put("/v1/messages/kept", json=request)
        is_taken = api.delete("/v1/messages/kept", headers={"If-Match": text}).status_code != 422
        if is_taken != jsonschema.Draft202012Validator(schema).is_valid(text):
            differs.append(("If-Match", text, is_taken))
    [parameter] = contract["paths"]["/v1/topics/{topic}/pause"]["parameters"]
    for text in ("mail", "a b"):
        is_taken = api.put(f"/v1/topics/{text}/pause").status_code == 200
        assert is_taken == jsonschema.Draft202012Validator(parameter["schema"]).is_valid(text)
    assert differs == []


def test_a_token_is_demanded_only_where_there_are_tokens(server: RealServer, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"admin {digest('all')} schedule read operate\n")
    for tokens in ("", str(path)):
        with running(settings_of(server.url, tokens=tokens)) as api:
            document = api.get("/openapi.json").json()
            assert ("securitySchemes" in document["components"]) == bool(tokens)
            for operations in document["paths"].values():
                for method, operation in operations.items():
                    if method != "parameters":
                        assert ("security" in operation) == bool(tokens and "x-right" in operation)


def test_a_client_that_asks_for_json_gets_problem_details_from_every_path(api: Api) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for path, method in (
        ("/messages", "PUT"),
        ("/dead", "PUT"),
        ("/topics/a b", "GET"),
        ("/nothing", "GET"),
        ("/v1/messages", "PUT"),
    ):
        answer = api.request(method, path, headers={"Accept": "application/json"})
        assert answer.headers["content-type"] == "application/problem+json", path
        is_page = "html" in api.request(method, path, headers=browser).headers["content-type"]
        assert is_page == (not path.startswith("/v1")), path
    assert api.put("/messages").headers["allow"] == "GET, POST, HEAD"
    assert api.put("/dead").headers["allow"] == "GET, HEAD"


def test_the_short_paths_do_what_those_of_v1_do(api: Api) -> None:
    done = api.post("/messages", json={"message": "tea is ready", "delay_sec": 60})
    assert done.status_code == 201
    at = done.json()["scheduled_for"]
    assert at == pytest.approx(api.get(done.headers["location"]).json()["scheduled_for"])
    assert api.get("/status").json()["scheduled"] == 1
    assert api.get("/messages").headers["content-type"].startswith("text/html"), "the page stays"
    for path in ("/messages", "/v1/messages"):
        assert api.post(path, json={"message": ""}).json()["reason"] == "empty_message"
        assert api.post(path, data={"message": "a", "delay_sec": "1"}).status_code == 415
        assert (
            api.post(path, json={"message": "m", "delay_sec": 1}, headers={"Origin": "http://evil.example"}).status_code
            == 403
        )


def test_a_field_that_is_there_twice_is_refused_in_every_body(api: Api) -> None:
    api.schedule(id="tea")
    before = api.get("/v1/messages/tea").json()
    for method, path, body in (
        ("PATCH", "/v1/messages/tea", '{"delay_sec": 5000, "delay_sec": 7000}'),
        ("POST", "/v1/cancellations", '{"ids": ["tea"], "ids": ["tea"]}'),
        ("POST", "/v1/dead/purge", '{"topic": "a", "topic": "b"}'),
    ):
        answer = api.request(method, path, content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["reason"]) == (422, "duplicate_key"), path
    assert api.get("/v1/messages/tea").json() == before
    patch = {"Content-Type": "application/merge-patch+json"}
    assert api.patch("/v1/messages/tea", content='{"delay_sec": 7000}', headers=patch).status_code == 200


def test_a_span_that_ends_before_it_begins_is_refused(api: Api) -> None:
    for path in ("/v1/messages", "/messages"):
        assert api.get(path, params={"from": 1_800_000_000_001, "to": 1_800_000_000_000}).status_code == 422
        assert api.get(path, params={"from": 1_800_000_000_000, "to": 1_800_000_000_000}).status_code == 200
        assert api.get(path, params={"from": "9" * 5_000}).status_code == 422
