"""A namespace as several shards: each has all keys of its own under its own hash tag, and messages are spread over them.

A message belongs to the shard of its part of a file, or of its idempotency key, so that the same key always meets the
same memory of keys (docs/adr/0010-shards.md). How many shards a namespace has is written down in it: with another number
the markers and idempotency keys would be looked for in the wrong places.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.config import DrainSettings, RedisSettings
from pipeline.store.base import Ack, Claim, ClaimReply, Exchange
from pipeline.store.keys import keys_of
from pipeline.store.redis_store import RedisStore
from pipeline.store.scripts import Scripts


def shard_of(name: str, shards: int) -> int:
    """Return the shard of a part id or idempotency key: CRC-32 of its UTF-8 bytes, modulo the number of shards."""
    return zlib.crc32(name.encode()) % shards


class ShardedStore:
    """All shards of a namespace, as the drain loop and the driver see them; the verbs are those of ``RedisStore``."""

    def __init__(self, shards: Sequence[RedisStore]) -> None:
        self._shards = shards
        self._next = 0

    def markers(self, source_id: str, part_ids: Sequence[str]) -> list[str]:
        """Return how far each part is stored in its own shard; what has an idempotency key may still be missing elsewhere."""
        found: dict[str, str] = {}
        for number, shard in enumerate(self._shards):
            own = [part_id for part_id in part_ids if shard_of(part_id, len(self._shards)) == number]
            found.update(zip(own, shard.markers(source_id, own), strict=True))
        return [found[part_id] for part_id in part_ids]

    def marked_parts(self, source_id: str) -> Iterator[tuple[str, int]]:
        """Walk the markers of a source; one that several shards have comes several times, from each with its own time."""
        for shard in self._shards:
            yield from shard.marked_parts(source_id)

    def forget_markers(self, source_id: str, part_ids: Sequence[str]) -> None:
        """Drop markers from all shards."""
        for shard in self._shards:
            shard.forget_markers(source_id, part_ids)

    def claim(self, name: str) -> ClaimReply:
        """Claim from the first shard that has something due, beginning behind the last that had.

        After ``StoreUnavailable`` the same name goes on with the shard that did not answer, which so gives the same messages.
        """
        replies: list[ClaimReply] = []
        for _ in self._shards:
            reply = self._shards[self._next].claim(name)
            self._next = (self._next + 1) % len(self._shards)
            replies.append(reply)
            if reply.claim is not None or reply.moved:
                break
        claim, now_ms = replies[-1].claim, replies[-1].now_ms
        # What was not due when its shard was asked can be due by now: then at once, and never in the past.
        dues = [] if claim else [max(r.next_due_ms, now_ms) for r in replies if r.next_due_ms is not None]
        return ClaimReply(
            now_ms=now_ms,
            claim=claim,
            next_due_ms=min(dues, default=None),
            first_lease_ms=min((r.first_lease_ms for r in replies if r.first_lease_ms is not None), default=None),
            moved=replies[-1].moved,
        )

    def ack(self, claim: Claim, delivered: int, idempotency_keys: Sequence[str]) -> bool:
        """Forget what is delivered, in the shard of the claim."""
        return self._shards[claim.shard].ack(claim, delivered, idempotency_keys)

    def begin(self, name: str, ack: Ack | None) -> Exchange | None:
        """Begin to acknowledge and to claim, if there is one shard: of more, the next claim is mostly in another."""
        return self._shards[0].begin(name, ack) if len(self._shards) == 1 else None

    def release(self, claim: Claim, delivered: int) -> int:
        """Give back the rest to the shard of the claim."""
        return self._shards[claim.shard].release(claim, delivered)

    def reclaim(self) -> int:
        """Give back the claims of all shards whose lease is over."""
        return sum(shard.reclaim() for shard in self._shards)


def open_shards(
    client: Any,
    settings: RedisSettings,
    drain: DrainSettings | None = None,
    scripts: Scripts | None = None,
    now_ms: Callable[[], int] | None = None,
) -> list[RedisStore]:
    """Return a store for each shard, all of one client; see ``RedisStore``."""
    return [RedisStore(client, keys, drain, scripts, now_ms, settings.shards) for keys in keys_of(settings)]
