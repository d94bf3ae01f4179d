"""Short ways to say what a test stores."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from pipeline.config import TopicSettings
from pipeline.core.messages import Message
from pipeline.store.base import NO_MARKER, Claim, MarkerMove, MessageRows, Transaction
from pipeline.store.keys import Keys

BUCKET_MS = 600_000
TOKEN = "P" * 14


def member(line: int, text: str = "", token: str = TOKEN) -> bytes:
    return f"{token}{line:08x}m{text or f'message {line}'}".encode()


def in_rows(messages: Iterable[tuple[int, bytes]]) -> MessageRows:
    """Messages in order of due time, each with its due_ms in front."""
    in_order = sorted(messages, key=lambda message: message[0])
    return MessageRows([due_ms for due_ms, _ in in_order], [member for _, member in in_order])


def in_keyed_rows(messages: Iterable[tuple[int, bytes, str]]) -> MessageRows:
    """Messages with their idempotency keys."""
    due_ms, members, keys = (list(column) for column in zip(*messages, strict=True)) if messages else ([], [], [])
    return MessageRows(due_ms, members, keys)


def transaction(
    *rows: tuple[int, int],
    before: str = NO_MARKER,
    after: str = "all",
    rejected: int = 0,
    identified: tuple[tuple[int, int, str], ...] = (),
    token: str = TOKEN,
    member_of: Callable[[int, str], bytes] | None = None,
) -> Transaction:
    """A transaction of one file: (line, due_ms) rows, and (line, due_ms, idempotency key) rows.

    Args:
        member_of: what is stored for a line and its idempotency key.
    """
    write = member_of or (lambda line, idempotency_key: member(line, token=token))
    return Transaction(
        moves=[MarkerMove(token, before, after)],
        rows=in_rows((due_ms, write(line, "")) for line, due_ms in rows),
        identified=in_keyed_rows([(due_ms, write(line, key), key) for line, due_ms, key in identified]),
        rejected=rejected,
    )


def keyed(claim: Claim) -> list[tuple[str, str]]:
    """Return message id and idempotency key of the messages of a claim that have one, as an acknowledgement takes them."""
    found = [Message.read_member(each.member, each.due_ms) for each in claim.messages]
    return [(message.message_id, message.id) for message in found if message.id != message.message_id]


def set_topic(client: Any, keys: Keys, topic: str, settings: TopicSettings) -> None:
    """Give a topic settings, ``*`` being all topics, as the namespace keeps them."""
    client.hset(keys.topic_settings(), topic, json.dumps(asdict(settings)))
