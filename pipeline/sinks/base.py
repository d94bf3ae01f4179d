"""What the drain loop asks of a sink."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.core.messages import Message


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message on its way out. Times are epoch ms UTC; ``attempt`` counts from 1."""

    message: Message
    due_ms: int
    attempt: int


class Sink(Protocol):
    """Takes messages in order."""

    def deliver(self, deliveries: Sequence[Delivery], in_time: Callable[[], bool], patient: Callable[[], bool]) -> int:
        """Hand over messages in order, and return how many of them are wholly out of this process.

        Args:
            in_time: asked before messages are begun; once false, no more are.

            patient: asked while nobody takes what is handed over; once false, the wait is given up.
        Raises:
            SinkClosed: nobody takes messages any more.
        """
        ...
