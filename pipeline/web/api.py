"""What all resources of the API share: the client, connections for its threads, limits, and how an error is told."""

import asyncio
import logging
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
    ConfigError,
    RequestRefused,
    StoreError,
    StoreFull,
    StoreUnavailable,
    VersionDiffers,
)
from pipeline.core.messages import Message
from pipeline.store.by_id import MessagesById
from pipeline.store.checks import meaning_of_stored
from pipeline.store.keys import Keys
from pipeline.store.shards import open_shards
from pipeline.store.topics import Topics
from pipeline.web.call import Reading
from pipeline.web.grouped import Grouped
from pipeline.web.keyed import KeyedBatches
from pipeline.web.meters import Meters
from pipeline.web.problems import Problem

THREADS: Final = 4  # for what is no single message: listings, topics, dead letters, status
READY_MS: Final = 1_000  # for which an answer to whether all is ready counts
LOOK_SEC: Final = 0.5  # until a server that has not said its time does not answer

log = logging.getLogger(__name__)

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
        self._given_up = 0  # of these threads, those that work on what nobody waits for any more
        self._probe_thread = ThreadPoolExecutor(1, "api-probe")
        self._ready_lock = asyncio.Lock()
        self._ready: tuple[float, str | None] | None = None  # when it was asked last, and the answer
        self._batch_threads = ThreadPoolExecutor(settings.api.batches_max, "api-batch")

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)
        self._probe_thread.shutdown(wait=False)
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
            Problem: ``busy``, ``took_too_long``.
            StoreError, TimeoutError: no answer, or an error.
        """
        if self._given_up >= THREADS:
            raise Problem("busy", "All threads still work on requests that took too long.")
        work = self._threads.submit(self._patience, call)
        try:
            async with asyncio.timeout(self.settings.api.patience_sec):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            if work.running():  # a thread can't be stopped
                with self._lock:
                    self._given_up += 1
                work.add_done_callback(self._end_of_given_up)
            if not await self._answers():
                raise
        raise Problem("took_too_long", f"It was given up after {self.settings.api.patience_sec:g} s.")

    def _end_of_given_up(self, _: object) -> None:
        with self._lock:
            self._given_up -= 1

    async def _answers(self) -> bool:
        """Say whether Redis answers at all."""
        try:
            async with asyncio.timeout(LOOK_SEC):
                asked = self._probe_thread.submit(Topics(self.client, self.shards).now_ms)
                await asyncio.wrap_future(asked)
        except (StoreError, ConfigError, TimeoutError):
            return False
        return True

    async def what_stored_means(self) -> str | None:
        """Return what counts as stored, None if Redis does not answer or is not fit; asked once in ``READY_MS``."""
        how = (self.settings.api.wait_for_disk, "message", "api.wait_for_disk")
        async with self._ready_lock:
            if self._ready is None or self.clock.monotonic_ms() - self._ready[0] >= READY_MS:
                meaning = None
                try:
                    async with asyncio.timeout(self.settings.api.patience_sec):
                        work = self._probe_thread.submit(
                            self._patience, lambda: meaning_of_stored(self.client, self.shards, *how)
                        )
                        meaning = await asyncio.wrap_future(work)
                except (StoreError, ConfigError, TimeoutError) as exc:
                    log.warning("not ready: %s", str(exc) or "no answer")
                self._ready = (self.clock.monotonic_ms(), meaning)
            return self._ready[1]

    def ask_for_batch(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Do the work of a batch in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._batch_threads, call)


def problem_of(error: BaseException, changes: bool) -> Problem | None:
    """Return how an error is told, of a request that ``changes`` something or only looks; None if it is not expected."""
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
        again = "What was to be stored or changed may be: send it again with the same id or Idempotency-Key, and it is done once."
        return Problem("store_away", again if changes else "Ask again when it does.")
    if isinstance(error, StoreError):
        return Problem("store_error", "The log of the server says more.")
    return None
