"""One look at everything that a namespace holds."""

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.store.base import Stats
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys

PAGE = 1_000  # keys a round trip


def survey(client: Any, keys: Keys, now_ms: int) -> Stats:
    """Count what is there. Not atomic: a message that is claimed meanwhile may count as both scheduled and in flight.

    Args:
        client: a ``redis.Redis``.

        now_ms: the server's clock, epoch ms.
    Raises:
        StoreUnavailable: no answer.
    """
    with translated_errors():
        starts = [int(start) for start in client.zrange(keys.buckets(), 0, -1)]
        scheduled = sum(ask_each(client, ("ZCARD",), [keys.bucket(start) for start in starts]))
        next_due_ms = first_due_ms(client, keys, starts)
        claims = [keys.claim(token.decode()) for token in client.zrange(keys.claims(), 0, -1)]
        in_flight = sum(ask_each(client, ("LLEN",), claims)) // 2
        heads = [int(due_ms) for due_ms in ask_each(client, ("LINDEX",), claims, (1,)) if due_ms is not None]
        counters = client.hgetall(keys.counters())
        topics = [topic.decode() for topic in client.smembers(keys.topics())]
        helds = [keys.held(topic) for topic in topics]
        held = sum(ask_each(client, ("ZCARD",), helds))
        dead = sum(ask_each(client, ("XLEN",), [keys.dead(topic) for topic in topics]))
        heads += [int(score) for key in helds for _, score in client.zrange(key, 0, 0, withscores=True)]
    oldest_ms = min([*heads, *([] if next_due_ms is None else [next_due_ms])], default=now_ms)
    return Stats(
        now_ms=now_ms,
        scheduled=scheduled + held,
        held=held,
        in_flight=in_flight,
        dead=dead,
        next_due_ms=next_due_ms,
        overdue_ms=max(0, now_ms - oldest_ms),
        counters={name.decode(): int(value) for name, value in counters.items()},
    )


def first_due_ms(client: Any, keys: Keys, starts: Sequence[int]) -> int | None:
    """Return the due time of the oldest message; a bucket that was emptied may still be in the index for a moment."""
    for start in starts:
        head = client.zrange(keys.bucket(start), 0, 0, withscores=True)
        if head:
            return int(head[0][1])
    return None


def ask_each(client: Any, command: tuple[str, ...], names: Sequence[str], rest: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Give one command to each key, many in a round trip."""
    for first in range(0, len(names), PAGE):
        pipeline = client.pipeline(transaction=False)
        for name in names[first : first + PAGE]:
            pipeline.execute_command(*command, name, *rest)
        yield from pipeline.execute()
