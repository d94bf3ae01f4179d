"""Messages of every form, and what must be shown of each."""

from collections.abc import Sequence
from typing import Any

from pipeline.core.clock import SystemClock
from pipeline.core.messages import Message
from pipeline.store.base import MarkerMove, Transaction
from tests.store.builders import in_keyed_rows, in_rows

DUES_MS = (-5_000, -5_000, -700_000, 150, 400)  # from now: most at once, some of an older bucket, some soon


def make_mail(
    number: int, count: int, text: str = "", dues_ms: Sequence[int] = DUES_MS
) -> tuple[Transaction, dict[str, dict[str, Any]]]:
    """Make a transaction, and by id what must be shown; some have an idempotency key, a topic, headers.

    Args:
        number: unique to the transaction.

        text: what each message has at its end.

        dues_ms: when the messages are due, from now, in turn.
    """
    token, now_ms = f"{number:014d}", SystemClock().wall_ms()
    plain: list[tuple[int, bytes]] = []
    identified: list[tuple[int, bytes, str]] = []
    sent: dict[str, dict[str, Any]] = {}
    for line in range(1, count + 1):
        message_id = f"{token}{line:08x}"
        idempotency_key = None if line % 7 else f"order-{token}-{line}"
        due_ms = now_ms + dues_ms[line % len(dues_ms)]
        message = f"message {line} of {number}, \u00e4\u4e16{text}"
        topic = "default" if line % 11 else "mail"
        headers = None if line % 13 else {"n": str(line)}
        member = Message(due_ms, message, topic, idempotency_key or "", headers or {}).to_member(message_id)
        if idempotency_key:
            identified.append((due_ms, member, idempotency_key))
        else:
            plain.append((due_ms, member))
        sent[idempotency_key or message_id] = {"message": message, "topic": topic, "headers": headers, "due_ms": due_ms}
    return Transaction(
        [MarkerMove(token, "", "all")], in_rows(sorted(plain)), in_keyed_rows(identified), rejected=0
    ), sent
