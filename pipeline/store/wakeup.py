"""Waits until something is scheduled that is due earlier than everything known, or a time is over."""

import select
from collections.abc import Sequence
from typing import Any

import redis
from redis.client import PubSub

from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys

NOTIFICATIONS_MAX = 100  # that one wait takes; a client that sends them faster must not keep a loop from its claims


class WakeListener:
    """Listens on the wake channels of shards; see ``drain.loop.Waiter``.

    A lost connection only costs the early wake-up: the caller caps its waits, and its next call to the store tells what is wrong.
    """

    def __init__(self, client: Any, shards: Sequence[Keys]) -> None:
        self._client = client
        self._channels = [keys.wake() for keys in shards]
        self._pubsub: PubSub | None = None
        self._heard: set[str] = set()

    def wait(self, timeout_ms: float) -> None:
        """Return when notified or after ``timeout_ms``.

        It also returns when a new subscription is confirmed, since a notification before that went unheard.
        """
        try:
            if self._pubsub is None:
                self._pubsub = self._client.pubsub()
                # Confirmed by a message, which is waited for like a notification.
                self._pubsub.subscribe(*self._channels)
            for _ in range(NOTIFICATIONS_MAX):
                message = self._pubsub.get_message(timeout=timeout_ms / 1000)
                if message is None:
                    return
                self._heard.add(message["channel"].decode())
                timeout_ms = 0  # take the other notifications, too: the same claim answers them all
        except (redis.exceptions.RedisError, OSError):
            self.close()
            select.select([], [], [], timeout_ms / 1000)

    def heard(self) -> set[str]:
        """Return the channels that were heard of since this was asked last."""
        heard, self._heard = self._heard, set()
        return heard

    def close(self) -> None:
        """Give the connection back."""
        if self._pubsub is not None:
            self._pubsub.close()
            self._pubsub = None


def notify_loops(client: Any, shards: Sequence[Keys]) -> None:
    """Let all drain loops look at once: messages are there that none of them knows of.

    Raises:
        StoreError: no answer, or an error.
    """
    with translated_errors():
        for keys in shards:
            client.publish(keys.wake(), 0)
