"""Reading the streams of a group, also where they lie on several masters: a server reads, and waits for, only its own."""

import selectors
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis

from pipeline.store.topology import ClusterClient


class GroupReads:
    """The reads of one consumer of a group. Each verb may raise ``redis.RedisError``.

    Args:
        streams: of each shard, by its hash tag.
    """

    def __init__(self, client: Any, group: str, consumer: str, streams: Mapping[str, Sequence[str]]) -> None:
        self._client, self._group, self._consumer, self._streams = client, group, consumer, streams
        is_apart = isinstance(client, ClusterClient) and len(streams) > 1
        self._wait = _StreamWait(client, streams, self._last_delivered) if is_apart else None

    @property
    def is_apart(self) -> bool:
        """Whether no single command reads all of the streams."""
        return self._wait is not None

    def read(self, limit: int, block_ms: int | None) -> list[Any]:
        """Wait for new entries, at most ``block_ms``, and take up to ``limit`` of each stream; as XREADGROUP gives them."""
        if not self._wait:
            return self._read([stream for each in self._streams.values() for stream in each], limit, block_ms)
        if not (found := self._read_each(limit)) and block_ms:
            self.wait(block_ms)
            found = self._read_each(limit)
        return found

    def wait(self, block_ms: int) -> None:
        """Wait until something is new for the group; if it is gone, the next read tells."""
        if self._wait:
            self._wait.wait(block_ms)
        elif after := self._last_delivered([stream for each in self._streams.values() for stream in each]):
            self._client.xread(after, count=1, block=block_ms)

    def close(self) -> None:
        """Give the connections back that wait."""
        if self._wait:
            self._wait.close()

    def _read_each(self, limit: int) -> list[Any]:
        return [row for streams in self._streams.values() for row in self._read(streams, limit, None)]

    def _read(self, streams: Sequence[str], limit: int, block_ms: int | None) -> list[Any]:
        after = dict.fromkeys(streams, ">")
        found = self._client.xreadgroup(self._group, self._consumer, after, count=limit, block=block_ms)
        return list(found or ())

    def _last_delivered(self, streams: Sequence[str]) -> dict[str, str]:
        after: dict[str, str] = {}
        for stream in streams:
            for group in self._client.xinfo_groups(stream):
                if group["name"] == self._group.encode():
                    after[stream] = group["last-delivered-id"].decode()
        return after


class _StreamWait:
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
            with selectors.DefaultSelector() as selector:
                for tag, connection in self._waiting.items():
                    selector.register(connection._sock, selectors.EVENT_READ, tag)
                readable = [key.data for key, _ in selector.select(block_ms / 1000)]
            for tag in readable:
                self._hear(tag)
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
