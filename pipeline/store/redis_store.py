"""The store on a Redis server: Python values in and out, the scripts' status words turned into results or errors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from pipeline.config import DrainSettings
from pipeline.core.errors import StoreProtocolError, StoreUnavailable
from pipeline.store.base import Claim, ClaimedMessage, ClaimReply, Scheduled, Stats, Transaction
from pipeline.store.connection import server_ms, translated_errors
from pipeline.store.keys import Keys
from pipeline.store.resp import frame_command
from pipeline.store.routes import ALL_TO_SCREEN, Routes, TopicRules
from pipeline.store.schedule import schedule
from pipeline.store.scripts import Scripts, run_script
from pipeline.store.survey import survey

CLAIM_TRIES = (
    8  # how often another loop may retire the oldest bucket, or a topic be new, before we look after other things
)
RECLAIM_LIMIT = 16  # claims a call; each is at most claim_limit messages
PAGE = 1_000  # fields a round trip
DISK_WAIT_MS = 2_000  # appendfsync everysec takes one second; less than a reply may take

T = TypeVar("T")


class RedisStore:
    """One shard of a namespace on one server.

    Args:
        client: a ``redis.Redis`` whose own retries are off: only a caller knows whether a call may be repeated. Its published
            types are unions of what every protocol version and option could give, so they are not used.

        keys: the shard.

        drain: limits and leases of ``claim``; a writer may leave the defaults.

        scripts: tests pass scripts without flags, for fakeredis.

        now_ms: tests pass a clock for the scripts; None means the server's own.

        rules: where ``claim`` lets the messages of each topic go.
    """

    def __init__(
        self,
        client: Any,
        keys: Keys,
        drain: DrainSettings | None = None,
        scripts: Scripts | None = None,
        now_ms: Callable[[], int] | None = None,
        rules: TopicRules = ALL_TO_SCREEN,
    ) -> None:
        self._client = client
        self._keys = keys
        self._drain = drain or DrainSettings()
        self._scripts = scripts or Scripts()
        self._now_ms = now_ms
        self._oldest_bucket_ms = 0
        self._routes = Routes(keys, rules)

    def fences(self, source_id: str, fence_tokens: Sequence[str]) -> list[str]:
        """Return how far each file is stored, ``NO_FENCE`` where nothing is."""
        if not fence_tokens:
            return []
        values = self._read(
            partial(self._client.mget, [self._keys.fence(source_id, fence_token) for fence_token in fence_tokens])
        )
        return [(value or b"").decode() for value in values]

    def schedule(self, source_id: str, transaction: Transaction) -> Scheduled | None:
        """Store a transaction, if all its fences still are where it says. Atomic.

        Returns:
            None if another writer, or this one before a lost reply, has moved a fence: nothing was done now.
        Raises:
            StoreUnavailable: it may be stored; call again with the same arguments.
        """
        with translated_errors(), self._connection() as connection:
            return schedule(connection, self._keys, self._scripts, source_id, transaction, self._now())

    def wait_for_disk(self) -> None:
        """Return when the server has everything that it has taken so far in its append-only file on disk.

        Raises:
            StoreUnavailable: it has not got there in ``DISK_WAIT_MS``; ask again.
            StoreProtocolError: it keeps no such file.
        """
        # WAITAOF looks at the writes of its own connection only, so this one writes: what others wrote before is in front of it.
        write = frame_command("HINCRBY", self._keys.counters(), "stored", 0)
        with translated_errors(), self._connection() as connection:
            connection.send_packed_command([write, frame_command("WAITAOF", 1, 0, DISK_WAIT_MS)])
            connection.read_response()
            on_disk, _ = connection.read_response()
        if on_disk < 1:
            raise StoreUnavailable("what it has taken is not on disk yet.")

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Lend a connection; after an error it is closed, as replies may still be on their way."""
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def claim(self, name: str) -> ClaimReply:
        """Take the oldest due messages of the oldest bucket, in flight or into the streams of their topics. Atomic.

        Idempotent per ``name`` for what is in flight; what moved into a stream does so once, whoever asks and how often.

        Args:
            name: unique to this claim of this loop. After ``StoreUnavailable`` the same name gives the same messages.

        Raises:
            StoreUnavailable: whether messages are in flight now is unknown; call again with the same name.
        """
        keys, drain, routes = self._keys, self._drain, self._routes
        for _ in range(CLAIM_TRIES):
            bucket_start_ms = self._oldest_bucket_ms
            token = f"{bucket_start_ms}:{name}"
            reply = self._evaluate(
                "claim",
                [
                    *(keys.buckets(), keys.bucket(bucket_start_ms), keys.claims(), keys.claim(token), keys.attempts()),
                    *(keys.pauses(), keys.ids(), keys.counters(), keys.paces(), keys.topics()),
                    *routes.keys(),
                ],
                [
                    *(bucket_start_ms, token, drain.claim_limit, drain.claim_bytes_max, round(drain.lease_sec * 1000)),
                    *(drain.id_memory_sec * 1000, self._now()),
                    *routes.arguments(),
                ],
            )
            status, now_ms, first_lease_ms, detail, rows, attempts, dues = reply
            now, first_lease = int(now_ms), int(first_lease_ms) if first_lease_ms else None
            moved = {dues[i].decode(): [int(due_ms) for due_ms in dues[i + 1]] for i in range(0, len(dues), 2)}
            if status == b"OK":
                claim = Claim(keys.shard, token, bucket_start_ms, int(detail), _claimed_messages(rows, attempts))
                return ClaimReply(now, claim, None, first_lease, moved)
            if status == b"MOVED":
                return ClaimReply(now, None, now, first_lease, moved)
            if status == b"WAIT":
                return ClaimReply(now, None, int(detail), first_lease)
            if status == b"EMPTY":
                return ClaimReply(now, None, None, first_lease)
            self._learn(status, detail.decode())
        return ClaimReply(now, None, now, first_lease)

    def _learn(self, status: bytes, detail: str) -> None:
        """Take note of what the next try to claim must name."""
        if status == b"BUCKET":
            self._oldest_bucket_ms = int(detail)
        elif status == b"ROUTE":
            self._routes.learn_route(detail)
        elif status == b"LATER":
            self._routes.learn_later(detail)
        else:
            raise _unknown_word("claim", status)

    def ack(self, claim: Claim, delivered: int, caller_ids: Sequence[str]) -> bool:
        """Forget the first ``delivered`` messages of ``claim``. Atomic; saying it twice counts once.

        Args:
            caller_ids: the ids that callers gave to those messages; they are remembered for ``id_memory_sec``.

        Returns:
            False if the lease is over: the messages are, or will be, delivered again by whoever takes them.
        """
        keys = self._keys
        status, _ = self._evaluate(
            "ack",
            [keys.claims(), keys.claim(claim.lease_token), keys.attempts(), keys.ids(), keys.counters()],
            [
                claim.lease_token,
                claim.lease_until_ms,
                len(claim.messages),
                delivered,
                self._drain.id_memory_sec * 1000,
                self._now(),
                *caller_ids,
            ],
        )
        return _holds("ack", status)

    def release(self, claim: Claim, delivered: int) -> int:
        """Give back at once what is not acknowledged of ``claim``. Atomic.

        Args:
            delivered: messages from its beginning that may have reached the sink; their attempt counts.
        """
        return self._release(
            claim.lease_token, claim.bucket_start_ms, claim.lease_until_ms, len(claim.messages), delivered
        )

    def reclaim(self) -> int:
        """Give back the claims whose lease is over, at most ``RECLAIM_LIMIT`` of them. Atomic per claim."""
        expired = self._read(
            lambda: self._client.zrange(
                self._keys.claims(), "-inf", self._server_ms(), byscore=True, offset=0, num=RECLAIM_LIMIT
            )
        )
        given_back = 0
        for token in expired:
            bucket_start_ms = int(token.partition(b":")[0])
            given_back += self._release(token.decode(), bucket_start_ms, "", 0, 0)
        return given_back

    def fenced_tokens(self, source_id: str) -> Iterator[str]:
        """Walk the fences of a source, a page at a time."""
        cursor = 0
        while True:
            cursor, page = self._read(partial(self._client.zscan, self._keys.fences(source_id), cursor, count=PAGE))
            yield from (token.decode() for token, _ in page)
            if cursor == 0:
                return

    def forget_fences(self, source_id: str, fence_tokens: Sequence[str]) -> None:
        """Drop the fences of landing files that are gone for good; a file that came back would be stored again."""
        for first in range(0, len(fence_tokens), PAGE):
            page = fence_tokens[first : first + PAGE]
            # The index last: what is cut off between the two is found again.
            self._read(partial(self._client.unlink, *(self._keys.fence(source_id, token) for token in page)))
            self._read(partial(self._client.zrem, self._keys.fences(source_id), *page))

    def stats(self) -> Stats:
        """Count what is there; see ``survey``."""
        return survey(self._client, self._keys, self._server_ms())

    def _release(
        self, token: str, bucket_start_ms: int, lease_until_ms: int | str, claimed: int, delivered: int
    ) -> int:
        keys = self._keys
        status, given_back = self._evaluate(
            "release",
            [
                keys.claims(),
                keys.claim(token),
                keys.buckets(),
                keys.bucket(bucket_start_ms),
                keys.attempts(),
                keys.counters(),
            ],
            [token, bucket_start_ms, lease_until_ms, claimed, delivered, self._now()],
        )
        return int(given_back) if _holds("release", status) else 0

    def _evaluate(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return run_script(self._client, self._scripts, name, keys, arguments)

    def _read(self, call: Callable[[], T]) -> T:
        with translated_errors():
            return call()

    def _now(self) -> int | str:
        return self._now_ms() if self._now_ms else ""

    def _server_ms(self) -> int:
        return self._now_ms() if self._now_ms else server_ms(self._client)


def _claimed_messages(rows: Sequence[bytes], attempts: Sequence[bytes]) -> list[ClaimedMessage]:
    if not attempts:
        return [ClaimedMessage(int(rows[i + 1]), 1, rows[i]) for i in range(0, len(rows), 2)]
    return [ClaimedMessage(int(rows[i + 1]), int(attempts[i // 2]) + 1, rows[i]) for i in range(0, len(rows), 2)]


def _holds(script: str, status: bytes) -> bool:
    if status not in (b"OK", b"LOST"):
        raise _unknown_word(script, status)
    return status == b"OK"


def _word(status: bytes) -> str:
    return status.decode("utf-8", "replace")


def _unknown_word(script: str, status: bytes) -> StoreProtocolError:
    return StoreProtocolError(
        f"The script {script} answered {_word(status)!r}, which this version doesn't know; "
        "run the same version of the pipeline everywhere."
    )
