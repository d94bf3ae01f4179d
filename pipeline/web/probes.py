"""What the API tells about itself and the namespace: alive, ready, status, load, metrics, contract, words of problems."""

from typing import Any, Final

from starlette.responses import Response

from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.status import read_status
from pipeline.store.stats import read_forecast
from pipeline.web.api import Api
from pipeline.web.call import Call, answer, text_answer
from pipeline.web.messages import due_record
from pipeline.web.meters import MEDIA_TYPE
from pipeline.web.openapi import contract as describe
from pipeline.web.problems import Problem, meaning_of

HOURS, HOURS_MAX = 24, 168
PLAIN: Final = "text/plain; charset=utf-8"


async def live(api: Api, call: Call) -> Response:
    """Say that the process answers."""
    return answer({"alive": True})


async def ready(api: Api, call: Call) -> Response:
    """Say whether Redis answers, and what counts as stored."""
    meaning = await api.what_stored_means()
    if meaning is None:
        raise Problem("store_away", "Redis does not answer, or is not fit: the log of the server says more.")
    return answer({"ready": True, "stored_means": meaning})


async def status(api: Api, call: Call) -> Response:
    """Return one look at the namespace and its jobs."""
    call.parameters()
    found = await api.ask(lambda: read_status(api.client, api.shards))
    return answer(found.to_record())


async def load(api: Api, call: Call) -> Response:
    """Return how many messages are scheduled for each ten minutes."""
    hours = call.parameters("hours").number("hours", HOURS, 1, HOURS_MAX)
    found = await api.ask(lambda: read_forecast(api.client, api.shards))
    if found.away:
        raise Problem("store_away", f"Shards do not answer: {', '.join(map(str, found.away))}.")
    present_ms = bucket_start_ms(found.now_ms)
    ends_ms = present_ms + hours * 3_600_000
    past = sum(messages for start_ms, messages in found.buckets.items() if start_ms < present_ms)
    ahead: list[dict[str, Any]] = [
        {"from": due_record(start_ms)["due"], "from_ms": start_ms, "messages": found.buckets.get(start_ms, 0)}
        for start_ms in range(present_ms, ends_ms, BUCKET_WIDTH_MS)
    ]
    return answer({"now_ms": found.now_ms, "past": past, "held": found.held, "ahead": ahead})


async def metrics(api: Api, call: Call) -> Response:
    """Return what is counted, for Prometheus."""
    return text_answer(api.meters.text(), MEDIA_TYPE)


async def contract(api: Api, call: Call) -> Response:
    """Return the description of the API."""
    limits = api.settings.api
    return answer(describe(limits.read_only, bool(limits.tokens), limits.public_url.rstrip("/") or "/"))


async def explain(api: Api, call: Call) -> Response:
    """Say what a word of a problem means."""
    word = call.path["word"]
    try:
        status_code, meaning = meaning_of(word)
    except KeyError:
        raise Problem("not_found", "There is no such word.") from None
    return text_answer(f"{word} (status {status_code}): {meaning}.\n", PLAIN)
