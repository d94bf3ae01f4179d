"""Storing a transaction: compare and set, with WATCH and MULTI.

The messages go in by plain ZADD commands, as through a script each costs the server a microsecond more; what needs a decision is
left to one script at the end (``schedule.lua``). Two round trips: one watches and reads the markers, one does all the rest.
"""

from collections.abc import Sequence
from typing import Any

from pipeline.core.errors import StoreProtocolError
from pipeline.store.base import Scheduled, Transaction
from pipeline.store.keys import Keys
from pipeline.store.resp import FramedRows, frame_command, frame_rows
from pipeline.store.scripts import Scripts


def schedule(
    connection: Any, keys: Keys, scripts: Scripts, source_id: str, transaction: Transaction, now_ms: int | str
) -> Scheduled | None:
    """Store a transaction over a connection of its own; see ``RedisStore.schedule``.

    Raises:
        redis.RedisError: what the server or the connection had to say; the connection can't be used again.
        StoreProtocolError: keys hold what is not ours.
    """
    marker_keys = [keys.marker(source_id, move.part_id) for move in transaction.moves]
    connection.send_packed_command([frame_command("WATCH", *marker_keys), frame_command("MGET", *marker_keys)])
    connection.read_response()
    markers = [(value or b"").decode() for value in connection.read_response()]
    if markers != [move.before for move in transaction.moves]:
        connection.send_command("UNWATCH")
        connection.read_response()
        return None
    framed = frame_rows(transaction.rows, keys.bucket)
    commands = [
        frame_command("MULTI"),
        *framed.commands,
        frame_command(*_finish_command(keys, scripts, source_id, transaction, framed, marker_keys, now_ms)),
    ]
    connection.send_packed_command([b"".join([*commands, frame_command("EXEC")])])
    for _ in commands:
        connection.read_response()  # a command that is refused here raises what the server says, and nothing is done
    replies = connection.read_response()
    if replies is None:
        return None
    for reply in replies:
        if isinstance(reply, Exception):
            raise StoreProtocolError(f"Redis could not store all of a transaction ({reply}); its keys are not ours.")
    stored, duplicates = replies[-1]
    return Scheduled(stored, tuple(duplicates))


def _finish_command(
    keys: Keys,
    scripts: Scripts,
    source_id: str,
    transaction: Transaction,
    framed: FramedRows,
    marker_keys: Sequence[str],
    now_ms: int | str,
) -> tuple[str | int | bytes, ...]:
    identified = transaction.identified
    starts = sorted({*framed.bucket_starts, *(message.bucket_start_ms for message in identified)})
    number = {start: index for index, start in enumerate(starts, start=1)}
    names = [keys.buckets(), keys.markers(source_id), keys.places(), keys.ids(), keys.cancelled(), keys.counters()]
    names += marker_keys
    names += map(keys.bucket, starts)
    arguments: list[str | int | bytes] = [
        keys.wake(),
        len(transaction.rows),
        framed.first_member,
        transaction.rejected,
        now_ms,
        len(transaction.moves),
        len(starts),
    ]
    for move in transaction.moves:
        arguments += (move.part_id, move.after)
    arguments += starts
    for message in identified:
        arguments += (number[message.bucket_start_ms], message.due_ms, message.member, message.idempotency_key)
    # With its text: a digest that the server has forgotten would fail within MULTI, behind what came before it.
    return scripts.command_with_text("schedule", names, arguments)
