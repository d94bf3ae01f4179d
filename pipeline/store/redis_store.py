"""The store on a Redis server: Python values in and out, the scripts' status words turned into results or errors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

from pipeline.config import DrainSettings
from pipeline.core.errors import StoreProtocolError
from pipeline.store.base import Ack, Claim, ClaimedMessage, ClaimReply, Exchange, Moved, Scheduled, Transaction
from pipeline.store.connection import server_ms, translated_errors
from pipeline.store.hydration import hydrate
from pipeline.store.keys import Keys
from pipeline.store.replication import read_position, wait_for_copies
from pipeline.store.routes import Targets
from pipeline.store.schedule import schedule
from pipeline.store.scripts import Call, Scripts, begin_scripts, run_script

CLAIM_TRIES = 8  # how often the oldest bucket may change, or a target be missing, before the loop goes on
RECLAIM_LIMIT = 16  # claims a call; each is at most claim_limit messages
PAGE = 1_000  # fields a round trip

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

        shards: of the namespace; they share the ``max_rate`` of a topic.
    """

    def __init__(
        self,
        client: Any,
        keys: Keys,
        drain: DrainSettings | None = None,
        scripts: Scripts | None = None,
        now_ms: Callable[[], int] | None = None,
        shards: int = 1,
    ) -> None:
        self._client = client
        self._keys = keys
        self._drain = drain or DrainSettings()
        self._scripts = scripts or Scripts()
        self._now_ms = now_ms
        self._oldest_bucket_ms = 0
        self._shards = shards
        self._targets = Targets()

    def markers(self, source_id: str, part_ids: Sequence[str]) -> list[str]:
        """Return how far each file is stored, ``NO_MARKER`` where nothing is."""
        if not part_ids:
            return []
        values = self._read(partial(self._client.mget, [self._keys.marker(source_id, part_id) for part_id in part_ids]))
        return [(value or b"").decode() for value in values]

    def schedule(self, source_id: str, transaction: Transaction) -> Scheduled | None:
        """Store a transaction, if all its markers still are where it says. Atomic.

        Returns:
            None if another writer, or this one before a lost reply, has moved a marker: nothing was done now.
        Raises:
            StoreUnavailable: it may be stored; call again with the same arguments.
        """
        with translated_errors(), self._connection() as connection:
            return schedule(connection, self._keys, self._scripts, source_id, transaction, self._now())

    def hydrate(self, source_id: str, transaction: Transaction) -> Scheduled | None:
        """Bring cold messages back, as ``schedule`` stores new ones; ``cold_identified`` says where those with a key were.

        Those whose key leads elsewhere by now are left out, and not counted in what is returned.
        """
        with translated_errors(), self._connection() as connection:
            return hydrate(connection, self._keys, self._scripts, source_id, transaction, self._now())

    def wait_for_copies(self, on_disk: bool, replicas: int = 0) -> None:
        """Return when what the server has taken so far is where it should be; see ``replication.wait_for_copies``."""
        with translated_errors(), self._connection() as connection:
            wait_for_copies(connection, self._keys, on_disk, replicas)

    def history(self) -> str:
        """Return the ID of the server's history of writes, "" if its user may not ask; see ``replication.Position``."""
        position = read_position(self._client)
        return position.history if position else ""

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
        for _ in range(CLAIM_TRIES):
            token = f"{self._oldest_bucket_ms}:{name}"
            reply, now_ms = self._read_claim(token, self._evaluate("claim", *self._claim_call(token)))
            if reply is not None:
                return reply
        return ClaimReply(now_ms, None, now_ms, None)

    def begin(self, name: str, ack: Ack | None) -> Exchange:
        """Send ``claim``, behind an ``ack`` if there is one; see ``DrainStore``."""
        token = f"{self._oldest_bucket_ms}:{name}"
        calls: list[Call] = [("ack", *self._ack_call(*ack))] if ack else []
        begun = begin_scripts(self._client, self._scripts, [*calls, ("claim", *self._claim_call(token))])

        def exchange() -> tuple[bool | None, ClaimReply]:
            *acked, answer = begun()
            held = _holds("ack", acked[0][0]) if acked else None
            return held, self._read_claim(token, answer)[0] or self.claim(name)

        return exchange

    def _claim_call(self, token: str) -> tuple[list[Any], list[Any]]:
        keys, drain, bucket_start_ms = self._keys, self._drain, self._oldest_bucket_ms
        names = [
            *(keys.buckets(), keys.bucket(bucket_start_ms), keys.claims(), keys.claim(token), keys.attempts()),
            *(keys.pauses(), keys.places(), keys.ids(), keys.counters(), keys.rate_limits(), keys.topics()),
            *(keys.topic_settings(), keys.held_topics(), keys.dead_topics(), *self._targets.keys),
        ]
        arguments = [
            bucket_start_ms,
            token,
            drain.claim_limit,
            drain.claim_bytes_max,
            round(drain.lease_sec * 1000),
            drain.id_retention_sec * 1000,
            self._now(),
            self._shards,
            int(self._targets.are_many),
        ]
        return names, arguments

    def _read_claim(self, token: str, answer: Any) -> tuple[ClaimReply | None, int]:
        """Return what the script says, None if it has to be asked again, and the server's time."""
        status, now_ms, first_lease_ms, detail, rows, attempts, texts, wanted = answer
        self._targets.want(wanted)
        now, first_lease = int(now_ms), int(first_lease_ms) if first_lease_ms else None
        moved = _moved(texts)
        if status == b"OK":
            claim = Claim(
                self._keys.shard, token, int(token.partition(":")[0]), int(detail), _claimed_messages(rows, attempts)
            )
            return ClaimReply(now, claim, None, first_lease, moved), now
        if status == b"MOVED":
            return ClaimReply(now, None, now, first_lease, moved), now
        if status == b"WAIT":
            return ClaimReply(now, None, int(detail), first_lease), now
        if status == b"EMPTY":
            return ClaimReply(now, None, None, first_lease), now
        if status == b"BUCKET":
            self._oldest_bucket_ms = int(detail)
        elif status != b"TARGET":
            raise _unknown_status("claim", status)
        return None, now

    def ack(self, claim: Claim, delivered: int, keyed: Sequence[tuple[str, str]]) -> bool:
        """Forget the first ``delivered`` messages of ``claim``. Atomic; saying it twice counts once.

        Args:
            keyed: message id and idempotency key of those messages that have one, which is remembered for ``id_retention_sec``.

        Returns:
            False if the lease is over: the messages are, or will be, delivered again by whoever takes them.
        """
        status, _ = self._evaluate("ack", *self._ack_call(claim, delivered, keyed))
        return _holds("ack", status)

    def _ack_call(self, claim: Claim, delivered: int, keyed: Sequence[tuple[str, str]]) -> tuple[list[Any], list[Any]]:
        keys, lease_token = self._keys, claim.lease_token
        names = [keys.claims(), keys.claim(lease_token), keys.attempts(), keys.places(), keys.ids(), keys.counters()]
        about = (lease_token, claim.lease_until_ms, len(claim.messages), delivered)
        flat = [text for pair in keyed for text in pair]
        return names, [*about, self._drain.id_retention_sec * 1000, self._now(), *flat]

    def release(self, claim: Claim, delivered: int) -> int:
        """Give back at once what is not acknowledged of ``claim``. Atomic.

        Args:
            delivered: messages from its beginning that may have reached the sink; their attempt counts.
        """
        return self._release(claim.lease_token, claim.lease_until_ms, len(claim.messages), delivered)

    def reclaim(self) -> int:
        """Give back the claims whose lease is over, at most ``RECLAIM_LIMIT`` of them. Atomic per claim."""
        expired = self._read(
            lambda: self._client.zrange(
                self._keys.claims(), "-inf", self._server_ms(), byscore=True, offset=0, num=RECLAIM_LIMIT
            )
        )
        given_back = 0
        for token in expired:
            start = token.partition(b":")[0]
            if not start.removeprefix(
                b"-"
            ).isdigit():  # another program's entry: there is no bucket to give messages back to
                self._read(partial(self._client.zrem, self._keys.claims(), token))
                continue
            given_back += self._release(token.decode(), "", 0, 0)
        return given_back

    def marked_parts(self, source_id: str) -> Iterator[tuple[str, int]]:
        """Walk the parts that have a marker, a page at a time, each with when the marker moved last (epoch ms)."""
        cursor = 0
        while True:
            cursor, page = self._read(partial(self._client.zscan, self._keys.markers(source_id), cursor, count=PAGE))
            yield from ((part_id.decode(), int(moved_ms)) for part_id, moved_ms in page)
            if cursor == 0:
                return

    def forget_markers(self, source_id: str, part_ids: Sequence[str]) -> None:
        """Drop the markers of landing files that are gone for good; a file that came back would be stored again."""
        for first in range(0, len(part_ids), PAGE):
            page = part_ids[first : first + PAGE]
            # The index last: what is cut off between the two is found again.
            self._read(partial(self._client.unlink, *(self._keys.marker(source_id, token) for token in page)))
            self._read(partial(self._client.zrem, self._keys.markers(source_id), *page))

    def _release(self, token: str, lease_until_ms: int | str, claimed: int, delivered: int) -> int:
        keys = self._keys
        status, given_back = self._evaluate(
            "release",
            [keys.claims(), keys.claim(token), keys.buckets(), keys.attempts(), keys.counters()],
            [token, lease_until_ms, claimed, delivered, self._now()],
        )
        return int(given_back) if _holds("release", status) else 0

    def _evaluate(self, name: str, keys: Sequence[str | bytes], arguments: Sequence[Any]) -> Any:
        return run_script(self._client, self._scripts, name, keys, arguments)

    def _read(self, call: Callable[[], T]) -> T:
        with translated_errors():
            return call()

    def _now(self) -> int | str:
        return self._now_ms() if self._now_ms else ""

    def _server_ms(self) -> int:
        return self._now_ms() if self._now_ms else server_ms(self._client)


def _claimed_messages(rows: Sequence[bytes], attempts: Sequence[bytes]) -> list[ClaimedMessage]:
    tries = [int(before) + 1 for before in attempts] or repeat(1)
    return [*map(ClaimedMessage, map(int, rows[1::2]), tries, rows[::2])]


def _moved(texts: Sequence[bytes]) -> list[Moved]:
    moved: list[Moved] = []
    for text in texts:
        if b":" in text:
            due_ms, topic, group, id_head = text.decode("utf-8", "replace").split(":", 3)
            moved.append(Moved(topic, group, id_head, [int(due_ms)]))
        else:
            moved[-1].dues_ms.append(int(text))
    return moved


def _holds(script: str, status: bytes) -> bool:
    if status not in (b"OK", b"LOST"):
        raise _unknown_status(script, status)
    return status == b"OK"


def _unknown_status(script: str, status: bytes) -> StoreProtocolError:
    answer = status.decode("utf-8", "replace")
    return StoreProtocolError(
        f"The script {script} answered {answer!r}, which this version doesn't know; "
        "run the same version of the pipeline everywhere."
    )
