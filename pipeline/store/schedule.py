"""Storing a transaction: compare and set, with WATCH and MULTI.

The messages go in by plain HSET and ZADD commands, as through a script each costs the server several times as much; what needs a
decision is left to a script at the beginning, for idempotency keys (``check_ids.lua``), and one at the end (``schedule.lua``). Two
round trips: one watches and reads the markers, one does all the rest, and again without the messages whose keys are known.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.core.errors import StoreProtocolError, StoreUnavailable
from pipeline.store.base import MessageRows, Scheduled, Transaction
from pipeline.store.keys import Keys
from pipeline.store.resp import (
    count_hours,
    frame_cold_places,
    frame_command,
    frame_names,
    frame_places,
    frame_rows,
    join,
    repeated,
    select,
)
from pipeline.store.scripts import Scripts

TRIES = 8  # how often other writers may store one of the idempotency keys between a look at them and the next


def schedule(
    connection: Any, keys: Keys, scripts: Scripts, source_id: str, transaction: Transaction, now_ms: int | str
) -> Scheduled | None:
    """Store a transaction over a connection of its own; see ``RedisStore.schedule``.

    Raises:
        redis.RedisError: what the server or the connection had to say; the connection can't be used again.
        StoreProtocolError: keys hold what is not ours.
        StoreUnavailable: other writers store the same idempotency keys all the time.
    """
    all_identified = join(transaction.identified, transaction.cold_identified)
    duplicates = repeated(all_identified)
    for _ in range(TRIES):
        left = sorted({*range(len(all_identified))} - {*duplicates})
        identified = select(all_identified, left) if duplicates else all_identified
        hot = sum(place < len(transaction.identified) for place in left)
        if not watch(connection, keys, source_id, transaction):
            return None
        known = _store(connection, keys, scripts, source_id, transaction, identified, hot, len(duplicates), now_ms)
        if known is None:
            return None
        if not known:
            stored = len(transaction.rows) + len(transaction.cold) + len(identified)
            return Scheduled(stored, tuple(sorted(duplicates)))
        duplicates += (left[place] for place in known)
    raise StoreUnavailable("Other writers store messages with the same idempotency keys all the time.")


def watch(connection: Any, keys: Keys, source_id: str, transaction: Transaction) -> bool:
    """Watch the markers; says whether they are where they must be, and otherwise watches nothing."""
    marker_keys = [keys.marker(source_id, move.part_id) for move in transaction.moves]
    connection.send_packed_command([frame_command("WATCH", *marker_keys), frame_command("MGET", *marker_keys)])
    connection.read_response()
    markers = [(value or b"").decode() for value in connection.read_response()]
    if markers != [move.before for move in transaction.moves]:
        connection.send_command("UNWATCH")
        connection.read_response()
        return False
    return True


def _store(
    connection: Any,
    keys: Keys,
    scripts: Scripts,
    source_id: str,
    transaction: Transaction,
    identified: MessageRows,
    hot: int,
    duplicates: int,
    now_ms: int | str,
) -> list[int] | None:
    """Do the rest, or nothing: returns None if a marker has moved, and otherwise which idempotency keys are known.

    The first ``hot`` of ``identified`` go into buckets, the others are cold.
    """
    hot_identified, cold_identified = identified[:hot], identified[hot:]
    framed = [frame_rows(rows, keys.bucket) for rows in (transaction.rows, hot_identified)]
    starts = sorted({*framed[0].bucket_starts, *framed[1].bucket_starts})
    written = [keys.places(), *map(keys.bucket, starts)]
    aside = [*map(keys.aside, written)] if len(identified) else []
    commands = [frame_command("MULTI")]
    if len(identified):
        names = [keys.ids(), keys.cancelled(), *written, *aside]
        check = scripts.command_with_text("check_ids", names, [now_ms])
        commands += [
            frame_command(*check, more=len(identified), framed=frame_names(identified)),
            *([frame_places(hot_identified, keys.places())] if hot else []),
            *([frame_cold_places(cold_identified, keys.places())] if len(cold_identified) else []),
        ]
    commands += [*framed[0].commands, *framed[1].commands]
    hours = Counter(count_hours(transaction.cold)) + Counter(count_hours(cold_identified))
    stored = len(transaction.rows) + len(transaction.cold) + len(identified)
    names = [keys.buckets(), keys.markers(source_id), keys.counters(), keys.cold()]
    names += [keys.marker(source_id, move.part_id) for move in transaction.moves]
    arguments: list[str | int | bytes] = [keys.wake(), stored, duplicates, transaction.rejected]
    arguments += (*(rows.first_member for rows in framed), now_ms, len(transaction.moves), len(starts))
    for move in transaction.moves:
        arguments += (move.part_id, move.after)
    arguments += (*starts, *(value for counted in hours.items() for value in counted))
    finish = scripts.command_with_text("schedule", [*names, *written, *aside], arguments)
    # With their text: a digest that the server has forgotten would fail within MULTI, behind what came before it.
    commands.append(frame_command(*finish))
    return transact(connection, commands)


def transact(connection: Any, commands: Sequence[bytes]) -> list[int] | None:
    """Run commands from ``MULTI`` on; None says that what is watched has changed, so that nothing was done.

    Nor was it if something is returned: that is what a check at the beginning has found. Raises as ``schedule``.
    """
    connection.send_packed_command([b"".join([*commands, frame_command("EXEC")])])
    for _ in commands:
        connection.read_response()  # a command that is refused here raises what the server says, and nothing is done
    replies = connection.read_response()
    if replies is None:
        return None
    if isinstance(replies[0], list) and replies[0]:
        return [int(place) for place in replies[0]]  # the other commands have failed, as they had to
    for reply in replies:
        if isinstance(reply, Exception):
            raise StoreProtocolError(f"Redis could not store all of a transaction ({reply}); its keys are not ours.")
    return []
