"""The contract of the API as OpenAPI 3.1. The rules of a request are those of ``core/validation.py``; here is their form."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipeline import __version__
from pipeline.client import State
from pipeline.core.dead import DeadReason
from pipeline.core.due import DELAY_SEC_MAX
from pipeline.core.messages import Reason
from pipeline.core.validation import ID_PATTERN, TOPIC_PATTERN
from pipeline.web.problems import WORDS

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_FLAG: Final[Schema] = {"type": "string", "enum": ["0", "1"]}
_MS: Final[Schema] = {"type": "integer", "description": "Epoch milliseconds, UTC."}
_TIME: Final[Schema] = {"type": "string", "description": "ISO 8601 with a zone, or epoch milliseconds."}
_TOPIC: Final[Schema] = {"type": "string", "pattern": f"^{TOPIC_PATTERN}$"}
_HEADERS: Final[Schema] = {"type": "object", "additionalProperties": _TEXT}
_STATE: Final[Schema] = {"type": "string", "enum": [*State]}
_ANY: Final[Schema] = {"type": "object"}


def _object(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": [*required]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_WHEN: Final[Mapping[str, Schema]] = {
    "delay_sec": {"type": "number", "minimum": 0, "maximum": DELAY_SEC_MAX},
    "countdown": {"type": "number", "minimum": 0, "maximum": DELAY_SEC_MAX},
    "due": {"type": ["string", "integer"], "description": "ISO 8601 with a zone, or epoch milliseconds."},
}
_DUE: Final[Mapping[str, Schema]] = {
    "scheduled_for": {"type": "number", "description": "When it is due, epoch seconds."},
    "due": {"type": "string", "description": "When it is due, ISO 8601 in UTC."},
    "due_ms": {"type": "integer", "description": "When it is due, epoch milliseconds."},
}
_DEAD_FILTER: Final[Mapping[str, Schema]] = {
    "topic": _TOPIC,
    "group": _TEXT,
    "reason": {"type": "string", "description": f"{', '.join(DeadReason)}"},
    "older_than": {"type": "string", "description": "An age such as 15m, 2h or 7d."},
}
_COUNTS: Final = (
    *("scheduled", "held", "in_flight", "late", "dead", "delivered", "rejected", "stored", "duplicates"),
    *("reclaimed", "late_acks"),
)

SCHEMAS: Final[Mapping[str, Schema]] = {
    "Request": _object(
        {"message": {"type": "string", "minLength": 1, "description": "What is delivered, at most 256 KiB."}},
        **_WHEN,
        id={"type": "string", "pattern": f"^{ID_PATTERN}$", "description": "Your idempotency key."},
        topic=_TOPIC,
        headers=_HEADERS,
    )
    | {"additionalProperties": False, "description": "Give exactly one of delay_sec, countdown and due."},
    "Receipt": _object({"id": _TEXT, "topic": _TOPIC, "state": _STATE}, **_DUE, known={"const": True}),
    "Message": _object({"id": _TEXT, "state": _STATE}, topic=_TEXT, **_DUE, message=_TEXT, headers=_HEADERS),
    "Problem": _object(
        {
            "type": _TEXT,
            "title": _TEXT,
            "status": {"type": "integer"},
            "reason": {"type": "string", "enum": [*Reason, *WORDS]},
            "detail": _TEXT,
        }
    )
    | {"description": "RFC 9457. What a reason means is at its type."},
    "Rejected": _object({"line": {"type": "integer", "minimum": 1}, "reason": {"enum": [*Reason]}, "detail": _TEXT}),
    "Page": _object({"messages": _list(_ref("Message"))}, cursor=_TEXT),
    "Stored": _object(
        {"stored": _COUNT, "known": _COUNT, "rejected": _list(_ref("Rejected"))},
        cancelled=_COUNT,
        replaced=_COUNT,
        late=_COUNT,
        ids=_list({"type": ["string", "null"]}),
    ),
    "States": _object({"states": {"type": "object", "additionalProperties": _STATE}}),
    "Load": _object(
        {
            "now_ms": _MS,
            "past": _COUNT,
            "held": _COUNT,
            "ahead": _list(_object({"from": _TEXT, "from_ms": _MS, "messages": _COUNT})),
        }
    ),
    "Status": _object(
        {"verdict": _TEXT, "now_ms": _MS, **dict.fromkeys(_COUNTS, _COUNT), "ingest": _list(_ANY), "drain": _ANY}
    ),
    "Topic": _object(
        {
            "name": _TEXT,
            "in_stream": _COUNT,
            "held": _COUNT,
            "dead": _COUNT,
            "paused_ms": {"type": ["integer", "null"]},
        },
        groups=_list(_ANY),
        settings=_ANY,
    ),
    "Topics": _object({"topics": _list(_ref("Topic"))}, cursor=_TEXT),
    "Letter": _object(
        {"name": _TEXT, "id": _TEXT, "topic": _TEXT, "message": _TEXT, "reason": _TEXT, "detail": _TEXT, "died_ms": _MS}
    ),
    "Letters": _object({"letters": _list(_ref("Letter"))}, cursor=_TEXT),
    "Ready": _object({"ready": {"const": True}, "stored_means": _TEXT}),
    "Alive": _object({"alive": {"const": True}}),
}


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
            "content": _content(text or "application/json", _ref(name) if name else _TEXT),
        }
        for status, name in answers.items()
    }
    for status in sorted({*problems, *usual, 421}):
        said = "; ".join(title for known, title in WORDS.values() if known == status)
        content = _content("application/problem+json", _ref("Problem"))
        responses[str(status)] = {"description": said, "content": content}
    parameters = [_parameter(name, schema) for name, schema in (query or {}).items()]
    parameters += (
        [_parameter("Idempotency-Key", {"type": "string", "pattern": f"^{ID_PATTERN}$"}, "header")] if key else []
    )
    parameters += [_parameter("If-Match", _TEXT, "header")] if match else []
    described: Schema = {"summary": summary, "responses": responses, "parameters": parameters}
    if body is not None:
        described["requestBody"] = {"required": True, "content": body}
    if right:
        described |= {"security": [{"token": []}], "x-right": right}
    return described


def _json_body(schema: Schema, example: Any) -> Schema:
    return _content("application/json", schema, example)


_DEAD_BODY: Final = _object(
    {}, names=_list(_TEXT), **_DEAD_FILTER, all={"type": "boolean"}, expect={"type": "integer", "minimum": 0}
)
_PAGING: Final = {"limit": {"type": "integer", "minimum": 1, "maximum": 500}, "cursor": _TEXT}
_REQUEST_EXAMPLE: Final = {"message": "Your trial ends tomorrow", "delay_sec": 3600, "id": "trial-42", "topic": "mail"}
_BATCH_EXAMPLE: Final = '{"message": "one", "delay_sec": 60}\n{"message": "two", "delay_sec": 61}\n'
_TOO_LATE: Final = (404, 409, 412, 422)

PATHS: Final[Mapping[str, Mapping[str, Schema]]] = {
    "/v1/messages": {
        "post": _operation(
            "Schedule a message; 201 says that it is stored, 200 that its id was known.",
            {201: "Receipt", 200: "Receipt"},
            (408, 409, 413, 415, 422),
            right="schedule",
            body=_json_body(_ref("Request"), _REQUEST_EXAMPLE),
            key=True,
        ),
        "get": _operation(
            "List what is scheduled, in order of due time.",
            {200: "Page"},
            (422,),
            right="read",
            query={"from": _TIME, "to": _TIME, "topic": _TOPIC, **_PAGING},
        ),
    },
    "/v1/messages/{id}": {
        "get": _operation("Return a message by its id or handle.", {200: "Message"}, (404, 422), right="read"),
        "put": _operation(
            "Replace the message of an id, or store the first one, also after a cancellation.",
            {201: "Message", 200: "Message"},
            (408, 409, 412, 413, 415, 422),
            right="schedule",
            body=_json_body(_ref("Request"), {"message": "Your trial ends today", "delay_sec": 60}),
            match=True,
        ),
        "delete": _operation("Cancel a message.", {200: "Message"}, _TOO_LATE, right="schedule", match=True),
        "patch": _operation(
            "Give a message another due time.",
            {200: "Message"},
            (*_TOO_LATE, 408, 413, 415),
            right="schedule",
            body=_json_body(_object({}, **_WHEN), {"delay_sec": 7200}),
            match=True,
        ),
    },
    "/v1/batches": {
        "post": _operation(
            "Store many requests, a line each.",
            {200: "Stored"},
            (408, 413, 415, 422),
            right="schedule",
            query={"strict": _FLAG, "ids": _FLAG},
            body=_content("application/x-ndjson", _TEXT, _BATCH_EXAMPLE),
            key=True,
        )
    },
    "/v1/cancellations": {
        "post": _operation(
            "Cancel up to 1,000 messages.",
            {200: "States"},
            (408, 413, 415, 422),
            right="schedule",
            body=_json_body(_object({"ids": _list(_TEXT)}), {"ids": ["trial-42"]}),
        )
    },
    "/v1/load": {
        "get": _operation(
            "Count what is scheduled for each ten minutes.",
            {200: "Load"},
            (422,),
            right="read",
            query={"hours": _COUNT},
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
            "List dead letters.", {200: "Letters"}, (422,), right="read", query={**_DEAD_FILTER, **_PAGING}
        )
    },
    **{
        f"/v1/dead/{verb}": {
            "post": _operation(
                summary,
                {200: "Changed"},
                (408, 412, 413, 415, 422),
                right="operate",
                body=_json_body(_DEAD_BODY, {"topic": "mail", "older_than": "7d"}),
            )
        }
        for verb, summary in (("redrive", "Schedule dead letters again."), ("purge", "Drop dead letters."))
    },
    "/livez": {"get": _operation("Say that the process answers.", {200: "Alive"})},
    "/readyz": {"get": _operation("Say whether Redis answers, and what stored means.", {200: "Ready"}, (503,))},
    "/metrics": {"get": _operation("Metrics for Prometheus.", {200: ""}, right="read", text="text/plain")},
    "/openapi.json": {"get": _operation("This document.", {200: "Document"})},
    "/problems/{word}": {"get": _operation("What a reason means.", {200: ""}, (404,), text="text/plain")},
}


def contract(is_read_only: bool) -> Schema:
    """Return the document; of an API that is read-only without what changes something."""
    paths: Schema = {}
    for path, operations in PATHS.items():
        kept = {method: each for method, each in operations.items() if method == "get" or not is_read_only}
        if kept:
            names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
            paths[path] = kept | ({"parameters": [_parameter(name, _TEXT, "path") for name in names]} if names else {})
    changed = _object({"has_more": {"type": "boolean"}}, redriven=_COUNT, purged=_COUNT)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Duetime", "version": __version__, "summary": "Messages at a future time."},
        "paths": paths,
        "components": {
            "schemas": {**SCHEMAS, "Changed": changed, "Document": _ANY},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
