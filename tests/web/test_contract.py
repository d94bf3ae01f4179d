"""The contract: what it says is what is served."""

import re
from typing import Any

import jsonschema
import pytest

from pipeline.core.messages import REQUEST_FIELDS, Reason
from pipeline.web.app import OPERATIONS
from pipeline.web.problems import WORDS
from tests.servers import RealServer
from tests.web.running import Api, running, settings_of

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
    for path, method in described:
        operation = contract["paths"][path][method]
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
                if media_type == "application/json":
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
    assert answers[1].headers["allow"] == "POST, GET"


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
