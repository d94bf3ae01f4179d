"""A writer that is slow between its look at the markers and its transaction."""

from collections.abc import Callable, Sequence
from typing import Any


class SlowClient:
    """What ``RedisStore.schedule`` asks of a client, with something that happens meanwhile.

    ``meanwhile`` is called once, between the reply to ``WATCH`` and the sending of ``MULTI``.
    """

    def __init__(self, client: Any, meanwhile: Callable[[], None]) -> None:
        self._pool = client.connection_pool
        self._meanwhile = meanwhile
        self.connection_pool = self

    def get_connection(self) -> "SlowClient":
        """Lend the one connection."""
        self._connection = self._pool.get_connection()
        return self

    def release(self, connection: "SlowClient") -> None:
        """Take it back."""
        self._pool.release(connection._connection)

    def send_packed_command(self, packed: Sequence[bytes]) -> None:
        """Send at once, except for ``MULTI``."""
        if b"MULTI" in packed[0]:
            self._meanwhile()
        self._connection.send_packed_command(packed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)
