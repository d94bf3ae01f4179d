"""Topics: what they hold, their settings and groups; pause and resume."""

from dataclasses import asdict
from typing import Any

from starlette.responses import Response

from pipeline.config import check_name
from pipeline.core.errors import ConfigError
from pipeline.store.namespace import current_topic_settings
from pipeline.store.topics import Topics
from pipeline.web.api import Api
from pipeline.web.call import Call, answer
from pipeline.web.problems import Problem

PAGE, PAGE_MAX = 100, 500  # topics that a listing returns


def _topics(api: Api) -> Topics:
    return Topics(api.client, api.shards)


def _name(call: Call) -> str:
    try:
        return check_name("topic", call.path["topic"])
    except ConfigError as exc:
        raise Problem("bad_parameter", str(exc)) from exc


async def list_page(api: Api, call: Call) -> Response:
    """Return what topics hold, in order of their names, and a cursor if there are more."""
    given = call.parameters("limit", "cursor")
    limit, after = given.number("limit", PAGE, 1, PAGE_MAX), given.text("cursor")

    def read() -> tuple[list[dict[str, Any]], bool]:
        topics = _topics(api)
        names = [name for name in topics.names() if name > after]
        return [asdict(topics.look(name)) for name in names[:limit]], len(names) > limit

    found, has_more = await api.ask(read)
    record: dict[str, Any] = {"topics": found}
    if has_more:
        record["cursor"] = found[-1]["name"]
    return answer(record)


async def look(api: Api, call: Call) -> Response:
    """Return what a topic holds, how far each group is, and the settings that count for it."""
    call.parameters()
    name = _name(call)

    def read() -> dict[str, Any]:
        topics = _topics(api)
        groups = [asdict(group) for group in topics.groups(name)]
        settings = asdict(current_topic_settings(api.client, api.settings, name))
        return {**asdict(topics.look(name)), "groups": groups, "settings": settings}

    return answer(await api.ask(read))


async def pause(api: Api, call: Call) -> Response:
    """Hold what comes due of a topic from now on."""
    call.parameters()
    name = _name(call)

    def change() -> dict[str, Any]:
        topics = _topics(api)
        topics.pause(name, topics.now_ms())
        return asdict(topics.look(name))

    return answer(await api.ask(change))


async def resume(api: Api, call: Call) -> Response:
    """End a pause, and let drain loops deliver what was held."""
    call.parameters()
    name = _name(call)

    def change() -> dict[str, Any]:
        topics = _topics(api)
        topics.resume(name)
        return asdict(topics.look(name))

    return answer(await api.ask(change))
