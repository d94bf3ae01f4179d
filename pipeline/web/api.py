"""What all resources of the API share: the client, connections for its threads, limits, and how an error is told."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from uvicorn.server import ServerState

from pipeline.client import AsyncDuetime, Receipt
from pipeline.client.cold import cold_reader
from pipeline.client.patience import Patience
from pipeline.config import Settings
from pipeline.core.clock import Clock
from pipeline.core.errors import (
    ColdUnavailable,
    RequestRefused,
    StoreError,
    StoreFull,
    StoreUnavailable,
    VersionDiffers,
)
from pipeline.core.messages import Message
from pipeline.store.by_id import MessagesById
from pipeline.store.keys import Keys
from pipeline.store.shards import open_shards
from pipeline.web.call import Reading
from pipeline.web.grouped import Grouped
from pipeline.web.keyed import KeyedBatches
from pipeline.web.meters import Meters
from pipeline.web.problems import Problem

THREADS: Final = 4  # for what is no single message: listings, topics, dead letters, status

T = TypeVar("T")


class Api:
    """The parts that a request is answered with.

    Args:
        client: a ``redis.Redis`` for what the client of messages does not do.

        shards: the keys of each shard.
    """

    def __init__(
        self, settings: Settings, duetime: AsyncDuetime, client: Any, shards: Sequence[Keys], clock: Clock
    ) -> None:
        self.settings = settings
        self.duetime = duetime
        self.client = client
        self.shards = shards
        self.clock = clock
        self.get = Grouped(duetime.get_many)
        self.cancel = Grouped(duetime.cancel_many)
        self.server: ServerState | None = None  # of uvicorn, once it runs
        self.reading = Reading(settings.api.waiting_bytes_max)
        self.meters = Meters(self)
        self.batches = asyncio.Semaphore(settings.api.batches_max)
        self._batch_messages = 0  # lines of batches that are worked on
        self._lock = threading.Lock()
        self._patience = Patience(clock, settings.api.patience_sec)
        self.keyed = KeyedBatches(
            open_shards(client, settings.redis),
            MessagesById(
                client,
                shards,
                settings.drain.id_retention_sec * 1000,
                read_cold=cold_reader(settings, client, clock),
            ),
            self._patience,
            clock,
            settings.ingest.marker_keep_sec,
            settings.api.wait_for_disk,
        )
        self._threads = ThreadPoolExecutor(THREADS, "api")
        self._batch_threads = ThreadPoolExecutor(settings.api.batches_max, "api-batch")

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)
        self._batch_threads.shutdown(wait=False)

    def count_connections(self) -> int:
        """Return how many connections are open."""
        return len(self.server.connections) if self.server else 0

    @property
    def waiting_messages(self) -> int:
        """How many messages wait to be stored."""
        return self.duetime.waiting_messages + self._batch_messages

    def check_room(self, messages: int, size: int) -> None:
        """Refuse messages that there is no room for.

        Raises:
            Problem: ``busy``.
        """
        limits = self.settings.api
        if (
            self.waiting_messages + messages > limits.waiting_messages_max
            or self.duetime.waiting_characters + size > limits.waiting_bytes_max
        ):
            raise Problem("busy", "Too many messages wait to be stored.")

    @contextmanager
    def room_for_batch(self, messages: int, size: int) -> Iterator[None]:
        """Count messages as waiting meanwhile, from any thread.

        Raises:
            Problem: ``busy``.
        """
        with self._lock:
            self.check_room(messages, size)
            self._batch_messages += messages
        try:
            yield
        finally:
            with self._lock:
                self._batch_messages -= messages

    async def store(self, message: Message) -> Receipt:
        """Store a message.

        Raises:
            Problem: ``busy``.
            StoreError, TimeoutError: no answer, or an error; it may be stored.
        """
        self.check_room(1, len(message.body))
        async with asyncio.timeout(self.settings.api.patience_sec):
            return await self.duetime.store(message)

    async def ask(self, call: Callable[[], T]) -> T:
        """Call Redis in a thread, again if it does not answer. ``call`` may be repeated.

        Raises:
            StoreError, TimeoutError: no answer, or an error.
        """
        async with asyncio.timeout(self.settings.api.patience_sec):
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._patience, call)

    def ask_for_batch(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Do the work of a batch in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._batch_threads, call)


def problem_of(error: BaseException) -> Problem | None:
    """Return how an error is told; None if it is not expected."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestRefused):
        return Problem(error.reason, error.detail)
    if isinstance(error, VersionDiffers):
        return Problem("version_differs", str(error))
    if isinstance(error, StoreFull):
        return Problem("store_full", "Send it again when there is room; what is stored is delivered meanwhile.")
    if isinstance(error, ColdUnavailable):
        return Problem("cold_away", str(error))
    if isinstance(error, StoreUnavailable | TimeoutError):
        return Problem("store_away", "Send it again with the same id or Idempotency-Key, and it is done once.")
    if isinstance(error, StoreError):
        return Problem("store_error", "The log of the server says more.")
    return None
