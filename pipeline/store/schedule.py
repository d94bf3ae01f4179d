"""Storing a transaction: compare and set, with WATCH and MULTI.

The messages go in by plain ZADD commands, as through a script each costs the server a microsecond more; what needs a decision is
left to one script at the end (``schedule.lua``). Two round trips: one watches and reads the fences, one does all the rest.
"""

from collections.abc import Sequence
from typing import Any

from pipeline.core.errors import StoreProtocolError
from pipeline.store.base import Scheduled, Transaction
from pipeline.store.keys import Keys
from pipeline.store.resp import frame_command, frame_zadd, unframe_pairs
from pipeline.store.scripts import Scripts


def schedule(
    connection: Any, keys: Keys, scripts: Scripts, source_id: str, transaction: Transaction, now_ms: int | str
) -> Scheduled | None:
    """Store a transaction over a connection of its own; see ``RedisStore.schedule``.

    Raises:
        redis.RedisError: what the server or the connection had to say; the connection can't be used again.
        StoreProtocolError: keys hold what is not ours.
    """
    fence_keys = [keys.fence(source_id, move.fence_token) for move in transaction.moves]
    connection.send_packed_command([frame_command("WATCH", *fence_keys), frame_command("MGET", *fence_keys)])
    connection.read_response()
    fences = [(value or b"").decode() for value in connection.read_response()]
    if fences != [move.before for move in transaction.moves]:
        connection.send_command("UNWATCH")
        connection.read_response()
        return None
    commands = [
        frame_command("MULTI"),
        *(frame_zadd(keys.bucket(group.bucket_start_ms), group) for group in transaction.groups),
        frame_command(*_finish_command(keys, scripts, source_id, transaction, fence_keys, now_ms)),
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
    stored, known = replies[-1]
    return Scheduled(stored=stored, known=known)


def _finish_command(
    keys: Keys,
    scripts: Scripts,
    source_id: str,
    transaction: Transaction,
    fence_keys: Sequence[str],
    now_ms: int | str,
) -> tuple[str | int | bytes, ...]:
    groups, identified = transaction.groups, transaction.identified
    starts = sorted({*(group.bucket_start_ms for group in groups), *(m.bucket_start_ms for m in identified)})
    number = {start: index for index, start in enumerate(starts, start=1)}
    names = [keys.buckets(), keys.fences(source_id), keys.ids(), keys.counters(), *fence_keys]
    names += map(keys.bucket, starts)
    arguments: list[str | int | bytes] = [
        keys.wake(),
        sum(group.count for group in groups),
        *(next(unframe_pairs(groups[0].wire)) if groups else ("", "")),
        transaction.rejected,
        now_ms,
        len(transaction.moves),
        len(starts),
    ]
    for move in transaction.moves:
        arguments += (move.fence_token, move.after)
    arguments += starts
    for message in identified:
        arguments += (number[message.bucket_start_ms], message.due_ms, message.member, message.caller_id)
    # With its text: a digest that the server has forgotten would fail within MULTI, behind what came before it.
    return scripts.command_with_text("schedule", names, arguments)
