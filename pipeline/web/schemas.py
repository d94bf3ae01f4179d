"""The schemas of the contract: what requests and answers look like."""

from collections.abc import Mapping
from typing import Any, Final

from pipeline.client import State
from pipeline.core.dead import DeadReason
from pipeline.core.due import DELAY_SEC_MAX
from pipeline.core.messages import Reason
from pipeline.core.validation import ID_PATTERN, TOPIC_PATTERN
from pipeline.web.problems import WORDS

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
FLAG: Final[Schema] = {"type": "string", "enum": ["0", "1"]}
MS: Final[Schema] = {"type": "integer", "description": "Epoch milliseconds, UTC."}
TIME: Final[Schema] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 100,
    "description": "ISO 8601 with a zone, or epoch milliseconds.",
}
TOPIC: Final[Schema] = {"type": "string", "pattern": f"^{TOPIC_PATTERN}$"}
TOPIC_OR_NONE: Final[Schema] = {"type": "string", "pattern": f"^({TOPIC_PATTERN})?$"}
NAME: Final[Schema] = {"type": "string", "pattern": "^[A-Za-z0-9._:~-]{1,160}$", "description": "An id or a handle."}
VERSIONS: Final[Schema] = {
    "type": "string",
    "pattern": r"""^ *(\*|(W/)?"[!#-+.-~-]*"( *, *(W/)?"[!#-+.-~-]*")*) *$""",
    "description": "What an answer has as its ETag, or *.",
}
COUNT_QUERY: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 168, "default": 24}
HEADERS: Final[Schema] = {"type": "object", "additionalProperties": TEXT}
STATE: Final[Schema] = {"type": "string", "enum": [*State]}
ANY: Final[Schema] = {"type": "object"}


def object_of(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    """Return the schema of an object with these fields."""
    return {"type": "object", "properties": {**required, **optional}, "required": [*required]}


def list_of(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def ref(name: str) -> Schema:
    """Return a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


WHEN: Final[Mapping[str, Schema]] = {
    "delay_sec": {"type": "number", "minimum": 0, "maximum": DELAY_SEC_MAX},
    "countdown": {"type": "number", "minimum": 0, "maximum": DELAY_SEC_MAX},
    "due": {"type": ["string", "integer"], "description": "ISO 8601 with a zone, or epoch milliseconds."},
}
ONE_TIME: Final = [{"required": [name]} for name in WHEN]
DUE: Final[Mapping[str, Schema]] = {
    "scheduled_for": {"type": "number", "description": "When it is due, epoch seconds."},
    "due": {"type": "string", "description": "When it is due, ISO 8601 in UTC."},
    "due_ms": {"type": "integer", "description": "When it is due, epoch milliseconds."},
}
DEAD_FILTER: Final[Mapping[str, Schema]] = {
    "topic": TOPIC_OR_NONE,
    "group": TEXT,
    "reason": {"type": "string", "description": ", ".join(DeadReason)},
    "older_than": {
        "type": "string",
        "pattern": "^([0-9]{1,12}[smhd])?$",
        "description": "An age such as 15m, 2h or 7d.",
    },
}
COUNTS: Final = (
    *("scheduled", "held", "throttled", "in_flight", "late", "dead", "delivered", "rejected", "stored", "duplicates"),
    *("reclaimed", "late_acks"),
)

SCHEMAS: Final[Mapping[str, Schema]] = {
    "Request": object_of(
        {"message": {"type": "string", "minLength": 1, "description": "What is delivered, at most 256 KiB."}},
        **WHEN,
        id={"type": "string", "pattern": f"^{ID_PATTERN}$", "description": "Your idempotency key."},
        topic=TOPIC,
        headers=HEADERS,
    )
    | {
        "additionalProperties": False,
        "oneOf": ONE_TIME,
        "description": "Give exactly one of delay_sec, countdown and due.",
    },
    "Receipt": object_of({"id": TEXT, "topic": TOPIC, "state": STATE}, **DUE, known={"type": "boolean"}),
    "Message": object_of({"id": TEXT, "state": STATE}, topic=TEXT, **DUE, message=TEXT, headers=HEADERS),
    "Problem": object_of(
        {
            "type": TEXT,
            "title": TEXT,
            "status": {"type": "integer"},
            "reason": {"type": "string", "enum": [*Reason, *WORDS]},
            "detail": TEXT,
        }
    )
    | {"description": "RFC 9457. What a reason means is at its type."},
    "Rejected": object_of({"line": {"type": "integer", "minimum": 1}, "reason": {"enum": [*Reason]}, "detail": TEXT}),
    "Page": object_of({"messages": list_of(ref("Message"))}, cursor=TEXT),
    "Stored": object_of(
        {"stored": COUNT, "known": COUNT, "rejected": list_of(ref("Rejected"))},
        cancelled=COUNT,
        replaced=COUNT,
        late=COUNT,
        ids=list_of({"type": ["string", "null"]}),
    ),
    "States": object_of({"states": {"type": "object", "additionalProperties": STATE}}),
    "Load": object_of(
        {
            "now_ms": MS,
            "past": COUNT,
            "held": COUNT,
            "ahead": list_of(object_of({"from": TEXT, "from_ms": MS, "messages": COUNT})),
        }
    ),
    "Status": object_of(
        {"verdict": TEXT, "now_ms": MS, **dict.fromkeys(COUNTS, COUNT), "ingest": list_of(ANY), "drain": ANY}
    ),
    "Topic": object_of(
        {
            "name": TEXT,
            "in_stream": COUNT,
            "held": COUNT,
            "dead": COUNT,
            "paused_ms": {"type": ["integer", "null"]},
        },
        groups=list_of(ANY),
        settings=ANY,
    ),
    "Topics": object_of({"topics": list_of(ref("Topic"))}, cursor=TEXT),
    "Letter": object_of(
        {"name": TEXT, "id": TEXT, "topic": TEXT, "message": TEXT, "reason": TEXT, "detail": TEXT, "died_ms": MS}
    ),
    "Letters": object_of({"letters": list_of(ref("Letter"))}, cursor=TEXT),
    "Ready": object_of({"ready": {"type": "boolean"}, "stored_means": TEXT}),
    "Alive": object_of({"alive": {"type": "boolean"}}),
}

CHANGED: Final = object_of({"has_more": {"type": "boolean"}}, redriven=COUNT, purged=COUNT)
CANCEL_BODY: Final = object_of({"ids": list_of(NAME) | {"minItems": 1, "maxItems": 1_000}}) | {
    "additionalProperties": False
}
MOVE_BODY: Final = object_of({}, **WHEN) | {"additionalProperties": False, "oneOf": ONE_TIME}
_FILTERED: Final = [{"required": [name], "properties": {name: {"minLength": 1}}} for name in DEAD_FILTER]
_ALL: Final[Schema] = {"required": ["all"], "properties": {"all": {"const": True}}}
_BY_FILTER: Final[Schema] = {"not": {"required": ["names"]}, "anyOf": [*_FILTERED, _ALL]}
_BY_NAME: Final[Schema] = {
    "required": ["names"],
    "properties": {"all": {"const": False}},
    "not": {"anyOf": [{"required": [name]} for name in DEAD_FILTER]},
}
DEAD_BODY: Final = object_of(
    {},
    names=list_of(TEXT) | {"maxItems": 1_000},
    **DEAD_FILTER,
    all={"type": "boolean"},
    expect=COUNT | {"maximum": 10_000},
) | {"additionalProperties": False, "anyOf": [_BY_NAME, _BY_FILTER]}
