"""What ingest jobs tell about themselves, for eyes: nothing of the work rests on it."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeline.store.accounts import replace_account
from pipeline.store.connection import translated_errors
from pipeline.store.keys import Keys

KEEP_SEC = 7 * 86_400  # after the last batch; it bounds how many sources are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestProgress:
    """What one ingest job has done since it started, and its last batch; times are epoch ms UTC on the job's clock.

    ``reads`` is the input in words. ``files`` counts what Spark read: landing files, so the segments of a large one.
    ``last_oldest_waiting_ms`` is how long the oldest file that was not stored after the last batch had waited, 0 if there was
    none, None if it can't be known. ``last_phases_ms`` has Spark's own names.
    """

    source_id: str
    reads: str
    started_ms: int
    batches: int
    files: int
    lines: int
    stored: int
    known: int
    rejected: int
    blank: int
    last_batch_ms: int
    last_lines: int
    last_lines_per_sec: int
    last_took_ms: int
    last_oldest_waiting_ms: int | None
    last_phases_ms: dict[str, int]


def write_progress(client: Any, keys: Keys, progress: IngestProgress) -> None:
    """Replace what is known of a source, in one round trip.

    Raises:
        StoreError: no answer, or an error.
    """
    replace_account(
        client,
        keys.ingest(progress.source_id),
        keys.ingests(),
        progress.source_id,
        progress.last_batch_ms,
        KEEP_SEC,
        asdict(progress),
    )


def read_progress(client: Any, keys: Keys) -> list[IngestProgress]:
    """Return what is known of each source, the latest first.

    Raises:
        StoreError: no answer, or an error.
    """
    with translated_errors():
        sources = client.zrange(keys.ingests(), 0, -1, desc=True)
        found = [client.hgetall(keys.ingest(source.decode())) for source in sources]
    names = [field.name for field in fields(IngestProgress)]
    # A hash that is gone has expired; one that lacks a field is of another version.
    return [
        IngestProgress(**{name: json.loads(values[name.encode()]) for name in names})
        for values in found
        if all(name.encode() in values for name in names)
    ]
