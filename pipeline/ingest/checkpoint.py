"""A local checkpoint seen from outside: which landing files its committed batches have read, and how it is started anew.

Spark's file source remembers every file that it has ever seen, in memory and in a log that it rewrites every ten batches, so
a checkpoint that lives for a year gets slower every day. Ours may be thrown away at any time: what makes storing exactly-once
is the marker of each landing file in Redis. ``docs/adr/0009-rolling-the-checkpoint.md`` has the order of the steps and why.

    commits/N            there once batch N is committed
    offsets/N            last line {"logOffset": K}: batch N ends with entry K of the log of files
    sources/0/K          the files that entry K brought, one JSON line each; after a crash one batch can have several entries
    sources/0/K.compact  the same and all entries before it
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError

log = logging.getLogger(__name__)

LOOK_MS = 10_000  # how often the length of the log is looked at
GAP_MS = 20_000  # how long a gap between two batches is waited for; then one is cut off, which costs its work once more
MARK_NAME = "duetime-rolling"
# What Spark keeps in a checkpoint. Anything else in the folder is not ours to delete.
_SPARKS_NAMES = ("commits", "offsets", "sources", "state", "metadata", ".metadata.crc")
_COMPACT = ".compact"
_FORMAT = "v1"
OWN_MAX = 5  # entries that are looked for one by one


def log_id_of(checkpoint: Path, batch_id: int) -> int:
    """Return the last entry of the log of files that a batch has read.

    Raises:
        OSError, ValueError: it is not there, or not of the form that this version knows.
    """
    lines = _read_log(checkpoint / "offsets" / str(batch_id))
    try:
        return int(json.loads(lines[-1])["logOffset"])
    except (IndexError, KeyError, TypeError) as exc:
        raise ValueError(f"{checkpoint}/offsets/{batch_id} names no entry of the log of files") from exc


def committed_log_id(checkpoint: Path) -> int:
    """Return the last entry of the log of files that committed batches have read, -1 if there is none; raises as above."""
    committed = [int(name) for name in _names(checkpoint / "commits") if name.isdecimal()]
    return log_id_of(checkpoint, max(committed)) if committed else -1


def names_read(checkpoint: Path, after: int, up_to: int) -> set[str]:
    """Return the names of the files that the entries ``after`` < K <= ``up_to`` brought; raises as above."""
    found = set()
    for path in _logs_between(checkpoint, after, up_to):
        for line in _read_log(path):
            entry = json.loads(line)
            if after < entry["batchId"] <= up_to:
                found.add(entry["path"].rpartition("/")[2])
    return found


def begin_anew(checkpoint: Path) -> None:
    """Throw away what Spark keeps in the checkpoint; a kill in between is made good by ``finish_beginning_anew``."""
    (checkpoint / MARK_NAME).touch()
    descriptor = os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)  # no power cut may leave half a checkpoint without the mark
    finally:
        os.close(descriptor)
    finish_beginning_anew(checkpoint)


def finish_beginning_anew(checkpoint: Path) -> None:
    """Go on where a kill has interrupted ``begin_anew``; without a mark nothing is done."""
    if (checkpoint / MARK_NAME).exists():
        for name in _SPARKS_NAMES:
            _remove(checkpoint / name)
        _remove(checkpoint / MARK_NAME)


@dataclass(slots=True)
class CheckpointRoller:
    """Keeps a local checkpoint short.

    Args:
        delete_stored: deletes those of the named landing files that are stored, and returns the others that are there.
    """

    checkpoint: Path
    delete_stored: Callable[[Iterable[str]], Sequence[str]]
    files_max: int
    clock: Clock
    _next_look_ms: float = 0.0
    _due_since_ms: float | None = None

    def prepare(self) -> int:
        """Clean up while no query runs: what a stop or a crash has left of files that are stored, and a log that is too long.

        A log that names a file which is not stored is thrown away, too: Spark would never read that file again.

        Returns:
            How many files the log named that was thrown away, 0 if it goes on.
        Raises:
            PipelineError: the checkpoint is damaged or can't be changed.
        """
        try:
            finish_beginning_anew(self.checkpoint)
            # In this order: whatever is in the landing folder when a checkpoint begins will be read.
            committed = self._committed_names()
            if unstored := self.delete_stored(committed):
                log.warning("%d files are read again, since no marker says that they are stored whole", len(unstored))
            elif len(committed) <= self.files_max:
                return 0
            begin_anew(self.checkpoint)
            return len(committed)
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise PipelineError(
                f"The checkpoint {self.checkpoint} can't be used ({exc}): put that right, or delete the folder; "
                "what is stored is known from Redis."
            ) from exc

    def wants_stop(self, is_between_batches: Callable[[], bool]) -> bool:
        """Tell whether the query should be stopped now, for ``prepare``, and started again."""
        now_ms = self.clock.monotonic_ms()
        if self._due_since_ms is None and now_ms >= self._next_look_ms:
            self._next_look_ms = now_ms + LOOK_MS
            if self._is_long():
                self._due_since_ms = now_ms
        if self._due_since_ms is None:
            return False
        if now_ms - self._due_since_ms < GAP_MS and not is_between_batches():
            return False
        self._due_since_ms = None
        return True

    def _is_long(self) -> bool:
        try:
            return len(self._committed_names()) > self.files_max
        except (OSError, ValueError) as exc:  # Spark may have tidied up between two of our steps
            log.debug("the length of the checkpoint's log is looked at later: %s", exc)
            return False

    def _committed_names(self) -> set[str]:
        # Without those of the batch in flight: however long a batch takes, cutting it off can't repeat for ever.
        return names_read(self.checkpoint, -1, committed_log_id(self.checkpoint))


def _logs_between(checkpoint: Path, after: int, up_to: int) -> Iterator[Path]:
    """List the files that have the entries ``after`` < K <= ``up_to``: their own, or the newest compacted one and later ones."""
    folder = checkpoint / "sources" / "0"
    # The entries of one batch lie in files of their own, but for every tenth: no need to list the thousands that Spark keeps.
    own = [folder / str(log_id) for log_id in range(after + 1, min(up_to, after + OWN_MAX) + 1)]
    if up_to - after <= OWN_MAX and all(path.exists() for path in own):
        yield from own
        return
    ids = {name: int(name.removesuffix(_COMPACT)) for name in _names(folder) if name.removesuffix(_COMPACT).isdecimal()}
    newest = max((log_id for name, log_id in ids.items() if name.endswith(_COMPACT)), default=-1)
    for name, log_id in ids.items():
        is_between = after < log_id <= up_to
        if (is_between and log_id > newest) or (name == f"{newest}{_COMPACT}" and after < newest):
            yield folder / name


def _read_log(path: Path) -> list[str]:
    first, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    if first != _FORMAT:
        raise ValueError(f"{path} is not a log of the form {_FORMAT}")
    return lines


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
