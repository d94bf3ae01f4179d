"""Listing what is scheduled, in order of due time, a page at a time."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from heapq import merge
from itertools import accumulate
from typing import Any, NamedTuple

from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.due import DUE_MS_MAX, time_of_ms
from pipeline.core.ids import MESSAGE_ID_LENGTH
from pipeline.core.messages import Message
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys
from pipeline.store.places import handle
from pipeline.store.stats import ask_each

PAGE = 500  # members a round trip
BUCKETS_AHEAD = 100  # of which the next page may be made


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


def count_scheduled(client: Any, keys: Keys, from_ms: int, until_ms: int) -> dict[int, int]:
    """Return how many messages each bucket of a shard has that reaches into a time (epoch ms UTC), by its start.

    Raises:
        StoreError: no answer, or an error.
    """
    with translated_errors():
        found = client.zrange(keys.buckets(), bucket_start_ms(from_ms), f"({until_ms}", byscore=True)
        starts = [int(each) for each in found]
        counts = [*ask_each(client, ("ZCARD",), [keys.bucket(each) for each in starts])]
    return dict(zip(starts, counts, strict=True))


def _walk(
    client: Any, keys: Keys, from_ms: int, until_ms: int, after: tuple[int, str] | None
) -> Iterator[ScheduledMessage]:
    start = bucket_start_ms(from_ms)
    if start < until_ms:
        yield from _walk_bucket(client, keys.bucket(start), from_ms, until_ms, after)
    while group := _next_buckets(client, keys, start, until_ms):
        names = [keys.bucket(start) for start in group]
        with translated_errors():
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.zrange(name, 0, PAGE - 1, withscores=True)
            pages = pipeline.execute()
        for name, page in zip(names, pages, strict=True):
            last = None
            for member, score in page:
                if score >= until_ms:
                    return
                last = _message(member, score)
                yield last
            if len(page) == PAGE and last:  # there may be more of it
                yield from _walk_bucket(client, name, 0, until_ms, last[:2])
        start = group[-1]


def _next_buckets(client: Any, keys: Keys, start: int, until_ms: int) -> list[int]:
    """Return the next buckets: as many as have a page of messages together, or else one."""
    with translated_errors():
        found = client.zrange(
            keys.buckets(), start + BUCKET_WIDTH_MS, f"({until_ms}", byscore=True, offset=0, num=BUCKETS_AHEAD
        )
        starts = [int(each) for each in found]
        counts = [*ask_each(client, ("ZCARD",), [keys.bucket(each) for each in starts])]
    wholes = sum(total <= PAGE for total in accumulate(counts))
    return starts[: max(1, wholes)]


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
            found = _message(member, score)
            after = found[:2]
            yield found
        if len(page) < PAGE:
            return


def _message(member: bytes, score: float) -> ScheduledMessage:
    message_id = member[:MESSAGE_ID_LENGTH].decode("utf-8", "replace")
    return ScheduledMessage(int(score), message_id, Message.read_member(member, int(score)))


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
