"""Waits until something is scheduled that is due earlier than everything known, or a time is over."""

import select
from collections.abc import Sequence
from typing import Any

import redis
from redis.client import PubSub

from pipeline.store.keys import Keys


class Doorbell:
    """Listens on the wake channels of shards; see ``drain.loop.Waiter``.

    A lost connection only costs the early wake-up: the caller caps its waits, and its next call to the store tells what is wrong.
    """

    def __init__(self, client: Any, shards: Sequence[Keys]) -> None:
        self._client = client
        self._channels = [keys.wake() for keys in shards]
        self._pubsub: PubSub | None = None

    def wait(self, timeout_ms: float) -> None:
        """Return when rung or after ``timeout_ms``.

        It also returns when a new subscription is confirmed, since a ring before that went unheard.
        """
        try:
            if self._pubsub is None:
                self._pubsub = self._client.pubsub()
                self._pubsub.subscribe(*self._channels)  # confirmed by a message, which is waited for like a ring
            while self._pubsub.get_message(timeout=timeout_ms / 1000) is not None:
                timeout_ms = 0  # rung: take the other rings, they are answered by the same look
        except (redis.exceptions.RedisError, OSError):
            self.close()
            select.select([], [], [], timeout_ms / 1000)

    def close(self) -> None:
        """Give the connection back."""
        if self._pubsub is not None:
            self._pubsub.close()
            self._pubsub = None
