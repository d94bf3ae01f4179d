"""Pages to look at: each reads what it shows and is a whole document, which works without JavaScript."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response, StreamingResponse

from pipeline.config import check_name
from pipeline.core.due import DUE_MS_MAX
from pipeline.core.errors import ConfigError
from pipeline.core.messages import Message
from pipeline.store.base import State
from pipeline.store.dead_letters import DeadLetters, read_name
from pipeline.store.entries import DeadLetter
from pipeline.store.topics import Topics
from pipeline.web import dead, messages
from pipeline.web.bodies import Content, content_of, preview_of
from pipeline.web.call import Call, Parameters
from pipeline.web.charts import RANGES
from pipeline.web.live import PARTS, View
from pipeline.web.problems import Problem
from pipeline.web.rendering import HEADERS, TYPES, day_text, path_of, static_files
from pipeline.web.site import Site, Visitor

PAGE: Final = 50
QUIET: Final = ("done", "count", "more")  # what a page is told about the change before it
MESSAGE_FILTERS: Final = ("from", "to", "topic")


async def overview(site: Site, call: Call, visitor: Visitor) -> Response:
    """Show what waits, what comes due when, and how it goes."""
    given = call.parameters("hours", *QUIET)
    hours = given.number("hours", 24, min(RANGES), max(RANGES))
    if hours not in RANGES:
        raise Problem("bad_parameter", f"The parameter hours takes {', '.join(map(str, RANGES))}.")
    return await _followed(site, call, visitor, "overview", str(hours))


async def loops(site: Site, call: Call, visitor: Visitor) -> Response:
    """Show the drain loops and ingest jobs, each with its numbers."""
    call.parameters(*QUIET)
    return await _followed(site, call, visitor, "loops", "")


async def list_topics(site: Site, call: Call, visitor: Visitor) -> Response:
    """Show what topics hold."""
    return await _followed(site, call, visitor, "topics", call.parameters("after", *QUIET).text("after"))


async def show_topic(site: Site, call: Call, visitor: Visitor) -> Response:
    """Show a topic, its groups and its settings."""
    call.parameters(*QUIET)
    return await _followed(site, call, visitor, "topic", topic_name(call))


def topic_name(call: Call) -> str:
    """Return the topic that an address names.

    Raises:
        Problem: ``not_found``: none can have this name.
    """
    try:
        return check_name("topic", call.path["topic"])
    except ConfigError as exc:
        raise Problem("not_found", str(exc)) from exc


async def _followed(site: Site, call: Call, visitor: Visitor, page: str, about: str) -> Response:
    """Show a page that follows what happens."""
    values = await site.hub.values((page, about))
    address = path_of("live", page=page, about=about)
    return site.render(f"{page}.html", call, visitor, page=page, live=address, about=about, **values)


async def live(site: Site, call: Call, visitor: Visitor) -> Response:
    """Send what changes of a page, as server-sent events."""
    given = call.parameters("page", "about")
    view: View = (given.text("page"), given.text("about"))
    if view[0] not in PARTS or (view[0] == "overview" and view[1] not in map(str, RANGES)):
        raise Problem("bad_parameter", "There is no such page that follows what happens.")
    if view[0] == "topic":
        try:
            check_name("topic", view[1])
        except ConfigError as exc:
            raise Problem("bad_parameter", str(exc)) from exc
    site.hub.check_room()
    headers = {**HEADERS, "X-Accel-Buffering": "no"}  # which a proxy that collects answers asks for
    return StreamingResponse(site.hub.stream(view), 200, headers, "text/event-stream")


async def list_messages(site: Site, call: Call, visitor: Visitor) -> Response:
    """Show what is scheduled, by due time."""
    given = call.parameters(*MESSAGE_FILTERS, "cursor", *QUIET)
    from_ms, until_ms, topic = message_filter(given)
    after = messages.read_cursor(given)
    api = site.api

    def read() -> tuple[Any, Any, int]:
        found, last = messages.read_page(api, from_ms, until_ms, topic, PAGE, after)
        return found, last, Topics(api.client, api.shards).now_ms()

    found, last, now_ms = await api.ask(read)
    chosen = filter_values(from_ms, until_ms, topic)
    shows = api.settings.api.show_messages
    rows = [
        (each, path_of("messages", each.id), preview_of(each.message.body, each.message.headers) if shows else "")
        for each in found
    ]
    changes = {verb: path_of("change", "messages", verb=verb, **chosen) for verb in ("cancel", "move", "now")}
    more = path_of("messages", **chosen, cursor=messages.cursor_of(last)) if last else ""
    return site.render(
        "messages.html", call, visitor, page="messages", rows=rows, now_ms=now_ms, more=more, chosen=chosen, changes=changes,
        has_cursor=after is not None,
    )  # fmt: skip


def message_filter(given: Parameters) -> tuple[int, int, str]:
    """Return from when, until when and of which topic.

    Raises:
        Problem: ``bad_parameter``.
    """
    from_ms, until_ms = (time_of_form(given, name, default) for name, default in (("from", 0), ("to", DUE_MS_MAX)))
    if from_ms > until_ms:
        raise Problem("bad_parameter", "The time from lies behind the time to.")
    return from_ms, until_ms, given.topic("topic")


def time_of_form(given: Parameters, name: str, default: int) -> int:
    """Return a time as epoch ms; one without a zone, as forms have it, is UTC; "" is the default.

    Raises:
        Problem: ``bad_parameter``.
    """
    text = given.text(name).strip()
    is_local = "T" in text and len(text) in (16, 19)
    return Parameters({name: f"{text}Z" if is_local else text}).time_ms(name, default) if text else default


def filter_values(from_ms: int, until_ms: int, topic: str) -> dict[str, str]:
    """Return a filter as the fields of a form have it."""
    found = {"from": day_text(from_ms) if from_ms else "", "to": day_text(until_ms) if until_ms < DUE_MS_MAX else ""}
    # What the fields would cut, the milliseconds, is kept.
    for name, ms in (("from", from_ms), ("to", until_ms)):
        found[name] = str(ms) if found[name] and ms % 1000 else found[name]
    return {**found, "topic": topic}


async def find(site: Site, call: Call, visitor: Visitor) -> Response:
    """Lead to the message of an id."""
    name = call.parameters("id").text("id").strip()
    if not messages.is_name(name):
        raise Problem("unknown_id", "An id has 1 to 128 of A-Z a-z 0-9 . _ : -, and a handle begins with ~.")
    return site.go(call, visitor, path_of("messages", name))


async def show_message(site: Site, call: Call, visitor: Visitor) -> Response:
    """Show a message: where it is, and what it holds if it waits."""
    call.parameters(*QUIET)
    name = call.path["id"]
    if not messages.is_name(name):
        raise Problem("unknown_id", "That is no id.")
    async with asyncio.timeout(site.api.settings.api.patience_sec):
        found = await site.api.get(name)
    now_ms = await site.api.ask(lambda: Topics(site.api.client, site.api.shards).now_ms())
    # The page of a message that was just scheduled, reloaded once it has gone.
    was_scheduled = found.message is None and call.quiet_parameters().get("done") == "scheduled"
    status = 404 if found.state is State.UNKNOWN and not was_scheduled else 200
    return site.render(
        "message.html", call, visitor, status, page="messages", name=name, found=found, now_ms=now_ms,
        content=shown_content(site, found.message), path_here=path_of("messages", name), is_waiting=found.message is not None,
        was_scheduled=was_scheduled, has_notice=not was_scheduled,
    )  # fmt: skip


def shown_content(site: Site, message: Message | None) -> Content | None:
    """Return what is shown of a body; None if there is none, or it is not shown."""
    if message is None or not site.api.settings.api.show_messages:
        return None
    return content_of(message.body, message.headers)


async def list_dead(site: Site, call: Call, visitor: Visitor) -> Response:
    """Show dead letters, the oldest of each topic first."""
    given = call.parameters(*dead.FILTERS, "cursor", *QUIET)
    chosen = {name: given.text(name).strip() for name in dead.FILTERS}
    filter_ = dead.Filter.of(chosen)
    cursor = given.text("cursor")
    after = read_name(cursor)
    if cursor and after is None:
        raise Problem("bad_parameter", "The parameter cursor takes what the page before has as its cursor.")
    api = site.api

    def read() -> tuple[list[DeadLetter], DeadLetter | None, int]:
        found, last = dead.read_page(api, filter_, PAGE, after)
        return found, last, Topics(api.client, api.shards).now_ms()

    found, last, now_ms = await api.ask(read)
    return site.render(
        "dead.html", call, visitor, page="dead", now_ms=now_ms, chosen=chosen, has_cursor=after is not None,
        rows=[(letter, path_of("letter", name=letter.name)) for letter in found],
        more=path_of("dead", **chosen, cursor=last.name) if last else "",
        changes={verb: path_of("change", "dead", verb=verb, **chosen) for verb in ("redrive", "purge")},
    )  # fmt: skip


async def show_letter(site: Site, call: Call, visitor: Visitor) -> Response:
    """Show a dead letter: why it died, and what it holds."""
    name = call.parameters("name", *QUIET).text("name")
    api = site.api
    letter, now_ms = await api.ask(
        lambda: (DeadLetters(api.client, api.shards).find(name), Topics(api.client, api.shards).now_ms())
    )
    if letter is None:
        raise Problem("not_found", "It is not there any more: it was scheduled again, or dropped.")
    detail = content_of(letter.detail, {}).text if api.settings.api.show_messages else ""
    content = shown_content(site, letter)
    return site.render(
        "letter.html", call, visitor, page="dead", letter=letter, now_ms=now_ms, detail=detail, content=content
    )


async def static(site: Site, call: Call, visitor: Visitor) -> Response:
    """Send a file beside the pages."""
    name = call.path["name"]
    if name not in TYPES:
        raise Problem("not_found", "There is no such file.")
    content, version = static_files()[name]
    is_current = call.quiet_parameters().get("v") == version
    caching = {"Cache-Control": "public, max-age=31536000, immutable"} if is_current else {}
    headers: Mapping[str, str] = {**HEADERS, **caching}
    return Response(content, 200, headers, f"{TYPES[name]}; charset=utf-8")
