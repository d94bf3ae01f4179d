"""The outbox of a shard: messages that came due and go to Kafka, in order, until they are there.

``claim.lua`` writes it; one drain loop at a time, which holds the lease of ``Keys.forwarder``, writes it to Kafka. An entry that is
in Kafka is dropped with the next read. So what a crash leaves is either still to be written, or told by the position in Kafka.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from pipeline.core.errors import StoreUnavailable
from pipeline.core.ids import LINE_NO_LENGTH, MESSAGE_ID_LENGTH, TOKEN_LENGTH
from pipeline.core.messages import DEFAULT_TOPIC, FORM_PLAIN, Message, number_of, read_headers
from pipeline.store.connection import translated_errors
from pipeline.store.entries import entry_id_of
from pipeline.store.keys import Keys
from pipeline.store.scripts import Scripts, run_script

BYTES_MAX: Final = 4 * 1024 * 1024  # of messages that one read brings, give or take a page
# Entries a round trip; through a script they would take the server six times as long. In a flood each waits for a claim: with pages
# of 500 a loop writes a third more. Only small messages come so many at a time, as nobody knows how large the next ones are.
PAGE, PAGE_MAX, PAGE_BYTES = 100, 500, 256 * 1024
BEGINNING: Final = "0-0"

log = logging.getLogger(__name__)


class OutboxEntry(NamedTuple):
    """A message on its way into Kafka; see ``Message``. ``body`` is its UTF-8."""

    entry_id: str
    topic: str
    id: str
    due_ms: int
    body: bytes
    headers: Mapping[str, str]


class Outbox:
    """The outbox of one shard. Each verb may raise ``StoreError``: no answer, or an error; it may be called again.

    Args:
        name: of who forwards it, unique among all that ever do.

        lease_ms: how long it is nobody else's after ``acquire``, ``keep`` or ``read``.
    """

    def __init__(self, client: Any, keys: Keys, name: str, lease_ms: int, scripts: Scripts | None = None) -> None:
        self._client = client
        self._keys = keys
        self._name = name
        self._leases = 0
        self._lease_ms = lease_ms
        self._scripts = scripts or Scripts()
        self._page = PAGE

    def exists(self) -> bool:
        """Return whether anything ever went into it."""
        with translated_errors():
            return bool(self._client.exists(self._keys.outbox()))

    def length(self) -> int:
        """Return how many messages are in it."""
        with translated_errors():
            return int(self._client.xlen(self._keys.outbox()))

    def acquire(self) -> bool:
        """Take a new lease, if nobody else has one."""
        self._leases += 1  # so that what an earlier one began can't do anything under this
        return bool(self._run("acquire_active", [self._keys.forwarder()], self._token, self._lease_ms))

    def leave(self) -> None:
        """End the lease: others may have one at once."""
        self._run("acquire_active", [self._keys.forwarder()], self._token, 0)

    def keep(self) -> bool:
        """Renew the lease; False if it is over. Any thread may call it."""
        return self._go_on("") is not None

    def read(self, position: str, after: str, limit: int) -> list[OutboxEntry] | None:
        """Drop what is in Kafka, renew the lease, and return some of what is there; None if the lease is over.

        A server that lost its last writes may have entries again that are in Kafka, and could give their ids to what comes next. So
        all entries get ids beyond the position: they come twice, and nothing is lost.

        Args:
            position: the last entry that is in Kafka; "" if none is known to be.

            after: the entry to begin behind, "" for the first one.
        """
        moved = self._go_on(position)
        if moved is None:
            return None
        if moved:
            log.warning("Redis has lost its last writes: %d messages may be in Kafka twice", moved)
        found: list[OutboxEntry] = []
        size = 0
        while len(found) < limit and size < BYTES_MAX:
            count = min(self._page, limit - len(found))
            with translated_errors():
                page = self._client.xrange(self._keys.outbox(), f"({after}" if after else "-", count=count)
            found += [_entry(entry_id.decode(), fields) for entry_id, fields in page]
            page_bytes = sum(sum(map(len, fields.values())) for _, fields in page)
            size += page_bytes
            if page:
                self._page = min(max(PAGE_BYTES * len(page) // max(page_bytes, 1), PAGE), PAGE_MAX)
            if len(page) < count:
                break
            after = found[-1].entry_id
        return found

    def wait(self, position: str, block_ms: int) -> None:
        """Return when something is behind a position, or after so many milliseconds."""
        with translated_errors():
            self._client.xread({self._keys.outbox(): position or BEGINNING}, count=1, block=block_ms)

    def refuse(self, entry: OutboxEntry, reason: str, detail: str) -> bool:
        """Make a dead letter of a message; False if it was one already.

        Raises:
            StoreUnavailable: as always, or the lease is over.
        """
        keys = self._keys
        names = [keys.outbox(), keys.forwarder(), keys.dead(entry.topic), keys.topics()]
        names += [keys.counters(), keys.dead_topics()]
        status = self._run("refuse", names, self._token, entry.entry_id, entry.topic, reason, detail, "")
        if status == b"LOST":
            raise StoreUnavailable("The lease of the outbox is over.")
        return bool(status == b"OK")

    @property
    def _token(self) -> str:
        return f"{self._name}:{self._leases}"

    def _go_on(self, position: str) -> int | None:
        keys = [self._keys.outbox(), self._keys.forwarder()]
        found: int | None = self._run("forward", keys, self._token, self._lease_ms, position)
        return found

    def _run(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        return run_script(self._client, self._scripts, script, keys, arguments)


_is_time: Final = re.compile(rb"-?[0-9]{1,16}").fullmatch
_is_plain_member: Final = re.compile(
    rf"([0-9A-Za-z_-]{{{TOKEN_LENGTH}}}[0-9a-f]{{{LINE_NO_LENGTH}}}){FORM_PLAIN}".encode()
).match
_read_texts: Final = msgspec.json.Decoder(dict[str, str]).decode


def _entry(entry_id: str, fields: Mapping[bytes, bytes]) -> OutboxEntry:
    """Read an entry: a message's fields, as those of a stream, or its due time with its member, as it was scheduled."""
    if len(fields) == 1:
        [(due, member)] = fields.items()
        if _is_time(due):
            return _entry_of_member(entry_id, int(due), member)
    get = fields.get
    topic, key, due_ms, headers = get(b"topic"), get(b"id"), get(b"due_ms", b""), get(b"headers")
    return OutboxEntry(
        entry_id,
        DEFAULT_TOPIC if topic is None else topic.decode("utf-8", "replace"),
        entry_id if key is None else key.decode("utf-8", "replace"),
        int(due_ms) if due_ms.isdigit() and len(due_ms) <= 16 else _odd_due_ms(due_ms, entry_id),
        get(b"message", b""),
        _headers(headers) if headers else {},
    )


def _entry_of_member(entry_id: str, due_ms: int, member: bytes) -> OutboxEntry:
    if plain := _is_plain_member(member):  # whatever its bytes
        return OutboxEntry(entry_id, DEFAULT_TOPIC, plain[1].decode(), due_ms, member[plain.end() :], {})
    try:
        message = Message.from_member(member, due_ms)
    except ValueError:  # as it stands, whatever its bytes
        message_id = member[:MESSAGE_ID_LENGTH].decode("utf-8", "replace")
        return OutboxEntry(entry_id, DEFAULT_TOPIC, message_id, due_ms, member, {})
    return OutboxEntry(entry_id, message.topic, message.id, due_ms, message.body.encode(), message.headers)


def _odd_due_ms(text: bytes, entry_id: str) -> int:
    return number_of(text.decode("utf-8", "replace"), entry_id_of(entry_id)[0])


def _headers(text: bytes) -> Mapping[str, str]:
    try:
        return _read_texts(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return read_headers(text.decode("utf-8", "replace"))  # which takes what any program wrote
