"""SIGINT and SIGTERM as a question that loops ask."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopRequested(BaseException):
    """Raised out of an interruptible wait by SIGINT or SIGTERM; no error."""


class Stop:
    """Whether a stop was ``requested``. Waits may be cut short by it, work is not."""

    def __init__(self) -> None:
        self.requested = False
        self._interruptible = False
        self._before: dict[int, Any] = {}
        self._is_restored = False

    def install(self) -> None:
        """Take both signals over, for the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Give both signals back to what handled them before; of several stops, in any order."""
        self._is_restored = True
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                while (
                    isinstance(owner := getattr(signal.getsignal(number), "__self__", None), Stop)
                    and owner._is_restored
                ):
                    signal.signal(number, owner._before[number])

    def __call__(self) -> bool:
        return self.requested

    def interrupting(self, wait: Callable[[], object]) -> None:
        """Call ``wait``, and leave it at once when a stop is, or was, requested."""
        try:
            try:
                # A signal is handled in the main thread, so no other one can be interrupted by it.
                self._interruptible = threading.current_thread() is threading.main_thread()
                if not self.requested:
                    wait()
            finally:
                self._interruptible = False
        except StopRequested:
            pass  # from anywhere above: the signal may come between two of these lines

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        before = self._before.get(number)
        if callable(before) and (self._is_restored or isinstance(getattr(before, "__self__", None), Stop)):
            before(number, frame)
        if self._interruptible:
            self._interruptible = False
            raise StopRequested
