"""The drain loops of several shards, each in a thread of its own: a shard that is slow or away delays no message of another."""

import threading
from collections.abc import Callable, Sequence

from pipeline.core.messages import Message
from pipeline.drain.loop import DrainLoop
from pipeline.sinks.base import Sink
from pipeline.store.keys import Keys
from pipeline.store.wakeup import WakeListener

CHECK_SEC = 0.05  # between two looks of a loop that waits for the sink, whether it still may
LISTEN_MS = 1_000  # at most, between two looks whether all loops have ended
LISTEN_ENDING_MS = 20  # the same of loops that end by themselves


class SharedSink:
    """A sink that several loops take turns at, a claim each."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._lock = threading.Lock()

    def deliver(self, messages: Sequence[Message], in_time: Callable[[], bool], may_wait: Callable[[], bool]) -> int:
        """Hand over messages when it is this loop's turn; see ``Sink``."""
        while not self._lock.acquire(timeout=CHECK_SEC):
            if not may_wait():
                return 0
        try:
            return self._sink.deliver(messages, in_time, may_wait)
        finally:
            self._lock.release()


class ShardWaiter:
    """Waits for one shard; see ``Waiter``. The listener that all shards share says when one has something new."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wait(self, timeout_ms: float) -> None:
        """Return after ``timeout_ms``, or when ``notify`` was called since the last wait."""
        self._event.wait(timeout_ms / 1000)
        self._event.clear()

    def notify(self) -> None:
        """End the wait."""
        self._event.set()


class SideBySide:
    """Runs the loops of all shards.

    Args:
        listen: waits for at most so many milliseconds by ``listener``; a signal ends it.
    """

    def __init__(
        self,
        shards: Sequence[Keys],
        listener: WakeListener,
        listen: Callable[[float], object],
        stop: Callable[[], bool],
    ) -> None:
        self._waiters = {keys.wake(): ShardWaiter() for keys in shards}
        self._listener, self._listen, self._stop = listener, listen, stop
        self._error: BaseException | None = None

    def waiter(self, keys: Keys) -> ShardWaiter:
        """Return what the loop of a shard waits by."""
        return self._waiters[keys.wake()]

    def stopping(self) -> bool:
        """Whether a stop was requested, or one of the loops failed."""
        return self._stop() or self._error is not None

    def run(self, loops: Sequence[DrainLoop]) -> None:
        """Run the loops until all have ended; a single one in this thread.

        Raises:
            what a loop does, of the first that fails; the others end as on a stop.
        """
        if len(loops) == 1:
            loops[0].run()
            return
        threads = [threading.Thread(target=self._run, args=(loop,), name="drain", daemon=True) for loop in loops]
        for thread in threads:
            thread.start()
        listen_ms = LISTEN_MS if loops[0].until is None else LISTEN_ENDING_MS
        while not self.stopping() and any(thread.is_alive() for thread in threads):
            self._listen(listen_ms)
            for channel in self._listener.heard():
                self._waiters[channel].notify()
        for waiter in self._waiters.values():
            waiter.notify()
        for thread in threads:
            thread.join()
        if self._error:
            raise self._error

    def _run(self, loop: DrainLoop) -> None:
        try:
            loop.run()
        except BaseException as exc:
            self._error = self._error or exc
