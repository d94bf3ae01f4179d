"""Bringing cold messages into Redis: compare and set, as in ``schedule.py``, but that nothing new is counted."""

from typing import Any

from pipeline.core.errors import StoreProtocolError
from pipeline.store.base import Scheduled, Transaction
from pipeline.store.keys import Keys
from pipeline.store.resp import count_hours, frame_cold_rows, frame_command, frame_rows
from pipeline.store.schedule import watch
from pipeline.store.scripts import Scripts


def hydrate(
    connection: Any, keys: Keys, scripts: Scripts, source_id: str, transaction: Transaction, now_ms: int | str
) -> Scheduled | None:
    """Bring messages back over a connection of its own; see ``RedisStore.hydrate``.

    Raises:
        redis.RedisError: what the server or the connection had to say; the connection can't be used again.
        StoreProtocolError: keys hold what is not ours.
    """
    if not watch(connection, keys, source_id, transaction):
        return None
    framed = frame_rows(transaction.rows, keys.bucket)
    keyed, keyed_starts, framed_keyed = frame_cold_rows(transaction.identified, transaction.cold_identified)
    starts = sorted({*framed.bucket_starts, *keyed_starts})
    hours = count_hours(transaction.rows)
    names = [keys.buckets(), keys.markers(source_id), keys.cold(), keys.places()]
    names += [keys.marker(source_id, move.part_id) for move in transaction.moves]
    names += map(keys.bucket, starts)
    arguments: list[str | int] = [keys.wake(), now_ms, len(transaction.moves), len(starts), len(hours)]
    for move in transaction.moves:
        arguments += (move.part_id, move.after)
    arguments += starts
    for counted in hours.items():
        arguments += counted
    script = scripts.command_with_text("hydrate", names, arguments)
    commands = [
        frame_command("MULTI"),
        *framed.commands,
        frame_command(*script, more=keyed, framed=framed_keyed(starts)),
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
    return Scheduled(len(transaction.rows) + int(replies[-1]))
