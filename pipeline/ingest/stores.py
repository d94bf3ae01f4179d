"""The stores of a Python worker of Spark, which live as long as it does, and how long its tasks wait for them."""

import os
import random
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from pipeline.config import DrainSettings, RedisSettings, Settings
from pipeline.core.clock import Clock, SystemClock
from pipeline.core.errors import StoreUnavailable
from pipeline.ingest.cold_folder import ColdFolder, ColdPlace
from pipeline.store.base import SchedulingStore
from pipeline.store.by_id import MessagesById
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.redis_store import RedisStore
from pipeline.store.retry import retry_until_available
from pipeline.store.shards import open_shards
from pipeline.store.topology import CLUSTER, kind_of

T = TypeVar("T")
Opener = Callable[[Settings], AbstractContextManager[tuple[Any, Settings]]]  # connects, and finds the server if need be


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """What travels to the executors: values only, no clients."""

    redis: RedisSettings
    source_id: str
    rejects: str
    transaction_messages: int
    wait_for_disk: bool = False
    id_retention_sec: int = DrainSettings().id_retention_sec
    wait_for_replicas: int = 0
    tells_history: bool = False  # whether writers tell of the history of the servers that they wrote to
    rejects_mark: str = ""  # of the folder that all writers share, as ``RejectsWriter`` has it
    patience_ms: float = 0  # for the shards that are away, of a batch; 0: no end
    cold: ColdPlace | None = None  # None: no message of a file is cold


def patience_ms_of(redis: RedisSettings, patience_sec: float) -> float:
    """Return how long a batch waits for shards that are away: only where other servers than theirs go on."""
    return patience_sec * 1_000 if redis.shards > 1 and kind_of(redis.url) == CLUSTER else 0


def no_slower_than(redis: RedisSettings, limit_ms: float) -> RedisSettings:
    """Return settings by which no call waits for longer than a limit; 0 is none."""
    connect_ms, reply_ms = redis.connect_timeout_ms, redis.reply_timeout_ms
    limit = round(limit_ms) or max(connect_ms, reply_ms)
    return replace(redis, connect_timeout_ms=min(connect_ms, limit), reply_timeout_ms=min(reply_ms, limit))


class Retry(Protocol):
    """Makes a call until the server answers, or the folder of cold files can be used."""

    def __call__(self, call: Callable[[], T]) -> T: ...


def open_cold_folder(place: ColdPlace) -> ColdFolder:
    """Return this process's view of the folder of cold files."""
    key = (os.getpid(), place.folder, place.folder_id)
    if key not in _cold_folders:
        _cold_folders[key] = ColdFolder(place.folder, place.folder_id)
    return _cold_folders[key]


def retrying(call: Callable[[], T]) -> T:
    """Make a call to a store until the server answers; Spark ends the wait by ending the task."""
    return retry_until_available(call, lambda ms: threading.Event().wait(ms / 1000), SystemClock(), random.random)


class Patience:
    """How long the tasks of a batch wait, in one process and all together, for shards whose servers do not answer.

    A shard that they have given up is ``away``: it is not asked again, so that it costs the others no more time.

    Args:
        limit_ms: 0 is none; then nothing is given up.

        away: shards that are known to be away.
    """

    def __init__(self, limit_ms: float = 0, away: Collection[int] = (), clock: Clock | None = None) -> None:
        self._limit_ms = limit_ms
        self._waited_ms = 0.0
        self._clock = clock or SystemClock()
        self.away = {*away}

    def retrying(self, shard: int, call: Callable[[], T]) -> T:
        """Make a call to the store of a shard until its server answers, or the patience is at its end.

        Raises:
            StoreUnavailable: the shard is away.
        """
        if shard in self.away:
            raise StoreUnavailable(f"Shard {shard} is away.")
        if not self._limit_ms:
            return retrying(call)
        began_ms, waits = self._clock.monotonic_ms(), 0

        def left_ms() -> float:
            return self._limit_ms - self._waited_ms - (self._clock.monotonic_ms() - began_ms)

        def wait(ms: float) -> None:
            nonlocal waits
            waits += 1
            threading.Event().wait(max(0.0, min(ms, left_ms())) / 1_000)

        try:
            return retry_until_available(call, wait, self._clock, random.random, lambda: left_ms() <= 0)
        except StoreUnavailable:
            self.away.add(shard)
            raise
        finally:
            if waits or shard in self.away:  # one that is answered at once takes nothing, however long it works
                self._waited_ms += self._clock.monotonic_ms() - began_ms


_patience: dict[tuple[int, int], Patience] = {}  # of the last writings, by process and number
PATIENCE_MAX = 8


def patience_of(settings: WriterSettings, number: int, away: Collection[int]) -> Patience:
    """Return the patience that this process has with a writing; ``number`` is unique to it."""
    key = (os.getpid(), number)
    if key not in _patience:
        for old in [*_patience][: 1 - PATIENCE_MAX]:
            del _patience[old]
        _patience[key] = Patience(settings.patience_ms, away)
    return _patience[key]


def wait_until_kept(
    store: SchedulingStore, settings: WriterSettings, retrying: Callable[[Callable[[], Any]], Any] = retrying
) -> list[str]:
    """Wait until what is stored is where the settings say; returns the history of the server, if that is wanted."""
    if settings.wait_for_disk or settings.wait_for_replicas:
        retrying(partial(store.wait_for_copies, settings.wait_for_disk, settings.wait_for_replicas))
    return [retrying(store.history)] if settings.tells_history else []


_clients: dict[tuple[int, RedisSettings], Any] = {}
_cold_folders: dict[tuple[int, str, str], ColdFolder] = {}
_stores: dict[tuple[int, RedisSettings], list[RedisStore]] = {}
_changing_stores: dict[tuple[int, WriterSettings], list[MessagesById]] = {}


def open_stores(settings: RedisSettings) -> list[RedisStore]:
    """Return this process's stores, one a shard; Python workers live on from batch to batch, and so do their connections."""
    key = (os.getpid(), settings)
    if key not in _stores:
        _stores[key] = open_shards(open_client_once(settings), settings)
    return _stores[key]


def open_changing_stores(settings: WriterSettings) -> list[MessagesById]:
    """Return the same shards for the lines that cancel and replace."""
    key = (os.getpid(), settings)
    if key not in _changing_stores:
        client, retention_ms = open_client_once(settings.redis), settings.id_retention_sec * 1_000
        _changing_stores[key] = [MessagesById(client, [keys], retention_ms) for keys in keys_of(settings.redis)]
    return _changing_stores[key]


def open_client_once(settings: RedisSettings) -> Any:
    """Return this process's connection."""
    key = (os.getpid(), settings)
    if key not in _clients:
        _clients[key] = connect(settings)
    return _clients[key]
