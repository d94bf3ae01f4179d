"""Single messages: schedule, look, cancel, move; and listing what is scheduled."""

import asyncio
import re
from collections.abc import Collection
from itertools import islice
from typing import Any, Final

from starlette.responses import Response

from pipeline.client import Found, Receipt, State
from pipeline.core.due import DUE_MS_MAX, time_of_ms
from pipeline.core.messages import Message, Reason, Rejection
from pipeline.core.validation import ID_PATTERN, REQUEST_BYTES_MAX, validate_request
from pipeline.ingest.usual_lines import USUAL_LINE_BYTES_MAX
from pipeline.store.listing import ScheduledMessage, list_scheduled
from pipeline.store.places import handle_of
from pipeline.web.api import Api
from pipeline.web.call import JSON, MERGE_PATCH, Call, Parameters, answer
from pipeline.web.lines import judge
from pipeline.web.problems import Problem

PAGE, PAGE_MAX = 100, 500  # messages that a listing returns
SCANNED_MAX: Final = 5_000  # messages that it looks at, which a topic leaves most of out
PAGE_BYTES: Final = 4 * 1024 * 1024  # of message bodies, after which a page is full
CANCELLATIONS_MAX: Final = 1_000

is_id: Final = re.compile(ID_PATTERN).fullmatch
is_name: Final = re.compile(r"[A-Za-z0-9._:~-]{1,160}").fullmatch  # of a message: an id or a handle
_TAG: Final = re.compile(r'(W/)?"([\x21\x23-\x7e]*)"')
_CURSOR: Final = re.compile(r"([0-9]{1,15})~([0-9A-Za-z_-]{22})")


async def schedule(api: Api, call: Call) -> Response:
    """Store one message."""
    call.parameters()
    message = _with_key(await _request(api, call), idempotency_key(call))
    receipt = await api.store(message)
    if not receipt.is_duplicate:
        api.meters.stored.inc()
        return answer(_receipt(receipt, message), 201, {"Location": f"/v1/messages/{receipt.id}"})
    api.meters.duplicates.inc()
    waiting = receipt.message
    if waiting and (waiting.body, waiting.topic, waiting.headers) != (message.body, message.topic, message.headers):
        raise Problem("id_in_use", "Its message, topic or headers differ.", id=receipt.id, state=receipt.state)
    return answer(_receipt(receipt, message) | {"known": True}, 200)


async def replace(api: Api, call: Call) -> Response:
    """Have an id mean this message, whether one waits with it, is cancelled, or was never there."""
    call.parameters()
    name = call.path["id"]
    if not is_id(name):
        raise Problem(Reason.BAD_ID, "A message is replaced by its id: 1 to 128 of A-Z a-z 0-9 . _ : -.")
    message = _with_key(await _request(api, call), name)
    api.check_room(1, len(message.body))
    async with asyncio.timeout(api.settings.api.patience_sec):
        found = await api.duetime.put(message, _if_match(call))
    if found.message is None:
        raise Problem("too_late", f"It is {found.state.replace('_', ' ')}.", state=found.state)
    return _found(api, name, found, 201 if found.is_new else 200)


def _if_match(call: Call) -> Collection[str]:
    """Return the versions that the message may have, "*" for any; none if it does not matter.

    Raises:
        Problem: ``bad_parameter``.
    """
    if b"if-none-match" in call.headers and call.method != "GET":
        raise Problem("bad_parameter", "If-None-Match is not taken; POST stores only what is not there.")
    given = call.header(b"if-match")
    if b"if-match" not in call.headers or given == "*":
        return {*given}
    tags = [_TAG.fullmatch(tag.strip()) for tag in given.split(",")]
    if None in tags:
        raise Problem("bad_parameter", "The header If-Match takes what an answer has as its ETag, or *.")
    # A weak tag matches nothing, and "*" in quotes is no version.
    return {tag[2] if not tag[1] and tag[2] != "*" else tag[0] for tag in tags if tag}


async def _request(api: Api, call: Call) -> Message:
    """Read a body that is one request.

    Raises:
        Problem: it breaks a rule.
    """
    body = await call.body(JSON, REQUEST_BYTES_MAX, Reason.LINE_TOO_LONG)
    arrival_ms = api.clock.wall_ms()
    if len(body) <= USUAL_LINE_BYTES_MAX:
        judged = judge(body, arrival_ms)
    else:  # nobody else should wait for it
        judged = await api.ask(lambda: judge(body, arrival_ms))
    if judged is None:
        raise Problem(Reason.NOT_JSON, "The body is empty.")
    if isinstance(judged, Rejection):
        raise Problem.of(judged)
    if not isinstance(judged, Message):
        raise Problem(
            "bad_parameter", "DELETE cancels and PUT replaces; the fields cancel and replace are for batches."
        )
    return judged


def idempotency_key(call: Call) -> str:
    """Return the header Idempotency-Key, "" if there is none.

    Raises:
        Problem: ``bad_id``.
    """
    key = call.header(b"idempotency-key")
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if b"idempotency-key" in call.headers and not is_id(key):
        raise Problem(Reason.BAD_ID, "The header Idempotency-Key takes 1 to 128 of A-Z a-z 0-9 . _ : -.")
    return key


def _with_key(message: Message, key: str) -> Message:
    if not key or key == message.id:
        return message
    if message.id:
        raise Problem("bad_parameter", "The field id, and that of the path or the header Idempotency-Key, differ.")
    return Message(message.due_ms, message.body, message.topic, key, message.headers)


def _receipt(receipt: Receipt, message: Message) -> dict[str, Any]:
    """Return what whoever schedules is told; when a message was due that waits no longer is not known."""
    record: dict[str, Any] = {"id": receipt.id, "topic": message.topic, "state": receipt.state}
    return record | due_record(receipt.due_ms) if receipt.message else record


def due_record(due_ms: int) -> dict[str, Any]:
    """Return a due time in the forms that answers have: epoch seconds, ISO 8601, epoch ms."""
    due = time_of_ms(due_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"scheduled_for": due_ms / 1000, "due": due, "due_ms": due_ms}


def _name(call: Call) -> str:
    name = call.path["id"]
    if not is_name(name):
        raise _unknown()
    return name


def _unknown() -> Problem:
    return Problem("unknown_id", "It was never scheduled here, or is forgotten; a handle leads to what waits only.")


def _found(api: Api, name: str, found: Found, status: int = 200) -> Response:
    message = found.message
    if message is None:
        return answer({"id": name, "state": found.state}, status)
    record = {"id": handle_of(message), "topic": message.topic, "state": found.state, **due_record(message.due_ms)}
    headers = {"ETag": f'"{found.version}"'} if found.version else {}
    if status == 201:
        headers["Location"] = f"/v1/messages/{name}"
    return answer(record | _content(api, message), status, headers)


async def look(api: Api, call: Call) -> Response:
    """Return the state of a message, and its content if it waits."""
    call.parameters()
    name = _name(call)
    async with asyncio.timeout(api.settings.api.patience_sec):
        found = await api.get(name)
    if found.state is State.UNKNOWN:
        raise _unknown()
    return _found(api, name, found)


async def cancel(api: Api, call: Call) -> Response:
    """Take a message out of the schedule."""
    call.parameters()
    name = _name(call)
    versions = _if_match(call)
    async with asyncio.timeout(api.settings.api.patience_sec):
        found = await (api.duetime.cancel(name, if_versions=versions) if versions else api.cancel(name))
    refuse_late(found, State.CANCELLED)
    return _found(api, name, found)


async def move(api: Api, call: Call) -> Response:
    """Give a message another due time."""
    call.parameters()
    name = _name(call)
    fields = await call.fields("delay_sec", "countdown", "due", also=[MERGE_PATCH])
    judged = validate_request({"message": "-", **fields}, api.clock.wall_ms())
    if isinstance(judged, Rejection):
        raise Problem.of(judged)
    assert isinstance(judged, Message)  # there is no field cancel or replace
    async with asyncio.timeout(api.settings.api.patience_sec):
        found = await api.duetime.reschedule(name, due=time_of_ms(judged.due_ms), if_versions=_if_match(call))
    refuse_late(found, State.SCHEDULED)
    return _found(api, name, found)


def refuse_late(found: Found, wanted: State) -> None:
    """Refuse what came too late.

    Raises:
        Problem: ``unknown_id``, ``too_late``.
    """
    if found.state is State.UNKNOWN:
        raise _unknown()
    if found.state is not wanted:
        raise Problem("too_late", f"It is {found.state.replace('_', ' ')}.", state=found.state)


async def cancel_many(api: Api, call: Call) -> Response:
    """Cancel messages by their ids; say of each what became of it."""
    call.parameters()
    fields = await call.fields("ids")
    names = fields.get("ids")
    if not isinstance(names, list) or not 1 <= len(names) <= CANCELLATIONS_MAX:
        raise Problem("bad_parameter", f"The field ids takes a list of 1 to {CANCELLATIONS_MAX} ids.")
    for name in names:
        if not isinstance(name, str) or not is_name(name):
            raise Problem("bad_parameter", f"The field ids takes ids and handles, not {str(name)[:80]!r}.")
    async with asyncio.timeout(api.settings.api.patience_sec):
        found = await api.duetime.cancel_many(names)
    return answer({"states": {name: each.state for name, each in zip(names, found, strict=True)}})


async def list_page(api: Api, call: Call) -> Response:
    """Return scheduled messages in order of due time, and a cursor if there may be more."""
    given = call.parameters("from", "to", "topic", "limit", "cursor")
    from_ms, until_ms = given.span_ms((0, DUE_MS_MAX))
    topic, limit = given.topic("topic"), given.number("limit", PAGE, 1, PAGE_MAX)
    after = read_cursor(given)
    found, last = await api.ask(lambda: read_page(api, from_ms, until_ms, topic, limit, after))
    record: dict[str, Any] = {"messages": [_listed(api, each) for each in found]}
    if last:
        record["cursor"] = cursor_of(last)
    return answer(record)


def read_cursor(given: Parameters) -> tuple[int, str] | None:
    """Return the place behind which a page begins, None for the first one.

    Raises:
        Problem: ``bad_parameter``.
    """
    cursor = _CURSOR.fullmatch(given.text("cursor"))
    if given.text("cursor") and cursor is None:
        raise Problem("bad_parameter", "The parameter cursor takes what the page before has as its cursor.")
    return (int(cursor[1]), cursor[2]) if cursor else None


def cursor_of(last: ScheduledMessage) -> str:
    """Return the cursor of the page behind a message."""
    return f"{last.due_ms}~{last.message_id}"


def read_page(
    api: Api, from_ms: int, until_ms: int, topic: str, limit: int, after: tuple[int, str] | None
) -> tuple[list[ScheduledMessage], ScheduledMessage | None]:
    """Return messages, and the last one that was looked at, None at the end.

    Raises:
        StoreError: no answer, or an error.
    """
    found: list[ScheduledMessage] = []
    size = 0
    walk = list_scheduled(api.client, api.shards, from_ms, until_ms, after)
    for scanned, each in enumerate(islice(walk, SCANNED_MAX), start=1):
        if topic in ("", each.message.topic):
            found.append(each)
            size += len(each.message.body)
        if len(found) == limit or size >= PAGE_BYTES or scanned == SCANNED_MAX:
            return found, each
    return found, None


def _listed(api: Api, each: ScheduledMessage) -> dict[str, Any]:
    message = each.message
    record = {"id": each.id, "topic": message.topic, "state": State.SCHEDULED, **due_record(each.due_ms)}
    return record | _content(api, message)


def _content(api: Api, message: Message) -> dict[str, Any]:
    """Return what a message holds, if that is shown."""
    return {"message": message.body, "headers": dict(message.headers)} if api.settings.api.show_messages else {}
