"""The contract of the API as OpenAPI 3.1. The rules of a request are those of ``core/validation.py``; here is their form."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipeline import __version__
from pipeline.core.validation import ID_PATTERN
from pipeline.web.problems import WORDS
from pipeline.web.schemas import (
    CHANGED,
    COUNT_QUERY,
    DEAD_BODY,
    DEAD_FILTER,
    FLAG,
    MOVE_BODY,
    NAME,
    SCHEMAS,
    TEXT,
    TIME,
    TOPIC,
    TOPIC_OR_NONE,
    VERSIONS,
    Schema,
    list_of,
    object_of,
    ref,
)  # fmt: skip


def _content(media_type: str, schema: Schema, example: Any = None) -> Schema:
    return {media_type: {"schema": schema} | ({} if example is None else {"example": example})}


def _parameter(name: str, schema: Schema, place: str = "query") -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _operation(
    summary: str,
    answers: Mapping[int, str],
    problems: Sequence[int] = (),
    *,
    right: str = "",
    query: Mapping[str, Schema] | None = None,
    body: Schema | None = None,
    key: bool = False,
    match: bool = False,
    text: str = "",
) -> Schema:
    """Describe an operation.

    Args:
        answers: the name of the schema by status.

        problems: the statuses of errors, beside those that any request can have.

        right: of the token that is needed.

        match: whether it takes If-Match.

        text: the media type of an answer that is no JSON.
    """
    usual = (401, 403, 429, 503) if right else ()
    responses: Schema = {
        str(status): {
            "description": summary,
            "content": _content(text or "application/json", ref(name) if name else TEXT),
        }
        for status, name in answers.items()
    }
    for status in sorted({*problems, *usual, 421}):
        said = "; ".join(title for known, title in WORDS.values() if known == status)
        content = _content("application/problem+json", ref("Problem"))
        responses[str(status)] = {"description": said, "content": content}
    parameters = [_parameter(name, schema) for name, schema in (query or {}).items()]
    parameters += (
        [_parameter("Idempotency-Key", {"type": "string", "pattern": f"^{ID_PATTERN}$"}, "header")] if key else []
    )
    parameters += [_parameter("If-Match", VERSIONS, "header")] if match else []
    described: Schema = {"summary": summary, "responses": responses, "parameters": parameters}
    if body is not None:
        described["requestBody"] = {"required": True, "content": body}
    if right:
        described |= {"security": [{"token": []}], "x-right": right}
    return described


def _json_body(schema: Schema, example: Any) -> Schema:
    return _content("application/json", schema, example)


_PAGING: Final = {"limit": {"type": "integer", "minimum": 1, "maximum": 500}, "cursor": TEXT}
_PLACE: Final = {"type": "string", "pattern": "^([0-9]{1,15}~[0-9A-Za-z_-]{22})?$"}
MERGE_PATCH: Final = "application/merge-patch+json"
_REQUEST_EXAMPLE: Final = {"message": "Your trial ends tomorrow", "delay_sec": 3600, "id": "trial-42", "topic": "mail"}
_BATCH_EXAMPLE: Final = '{"message": "one", "delay_sec": 60}\n{"message": "two", "delay_sec": 61}\n'
_TOO_LATE: Final = (404, 409, 412, 422)

_SCHEDULE: Final = _operation(
    "Schedule a message; 201 says that it is stored, 200 that its id was known.",
    {201: "Receipt", 200: "Receipt"},
    (408, 409, 413, 415, 422),
    right="schedule",
    body=_json_body(ref("Request"), _REQUEST_EXAMPLE),
    key=True,
)
PATHS: Final[Mapping[str, Mapping[str, Schema]]] = {
    "/messages": {"post": _SCHEDULE},
    "/v1/messages": {
        "post": _SCHEDULE,
        "get": _operation(
            "List what is scheduled, in order of due time.",
            {200: "Page"},
            (422,),
            right="read",
            query={"from": TIME, "to": TIME, "topic": TOPIC_OR_NONE, **_PAGING, "cursor": _PLACE},
        ),
    },
    "/v1/messages/{id}": {
        "get": _operation(
            "Return the state of an id or handle, also cancelled or delivered; the message while it waits.",
            {200: "Message"},
            (404, 422),
            right="read",
        ),
        "put": _operation(
            "Replace the message of an id, or store the first one, also after a cancellation.",
            {201: "Message", 200: "Message"},
            (408, 409, 412, 413, 415, 422),
            right="schedule",
            body=_json_body(ref("Request"), {"message": "Your trial ends today", "delay_sec": 60}),
            match=True,
        ),
        "delete": _operation("Cancel a message.", {200: "Message"}, _TOO_LATE, right="schedule", match=True),
        "patch": _operation(
            "Give a message another due time.",
            {200: "Message"},
            (*_TOO_LATE, 408, 413, 415),
            right="schedule",
            body={
                each: {"schema": MOVE_BODY, "example": {"delay_sec": 7200}}
                for each in ("application/json", MERGE_PATCH)
            },
            match=True,
        ),
    },
    "/v1/batches": {
        "post": _operation(
            "Store many requests, a line each.",
            {200: "Stored"},
            (408, 413, 415, 422),
            right="schedule",
            query={"strict": FLAG, "ids": FLAG},
            body=_content("application/x-ndjson", TEXT, _BATCH_EXAMPLE),
            key=True,
        )
    },
    "/v1/cancellations": {
        "post": _operation(
            "Cancel up to 1,000 messages.",
            {200: "States"},
            (408, 413, 415, 422),
            right="schedule",
            body=_json_body(
                object_of({"ids": list_of(NAME) | {"minItems": 1, "maxItems": 1_000}})
                | {"additionalProperties": False},
                {"ids": ["trial-42"]},
            ),
        )
    },
    "/v1/load": {
        "get": _operation(
            "Count what is scheduled for each ten minutes.",
            {200: "Load"},
            (422,),
            right="read",
            query={"hours": COUNT_QUERY},
        )
    },
    "/v1/status": {"get": _operation("Say whether all is well.", {200: "Status"}, (422,), right="read")},
    "/v1/topics": {"get": _operation("List topics.", {200: "Topics"}, (422,), right="read", query=_PAGING)},
    "/v1/topics/{topic}": {"get": _operation("Look at a topic and its groups.", {200: "Topic"}, (422,), right="read")},
    "/v1/topics/{topic}/pause": {
        "put": _operation("Hold what comes due of a topic.", {200: "Topic"}, (422,), right="operate"),
        "delete": _operation("Release what is held.", {200: "Topic"}, (422,), right="operate"),
    },
    "/v1/dead": {
        "get": _operation(
            "List dead letters.", {200: "Letters"}, (422,), right="read", query={**DEAD_FILTER, **_PAGING}
        )
    },
    **{
        f"/v1/dead/{verb}": {
            "post": _operation(
                summary,
                {200: "Changed"},
                (408, 412, 413, 415, 422),
                right="operate",
                body=_json_body(DEAD_BODY, {"topic": "mail", "older_than": "7d"}),
            )
        }
        for verb, summary in (("redrive", "Schedule dead letters again."), ("purge", "Drop dead letters."))
    },
    "/status": {
        "get": _operation("Say whether all is well, as /v1/status does.", {200: "Status"}, (422,), right="read")
    },
    "/livez": {"get": _operation("Say that the process answers.", {200: "Alive"})},
    "/readyz": {"get": _operation("Say whether Redis answers, and what stored means.", {200: "Ready"}, (503,))},
    "/metrics": {"get": _operation("Metrics for Prometheus.", {200: ""}, right="read", text="text/plain")},
    "/openapi.json": {"get": _operation("This document.", {200: "Document"})},
    "/problems/{word}": {"get": _operation("What a reason means.", {200: ""}, (404,), text="text/plain")},
}


# The name of each operation, which generated clients call it by, and the part of the API that it belongs to.
NAMES: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("/messages", "post"): ("scheduleMessageByShortPath", "messages"),
    ("/v1/messages", "post"): ("scheduleMessage", "messages"),
    ("/v1/messages", "get"): ("listMessages", "messages"),
    ("/v1/messages/{id}", "get"): ("getMessage", "messages"),
    ("/v1/messages/{id}", "put"): ("replaceMessage", "messages"),
    ("/v1/messages/{id}", "delete"): ("cancelMessage", "messages"),
    ("/v1/messages/{id}", "patch"): ("moveMessage", "messages"),
    ("/v1/batches", "post"): ("storeBatch", "messages"),
    ("/v1/cancellations", "post"): ("cancelMessages", "messages"),
    ("/v1/load", "get"): ("getLoad", "status"),
    ("/v1/status", "get"): ("getStatus", "status"),
    ("/status", "get"): ("getStatusByShortPath", "status"),
    ("/v1/topics", "get"): ("listTopics", "topics"),
    ("/v1/topics/{topic}", "get"): ("getTopic", "topics"),
    ("/v1/topics/{topic}/pause", "put"): ("pauseTopic", "topics"),
    ("/v1/topics/{topic}/pause", "delete"): ("resumeTopic", "topics"),
    ("/v1/dead", "get"): ("listDeadLetters", "dead letters"),
    ("/v1/dead/redrive", "post"): ("redriveDeadLetters", "dead letters"),
    ("/v1/dead/purge", "post"): ("purgeDeadLetters", "dead letters"),
    ("/livez", "get"): ("isAlive", "status"),
    ("/readyz", "get"): ("isReady", "status"),
    ("/metrics", "get"): ("getMetrics", "status"),
    ("/openapi.json", "get"): ("getContract", "documents"),
    ("/problems/{word}", "get"): ("explainReason", "documents"),
}
TAGS: Final = {
    "messages": "Schedule, find, replace, move and cancel.",
    "topics": "What topics hold; pause and resume.",
    "dead letters": "Messages that were given up.",
    "status": "Whether all is well.",
    "documents": "What describes the API.",
}


def contract(is_read_only: bool, takes_tokens: bool, url: str = "/") -> Schema:
    """Return the document; of an API that is read-only without what changes something."""
    paths: Schema = {}
    for path, operations in PATHS.items():
        kept = {
            method: _named(path, method, each, takes_tokens)
            for method, each in operations.items()
            if method == "get" or not is_read_only
        }
        if kept:
            names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
            places = [_parameter(name, TOPIC if name == "topic" else TEXT, "path") for name in names]
            paths[path] = kept | ({"parameters": places} if places else {})
    components: Schema = {"schemas": {**SCHEMAS, "Changed": CHANGED, "Document": {"type": "object"}}}
    if takes_tokens:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Duetime",
            "version": __version__,
            "summary": "Messages at a future time.",
            "description": "Schedules messages, which are delivered when they are due. Errors are problem details (RFC 9457).",
            "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
            "contact": {"name": "whoever runs this server"},
        },
        "servers": [{"url": url}],
        "tags": [{"name": name, "description": said} for name, said in TAGS.items()],
        "paths": paths,
        "components": components,
    }


def _named(path: str, method: str, operation: Schema, takes_tokens: bool) -> Schema:
    """Return an operation with its name, and with what it takes of a token if there are any."""
    name, tag = NAMES[path, method]
    right = operation.get("x-right")
    said = (
        f"{operation['summary']} Its token needs the right {right}." if right and takes_tokens else operation["summary"]
    )
    left_out = () if takes_tokens else ("security",)
    kept = {key: value for key, value in operation.items() if key not in left_out}
    return {"operationId": name, "tags": [tag], "description": said, **kept}
