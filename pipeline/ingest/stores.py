"""The stores of a Python worker of Spark, which live as long as it does."""

import os
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pipeline.config import DrainSettings, RedisSettings, Settings
from pipeline.core.clock import SystemClock
from pipeline.store.base import SchedulingStore
from pipeline.store.by_id import MessagesById
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from pipeline.store.redis_store import RedisStore
from pipeline.store.retry import retry_until_available
from pipeline.store.shards import open_shards

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


def retrying(call: Callable[[], T]) -> T:
    """Make a call to a store until the server answers; Spark ends the wait by ending the task."""
    return retry_until_available(call, lambda ms: threading.Event().wait(ms / 1000), SystemClock(), random.random)


def wait_until_kept(store: SchedulingStore, settings: WriterSettings) -> list[str]:
    """Wait until what is stored is where the settings say; returns the history of the server, if that is wanted."""
    if settings.wait_for_disk or settings.wait_for_replicas:
        retrying(partial(store.wait_for_copies, settings.wait_for_disk, settings.wait_for_replicas))
    return [retrying(store.history)] if settings.tells_history else []


_clients: dict[tuple[int, RedisSettings], Any] = {}
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
