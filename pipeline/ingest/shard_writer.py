"""Storing what a task has for one shard: transactions from where the markers are, the file of cold messages before they count."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa

from pipeline.core.errors import PipelineError, StoreUnavailable
from pipeline.core.messages import Change
from pipeline.ingest.cold_files import cold_file_of
from pipeline.ingest.parsing import ParsedPart
from pipeline.ingest.stores import (
    Patience,
    WriterSettings,
    open_changing_stores,
    open_cold_folder,
    open_stores,
    retrying,
    wait_until_kept,
)
from pipeline.ingest.summary import Summary
from pipeline.ingest.transactions import ALL_STORED, PartQueue, Step
from pipeline.store.base import ChangingStore, Scheduled, SchedulingStore
from pipeline.store.shards import shard_of

R = TypeVar("R")

TRANSACTION_BYTES = 4 * 1024 * 1024  # long messages: a transaction has no more than this, give or take one
WAITING_FILES = 500  # tiny files: this many are stored together
# Parts are stored together, in order of due time, once they have so much: in longer runs order gains little more (ADR 4).
SORTED_MESSAGES, SORTED_BYTES = 100_000, 32 * 1024 * 1024


class ShardWriter:
    """Stores what a partition has for one shard. If that is away, it says so in its summary."""

    def __init__(
        self,
        store: SchedulingStore,
        changing: ChangingStore,
        settings: WriterSettings,
        shard: int = 0,
        patience: Patience | None = None,
    ) -> None:
        self._store = store
        self._changing = changing
        self._settings = settings
        self._shard = shard
        self._patience = patience or Patience()
        self._lacks = False
        self._waiting: list[PartQueue] = []
        self._part_ids: list[str] = []
        self._was_away = False
        self.summary = Summary()

    def add(self, queue: PartQueue) -> None:
        """Store a part, now or together with others."""
        self._waiting.append(queue)
        self._part_ids.append(queue.part_id)
        messages = sum(waiting.left + len(waiting.changes) for waiting in self._waiting)
        size = sum(waiting.cost_to(len(waiting))[1] for waiting in self._waiting)
        if len(self._waiting) >= WAITING_FILES or messages >= SORTED_MESSAGES or size >= SORTED_BYTES:
            self.store_waiting()

    def finish(self) -> Summary:
        """Store the rest, and look whether all of it is still there."""
        self.store_waiting()
        if self._part_ids and not self._lacks:
            try:
                self._look_again()
            except StoreUnavailable:
                self._lacks = True
        if self._lacks:  # of what was stored before, too, it is not known whether it is there
            tokens = sorted({part_id.partition(".")[0] for part_id in self._part_ids})
            self.summary.lacking = [f"{token} {self._shard}" for token in tokens]
        return self.summary

    def _look_again(self) -> None:
        histories = wait_until_kept(self._store, self._settings, self._retrying)
        # A server that came back without its last writes, as weak settings allow, has lost messages and markers together.
        markers = self._retrying(lambda: self._store.markers(self._settings.source_id, self._part_ids))
        self.summary.lost = sum(marker != ALL_STORED for marker in markers)
        self.summary.histories = histories

    def store_waiting(self) -> None:
        """Store what was added and is not stored yet."""
        queues, self._waiting = self._waiting, []
        try:
            self.store(queues)
        except StoreUnavailable:
            self._lacks = True
            self.summary.waiting += sum(queue.lines_left for queue in queues)
            self.summary.lines -= sum(queue.lines_left for queue in queues if not queue.is_repeated)

    def _retrying(self, call: Callable[[], R]) -> R:
        return self._patience.retrying(self._shard, call)

    def store(self, queues: list[PartQueue]) -> None:
        """Store by transactions; one that finds a marker elsewhere goes on from there.

        Raises:
            StoreUnavailable: the shard is away; how far it has come, the markers say.
        """
        if any(queue.changes for queue in queues):
            self._resume(queues)
            self._make_changes(queues)
        while step := self._next_step(queues):
            if cold := step.opens_cold:
                self._write_cold_files(cold)
            done = self._retrying(partial(self._store_step, step, queues))
            if done is not None:
                repeated, again = step.advance()
                self.summary.add(Summary(repeated, done.stored, len(done.duplicates), stored_again=again))
            else:
                self._resume(queues)

    def _next_step(self, queues: list[PartQueue]) -> Step:
        return Step(queues, self._settings.transaction_messages, TRANSACTION_BYTES)

    def _write_cold_files(self, queues: list[PartQueue]) -> None:
        """Write the cold messages of parts into their files. Whoever does so again, however late, writes the same."""
        if self._settings.cold is None:
            raise PipelineError(
                "Messages of a file were on their way into the cold folder when the job ended, and now cold.folder names none: set "
                "it again, and cold.horizon_hours = 8784 if no more messages shall go there."
            )
        folder = open_cold_folder(self._settings.cold)
        files = [cold_file_of(queue, self._settings.source_id, self._shard) for queue in queues]
        retrying(lambda: folder.write(files))  # without end, also where shards are given up: it is the folder of all

    def _store_step(self, step: Step, queues: list[PartQueue]) -> Scheduled | None:
        """Try to store a transaction. A server that was away may have lost what was changed, so that is changed again before."""
        if self._was_away:
            self._changing.apply(_changes_left(queues))
        self._was_away = True  # unless it answers
        done = self._schedule(step)
        self._was_away = done is None
        return done

    def _schedule(self, step: Step) -> Scheduled | None:
        return self._store.schedule(self._settings.source_id, step.transaction)

    def _resume(self, queues: list[PartQueue]) -> None:
        """Go on from where the markers are; what is stored already, by another writer or before a lost reply, is known."""
        part_ids = [queue.part_id for queue in queues]
        markers = self._retrying(lambda: self._store.markers(self._settings.source_id, part_ids))
        for queue, marker in zip(queues, markers, strict=True):
            before = queue.place
            known = queue.resume(marker) - before
            self.summary.duplicates += 0 if queue.is_repeated else known

    def _make_changes(self, queues: list[PartQueue]) -> None:
        """Cancel and replace what the parts say, and count it."""
        changes = _changes_left(queues)
        done = self._retrying(lambda: self._changing.apply(changes))
        self.summary.add(Summary(**asdict(done)))
        self.summary.lines += sum(len(_changes_left([queue])) for queue in queues if queue.is_repeated)
        self.summary.duplicates += sum(
            len(queue.changes) for queue in queues if queue.is_begun and not queue.is_repeated
        )


def split_by_shard(part: ParsedPart, shards: int) -> dict[int, ParsedPart]:
    """Split a part by the shards that its messages belong to.

    Messages and changes with an idempotency key go to the shard of that key. All others, and the count of rejects, go to the
    shard of the part, which is always in the result.
    """
    own = shard_of(part.part_id, shards)
    keys = part.idempotency_keys
    if shards == 1 or (keys.null_count == len(keys) and not part.changes):
        return {own: part}
    shard_numbers = np.full(len(part.due_ms), own)
    for index, key in enumerate(keys.to_pylist()):
        if key is not None:
            shard_numbers[index] = shard_of(key.decode(), shards)
    changes: dict[int, list[Change]] = {}
    for change in part.changes:
        changes.setdefault(shard_of(change.key, shards), []).append(change)
    split = {}
    for shard in {own, *changes, *shard_numbers.tolist()}:
        indexes = np.flatnonzero(shard_numbers == shard)
        split[shard] = replace(
            part,
            line_nos=part.line_nos[indexes],
            due_ms=part.due_ms[indexes],
            members=part.members.take(pa.array(indexes)),
            idempotency_keys=keys.take(pa.array(indexes)),
            rejected=part.rejected if shard == own else [],
            changes=changes.get(shard, []),
        )
    return split


def open_shard_writers(settings: WriterSettings, patience: Patience) -> list[ShardWriter]:
    """Return a writer for each shard, on the connections of this process."""
    stores = zip(open_stores(settings.redis), open_changing_stores(settings), strict=True)
    return [ShardWriter(*each, settings, shard, patience) for shard, each in enumerate(stores)]


def finish_all(writers: Sequence[ShardWriter]) -> Summary:
    """Store the rest of all shards, and only then look whether all is there: one server may have, and lose, what several got."""
    summary = Summary()
    for writer in writers:
        writer.store_waiting()
    for writer in writers:
        summary.add(writer.finish())
    return summary


def _changes_left(queues: Iterable[PartQueue]) -> list[Change]:
    """Return what parts change of which nothing is stored: a marker moves only after that. To change it again changes nothing."""
    return [change for queue in queues if not queue.is_begun for change in queue.changes]
