"""Storing the rows of cold files: transactions from where their markers are, as for files that come in (``shard_writer.py``)."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from pipeline.core.messages import Change
from pipeline.ingest.cold_files import ColdRows
from pipeline.ingest.cold_merging import GONE, MERGED
from pipeline.ingest.parsing import cold_places
from pipeline.ingest.shard_writer import TRANSACTION_BYTES, ShardWriter
from pipeline.ingest.stores import Retry, WriterSettings
from pipeline.ingest.transactions import PartQueue, Step
from pipeline.store.base import Changed, MessageRows, Scheduled, Transaction
from pipeline.store.redis_store import RedisStore

R = TypeVar("R")


class ColdQueue(PartQueue):
    """Rows of a cold file that are due soon, in order, and the place up to which they are in Redis."""

    def __init__(self, rows: ColdRows, marker: str) -> None:
        """Make one of what is due soon of a file, and go on from its marker."""
        self._is_end = rows.is_end
        super().__init__(rows.part)
        self.resume(marker)

    @property
    def is_stored(self) -> bool:
        """Whether nothing is left that is due soon, the record of that included."""
        return self.marker in GONE or (not self._is_end and self.place == len(self))

    def resume(self, marker: str) -> int:
        """Go on from a marker. Of a file that was merged meanwhile nothing is left to do here."""
        if marker == MERGED:
            self.marker, self.place = marker, len(self)
            return self.place
        return super().resume(marker)

    def marker_at(self, place: int) -> str:
        """Return the marker that says that everything before ``place`` is in Redis."""
        if place == len(self) and not self._is_end:
            return f"{self.due_ms[place - 1]} {self.line_nos[place - 1]:08x}"
        return super().marker_at(place)


class _ColdStep(Step):
    """The next transaction of some cold files."""

    @property
    def transaction(self) -> Transaction:
        """Return what the store is asked to do."""
        identified = self._rows(has_key=True)
        places = MessageRows(
            identified.due_ms, cold_places(identified.members, identified.due_ms), identified.idempotency_keys
        )
        return Transaction(self._moves(), self._rows(has_key=False), identified, 0, cold_identified=places)


class ColdWriter(ShardWriter):
    """Brings cold files of one shard into Redis."""

    _store: RedisStore

    def __init__(self, store: RedisStore, settings: WriterSettings, shard: int, retry: Retry) -> None:
        super().__init__(store, _NoChanges(), settings, shard)
        self._retry = retry

    def _retrying(self, call: Callable[[], R]) -> R:
        return self._retry(call)

    def _next_step(self, queues: list[PartQueue]) -> Step:
        return _ColdStep(queues, self._settings.transaction_messages, TRANSACTION_BYTES)

    def _schedule(self, step: Step) -> Scheduled | None:
        return self._store.hydrate(self._settings.source_id, step.transaction)


class _NoChanges:
    """Cold files have no lines that cancel or replace."""

    def apply(self, changes: Sequence[Change]) -> Changed:
        assert not changes
        return Changed()
