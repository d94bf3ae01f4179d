"""Waiting for new entries in streams that lie on several masters: a server can only wait for its own."""

import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis

from pipeline.store.topology import ClusterClient


class StreamWait:
    """Waits for streams of all shards at once, by a connection for each.

    A shard that has nothing new by the end of a wait goes on waiting, and counts for the next one: what it says is read then.
    Nothing is taken from a stream by that, so it may be given up at any time.

    Args:
        streams: of the shards, by their hash tags.

        read_ids: gives for some streams the entry after which something is new; those that are not there are left out.
    """

    def __init__(
        self,
        client: ClusterClient,
        streams: Mapping[str, Sequence[str]],
        read_ids: Callable[[Sequence[str]], Mapping[str, str]],
    ) -> None:
        self._client, self._streams, self._read_ids = client, streams, read_ids
        self._waiting: dict[str, Any] = {}  # connections that have asked, by hash tag

    def wait(self, block_ms: int) -> None:
        """Return when something is new, or after ``block_ms``.

        Raises:
            redis.RedisError: a server does not answer.
        """
        try:
            idle = [tag for tag in self._streams if tag not in self._waiting]
            after = self._read_ids([stream for tag in idle for stream in self._streams[tag]])
            for tag in idle:
                if own := {stream: after[stream] for stream in self._streams[tag] if stream in after}:
                    self._ask(tag, own, block_ms)
            tags = {connection._sock.fileno(): tag for tag, connection in self._waiting.items()}
            readable, _, _ = select.select([*tags], [], [], block_ms / 1000)
            for descriptor in readable:
                self._hear(tags[descriptor])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up waiting."""
        for tag, connection in self._waiting.items():
            connection.disconnect()
            self._client.of_tag(tag).connection_pool.release(connection)
        self._waiting.clear()

    def _ask(self, tag: str, after: Mapping[str, str], block_ms: int) -> None:
        connection = self._client.of_tag(tag).connection_pool.get_connection()
        self._waiting[tag] = connection
        connection.send_command("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", *after, *after.values())

    def _hear(self, tag: str) -> None:
        connection = self._waiting[tag]
        try:
            connection.read_response()
        except redis.exceptions.ResponseError as exc:
            if not str(exc).startswith("UNBLOCKED"):
                raise
        del self._waiting[tag]
        self._client.of_tag(tag).connection_pool.release(connection)
