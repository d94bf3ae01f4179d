"""A consumer for an asyncio program."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from pipeline.consume.consumer import Consumer
from pipeline.consume.retries import Outcome
from pipeline.core.stop import Stop
from pipeline.store.entries import Entry

T = TypeVar("T")


class AsyncConsumer:
    """A ``Consumer`` for an asyncio program; made by ``AsyncDuetime.consume``.

        async with duetime.consume("mail", "billing") as consumer:
            async for message in consumer:
                await consumer.ack(message)

    Args:
        join: makes the consumer.

        stop: ends its waiting.
    """

    def __init__(self, join: Callable[[], Consumer], stop: Stop) -> None:
        self._join = join
        self._stop = stop
        self._thread = ThreadPoolExecutor(1, "duetime-consumer")  # a consumer belongs to one thread
        self._next: asyncio.Future[Entry | None] | None = None
        self._consumer: Consumer
        self._entries: Iterator[Entry]

    async def __aenter__(self) -> Self:
        self._consumer = await self._call(self._join)
        self._entries = iter(self._consumer)
        return self

    async def __aexit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.requested = True
        await self._call(self._consumer.close)
        self._thread.shutdown(wait=False)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Entry:
        # A wait that was cancelled goes on in its thread: the message that it finds is the next one.
        self._next = self._next or asyncio.ensure_future(self._call(self._wait))
        try:
            entry = await asyncio.shield(self._next)
        except Exception:
            self._next = None
            raise
        self._next = None
        if entry is None:
            raise StopAsyncIteration
        return entry

    def _wait(self) -> Entry | None:
        try:
            return next(self._entries, None)
        except Exception:
            self._entries = iter(self._consumer)  # an error ends the iterator, not the consumer
            raise

    async def ack(self, *entries: Entry) -> bool:
        """Say that messages are handled; see ``Consumer.ack``."""
        return await self._call(self._consumer.ack, *entries)

    async def nack(self, entry: Entry, detail: str = "") -> Outcome:
        """Say that a message could not be handled; see ``Consumer.nack``."""
        return await self._call(self._consumer.nack, entry, detail)

    async def extend(self, *entries: Entry) -> bool:
        """Have another lease for messages; see ``Consumer.extend``."""
        return await self._call(self._consumer.extend, *entries)

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
