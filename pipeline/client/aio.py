"""The client of an asyncio program: the one for threads, with its waiting done in threads."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from types import TracebackType
from typing import Final, ParamSpec, Self, TypeVar

from pipeline.client.aio_consumer import AsyncConsumer
from pipeline.client.commit import BYTES_MAX, MESSAGES_MAX, Stored
from pipeline.client.requests import Delay, Due, Receipt, Request
from pipeline.client.sync import PATIENCE_SEC, Duetime
from pipeline.consume.opening import stop_on_signals
from pipeline.core.errors import StoreError, StoreUnavailable
from pipeline.core.messages import DEFAULT_TOPIC, Change, Message
from pipeline.core.stop import Stop
from pipeline.store.base import Changed, Found, Scheduled
from pipeline.store.listing import PAGE, ScheduledMessage

THREADS: Final = 8  # for calls other than schedule, which needs one

P = ParamSpec("P")
T = TypeVar("T")


class AsyncDuetime:
    """What ``Duetime`` does, for an asyncio program: the same verbs, arguments and errors.

        async with AsyncDuetime() as duetime:
            await duetime.schedule("tea is ready", delay=180)

    Calls of ``schedule`` that come at once share a transaction.
    """

    def __init__(
        self,
        url: str = "",
        *,
        namespace: str = "",
        config: Path | None = None,
        patience_sec: float = PATIENCE_SEC,
        wait_for_disk: bool = False,
    ) -> None:
        self._new: Callable[[], Duetime] = partial(
            Duetime, url, namespace=namespace, config=config, patience_sec=patience_sec, wait_for_disk=wait_for_disk
        )
        self.waiting_messages = 0  # given to ``store`` and not stored yet …
        self.waiting_characters = 0  # … and those of their bodies
        self._threads = ThreadPoolExecutor(THREADS, "duetime")
        self._queue: deque[tuple[Message, asyncio.Future[Stored]]] = deque()
        self._committing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._duetime: Duetime

    @classmethod
    def over(cls, open_duetime: Callable[[], Duetime]) -> Self:
        """Return a client that uses another one, which it opens and closes."""
        made = cls()
        made._new = open_duetime
        return made

    async def __aenter__(self) -> Self:
        self._duetime = await self._in_thread(self._new)
        return self

    async def __aexit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, when what is under way is stored. Every call after it raises ``RuntimeError``."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._committing:
            await self._committing
        await self._in_thread(self._duetime.close)
        self._threads.shutdown(wait=False)

    async def schedule(
        self,
        message: str,
        *,
        delay: Delay | None = None,
        due: Due | None = None,
        id: str = "",
        topic: str = DEFAULT_TOPIC,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        """Schedule a message; see ``Duetime.schedule``. A call that is cancelled may have stored it."""
        request = Request(message, delay=delay, due=due, id=id, topic=topic, headers=headers or {})
        return await self.store(self._duetime.check(request))

    async def store(self, message: Message) -> Receipt:
        """Store a message that is checked already, together with those that others store at once."""
        self._check_open()
        done: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        self._queue.append((message, done))
        self.waiting_messages += 1
        self.waiting_characters += len(message.body)
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit())
        stored = await done
        # Only a duplicate has to be looked up.
        return (
            await self._in_thread(self._duetime.receipt_of, stored)
            if stored.is_duplicate
            else self._duetime.receipt_of(stored)
        )

    async def _commit(self) -> None:
        try:
            while self._queue:
                await self._commit_some()
        finally:
            self._committing = None

    async def _commit_some(self) -> None:
        """Store what goes in one transaction; whoever waits for it gets a result, whatever happens."""
        taken = self._take_waiting()
        messages = [message for message, _ in taken]
        results: Sequence[Stored | Exception] = []
        try:
            results = await self._in_thread(self.try_all, messages)
        except Exception as exc:
            results = [exc] * len(taken)
        finally:
            self.waiting_messages -= len(messages)
            self.waiting_characters -= sum(len(message.body) for message in messages)
            for (_, done), result in zip_longest(taken, results):
                if done.done():
                    continue  # its caller was cancelled
                if result is None:  # this task was cancelled
                    done.cancel()
                elif isinstance(result, Exception):
                    done.set_exception(result)
                else:
                    done.set_result(result)

    def _take_waiting(self) -> list[tuple[Message, asyncio.Future[Stored]]]:
        """Take as many as go in one transaction."""
        taken = [self._queue.popleft()]
        size = len(taken[0][0].body)
        while self._queue and len(taken) < MESSAGES_MAX and size < BYTES_MAX:
            taken.append(self._queue.popleft())
            size += len(taken[-1][0].body)
        return taken

    def apply(self, changes: Sequence[Change]) -> Changed:
        """Make changes, from any thread; see ``Duetime.apply``."""
        return self._duetime.apply(changes)

    def try_all(self, messages: list[Message]) -> list[Stored | StoreError]:
        """Store checked messages in one transaction, from any thread; says what became of each."""
        try:
            return self._duetime.commits.store(messages)
        except Exception as exc:  # whoever waits must learn of it
            return [StoreUnavailable(f"It may be stored: {type(exc).__name__}: {exc}.")] * len(messages)

    async def schedule_many(self, requests: Iterable[Request]) -> Scheduled:
        """Schedule requests, which are read in a thread; see ``Duetime.schedule_many``."""
        return await self._call(self._duetime.schedule_many, requests)

    async def get(self, id: str) -> Found:
        """Look for a message; see ``Duetime.get``."""
        return await self._call(self._duetime.get, id)

    async def cancel(self, id: str, *, if_versions: Collection[str] = ()) -> Found:
        """Take a message out of the schedule; see ``Duetime.cancel``."""
        return await self._call(self._duetime.cancel, id, if_versions=if_versions)

    async def get_many(self, ids: Sequence[str]) -> list[Found]:
        """Look for messages; see ``Duetime.get_many``."""
        return await self._call(self._duetime.get_many, ids)

    async def cancel_many(self, ids: Sequence[str]) -> list[Found]:
        """Cancel messages; see ``Duetime.cancel_many``."""
        return await self._call(self._duetime.cancel_many, ids)

    async def replace(self, request: Request, *, if_versions: Collection[str] = ()) -> Found:
        """Have a request's id mean this message; see ``Duetime.replace``."""
        return await self._call(self._duetime.replace, request, if_versions=if_versions)

    async def put(self, message: Message, if_versions: Collection[str] = ()) -> Found:
        """Have the id of a message that is checked already mean it; see ``Duetime.replace``."""
        return await self._call(self._duetime.put, message, if_versions)

    async def reschedule(
        self, id: str, *, delay: Delay | None = None, due: Due | None = None, if_versions: Collection[str] = ()
    ) -> Found:
        """Give a message that waits another due time; see ``Duetime.reschedule``."""
        return await self._call(self._duetime.reschedule, id, delay=delay, due=due, if_versions=if_versions)

    async def upcoming(
        self, *, topic: str = "", after: Due | None = None, before: Due | None = None
    ) -> AsyncIterator[ScheduledMessage]:
        """Walk the scheduled messages in order of due time; see ``Duetime.upcoming``."""
        found = self._duetime.upcoming(topic=topic, after=after, before=before)
        while page := await self._call(_take, found):
            for message in page:
                yield message

    def consume(
        self, topic: str, group: str, *, consumer: str = "", start: str = "new", ordered: bool | None = None
    ) -> AsyncConsumer:
        """Return a consumer of a topic, to be used by ``async with``; see ``Duetime.consume``."""
        stop = Stop()
        return AsyncConsumer(partial(self._duetime.join, topic, group, consumer, start, ordered, stop), stop)

    async def run(
        self,
        topic: str,
        group: str,
        handler: Callable[[Message], Awaitable[object]],
        *,
        concurrency: int = 1,
        start: str = "new",
        ordered: bool | None = None,
        handle_signals: bool = True,
    ) -> None:
        """Await a handler for each message of a topic; see ``Duetime.run``.

        When the task is cancelled, as by SIGTERM and Ctrl-C, what is in hand is finished.
        """
        loop = asyncio.get_running_loop()

        async def handle(message: Message) -> None:
            await handler(message)

        def call(message: Message) -> None:
            asyncio.run_coroutine_threadsafe(handle(message), loop).result()

        with stop_on_signals(handle_signals) as stop, ThreadPoolExecutor(1, "duetime-run") as thread:
            work = loop.run_in_executor(
                thread, self._duetime.run_until, stop, topic, group, call, concurrency, start, ordered
            )
            try:
                await asyncio.shield(work)
            finally:
                stop.requested = True
                await work

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("This AsyncDuetime is closed: open another one.")

    async def _call(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        self._check_open()
        return await self._in_thread(function, *args, **options)

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        call = partial(function, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _take(messages: Iterator[ScheduledMessage]) -> list[ScheduledMessage]:
    return [*islice(messages, PAGE)]
