"""What a namespace is: the version of its wire format, and how many shards it has under which hash tags.

The first shard says so. Each other has a copy, for jobs that start while the first is away.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pipeline.config import RedisSettings
from pipeline.core.errors import StoreUnavailable
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys, keys_of

log = logging.getLogger(__name__)

FORMAT_VERSION = 1  # of docs/wire-format.md; higher when an older program can't read what a newer one wrote
_VERSION, _SHARDS, _TAGS = "format_version", "shards", "hash_tags"
_OUTBOX_ID, _COLD_ID = "outbox_id", "cold_folder_id"


def tags_of(settings: RedisSettings) -> str:
    """Return the hash tags of the shards, as the namespace has them."""
    return " ".join(keys.tag for keys in keys_of(settings))


def read_layout(client: Any, settings: RedisSettings, may_create: bool) -> tuple[Keys, Any, Any, Any]:
    """Return which shard says what the namespace is, and then version, number of shards and hash tags, None if it says nothing.

    Args:
        may_create: make what is missing as the settings have it.

    Raises:
        StoreUnavailable: no answer, or none that says what the namespace is.
    """
    layout = {_VERSION: FORMAT_VERSION, _SHARDS: settings.shards, _TAGS: tags_of(settings)}
    first, *others = keys_of(settings)
    try:
        found = _read(client, first)
        if None in found[:2] and may_create:
            _write(client, first, layout)
            found = _read(client, first)
    except StoreUnavailable as exc:
        copied = _read_a_copy(client, others, exc)
        log.warning("shard 0 is away, and with it what jobs tell of themselves: %s", exc)
        return copied
    if may_create and found == _texts(layout):
        for keys in others:
            _copy(client, keys, layout)
    return first, *found


def _texts(layout: Mapping[str, Any]) -> list[bytes]:
    return [str(value).encode() for value in layout.values()]


def _read(client: Any, keys: Keys) -> list[Any]:
    with translated_errors():
        return [*client.hmget(keys.meta(), _VERSION, _SHARDS, _TAGS)]


def _write(client: Any, keys: Keys, layout: Mapping[str, Any]) -> None:
    """Say what a namespace is. One that exists keeps what it has: of two jobs that start at once, the first one decides."""
    with translated_errors():
        pipeline = client.pipeline(transaction=True)
        for name, value in layout.items():
            pipeline.hsetnx(keys.meta(), name, value)
        pipeline.execute()


def _copy(client: Any, keys: Keys, layout: Mapping[str, Any]) -> None:
    """Give a shard its copy. One that is away, or full, gets it from the next job."""
    try:
        if _read(client, keys) != _texts(layout):
            with translated_errors():
                client.hset(keys.meta(), mapping=layout)
    except StoreUnavailable as exc:
        log.debug("shard %d has no copy of what the namespace is: %s", keys.shard, exc)


def _read_a_copy(client: Any, others: Sequence[Keys], exc: StoreUnavailable) -> tuple[Keys, Any, Any, Any]:
    """Return what the first other shard says that has a copy. Of another number of shards most have other keys, and none."""
    for keys in others:
        try:
            found = _read(client, keys)
        except StoreUnavailable:
            continue
        if None not in found:
            return keys, *found
    if not others:
        raise exc
    raise StoreUnavailable(
        f"The first shard of the namespace is away, and no other that answers says what it is: {exc} Start its master, or see "
        "whether redis.namespace and redis.shards are right."
    ) from exc


def outbox_id(client: Any, settings: RedisSettings) -> str:
    """Return what tells the outboxes of this namespace from those of all others, on any server: made by who asks first.

    Raises:
        StoreError: no answer, or an error.
    """
    return _agreed(client, settings, _OUTBOX_ID, secrets.token_hex(8))


def cold_folder_id(client: Any, settings: RedisSettings, new: str = "") -> str:
    """Return the ID of the folder in which messages of this namespace wait, "" if there is none.

    Args:
        new: it becomes the ID if there is none.

    Raises:
        StoreError: no answer, or an error.
    """
    return _agreed(client, settings, _COLD_ID, new)


def _agreed(client: Any, settings: RedisSettings, name: str, new: str) -> str:
    """Return a field on which the first shard decides. Whoever gives a ``new`` one gives the others their copies."""
    first, *others = keys_of(settings)

    def read(keys: Keys) -> Any:
        with translated_errors():
            return client.hget(keys.meta(), name)

    try:
        if new:
            with translated_errors():
                client.hsetnx(first.meta(), name, new)
        found = read(first)
    except StoreUnavailable:
        for keys in others:  # which have a copy
            with suppress(StoreUnavailable):
                if found := read(keys):
                    return str(found.decode())
        raise
    for keys in others if new else ():
        with suppress(StoreUnavailable):
            if read(keys) != found:
                with translated_errors():
                    client.hset(keys.meta(), name, found)
    return (found or b"").decode()
