"""Batches: many requests in one body, a line each, stored by one transaction in each shard."""

import asyncio
from typing import Any

from starlette.responses import Response

from pipeline.client.commit import Stored
from pipeline.store.base import Changed
from pipeline.store.places import handle_of
from pipeline.web.api import Api
from pipeline.web.call import LINES, Call, answer
from pipeline.web.gunzip import gunzip
from pipeline.web.keyed import Outcome
from pipeline.web.lines import judge_lines, split
from pipeline.web.messages import idempotency_key
from pipeline.web.problems import Problem


async def store(api: Api, call: Call) -> Response:
    """Store the lines of a batch that keep the rules."""
    given = call.parameters("strict", "ids")
    is_strict, with_ids = given.flag("strict"), given.flag("ids")
    key = idempotency_key(call)
    limits = api.settings.api
    body = await call.body(LINES, limits.batch_bytes_max, packed=True)
    try:
        async with asyncio.timeout(limits.patience_sec):
            await api.batches.acquire()
    except TimeoutError:
        raise Problem("busy", "Too many batches are worked on.") from None
    is_packed = call.header(b"content-encoding").lower() == "gzip"
    # Whoever waits may give up; the work goes on, and holds its place until it is done.
    work = api.ask_for_batch(lambda: _work(api, body, is_packed, key, is_strict))
    work.add_done_callback(lambda _: api.batches.release())
    work.add_done_callback(lambda done: done.cancelled() or done.exception())  # which nobody else may look at
    async with asyncio.timeout(limits.patience_sec):
        done = await asyncio.shield(work)
    stored = sum(done.is_new)
    known = len(done.is_new) - stored
    api.meters.stored.inc(stored)
    api.meters.duplicates.inc(known)
    judged, changed = done.judged, done.changed
    record: dict[str, Any] = {"stored": stored, "known": known + changed.duplicates, "rejected": judged.rejected}
    if judged.changes:
        record |= {"cancelled": changed.cancelled, "replaced": changed.replaced, "late": changed.late}
    if with_ids:
        ids: list[str | None] = [None] * judged.count
        for place, message in zip(judged.places, done.messages, strict=True):
            ids[place] = handle_of(message)
        for place, change in zip(judged.change_places, judged.changes, strict=True):
            ids[place] = change.key
        record["ids"] = ids
    return answer(record)


def _work(api: Api, body: bytes, is_packed: bool, key: str, is_strict: bool) -> Outcome:
    """Judge and store, in a thread."""
    limits = api.settings.api
    if is_packed:
        body = gunzip(body, limits.batch_bytes_max)
    if body.count(b"\n") > limits.batch_lines_max:
        raise Problem("body_too_long", f"At most {limits.batch_lines_max} lines are allowed.")
    lines = split(body)
    if len(lines) > limits.batch_lines_max:
        raise Problem("body_too_long", f"At most {limits.batch_lines_max} lines are allowed.")
    with api.room_for_batch(len(lines), len(body)):
        if key:
            return api.keyed.store(key, body, lambda arrival_ms: judge_lines(lines, arrival_ms, is_strict))
        judged = judge_lines(lines, api.clock.wall_ms(), is_strict)
        stored: list[Stored] = []
        for result in api.duetime.try_all(judged.messages) if judged.messages else []:
            if not isinstance(result, Stored):
                raise result
            stored.append(result)
        changed = api.duetime.apply(judged.changes) if judged.changes else Changed()
        messages = [each.message for each in stored]
        return Outcome(judged, messages, [not each.is_duplicate for each in stored], changed)
