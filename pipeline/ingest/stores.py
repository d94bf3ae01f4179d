"""The stores of a Python worker of Spark, which live as long as it does."""

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from pipeline.config import DrainSettings, RedisSettings
from pipeline.core.clock import SystemClock
from pipeline.ingest.cold_folder import ColdFolder, ColdPlace
from pipeline.store.base import SchedulingStore
from pipeline.store.by_id import MessagesById
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.redis_store import RedisStore
from pipeline.store.retry import retry_until_available
from pipeline.store.shards import open_shards

T = TypeVar("T")


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
    cold: ColdPlace | None = None  # None: no message of a file is cold


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


def wait_until_kept(store: SchedulingStore, settings: WriterSettings) -> list[str]:
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
        _stores[key] = open_shards(_open_client(settings), settings)
    return _stores[key]


def open_changing_stores(settings: WriterSettings) -> list[MessagesById]:
    """Return the same shards for the lines that cancel and replace."""
    key = (os.getpid(), settings)
    if key not in _changing_stores:
        client, retention_ms = _open_client(settings.redis), settings.id_retention_sec * 1_000
        _changing_stores[key] = [MessagesById(client, [keys], retention_ms) for keys in keys_of(settings.redis)]
    return _changing_stores[key]


def _open_client(settings: RedisSettings) -> Any:
    key = (os.getpid(), settings)
    if key not in _clients:
        _clients[key] = connect(settings)
    return _clients[key]
