"""What the drain loop asks of a sink."""

from collections.abc import Callable, Sequence
from typing import Protocol

from pipeline.core.messages import Message


class Sink(Protocol):
    """Takes messages in order."""

    def deliver(self, messages: Sequence[Message], in_time: Callable[[], bool], may_wait: Callable[[], bool]) -> int:
        """Hand over messages in order, and return how many of them are wholly out of this process.

        Args:
            in_time: asked before messages are started; once false, no more are.

            may_wait: asked while nobody takes what is handed over; once false, the wait is given up.
        Raises:
            SinkClosed: nobody takes messages any more.
        """
        ...
