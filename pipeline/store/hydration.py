"""Bringing cold messages into Redis: compare and set, as in ``schedule.py``, but that nothing new is counted.

Messages with an idempotency key go in by plain commands as well, and ``check_cold.lua`` at the beginning says which of them are not
to come; then all of it is done again without those.
"""

from collections import Counter
from typing import Any

from pipeline.core.errors import StoreUnavailable
from pipeline.store.base import MessageRows, Scheduled, Transaction
from pipeline.store.keys import Keys
from pipeline.store.resp import count_hours, frame_command, frame_names, frame_places, frame_rows, repeated, select
from pipeline.store.schedule import TRIES, transact, watch
from pipeline.store.scripts import Scripts


def hydrate(
    connection: Any, keys: Keys, scripts: Scripts, source_id: str, transaction: Transaction, now_ms: int | str
) -> Scheduled | None:
    """Bring messages back over a connection of its own; see ``RedisStore.hydrate``.

    Raises:
        redis.RedisError: what the server or the connection had to say; the connection can't be used again.
        StoreProtocolError: keys hold what is not ours.
        StoreUnavailable: others change what the same idempotency keys lead to all the time.
    """
    all_identified, all_places = transaction.identified, transaction.cold_identified
    left_out = _doubles(all_places)
    for _ in range(TRIES):
        left = sorted({*range(len(all_identified))} - {*left_out})
        identified, places = (select(rows, left) if left_out else rows for rows in (all_identified, all_places))
        if not watch(connection, keys, source_id, transaction):
            return None
        changed = _bring(connection, keys, scripts, source_id, transaction, identified, places, now_ms)
        if changed is None:
            return None
        if not changed:
            return Scheduled(len(transaction.rows) + len(identified))
        left_out += (left[number] for number in changed)
    raise StoreUnavailable("Others change what the same idempotency keys lead to all the time.")


def _doubles(places: MessageRows) -> list[int]:
    """Return which messages come a second time; with the same key, but in another place, it is another message."""
    if not repeated(places):
        return []
    first: dict[tuple[Any, Any], int] = {}
    pairs = zip(places.idempotency_keys, places.members, strict=True)
    return [number for number, pair in enumerate(pairs) if first.setdefault(pair, number) != number]


def _bring(
    connection: Any,
    keys: Keys,
    scripts: Scripts,
    source_id: str,
    transaction: Transaction,
    identified: MessageRows,
    places: MessageRows,
    now_ms: int | str,
) -> list[int] | None:
    """Do it, or nothing: returns None if a marker has moved, and otherwise which of ``identified`` are not to come."""
    framed = [frame_rows(rows, keys.bucket) for rows in (transaction.rows, identified)]
    starts = sorted({*framed[0].bucket_starts, *framed[1].bucket_starts})
    written = [keys.places(), *map(keys.bucket, starts)]
    aside = [*map(keys.aside, written)] if len(identified) else []
    commands = [frame_command("MULTI")]
    if len(identified):
        expected = b"".join(places.members.to_pylist())
        check = scripts.command_with_text("check_cold", [keys.cold(), *written, *aside], [expected])
        commands += [
            frame_command(*check, more=len(identified), framed=frame_names(identified)),
            frame_places(identified, keys.places()),
        ]
    commands += [*framed[0].commands, *framed[1].commands]
    hours = Counter(count_hours(transaction.rows)) + Counter(count_hours(identified))
    names = [keys.buckets(), keys.markers(source_id), keys.cold()]
    names += [keys.marker(source_id, move.part_id) for move in transaction.moves]
    values: list[str | int] = [keys.wake(), now_ms, len(transaction.moves), len(starts)]
    for move in transaction.moves:
        values += (move.part_id, move.after)
    values += (*starts, *(value for counted in hours.items() for value in counted))
    commands.append(frame_command(*scripts.command_with_text("hydrate", [*names, *written, *aside], values)))
    return transact(connection, commands)
