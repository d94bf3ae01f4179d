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
BEHIND = b"\xff"  # all members that begin with an id are before it and this: no text in UTF-8 has such a byte

Place = tuple[float, bytes]  # where to go on: at this due time, with the first member that is not before this text
Row = tuple[bytes, float]  # member, due_ms


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
    place: Place = (from_ms, b"")
    if after is not None:
        place = max(place, (after[0], after[1].encode() + BEHIND))
    return merge(*(_walk(client, keys, place, until_ms) for keys in shards), key=lambda found: found[:2])


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


def _walk(client: Any, keys: Keys, place: Place, until_ms: int) -> Iterator[ScheduledMessage]:
    start = bucket_start_ms(int(place[0]))
    if start < until_ms:
        yield from _walk_bucket(client, keys.bucket(start), place, until_ms)
    while group := _next_buckets(client, keys, start, until_ms):
        names = [keys.bucket(start) for start in group]
        with translated_errors():
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.zrange(name, 0, PAGE - 1, withscores=True)
            pages = pipeline.execute()
        for name, page in zip(names, pages, strict=True):
            for member, score in page:
                if score >= until_ms:
                    return
                yield _message(member, score)
            if len(page) == PAGE:  # there may be more of it
                yield from _walk_bucket(client, name, _behind(page[-1]), until_ms)
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


def _walk_bucket(client: Any, key: str, place: Place, until_ms: int) -> Iterator[ScheduledMessage]:
    while True:
        with translated_errors():
            page = _page_from(client, key, place)
        if not page:
            return
        for member, score in page:
            if score >= until_ms:
                return
            yield _message(member, score)
        place = _behind(page[-1])


def _page_from(client: Any, key: str, place: Place) -> list[Row]:
    """Return the next members from a place on, none at the end of the bucket.

    What loops claim meanwhile shifts the ranks. So a page counts only if it begins with a member that is before the place, or with
    the first of all: then nothing between the two was left out.
    """
    rank, step = _rank_of(client, key, place) - 1, PAGE
    while True:
        page: list[Row] = client.zrange(key, max(rank, 0), max(rank, 0) + PAGE - 1, withscores=True)
        if rank > 0 and (not page or _place_of(page[0]) >= place):
            rank, step = rank - step, 2 * step
            continue
        found = [row for row in page if _place_of(row) >= place]
        if found or len(page) < PAGE:
            return found
        rank = max(rank, 0) + PAGE - 1  # more has come before the place than a page holds


def _place_of(row: Row) -> Place:
    return row[1], row[0]


def _behind(row: Row) -> Place:
    return row[1], row[0] + b"\0"


def _message(member: bytes, score: float) -> ScheduledMessage:
    message_id = member[:MESSAGE_ID_LENGTH].decode("utf-8", "replace")
    return ScheduledMessage(int(score), message_id, Message.read_member(member, int(score)))


def _rank_of(client: Any, key: str, place: Place) -> int:
    """Return the rank of the first member from a place on. A million may be due at its millisecond, so it is found by halves."""
    due_ms, first = place
    low: int = client.zcount(key, "-inf", f"({due_ms}")
    high = low + client.zcount(key, due_ms, due_ms) if first else low
    while low < high:
        middle = (low + high) // 2
        found = client.zrange(key, middle, middle)
        if found and found[0] < first:
            low = middle + 1
        else:
            high = middle
    return low
