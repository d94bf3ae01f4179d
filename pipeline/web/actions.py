"""Forms that change something: each is checked, done, logged with who did it, and answered with the page to look at next."""

import asyncio
import logging
from typing import Any, Final

from starlette.responses import Response

from pipeline.core.due import time_of_ms
from pipeline.core.errors import VersionDiffers
from pipeline.core.messages import DEFAULT_TOPIC, Message, Reason, Rejection
from pipeline.core.validation import validate_request
from pipeline.store.base import State
from pipeline.store.dead_letters import DeadLetters
from pipeline.store.listing import ScheduledMessage
from pipeline.store.places import handle_of
from pipeline.store.topics import Topics
from pipeline.web import dead, messages
from pipeline.web.bodies import curl_line
from pipeline.web.call import Call, Parameters
from pipeline.web.pages import MESSAGE_FILTERS, filter_values, message_filter, time_of_form, topic_name
from pipeline.web.problems import Problem
from pipeline.web.rendering import path_of
from pipeline.web.site import Site, Visitor

CHANGED_MAX: Final = messages.SCANNED_MAX  # messages that one form looks at
VERBS: Final = {"cancel": "cancelled", "move": "moved", "now": "now"}
WHEN: Final = ("delay_sec", "due")
REQUEST: Final = ("message", "id", "topic", "headers", *WHEN)

log = logging.getLogger(__name__)


def _note(visitor: Visitor, what: str, count: int, topic: str = "") -> None:
    log.info("pages: %s: %d%s, by %s", what, count, f" of topic {topic}" if topic else "", visitor.name)


async def log_in(site: Site, call: Call, visitor: Visitor) -> Response:
    """Begin a session for who has a token."""
    given = await site.form(call, visitor, "token", "next")
    found = await site.log_in(visitor, given.text("token"), call.address)
    if found is None:
        log.warning("pages: somebody at %s tried to sign in with a token that is not known", call.address)
        return site.render(
            "login.html", call, visitor, 401, page="login", next=own_path(given.text("next")), is_wrong=True
        )
    log.info("pages: %s signed in", found.name)
    wanted = own_path(given.text("next"))
    return site.go(call, found, site.home(found) if wanted == "/" else wanted)


def own_path(text: str) -> str:
    """Return an address if it is one of ours for sure, else that of the overview."""
    is_ours = text.startswith("/") and text[1:2] not in ("/", "\\") and text.isascii() and text.isprintable()
    return text if is_ours and "\\" not in text and " " not in text else "/"


async def log_out(site: Site, call: Call, visitor: Visitor) -> Response:
    """End the session of this browser."""
    await site.form(call, visitor)
    return site.go(call, await site.log_out(visitor), "/")


async def change_message(site: Site, call: Call, visitor: Visitor) -> Response:
    """Cancel or move a message, if it still is as the page has shown it."""
    given = await site.form(call, visitor, "verb", "version", *WHEN)
    name, verb, version = call.path["id"], given.text("verb"), given.text("version")
    if not messages.is_name(name) or verb not in VERBS or not version:
        raise Problem("bad_parameter", "That is no change of a message.")
    due_ms = _due_ms(site, given, verb)
    duetime = site.api.duetime
    try:
        async with asyncio.timeout(site.api.settings.api.patience_sec):
            if verb == "cancel":
                found = await duetime.cancel(name, if_versions=[version])
            else:
                found = await duetime.reschedule(name, due=time_of_ms(due_ms), if_versions=[version])
    except VersionDiffers:
        return site.go(call, visitor, path_of("messages", name), "gone")
    is_done = found.state is (State.CANCELLED if verb == "cancel" else State.SCHEDULED)
    _note(visitor, VERBS[verb], int(is_done), found.message.topic if found.message else "")
    moved = handle_of(found.message) if found.message and verb != "cancel" else name
    return site.go(
        call, visitor, path_of("messages", moved), VERBS[verb] if is_done else "gone", 1 if is_done else None
    )


def _due_ms(site: Site, given: Parameters, verb: str) -> int:
    """Return when a form wants messages to be due; 0 for one that cancels."""
    now_ms = site.api.clock.wall_ms()
    if verb != "move":
        return now_ms if verb == "now" else 0
    judged = validate_request({"message": "-", **_when(given)}, now_ms)
    if isinstance(judged, Rejection):
        raise Problem.of(judged)
    assert isinstance(judged, Message)
    return judged.due_ms


def _when(given: Parameters) -> dict[str, object]:
    """Return the field of a request that says when, from the two of a form of which one is to be filled in."""
    fields: dict[str, object] = {}
    if delay := given.text("delay_sec").strip():
        try:
            fields["delay_sec"] = int(delay) if delay.isascii() and delay.isdigit() else float(delay)
        except ValueError:
            raise Problem(Reason.WRONG_TYPE, "The delay is not a number of seconds.") from None
    if given.text("due").strip():
        fields["due"] = time_of_ms(time_of_form(given, "due", 0)).isoformat()
    return fields


def _read_chosen(site: Site, given: Parameters) -> tuple[list[ScheduledMessage], bool]:
    """Return the messages that a filter takes of the first ``CHANGED_MAX``, and whether there may be more.

    Raises:
        StoreError: no answer, or an error.
    """
    found, last = messages.read_page(site.api, *message_filter(given), CHANGED_MAX, None)
    return found, last is not None


async def confirm_messages(site: Site, call: Call, visitor: Visitor) -> Response:
    """Say how many messages a change is about, before it is made."""
    given = call.parameters("verb", *MESSAGE_FILTERS)
    return await _ask_for_messages(site, call, visitor, given, 200)


async def _ask_for_messages(site: Site, call: Call, visitor: Visitor, given: Parameters, status: int) -> Response:
    verb = given.text("verb")
    if verb not in VERBS:
        raise Problem("bad_parameter", "The parameter verb takes cancel, move or now.")
    chosen = filter_values(*message_filter(given))
    found, has_more = await site.api.ask(lambda: _read_chosen(site, given))
    return site.render(
        "confirm.html", call, visitor, status, page="messages", what="messages", verb=verb, count=len(found), has_more=has_more,
        chosen=chosen, back=path_of("messages", **chosen), typed="", most=CHANGED_MAX, differs=status != 200,
    )  # fmt: skip


async def change_messages(site: Site, call: Call, visitor: Visitor) -> Response:
    """Cancel or move all messages of a filter, if they are as many as the page has said."""
    given = await site.form(call, visitor, "verb", "expect", *MESSAGE_FILTERS, *WHEN)
    verb, expected = given.text("verb"), given.number("expect", 0, 0, CHANGED_MAX)
    if verb not in VERBS:
        raise Problem("bad_parameter", "The field verb takes cancel, move or now.")
    due_ms = _due_ms(site, given, verb)
    found, has_more = await site.api.ask(lambda: _read_chosen(site, given))
    if len(found) != expected:
        return await _ask_for_messages(site, call, visitor, given, 412)
    names = [each.id for each in found]
    by_id, wanted = site.by_id, State.CANCELLED if verb == "cancel" else State.SCHEDULED
    done = await site.api.ask(
        lambda: by_id.cancel_many(names) if verb == "cancel" else by_id.reschedule_many(names, due_ms)
    )
    count = sum(each.state is wanted for each in done)
    chosen = filter_values(*message_filter(given))
    _note(visitor, VERBS[verb], count, chosen["topic"])
    return site.go(call, visitor, path_of("messages", **chosen), VERBS[verb], count, has_more)


async def pause(site: Site, call: Call, visitor: Visitor) -> Response:
    """Hold what comes due of a topic from now on, or end that."""
    given = await site.form(call, visitor, "verb")
    name, verb = topic_name(call), given.text("verb")
    if verb not in ("pause", "resume"):
        raise Problem("bad_parameter", "The field verb takes pause or resume.")
    topics = Topics(site.api.client, site.api.shards)

    def change() -> None:
        if verb == "pause":
            topics.pause(name, topics.now_ms())
        else:
            topics.resume(name)

    await site.api.ask(change)
    _note(visitor, verb, 1, name)
    return site.go(call, visitor, path_of("topics", name), f"{verb}d")


async def confirm_dead(site: Site, call: Call, visitor: Visitor) -> Response:
    """Say how many dead letters a change is about, before it is made."""
    given = call.parameters("verb", *dead.FILTERS)
    return await _ask_for_dead(site, call, visitor, given, 200)


async def _ask_for_dead(site: Site, call: Call, visitor: Visitor, given: Parameters, status: int) -> Response:
    verb = given.text("verb")
    if verb not in ("redrive", "purge"):
        raise Problem("bad_parameter", "The parameter verb takes redrive or purge.")
    chosen, filter_ = _dead_filter(given)
    count, has_more = await site.api.ask(lambda: dead.count(site.api, filter_))
    typed = _to_type(site, filter_.topic) if verb == "purge" else ""
    return site.render(
        "confirm.html", call, visitor, status, page="dead", what="dead", verb=verb, count=count, has_more=has_more,
        chosen=chosen, back=path_of("dead", **chosen), typed=typed, most=dead.SCANNED_MAX, differs=status != 200,
    )  # fmt: skip


def _dead_filter(given: Parameters) -> tuple[dict[str, str], dead.Filter]:
    chosen = {name: given.text(name).strip() for name in dead.FILTERS}
    return chosen, dead.Filter.of(chosen)


def _to_type(site: Site, topic: str) -> str:
    """Return what has to be typed before something is dropped for good."""
    return topic or site.api.settings.redis.namespace


async def change_dead(site: Site, call: Call, visitor: Visitor) -> Response:
    """Schedule dead letters again, or drop them: one of a name, or all of a filter if they are as many as the page has said."""
    given = await site.form(call, visitor, "verb", "name", "expect", "typed", *dead.FILTERS)
    verb, name = given.text("verb"), given.text("name")
    if verb not in ("redrive", "purge"):
        raise Problem("bad_parameter", "The field verb takes redrive or purge.")
    act = dead.redrive_letter if verb == "redrive" else dead.purge_letter
    chosen, filter_ = _dead_filter(given)
    topic = filter_.topic
    if name:
        letter = await site.api.ask(lambda: DeadLetters(site.api.client, site.api.shards).find(name))
        if letter is None:
            return site.go(call, visitor, "/dead", "gone")
        topic = letter.topic
    if verb == "purge" and given.text("typed").strip() != _to_type(site, topic):
        raise Problem("bad_parameter", "What was typed is not the name that was asked for: nothing is dropped.")
    expected = None if name else given.number("expect", 0, 0, dead.SCANNED_MAX)
    try:
        count, has_more = await dead.change(site.api, [name] if name else [], None if name else filter_, expected, act)
    except Problem as problem:
        if problem.word != "count_differs":
            raise
        return await _ask_for_dead(site, call, visitor, given, 412)
    done = "redriven" if verb == "redrive" else "purged"
    _note(visitor, f"dead letters {done}", count, topic)
    return site.go(call, visitor, path_of("dead", **chosen), done, count, has_more)


async def show_try(site: Site, call: Call, visitor: Visitor) -> Response:
    """Show a form that schedules a message."""
    call.parameters()
    filled = {"message": "tea is ready", "delay_sec": "10", "due": "", "id": "", "topic": DEFAULT_TOPIC, "headers": ""}
    return _render_try(site, call, visitor, filled)


def _render_try(
    site: Site, call: Call, visitor: Visitor, filled: dict[str, str], refused: str = "", **more: Any
) -> Response:
    try:
        curl = curl_line(site.origin(call), _request(Parameters(filled)), site.access.takes_tokens)
    except Problem:
        curl = ""
    status = 422 if refused else 200
    return site.render("try.html", call, visitor, status, page="try", filled=filled, curl=curl, refused=refused, **more)


def _request(given: Parameters) -> dict[str, object]:
    """Return the request that a form describes."""
    fields: dict[str, object] = {"message": given.text("message").replace("\r\n", "\n"), **_when(given)}
    for name in ("id", "topic"):
        if given.text(name).strip():
            fields[name] = given.text(name).strip()
    headers = {}
    for line in given.text("headers").replace("\r\n", "\n").split("\n"):
        name, colon, value = line.partition(":")
        if not colon and line.strip():
            raise Problem(Reason.BAD_HEADERS, "A header is a line of a name, a colon and a value.")
        if line.strip():
            headers[name.strip()] = value.strip()
    return fields | ({"headers": headers} if headers else {})


async def schedule(site: Site, call: Call, visitor: Visitor) -> Response:
    """Schedule the message of a form, or show the command that does."""
    given = await site.form(call, visitor, *REQUEST, "do")
    filled = {name: given.text(name) for name in REQUEST}
    if given.text("do") == "curl":
        return _render_try(site, call, visitor, filled)
    try:
        request = _request(given)
        judged = validate_request(request, site.api.clock.wall_ms())
        if isinstance(judged, Rejection):
            raise Problem.of(judged)
    except Problem as problem:
        return _render_try(site, call, visitor, filled, refused=problem.detail)
    assert isinstance(judged, Message)  # there is no field cancel or replace
    receipt = await site.api.store(judged)
    (site.api.meters.duplicates if receipt.is_duplicate else site.api.meters.stored).inc()
    _note(visitor, "known" if receipt.is_duplicate else "scheduled", 1, judged.topic)
    return site.go(call, visitor, path_of("messages", receipt.id), "known" if receipt.is_duplicate else "scheduled")
