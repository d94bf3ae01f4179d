"""Ours, as a program of its user: schedule_many, and two forms of a consumer of the stream that a drain loop moves messages into.

``work`` acknowledges each message when its handler returns. The further verb ``work_batches`` acknowledges what it took together.
"""

import sys
from collections.abc import Sequence

from shared import record, run, text_of

from pipeline.client import Duetime, Message, Request

duetime = Duetime(f"unix://{sys.argv[2]}")


def schedule(due_ms: Sequence[int]) -> None:
    """Schedule in bulk."""
    duetime.schedule_many(Request(text_of(number), due=due) for number, due in enumerate(due_ms))


def handle(message: Message) -> None:
    """Handle a message."""
    record(message.body)


def work_batches() -> None:
    """Handle batches."""
    with duetime.consume("default", "bench", start="beginning") as consumer:
        while not consumer.stopping():
            batch = consumer.take()
            for message in batch:
                record(message.body)
            consumer.ack(*batch)


if sys.argv[1] == "work_batches":
    work_batches()
else:
    run(schedule, lambda: duetime.run("default", "bench", handle, start="beginning"))
