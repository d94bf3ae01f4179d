"""The landing files of a query: each that a batch names is stored before the batch is committed, and deleted only then.

Spark alone does not see to that. A file that the driver lists and an executor can't read is an error (``readers.py``). But a file
that the driver itself misses for a moment, as on a mount that comes and goes, is left out silently, and Spark's ``cleanSource``
deletes whatever its log names, stored or not.
"""

import logging
import os
import shutil
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from threading import Lock

from pipeline.config import Settings
from pipeline.core.clock import Clock
from pipeline.core.errors import ConfigError, PipelineError, StoreUnavailable
from pipeline.core.files import make_private
from pipeline.core.ids import token_epoch_ms
from pipeline.core.text import count_text
from pipeline.ingest.checkpoint import log_id_of, names_read
from pipeline.ingest.parsing import PART_BYTES
from pipeline.ingest.transactions import ALL_STORED
from pipeline.ingest.waiting import WaitingFiles
from pipeline.landing.names import parse_landing_name, repeated_name
from pipeline.store.replication import may_fail_over

log = logging.getLogger(__name__)

LISTED_MAX = 10_000  # names that are looked at for the age of the oldest
ARCHIVE_NAME = ".stored"  # in the landing folder, hidden from Spark; in it one folder for each minute of storing
HISTORIES_NAME = "histories.json"
MINUTE_MS = 60_000
NEWEST_MAX = 100  # stored files whose markers are looked at to find out whether they are still there


def archive_ms_of(settings: Settings) -> float:
    """Return how long stored files are kept, 0 if not at all, as no other server can take its place.

    Raises:
        ConfigError: they would be kept longer than it is known what is stored of them.
    """
    ingest = settings.ingest
    if ingest.archive_sec >= ingest.marker_keep_sec:
        raise ConfigError(
            f"ingest.archive_sec ({ingest.archive_sec}) must be less than ingest.marker_keep_sec ({ingest.marker_keep_sec})."
        )
    return ingest.archive_sec * 1_000 if may_fail_over(settings.redis.url) else 0


class LandingFiles:
    """Knows which files are stored, by what the workers report, or else by their markers.

    Args:
        checkpoint: None if it is not a local folder. Then a batch is not compared with Spark's log of files.

        markers_of: returns the progress markers of landing files, each in the shard of its own.

        archive_ms: how long stored files are kept, to be stored again if a failover undoes it; 0 deletes them.

        marked_ms: how long after archiving a file its marker is surely there.

    Raises:
        ConfigError: others may write the archive.
    """

    def __init__(
        self,
        landing: Path,
        checkpoint: Path | None,
        markers_of: Callable[[Sequence[str]], list[str]],
        clock: Clock,
        archive_ms: float = 0,
        marked_ms: float = inf,
    ) -> None:
        self._landing = landing
        self._marked_ms = marked_ms
        self._archive = landing / ARCHIVE_NAME
        self._archive_ms = archive_ms
        if archive_ms:
            make_private(self._archive)
        self._lock = Lock()  # of what is moved into the archive, and back
        self._newest: deque[tuple[str, float]] = deque(_newest_of(self._archive), NEWEST_MAX)  # each with when
        self._again: set[int] = set()  # batches whose files are to be read again as soon as they may be moved
        self._checkpoint = checkpoint
        self._markers_of = markers_of
        self._clock = clock
        self._stored: dict[int, frozenset[str]] = {}  # tokens by batch, until they are deleted
        self._left: set[str] = set()  # tokens of stored files that can't be deleted
        self.waiting = WaitingFiles(landing, clock)

    def check_batch(self, batch_id: int, tokens: Collection[str], lacking: Iterable[str] = ()) -> None:
        """Compare the files that workers have read for a batch with those that Spark's log names for it.

        Those that a shard lacks are set aside until it answers, see ``WaitingFiles.put``; the batch is done without them.

        Args:
            lacking: as ``Summary.lacking``.

        Raises:
            PipelineError: files that are there were not read. The batch must fail; the next start reads them.
        """
        self._refuse_unread(batch_id, frozenset(tokens))
        shards: dict[str, set[int]] = {}
        for each in lacking:
            token, _, shard = each.rpartition(" ")
            shards.setdefault(token, set()).add(int(shard))
        if shards:
            with self._lock:
                self.waiting.put(shards)
        self._stored[batch_id] = frozenset(tokens) - shards.keys()

    def _refuse_unread(self, batch_id: int, read: frozenset[str]) -> None:
        missing = sorted(name for name in self._planned(batch_id) if (token := _token_of(name)) and token not in read)
        if not missing:
            return
        sizes = {name: _size_of(self._landing / name) for name in missing}
        if unread := [name for name, size in sizes.items() if size]:  # Spark makes no row of an empty file
            raise PipelineError(
                f"Spark on {socket.gethostname()} left {len(unread)} files of batch {batch_id} unread, such as "
                f"{self._landing / unread[0]}: check the mount of that folder and start the job again; nothing was deleted."
            )
        # A batch that is replayed from an older checkpoint names files that were stored and deleted. Their markers say so for
        # ``ingest.marker_keep_sec``; after that nobody knows, and failing for ever would bring back no file.
        # Those that wait for a shard, or were given back under another name, are not gone.
        elsewhere = {*self.waiting.tokens(), *map(_token_of, _names(self._landing))}
        gone = [name for name, size in sizes.items() if size is None and _token_of(name) not in elsewhere]
        if unknown := [name for name, marker in self._markers(gone).items() if marker != ALL_STORED]:
            log.warning(
                "%d files of batch %d, such as %s, are gone, and no marker says any more that they were stored",
                *(len(unknown), batch_id, unknown[0]),
            )

    def delete_batch(self, batch_id: int) -> None:
        """Delete what a batch, which is committed now, has stored, or archive it; what can't be the next start deletes."""
        with self._lock:
            tokens = self._stored.get(batch_id, frozenset())
            names = (name for name in _names(self._landing) if name.partition(".")[0] in tokens)
            if batch_id in self._again:
                self._read_again(self._landing, names)
                self._again.remove(batch_id)
            else:
                self._delete(names)
            self._stored.pop(batch_id, None)

    @property
    def histories(self) -> Path | None:
        """A file for the histories of the servers that have what is archived, see ``repair.Repair``."""
        return self._archive / HISTORIES_NAME if self._archive_ms else None

    def read_again(self, since_ms: int) -> str:
        """Have the files read again that were stored since; see ``repair.Repeatable``."""
        with self._lock:
            self._again.update(self._stored)
            self._newest.clear()
            minutes = sorted(int(name) for name in _names(self._archive) if name.isdecimal())
            folders = [self._archive / str(minute) for minute in minutes if minute >= since_ms // MINUTE_MS]
            moved = sum(self._read_again(folder, _names(folder)) for folder in folders)
            return count_text(moved, "file") if moved else ""

    def forget_archived(self) -> None:
        """Delete what was archived too long ago; see ``repair.Repeatable``."""
        before = (self._clock.wall_ms() - self._archive_ms) // MINUTE_MS
        for name in _names(self._archive):
            if name.isdecimal() and int(name) < before:
                shutil.rmtree(self._archive / name, ignore_errors=True)

    def newest_are_stored(self) -> bool:
        """Tell by their markers whether the files that were archived last are still stored; True if the server does not answer."""
        before_ms = self._clock.wall_ms() - self._marked_ms
        with self._lock:
            names = [name for name, stored_ms in self._newest if stored_ms > before_ms]
        return all(marker == ALL_STORED for marker in self._markers(names).values())

    def delete_marked(self, names: Iterable[str]) -> list[str]:
        """Delete those files whose markers say that they are stored whole, and return those of which they do not.

        While the server does not answer nothing is known, and nothing done.
        """
        markers = self._markers(sorted(set(_names(self._landing)).intersection(names)))
        stored = {name for name, marker in markers.items() if self._is_whole(name, marker)}
        with self._lock:
            self._delete(stored, empty={name for name in stored if markers[name] != ALL_STORED})
        return [name for name in markers if name not in stored]

    def oldest_waiting_ms(self) -> int | None:
        """Return how long the oldest file that is not stored has waited since it was landed; 0 if none waits, None if unknown."""
        backlog = self.backlog()
        return None if backlog is None else backlog[1]

    def backlog(self) -> tuple[int, int] | None:
        """Return how many files are not stored, and how long the oldest of them has waited; None if that is not known.

        It costs a listing of at most ``LISTED_MAX`` names; with more the oldest of those is taken.
        """
        try:
            with os.scandir(self._landing) as entries:
                tokens = {_token_of(entry.name) for entry in islice(entries, LISTED_MAX)}
        except OSError as exc:
            log.debug("how long files have waited is not known: %s", exc)
            return None
        waiting = tokens.difference([""], self._left.copy(), *self._stored.copy().values())
        # Tokens sort by time. One that was made in the same millisecond as others is a little ahead of the clock.
        oldest_ms = max(0, self._clock.wall_ms() - token_epoch_ms(min(waiting))) if waiting else 0
        return len(waiting), oldest_ms

    def _planned(self, batch_id: int) -> set[str]:
        if self._checkpoint is None:
            return set()
        try:
            before = log_id_of(self._checkpoint, batch_id - 1) if batch_id else -1
            return names_read(self._checkpoint, before, log_id_of(self._checkpoint, batch_id))
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise PipelineError(
                f"The checkpoint {self._checkpoint} can't be read ({exc}): put that right and start the job again."
            ) from exc

    def _delete(self, names: Iterable[str], empty: Collection[str] = ()) -> None:
        """Delete stored files, or archive them. One that can't be keeps no other, and still counts as stored.

        Args:
            empty: those that have no marker, as nothing is in them.
        """
        failures: list[OSError] = []
        folder = self._archive / str(self._clock.wall_ms() // MINUTE_MS)
        for name in names:
            try:
                if self._archive_ms:
                    folder.mkdir(parents=True, exist_ok=True)
                    (self._landing / name).rename(folder / name)
                    if name not in empty:
                        self._newest.append((name, self._clock.wall_ms()))
                else:
                    (self._landing / name).unlink(missing_ok=True)
            except FileNotFoundError:
                pass
            except OSError as exc:
                failures.append(exc)
                self._left.add(_token_of(name))
        if failures:
            log.warning(
                "Landing files that are stored, %d in all, can't be deleted (%s); the next start deletes them.",
                *(len(failures), failures[0]),
            )

    def _read_again(self, folder: Path, names: Iterable[str]) -> int:
        moved = 0
        for name in names:
            try:
                (folder / name).rename(self._landing / repeated_name(name))
                moved += 1
            except OSError as exc:
                log.warning("%s can't be read again: %s", folder / name, exc)
        return moved

    def _markers(self, names: Sequence[str]) -> dict[str, str]:
        if not names:
            return {}
        try:
            return dict(zip(names, self._markers_of([_token_of(name) for name in names]), strict=True))
        except StoreUnavailable as exc:
            log.debug("whether %d files are stored is not known: %s", len(names), exc)
            return {}

    def _is_whole(self, name: str, marker: str) -> bool:
        """Tell whether a marker says that a file is stored whole; of a file longer than a part it is only the first marker."""
        size = _size_of(self._landing / name)
        return not size or (marker == ALL_STORED and size <= PART_BYTES)


def _token_of(name: str) -> str:
    landed = parse_landing_name(name)
    return landed.token if landed else ""


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as exc:
        log.debug("the landing folder can't be listed: %s", exc)
        return []


def _newest_of(archive: Path) -> list[tuple[str, float]]:
    """Return the files that were archived last, in the order of their tokens, each with its minute (epoch ms UTC)."""
    minutes = [int(name) for name in _names(archive) if name.isdecimal()]
    if not minutes:
        return []
    newest = sorted(_names(archive / str(max(minutes))))[-NEWEST_MAX:]
    return [(name, max(minutes) * MINUTE_MS) for name in newest if _size_of(archive / str(max(minutes)) / name)]


def _size_of(path: Path) -> int | None:
    """Return the bytes of a file, None if it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
