"""Listing what is scheduled, in order of due time, a page at a time."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from heapq import merge
from typing import Any, NamedTuple

from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.due import DUE_MS_MAX, time_of_ms
from pipeline.core.ids import MESSAGE_ID_LENGTH
from pipeline.core.messages import Message
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys
from pipeline.store.places import handle

PAGE = 500  # members a round trip


class ScheduledMessage(NamedTuple):
    """A message that waits for its due time: of one that was rescheduled ``message.due_ms`` is when it was due first."""

    due_ms: int
    message_id: str
    message: Message

    @property
    def id(self) -> str:
        """What names it from now on: its idempotency key, else its handle."""
        return self.message.id if self.message.id != self.message_id else handle(self.message_id, self.due_ms)

    @property
    def due(self) -> datetime:
        """``due_ms`` as a time in UTC."""
        return time_of_ms(self.due_ms)


def list_scheduled(
    client: Any,
    shards: Sequence[Keys],
    from_ms: int = 0,
    until_ms: int = DUE_MS_MAX,
    after: tuple[int, str] | None = None,
) -> Iterator[ScheduledMessage]:
    """Walk what is due from ``from_ms`` on and before ``until_ms`` (epoch ms UTC), in order of due time, then of message id.

    What is added, moved or delivered meanwhile may be there or not; all else comes once. What its pause holds, and what is in
    flight, is left out.

    Args:
        after: due time and message id of the last one that the caller has seen.
    Raises:
        StoreError: no answer, or an error.
    """
    if after is not None:
        from_ms = max(from_ms, after[0])
    return merge(*(_walk(client, keys, from_ms, until_ms, after) for keys in shards), key=lambda found: found[:2])


def _walk(
    client: Any, keys: Keys, from_ms: int, until_ms: int, after: tuple[int, str] | None
) -> Iterator[ScheduledMessage]:
    start: int | None = bucket_start_ms(from_ms)
    while start is not None and start < until_ms:
        yield from _walk_bucket(client, keys.bucket(start), from_ms, until_ms, after)
        start = _next_bucket(client, keys, start)


def _next_bucket(client: Any, keys: Keys, start: int) -> int | None:
    with translated_errors():
        found = client.zrange(keys.buckets(), start + BUCKET_WIDTH_MS, "+inf", byscore=True, offset=0, num=1)
    return int(found[0]) if found else None


def _walk_bucket(
    client: Any, key: str, from_ms: int, until_ms: int, after: tuple[int, str] | None
) -> Iterator[ScheduledMessage]:
    while True:
        with translated_errors():
            first = client.zcount(key, "-inf", f"({from_ms}") if after is None else _rank_behind(client, key, after)
            page = client.zrange(key, first, first + PAGE - 1, withscores=True)
        for member, score in page:
            if score >= until_ms:
                return
            message_id = member[:MESSAGE_ID_LENGTH].decode("utf-8", "replace")
            after = (int(score), message_id)
            yield ScheduledMessage(*after, Message.read_member(member, int(score)))
        if len(page) < PAGE:
            return


def _rank_behind(client: Any, key: str, after: tuple[int, str]) -> int:
    """Return the rank of the first member behind a place. A million may be due at its millisecond, so it is found by halves."""
    due_ms, message_id = after[0], after[1].encode()
    low: int = client.zcount(key, "-inf", f"({due_ms}")
    high = low + client.zcount(key, due_ms, due_ms)
    while low < high:
        middle = (low + high) // 2
        found = client.zrange(key, middle, middle)
        if found and found[0][:MESSAGE_ID_LENGTH] <= message_id:
            low = middle + 1
        else:
            high = middle
    return low
