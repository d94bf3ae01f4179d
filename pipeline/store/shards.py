"""A namespace as several shards: each has all keys of its own under its own hash tag, and messages are spread over them.

A message belongs to the shard of its part of a file, or of its idempotency key, so that the same key always meets the
same memory of keys (docs/adr/0010-shards.md). How many shards a namespace has is written down in it: with another number
the markers and idempotency keys would be looked for in the wrong places.
"""

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pipeline.config import DrainSettings, RedisSettings
from pipeline.core.errors import StoreUnavailable
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys, keys_of
from pipeline.store.redis_store import RedisStore
from pipeline.store.scripts import Scripts
from pipeline.store.topology import client_of

log = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")


def shard_of(name: str, shards: int) -> int:
    """Return the shard of a part id or idempotency key: CRC-32 of its UTF-8 bytes, modulo the number of shards."""
    return zlib.crc32(name.encode()) % shards


class ShardedMarkers:
    """The progress markers of all shards, for the driver of the ingest job; the verbs are those of ``RedisStore``."""

    def __init__(self, shards: Sequence[RedisStore]) -> None:
        self._shards = shards

    def markers(self, source_id: str, part_ids: Sequence[str]) -> list[str]:
        """Return how far each part is stored in its own shard; what has an idempotency key may still be missing elsewhere."""
        found: dict[str, str] = {}
        for number, shard in enumerate(self._shards):
            own = [part_id for part_id in part_ids if shard_of(part_id, len(self._shards)) == number]
            found.update(zip(own, shard.markers(source_id, own), strict=True))
        return [found[part_id] for part_id in part_ids]

    def markers_that_answer(self, source_id: str, part_ids: Sequence[str]) -> list[tuple[str, ...]]:
        """Return for each part its marker in each shard that is not away.

        Raises:
            StoreUnavailable: no shard answers.
        """
        found = those_that_answer(self._shards, lambda shard: shard.markers(source_id, part_ids))
        return list(zip(*found, strict=True))

    def marked_parts(self, source_id: str) -> Iterator[tuple[str, int]]:
        """Walk the markers of a source; one that several shards have comes several times, from each with its own time."""
        for shard in self._shards:
            yield from shard.marked_parts(source_id)

    def forget_markers(self, source_id: str, part_ids: Sequence[str]) -> None:
        """Drop markers from all shards."""
        for shard in self._shards:
            shard.forget_markers(source_id, part_ids)


def open_shards(
    client: Any,
    settings: RedisSettings,
    drain: DrainSettings | None = None,
    scripts: Scripts | None = None,
    now_ms: Callable[[], int] | None = None,
) -> list[RedisStore]:
    """Return a store for each shard; see ``RedisStore``."""
    return [
        RedisStore(client_of(client, keys), keys, drain, scripts, now_ms, settings.shards) for keys in keys_of(settings)
    ]


def first_that_answers(shards: Sequence[Keys], call: Callable[[Keys], T]) -> T:
    """Ask the first shard, or another one if that is away.

    Raises:
        StoreError: no shard answers, or an error.
    """
    *firsts, last = shards
    for keys in firsts:
        try:
            with translated_errors():
                return call(keys)
        except StoreUnavailable as exc:
            log.debug("shard %d is away: %s", keys.shard, exc)
    with translated_errors():
        return call(last)


def those_that_answer(shards: Sequence[S], call: Callable[[S], T]) -> list[T]:
    """Ask all shards and return the answers, fewer if some are away.

    Raises:
        StoreError: no shard answers, or an error.
    """
    answers: list[T] = []
    for shard in shards:
        try:
            with translated_errors():
                answers.append(call(shard))
        except StoreUnavailable as exc:
            away = exc
            log.debug("a shard is away: %s", exc)
    if not answers:
        raise away
    return answers
