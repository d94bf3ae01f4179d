"""What replicas have of the writes of a server, and what a failover to one of them undid.

Replication is asynchronous: a primary acknowledges a write before its replicas have it. So what it acknowledged last may be gone
after a failover. ``wait_for_copies`` waits for replicas. ``FailoverWatch`` finds out afterwards, by what a server says of its
history of writes in ``INFO replication``: its ID, how many bytes it has, and for one that was a replica the ID of the history that
it received, and where that ended.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

from pipeline.core.clock import Clock
from pipeline.core.errors import ConfigError, StoreUnavailable
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys
from pipeline.store.resp import frame_command
from pipeline.store.topology import client_of

WAIT_MS: Final = 5_000  # for the disk and for replicas, of a client that waits for a reply without limit
KEEP_MS: Final = 600_000  # how far back it is known since when writes are undone
LOOK_MS: Final = 1_000  # between two looks, and so how exactly it is known since when writes are undone


def may_fail_over(url: str) -> bool:
    """Return whether another server may take the place of the one that a URL names, "" for the private one."""
    return bool(url) and not url.startswith("unix:")


def wait_for_copies(connection: Any, keys: Keys, on_disk: bool, replicas: int) -> None:
    """Return when the server has on disk, and ``replicas`` of its replicas have received, what it has taken so far.

    With neither it is enough that it takes something now.

    Raises:
        StoreUnavailable: it has not got there in time; ask again.
        StoreProtocolError: it keeps no append-only file, or can't tell what is on disk.
    """
    reply_sec = connection.socket_timeout  # the wait must end well before; and 0 would be for ever
    waits = on_disk + bool(replicas) or 1
    wait_ms = min(WAIT_MS, max(1, round(reply_sec * 1000 / 2 / waits)) if reply_sec else WAIT_MS)
    # These look at the writes of their own connection only, so this one writes: what others wrote before is in front of it.
    commands = [frame_command("HINCRBY", keys.counters(), "stored", 0)]
    if on_disk:
        commands.append(frame_command("WAITAOF", 1, 0, wait_ms))
    if replicas:
        commands.append(frame_command("WAIT", replicas, wait_ms))
    connection.send_packed_command(commands)
    connection.read_response()
    if on_disk and connection.read_response()[0] < 1:
        raise StoreUnavailable("what it has taken is not on disk yet.")
    if replicas and (received := connection.read_response()) < replicas:
        raise StoreUnavailable(f"what it has taken is on {received} replicas so far, not on {replicas}.")


@dataclass(frozen=True, slots=True)
class Position:
    """Where the history of a server's writes stands: its ID and its bytes, and where the one before it, if any, has ended."""

    history: str
    offset: int
    before: str
    before_ended: int


def read_position(client: Any) -> Position | None:
    """Return the position of a server, None if its user may not ask.

    Raises:
        StoreUnavailable: no answer, or from a replica.
    """
    try:
        with translated_errors():
            found = client.info("replication")
    except ConfigError:
        return None
    if found["role"] != "master":
        raise StoreUnavailable("This server is a replica.")
    ended = int(found["second_repl_offset"]) - 1
    return Position(found["master_replid"], int(found["master_repl_offset"]), found["master_replid2"], ended)


@dataclass(frozen=True, slots=True)
class Failover:
    """A server that goes on with another history than the one that was seen before.

    ``found_ms`` and ``since_ms`` are epoch ms UTC on the clock of this machine. What was written before ``since_ms`` is there, and
    what was written later may not be; 0 if nothing is known, as after a restart of the server or two failovers at once.
    ``undone_bytes`` are known to be missing, at least; None if nothing is known.
    """

    found_ms: int
    since_ms: int
    undone_bytes: int | None

    @property
    def is_harmless(self) -> bool:
        """Whether all that had been seen is still there."""
        return self.undone_bytes == 0


Patient = Callable[[Callable[[], Position | None]], Position | None]


class FailoverWatch:
    """Looks at the servers of some shards, and compares with what it saw before.

    Args:
        read: returns the position of a shard's server, as ``read_position``; one a shard.

        keep_ms: how far back it can tell since when writes are undone.

    ``saw_all`` says whether each server answered the last look. Several threads may look: a server that is slow to answer one
    holds up no other that does not want it.
    """

    def __init__(self, read: Sequence[Callable[[], Position | None]], clock: Clock, keep_ms: float = KEEP_MS) -> None:
        self._read = read
        self._clock = clock
        self._keep_ms = keep_ms
        self._locks = [Lock() for _ in read]
        self._seen: list[deque[tuple[int, Position]]] = [deque() for _ in read]
        self._answers = [True for _ in read]  # whether it did the last time
        self.saw_all = False

    @classmethod
    def of(cls, client: Any, shards: Sequence[Keys], clock: Clock, keep_ms: float = KEEP_MS) -> "FailoverWatch":
        """Watch the servers of a namespace; shards that one client reaches are one."""
        clients = {id(each): each for each in (client_of(client, keys) for keys in shards)}
        return cls([lambda each=each: read_position(each) for each in clients.values()], clock, keep_ms)  # type: ignore[misc]

    def histories(self) -> list[str]:
        """Return the IDs of the histories seen last; "" of a server that was not seen, or does not say."""
        return [self._history(index) for index in range(len(self._read))]

    def present(self) -> set[str]:
        """Return those of the servers that answered when they were looked at last."""
        return {self._history(index) for index, answers in enumerate(self._answers) if answers}

    def look(self, patient: Patient | None = None, wanted: Collection[str] = ()) -> Failover | None:
        """Look at all servers; return what has happened since the last look, None if nothing has.

        A server that does not answer is looked at the next time, see ``saw_all``.

        Args:
            patient: makes a call until there is an answer, for the servers whose histories, as seen last, are ``wanted``.
        """
        are_unknown = not {*wanted} <= {*self.histories()}
        found, saw_all = [], True
        for index, (read, seen) in enumerate(zip(self._read, self._seen, strict=True)):
            is_wanted = not wanted or (self._history(index) in wanted if seen else are_unknown)
            if not is_wanted and not self._answers[index]:
                saw_all = False
                continue
            with self._locks[index]:
                at_ms = self._clock.wall_ms()
                try:
                    position = patient(read) if patient and is_wanted else read()
                except StoreUnavailable:
                    self._answers[index] = saw_all = False
                    continue
                self._answers[index] = True
                if position is not None:
                    if seen and (failover := self._compare([*seen], position)):
                        found.append(failover)
                        seen.clear()
                    self._remember(seen, at_ms, position)
        self.saw_all = saw_all
        return _merged(found)

    def _history(self, index: int) -> str:
        for _, position in reversed([*self._seen[index]]):
            return position.history
        return ""

    def _compare(self, seen: Sequence[tuple[int, Position]], now: Position) -> Failover | None:
        last = seen[-1][1]
        if now.history == last.history and now.offset >= last.offset:
            return None
        found_ms = self._clock.wall_ms()
        if now.before != last.history or now.history == last.history:
            return Failover(found_ms, 0, None)
        since_ms = max((at_ms for at_ms, position in seen if position.offset <= now.before_ended), default=0)
        return Failover(found_ms, since_ms, max(0, last.offset - now.before_ended))

    def _remember(self, seen: deque[tuple[int, Position]], at_ms: int, position: Position) -> None:
        if len(seen) > 1 and at_ms - seen[-2][0] < LOOK_MS:
            seen.pop()  # one a second will do
        seen.append((at_ms, position))
        while seen[0][0] < at_ms - self._keep_ms:
            seen.popleft()


def _merged(found: Sequence[Failover]) -> Failover | None:
    if not found:
        return None
    sizes = [each.undone_bytes for each in found]
    return Failover(
        max(each.found_ms for each in found),
        min(each.since_ms for each in found),
        None if None in sizes else sum(size or 0 for size in sizes),
    )
