"""Bringing cold messages into Redis before they are due, each once (docs/adr/0031-cold-messages.md).

The folder of cold files is the queue: there is no cursor that could run ahead of it. A look takes every file that has something due
before the end of the hour that begins within the lead, however long ago that was, and stores it by transactions that move the
progress marker of the file, as files are stored that come in. So it does not matter who does it, how often, or where it was cut
off. A file whose marker says ``all`` goes to those that are done, and is deleted when no failover can undo its last writes
any more.
"""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from pipeline.core.clock import Clock
from pipeline.core.cold import HOUR_MS
from pipeline.core.errors import ColdUnavailable, PipelineError, StoreError
from pipeline.core.text import count_text
from pipeline.ingest.cold_files import ColdFile
from pipeline.ingest.cold_folder import DONE_NAME, SOURCE_ID, ColdFolder, ColdName
from pipeline.ingest.cold_merging import GONE, Merger, forget_markers
from pipeline.ingest.cold_writer import ColdQueue, ColdWriter
from pipeline.ingest.stores import WriterSettings, wait_until_kept
from pipeline.ingest.transactions import ALL_STORED
from pipeline.store.base import NO_MARKER
from pipeline.store.cold import HydratorLease, HydratorProgress
from pipeline.store.connection import server_ms
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.retry import retry_until_available
from pipeline.store.topology import client_of

LEASE_SEC: Final = 30
FILES_AT_ONCE: Final = 100  # small files: so many are stored together
ROWS_AT_ONCE: Final = 1_000_000  # and no further one once they have so many messages: all are in memory
NOTHING: Final = (-1, 0)  # in the place of the last message that counts
MINUTE_MS: Final = 60_000
HOUSE_MS: Final = 600_000

log = logging.getLogger(__name__)


@dataclass(slots=True)
class HydrationTotals:
    """What a hydrator did since it started: messages that it brought into Redis, and files that it was done with."""

    messages: int = 0
    files: int = 0

    def __str__(self) -> str:
        return f"{count_text(self.messages, 'message')} of {count_text(self.files, 'whole file')}"


class Hydrator:
    """Brings the cold messages of a namespace back, shard by shard, those of a shard under its lease.

    Args:
        name: of this process, unique.

        archive_ms: how long files that are done are kept, in case a failover undoes it; 0 deletes them.

        marker_keep_ms: how long progress markers of landing files are kept: a file that is twice as old is written by nobody.

        wait: pauses for so many milliseconds, or less, while a server does not answer.
    """

    def __init__(
        self,
        name: str,
        folder: ColdFolder,
        client: Any,
        shards: Sequence[Keys],
        stores: Sequence[RedisStore],
        settings: WriterSettings,
        lead_ms: int,
        archive_ms: float,
        marker_keep_ms: float,
        clock: Clock,
        stopping: Callable[[], bool],
        wait: Callable[[float], object],
    ) -> None:
        self._folder = folder
        self._client = client
        self._shards = shards
        self._stores = stores
        self._settings = replace(settings, source_id=SOURCE_ID)
        self._lead_ms = lead_ms
        self._archive_ms = archive_ms
        self._marker_keep_ms = marker_keep_ms
        self._next_house_ms = 0.0
        self._clock = clock
        self._stopping = stopping
        self._retry = partial(retry_until_available, wait=wait, clock=clock, random=random.random, stopping=stopping)
        self._leases = [HydratorLease(client, keys, name, LEASE_SEC) for keys in shards]
        self._next_due_ms: dict[ColdName, int] = {}  # of files that are begun; what is not here is known by its name
        self.totals = HydrationTotals()
        self.until_ms = 0
        self.last_success_ms = 0
        self._is_done = False
        self._problem = ""

    @property
    def is_well(self) -> bool:
        """Whether there was a look, and nothing in the way of the last one."""
        return self.until_ms > 0 and not self._problem

    def progress(self, name: str, started_ms: int) -> HydratorProgress:
        """Return what it has done."""
        return HydratorProgress(
            hydrator_id=name,
            started_ms=started_ms,
            messages=self.totals.messages,
            files=self.totals.files,
            until_ms=self.until_ms,
            lead_ms=self._lead_ms,
            is_done=self._is_done,
            problem=self._problem,
        )

    def look(self) -> bool:
        """Bring in what is due soon; returns whether all of it is in, as far as this process has the leases.

        Raises:
            StoreError: no answer, or an error.
            ColdUnavailable: the folder can't be used.
            PipelineError: a file is damaged; the others are in.
        """
        try:
            self._is_done = self._look()
        except PipelineError as exc:
            self._is_done, self._problem = False, str(exc)
            raise
        self._problem = ""
        if self._is_done:
            self.last_success_ms = self._clock.wall_ms()
        return self._is_done

    def _look(self) -> bool:
        names = self._folder.names()
        self._next_due_ms = {name: self._next_due_ms[name] for name in self._next_due_ms.keys() & {*names}}
        failures: list[PipelineError] = []
        has_all = True
        for shard, keys in enumerate(self._shards):
            if self._stopping():
                return False
            if not self._leases[shard].hold():
                has_all = False
                continue
            self.until_ms = self._until_ms(keys)
            due = [name for name in names if name.shard == shard and self._due_ms(name) < self.until_ms]
            due.sort(key=self._due_ms)
            while due:
                if self._stopping() or not self._leases[shard].hold():
                    return False
                failed, taken = self._bring(shard, due[:FILES_AT_ONCE])
                failures += failed
                due = due[taken:]
        if failures:
            raise failures[0]
        return has_all

    def keep_house(self) -> None:
        """Take away what is no longer needed and is not due soon, merge small files, and forget markers; once in a while.

        Raises:
            StoreError, ColdUnavailable, PipelineError: as ``look``; the next call goes on.
        """
        if self._clock.monotonic_ms() < self._next_house_ms:
            return
        self._next_house_ms = self._clock.monotonic_ms() + HOUSE_MS
        for shard, keys in enumerate(self._shards):
            if self._stopping() or not self._leases[shard].hold():
                continue
            names = self._folder.names()
            later = [name for name in names if name.shard == shard and self._due_ms(name) >= self.until_ms]
            # What was merged is taken away a while after, when no failover can undo that any more.
            self._retire(shard, later)
            merger = Merger(self._folder, self._stores[shard], shard, 2 * self._marker_keep_ms)
            merger.merge(self._clock.wall_ms(), self._until_ms(keys) + HOUR_MS)
            done = [each for minute in self._folder.done_minutes() for each in self._folder.names(DONE_NAME, minute)]
            now_ms = server_ms(client_of(self._client, keys))
            forget_markers(self._stores[shard], [*self._folder.names(), *done], now_ms)

    def leave(self) -> None:
        """Let others have the leases at once."""
        for lease in self._leases:
            lease.leave()

    def _until_ms(self, keys: Keys) -> int:
        """Return before when all shall be in Redis that is due: the end of an hour, so that a file is read once for each hour."""
        now_ms = server_ms(client_of(self._client, keys))
        return (now_ms + self._lead_ms) // HOUR_MS * HOUR_MS + HOUR_MS

    def _due_ms(self, name: ColdName) -> int:
        return self._next_due_ms.get(name, name.first_due_ms)

    def _bring(self, shard: int, names: Sequence[ColdName]) -> tuple[list[PipelineError], int]:
        """Bring in what is due soon of the first of some files, one at least.

        Returns:
            What is wrong with those that are damaged, and how many were taken.
        """
        store = self._stores[shard]
        writer = ColdWriter(store, self._settings, shard, self._retry)
        marker_ids = [name.marker_id for name in names]
        queues: dict[ColdName, ColdQueue] = {}
        next_due_ms: dict[ColdName, int] = {}
        failures: list[PipelineError] = []
        rows_read = taken = 0
        for name, marker in zip(names, store.markers(SOURCE_ID, marker_ids), strict=True):
            if rows_read >= ROWS_AT_ONCE:
                break
            taken += 1
            if marker in GONE or (name.is_merged and marker == NO_MARKER):
                continue
            try:
                with ColdFile(self._folder, name) as file:
                    stored = self._stored(store, file)
                    rows = file.rows(_due_ms_of(marker), self.until_ms, stored)
            except FileNotFoundError:
                continue  # another hydrator was done with it
            except PipelineError as exc:
                if isinstance(exc, StoreError | ColdUnavailable):
                    raise
                failures.append(exc)
                continue
            queues[name] = ColdQueue(rows, marker)
            rows_read += len(queues[name])
            next_due_ms[name] = rows.next_due_ms
        writer.store([*queues.values()])
        self._next_due_ms |= next_due_ms
        self.totals.messages += writer.summary.stored
        self._retire(shard, names[:taken])
        return failures, taken

    def _stored(self, store: RedisStore, file: ColdFile) -> tuple[int, int] | None:
        """Return due time and line of the last message of a file that counts, None if all do.

        Those behind the marker of their landing file are not stored yet: its writer died, and another will go on, perhaps in days.
        """
        if file.name.is_merged:
            return None
        [marker] = store.markers(file.source_id, [file.name.part_id])
        if marker == NO_MARKER and self._is_young(file.name):
            return NOTHING  # a failover has undone it: the file is read again
        if marker in (ALL_STORED, NO_MARKER):  # it was forgotten, long after all was stored
            return None
        due_ms, line, *_ = marker.split(" ")
        return int(due_ms), int(line, 16)

    def _is_young(self, name: ColdName) -> bool:
        """Return whether the marker of its landing file can't have been forgotten yet."""
        written_ms = self._folder.written_ms(name)
        return written_ms is not None and written_ms > self._clock.wall_ms() - self._marker_keep_ms

    def _retire(self, shard: int, names: Sequence[ColdName]) -> None:
        """Take away the files whose markers say that all is stored, once it is where the settings want it."""
        store = self._stores[shard]
        wait_until_kept(store, self._settings)
        # A server that came back without its last writes, as weak settings allow, has lost messages and markers together.
        markers = store.markers(SOURCE_ID, [name.marker_id for name in names])
        minute = self._clock.wall_ms() // MINUTE_MS
        for name, marker in zip(names, markers, strict=True):
            if marker not in GONE:
                continue
            if self._archive_ms:
                self._folder.move(name, (), (DONE_NAME, minute))
            else:
                self._folder.delete(name)
            self.totals.files += 1

    def bring_back(self, since_ms: int) -> int:
        """Have files looked at again that were done since (epoch ms UTC), as a failover has undone something; returns how many."""
        self._next_due_ms.clear()
        found = 0
        for minute in self._folder.done_minutes():
            if minute >= since_ms // MINUTE_MS:
                for name in self._folder.names(DONE_NAME, minute):
                    self._folder.move(name, (DONE_NAME, minute), ())
                    found += 1
        return found

    def forget_done(self) -> None:
        """Delete the files that were done too long ago; to be called while all servers are known to have what was stored."""
        before = (self._clock.wall_ms() - self._archive_ms) // MINUTE_MS
        for minute in self._folder.done_minutes():
            if minute < before:
                self._folder.delete_done(minute)


def _due_ms_of(marker: str) -> int:
    """Return when the last message is due that a marker speaks for."""
    return 0 if marker == NO_MARKER else int(marker.partition(" ")[0])
