"""From names to a consumer."""

import os
import random
import re
import secrets
import select
import socket
from datetime import datetime
from typing import Any

from pipeline.config import Settings, check_name, load_settings
from pipeline.consume.consumer import Consumer
from pipeline.core.clock import SystemClock
from pipeline.core.errors import ConfigError
from pipeline.store.connection import connect
from pipeline.store.groups import BEGINNING, NEW, GroupStore
from pipeline.store.shards import check_layout, keys_of

_ENTRY_ID = re.compile(r"[0-9]{1,16}-[0-9]{1,20}")
BLOCK_MS = 1_000  # that a read waits for a message; it must end before the wait for its reply does
LAST_OF_A_MS = 2**64 - 1  # the highest sequence number of an entry's id


def open_consumer(topic: str, group: str, consumer: str = "", start: str = "new", ordered: bool = False) -> Consumer:
    """Return a consumer for user code, on the server of ``REDIS_URL`` or the configuration file; close it, or use it by ``with``.

    Args:
        group: the logical consumer. It is registered if it is new, and then gets all messages, whether an instance runs or not.

        consumer: this instance; "" makes a name of its own.

        start: where a new group begins; see ``parse_start``.

        ordered: one instance at a time has the turn.
    Raises:
        ConfigError: a name or a setting is not valid, or no server is named.
        StoreUnavailable: no answer.
    """
    settings = load_settings({}, os.environ)
    if not settings.redis.url:
        raise ConfigError("No Redis server is named; set REDIS_URL.")
    client = connect(settings.redis)
    check_layout(client, settings.redis, may_set=True)
    store = new_store(client, settings, topic, group, consumer, ordered)
    store.register(parse_start(start))
    return new_consumer(store, settings, ordered)


def new_store(client: Any, settings: Settings, topic: str, group: str, consumer: str, ordered: bool) -> GroupStore:
    """Return the store of a consumer, its names checked.

    Raises:
        ConfigError: a name is not valid.
    """
    return GroupStore(
        client,
        keys_of(settings.redis),
        check_name("topic", topic),
        check_name("group", group),
        check_name("consumer", consumer or _own_name()),
        ordered,
    )


def new_consumer(store: GroupStore, settings: Settings, ordered: bool, **options: Any) -> Consumer:
    """Return a consumer on the clocks of this machine.

    Args:
        options: others of ``Consumer``.
    """
    return Consumer(
        **{
            "store": store,
            "settings": settings.of_topic(store.topic),
            "clock": SystemClock(),
            "wait": lambda ms: select.select([], [], [], ms / 1000),
            "random": random.random,
            "ordered": ordered,
            "block_ms": max(1, min(BLOCK_MS, settings.redis.reply_timeout_ms // 2)),  # 0 would be for ever
            **options,
        }
    )


def parse_start(text: str) -> str:
    """Return the entry after which a group begins: of ``beginning``, ``new``, an entry's id, or a time in ISO 8601 with its zone.

    Raises:
        ConfigError: it is none of these.
    """
    if text in ("beginning", "new"):
        return BEGINNING if text == "beginning" else NEW
    if _ENTRY_ID.fullmatch(text):
        return text
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigError(
            f"{text!r} is no place to begin at: say beginning, new, an entry's id such as 1795176000000-0, "
            "or a time with its zone such as 2026-11-20T12:00:00Z."
        )
    first_ms = round(moment.timestamp() * 1000)
    return f"{first_ms - 1}-{LAST_OF_A_MS}" if first_ms > 0 else BEGINNING


def _own_name() -> str:
    host = re.sub(r"[^0-9A-Za-z._-]", "-", socket.gethostname())[:32]
    return f"{host}-{os.getpid()}-{secrets.token_hex(6)}"
