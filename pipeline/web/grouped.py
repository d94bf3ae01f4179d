"""Calls for single messages that come at once: they share round trips to Redis."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from pipeline.client import Found

AT_ONCE: Final = 500


class Grouped:
    """A verb for one message by its name.

    Args:
        many: the verb for many messages, each for itself.
    """

    def __init__(self, many: Callable[[Sequence[str]], Awaitable[list[Found]]]) -> None:
        self._many = many
        self._queue: deque[tuple[str, asyncio.Future[Found]]] = deque()
        self._working: asyncio.Task[None] | None = None

    async def __call__(self, name: str) -> Found:
        """Call the verb, together with others that wait.

        Raises:
            StoreError: no answer, or an error.
        """
        done: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._queue.append((name, done))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await done

    async def _work(self) -> None:
        try:
            while self._queue:
                taken = [self._queue.popleft() for _ in range(min(AT_ONCE, len(self._queue)))]
                waiting = [(name, done) for name, done in taken if not done.done()]  # others have given up
                try:
                    results: Sequence[Found | BaseException] = await self._many([name for name, _ in waiting])
                except Exception as exc:
                    results = [exc] * len(waiting)
                for (_, done), result in zip(waiting, results, strict=True):
                    if done.done():
                        continue
                    if isinstance(result, BaseException):
                        done.set_exception(result)
                    else:
                        done.set_result(result)
        finally:
            self._working = None
