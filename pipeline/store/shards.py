"""A namespace as several shards: each has all keys of its own under its own hash tag, and messages are spread over them.

A message belongs to the shard of its file, or of the id that its caller gave it, so that the same id always meets the same memory
of ids (docs/adr/0010-shards.md). How many shards a namespace has is written down in it: with another number the fences and ids
would be looked for in the wrong places.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.config import DrainSettings, RedisSettings
from pipeline.core.errors import ConfigError
from pipeline.store.base import Claim, ClaimReply, Stats
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.routes import ALL_TO_SCREEN, TopicRules


def shard_of(name: str, shards: int) -> int:
    """Return the shard of a fence token or caller's id: CRC-32 of its UTF-8 bytes, modulo the number of shards."""
    return zlib.crc32(name.encode()) % shards


def keys_of(settings: RedisSettings) -> list[Keys]:
    """Return the keys of each shard; those of the first also hold what a namespace has once."""
    return [Keys(settings.namespace, shard) for shard in range(settings.shards)]


def check_layout(client: Any, settings: RedisSettings, may_set: bool) -> None:
    """Compare the number of shards with that of the namespace; the first job that ``may_set`` it does.

    Raises:
        ConfigError: the namespace has another number.
        StoreUnavailable: no answer.
    """
    key = Keys(settings.namespace).layout()
    with translated_errors():
        found = client.set(key, settings.shards, nx=True, get=True) if may_set else client.get(key)
    if found is not None and int(found) != settings.shards:
        raise ConfigError(
            f"The namespace {settings.namespace} has {int(found)} shards, not {settings.shards}; set redis.shards = {int(found)}, "
            f"take another namespace, or, if nothing was ever stored in this one, delete its key {key}."
        )


class ShardedStore:
    """All shards of a namespace, as the drain loop and the driver see them; the verbs are those of ``RedisStore``."""

    def __init__(self, shards: Sequence[RedisStore]) -> None:
        self._shards = shards
        self._next = 0

    def fences(self, source_id: str, fence_tokens: Sequence[str]) -> list[str]:
        """Return how far each file is stored in its own shard; what callers gave an id may still be missing elsewhere."""
        found: dict[str, str] = {}
        for number, shard in enumerate(self._shards):
            tokens = [token for token in fence_tokens if shard_of(token, len(self._shards)) == number]
            found.update(zip(tokens, shard.fences(source_id, tokens), strict=True))
        return [found[token] for token in fence_tokens]

    def fenced_tokens(self, source_id: str) -> Iterator[str]:
        """Walk the fences of a source; one that several shards have comes several times."""
        for shard in self._shards:
            yield from shard.fenced_tokens(source_id)

    def forget_fences(self, source_id: str, fence_tokens: Sequence[str]) -> None:
        """Drop fences from all shards."""
        for shard in self._shards:
            shard.forget_fences(source_id, fence_tokens)

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
        claim = replies[-1].claim
        dues = [] if claim else [reply.next_due_ms for reply in replies if reply.next_due_ms is not None]
        return ClaimReply(
            now_ms=replies[-1].now_ms,
            claim=claim,
            next_due_ms=min(dues, default=None),
            first_lease_ms=min((r.first_lease_ms for r in replies if r.first_lease_ms is not None), default=None),
            moved=replies[-1].moved,
        )

    def ack(self, claim: Claim, delivered: int, caller_ids: Sequence[str]) -> bool:
        """Forget what is delivered, in the shard of the claim."""
        return self._shards[claim.shard].ack(claim, delivered, caller_ids)

    def release(self, claim: Claim, delivered: int) -> int:
        """Give back the rest to the shard of the claim."""
        return self._shards[claim.shard].release(claim, delivered)

    def reclaim(self) -> int:
        """Give back the claims of all shards whose lease is over."""
        return sum(shard.reclaim() for shard in self._shards)

    def stats(self) -> Stats:
        """Add up what the shards have."""
        each = [shard.stats() for shard in self._shards]
        names = {name for stats in each for name in stats.counters}
        return Stats(
            now_ms=max(stats.now_ms for stats in each),
            scheduled=sum(stats.scheduled for stats in each),
            held=sum(stats.held for stats in each),
            in_flight=sum(stats.in_flight for stats in each),
            dead=sum(stats.dead for stats in each),
            next_due_ms=min((s.next_due_ms for s in each if s.next_due_ms is not None), default=None),
            overdue_ms=max(stats.overdue_ms for stats in each),
            counters={name: sum(stats.counters.get(name, 0) for stats in each) for name in names},
        )


def open_shards(
    client: Any, settings: RedisSettings, drain: DrainSettings | None = None, rules: TopicRules = ALL_TO_SCREEN
) -> list[RedisStore]:
    """Return a store for each shard, all of one client."""
    return [RedisStore(client, keys, drain, rules=rules) for keys in keys_of(settings)]
