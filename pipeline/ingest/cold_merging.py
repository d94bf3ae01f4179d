"""Merging small cold files of a shard, as inputs of a few lines leave them, into larger ones; and forgetting markers of files.

What a message counts for is decided in Redis, by progress markers, as everything else: a merged file is written, and then one
transaction says of it that it is valid, and of the files in it that they are merged, if nothing of any was begun. So whoever brings
cold messages back, at whatever time it has listed the folder, takes either the small files or the merged one. A small file goes
when its marker has said ``merged`` for a while, a merged one that never became valid when it is old.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa

from pipeline.core.text import count_text
from pipeline.ingest.cold_files import ColdFile, merged_file
from pipeline.ingest.cold_folder import SOURCE_ID, ColdFolder, ColdName
from pipeline.ingest.transactions import ALL_STORED
from pipeline.store.base import NO_MARKER, NO_ROWS, MarkerMove, Transaction
from pipeline.store.redis_store import RedisStore

MERGED: Final = "merged"  # the marker of a file whose messages are in a merged one
BEGINNING: Final = f"0 {0:08x}"  # the marker of a merged file that is valid
GONE: Final = (ALL_STORED, MERGED)  # files with these markers are no longer needed
ROWS_MAX: Final = 200_000  # of a merged file
BYTES_MAX: Final = 32 * 1024 * 1024  # of all that go into one
SMALL_BYTES: Final = 256 * 1024  # larger files stay as they are
FILES_MIN: Final = 20  # fewer are not worth it
FILES_MAX: Final = 2_000  # more would hold up others that want the server
KEEP_MS: Final = 30 * 86_400_000  # a marker of a file that is gone: longer than a stray task lives, or a backup is kept
KEEP_MERGED_MS: Final = 2 * 86_400_000  # of one that was merged, of which there may be many

log = logging.getLogger(__name__)


class Merger:
    """Merges the small files of one shard.

    Args:
        settled_ms: how old a file must be, so that no task writes it any more.
    """

    def __init__(self, folder: ColdFolder, store: RedisStore, shard: int, settled_ms: float) -> None:
        self._folder = folder
        self._store = store
        self._shard = shard
        self._settled_ms = settled_ms

    def merge(self, now_ms: int, from_due_ms: int) -> int:
        """Merge small files of which nothing is due before ``from_due_ms``, while nothing of them is begun.

        Args:
            now_ms: epoch ms UTC on the clock of the file system, more or less.

        Returns:
            How many files are merged.

        Raises:
            StoreError, ColdUnavailable: nothing is lost, and the next call goes on.
            PipelineError: a file is damaged.
        """
        sizes = {name: each for name, each in self._folder.sizes().items() if name.shard == self._shard}
        settled = {name: size for name, (size, at_ms) in sizes.items() if at_ms < now_ms - self._settled_ms}
        self._drop_invalid([name for name in settled if name.is_merged])
        small = [
            name
            for name, size in settled.items()
            if size < SMALL_BYTES and name.first_due_ms >= from_due_ms and not name.is_merged
        ]
        small.sort(key=lambda name: name.first_due_ms)
        merged = 0
        for group in self._groups(small, settled):
            merged += self._merge(group)
        return merged

    def _groups(self, names: Sequence[ColdName], sizes: dict[ColdName, int]) -> Iterable[list[ColdName]]:
        """Cut files that lie near in time into groups, each for one merged file."""
        group: list[ColdName] = []
        for name in names:
            if len(group) == FILES_MAX or sum(sizes[each] for each in group) + sizes[name] > BYTES_MAX:
                yield group
                group = []
            group.append(name)
        yield group

    def _merge(self, names: Sequence[ColdName]) -> int:
        markers = self._store.markers(SOURCE_ID, [name.marker_id for name in names])
        unbegun = [name for name, marker in zip(names, markers, strict=True) if marker == NO_MARKER]
        tables = self._read(unbegun)
        if len(tables) < FILES_MIN:
            return 0
        name, write = merged_file(tables, self._shard)
        self._folder.write([(name, write)])
        moves = [MarkerMove(each.marker_id, NO_MARKER, MERGED) for each in tables]
        moves.append(MarkerMove(name.marker_id, NO_MARKER, BEGINNING))
        if self._store.schedule(SOURCE_ID, Transaction(moves, NO_ROWS, NO_ROWS, 0)) is None:
            log.debug("something of %d files was begun meanwhile: they are not merged now", len(tables))
            return 0
        log.info("merged %s into %s", count_text(len(tables), "cold file"), name)
        return len(tables)

    def _read(self, names: Iterable[ColdName]) -> dict[ColdName, pa.Table]:
        """Read the files of parts that are stored whole, so that nobody writes them any more, up to ``ROWS_MAX`` rows."""
        tables: dict[ColdName, pa.Table] = {}
        part_ids: dict[str, list[ColdName]] = defaultdict(list)
        rows = 0
        for name in names:
            try:
                with ColdFile(self._folder, name) as file:
                    if rows + len(file) > ROWS_MAX:
                        break
                    rows += len(file)
                    part_ids[file.source_id].append(name)
                    tables[name] = file.table()
            except FileNotFoundError:
                continue
        for source_id, of_source in part_ids.items():
            markers = self._store.markers(source_id, [name.part_id for name in of_source])
            for name, marker in zip(of_source, markers, strict=True):
                if marker not in (ALL_STORED, NO_MARKER):  # without a marker it was forgotten, long after it was stored
                    del tables[name]
        return tables

    def _drop_invalid(self, names: Sequence[ColdName]) -> None:
        """Delete merged files that never became valid, and now never can."""
        for name, marker in zip(names, self._store.markers(SOURCE_ID, [name.marker_id for name in names]), strict=True):
            move = MarkerMove(name.marker_id, NO_MARKER, ALL_STORED)
            if marker == NO_MARKER and self._store.schedule(SOURCE_ID, Transaction([move], NO_ROWS, NO_ROWS, 0)):
                self._folder.delete(name)


def forget_markers(store: RedisStore, present: Iterable[ColdName], now_ms: int) -> None:
    """Forget the markers of cold files that have been gone for long.

    Args:
        present: the files that are there, also those that are done.

        now_ms: epoch ms UTC on the server's clock.
    """
    here = {name.marker_id for name in present}
    ages = {part_id: now_ms - moved_ms for part_id, moved_ms in store.marked_parts(SOURCE_ID) if part_id not in here}
    old = [part_id for part_id, age_ms in ages.items() if age_ms > KEEP_MERGED_MS]
    markers = dict(zip(old, store.markers(SOURCE_ID, old), strict=True))
    gone = [part_id for part_id in old if markers[part_id] == MERGED or ages[part_id] > KEEP_MS]
    store.forget_markers(SOURCE_ID, gone)
