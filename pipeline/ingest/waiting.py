"""What waits on the way in for shards that are away, while everything else goes on (docs/adr/0030-files-wait-for-shards.md)."""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final, Protocol

from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError, StoreUnavailable
from pipeline.core.files import make_private
from pipeline.core.ids import token_epoch_ms
from pipeline.core.text import count_text
from pipeline.ingest.stores import WriterSettings
from pipeline.landing.names import parse_landing_name, repeated_name
from pipeline.store.ingest_heartbeat import Waiting
from pipeline.store.shards import open_shards

log = logging.getLogger(__name__)

WAITING_NAME: Final = ".waiting"  # in the landing folder, hidden from Spark
LOOK_MS: Final = 1_000  # between two looks whether a shard answers
LOOK_MS_MAX: Final = 60_000  # the same, of one that answers the look and then stores nothing
CALM_MS: Final = 60_000  # a shard that has stayed for so long is looked at soon when it goes away again
PORTION_FILES: Final = 1_000  # that are given back at a time, so that new ones are not behind all that waited
PORTION_BYTES: Final = 64 * 1024 * 1024


class Waits(Protocol):
    """What waits while a shard is away."""

    def catch_up(self, shard: int) -> bool:
        """Store some of what a shard lacks that answers again, before batches ask it; returns whether there is no more of it.

        Raises:
            StoreUnavailable: it is away again.
        """
        ...

    def give_back(self, away: Collection[int]) -> object:
        """Let batches have what lacks a shard that is not away; called once a second."""
        ...

    def look(self) -> Waiting | None:
        """Return which files wait."""
        ...


class WaitingFiles:
    """Landing files of which a shard that was away lacks something. They are read again: their progress markers say what is left.

    Each lies in a folder of its own until then, also while the job does not run.
    """

    def __init__(self, landing: Path, clock: Clock) -> None:
        self._landing = landing
        self._folder = landing / WAITING_NAME
        self._clock = clock
        self._lock = Lock()
        # By name, the shards for which a file waits; None of what another run has left.
        self._lacking: dict[str, frozenset[int] | None] = dict.fromkeys(landing_names(self._folder))
        self._given: set[str] = set()  # names in the landing folder that were given back
        self._tokens: set[str] = {name.partition(".")[0] for name in self._lacking}  # of all, until they are stored

    def put(self, lacking: Mapping[str, Collection[int]]) -> None:
        """Take files out of the landing folder before their batch is committed; a start would take them for stored otherwise.

        Args:
            lacking: the shards by token.

        Raises:
            PipelineError: they can't be moved. The batch must fail; the next start reads it again.
        """
        try:
            with self._lock:
                make_private(self._folder)
                for name in landing_names(self._landing):
                    token = name.partition(".")[0]
                    if token in lacking:
                        (self._landing / name).rename(self._folder / name)
                        self._lacking[name] = frozenset(lacking[token])
                        self._given.discard(name)
                        self._tokens.add(token)
                for folder in (self._folder, self._landing):
                    _sync(folder)
        except OSError as exc:
            raise PipelineError(
                f"Files that wait for a shard can't be moved into {self._folder} ({exc}): put that right and start the job "
                "again; nothing of them was deleted."
            ) from exc

    def give_back(self, away: Collection[int], all_at_once: bool = False) -> int:
        """Have files read again that lack a shard which is not away; returns how many: a portion, if none of the last is left.

        Raises:
            OSError: they can't be moved now.
        """
        with self._lock:
            self._given = {name for name in self._given if (self._landing / name).exists()}
            if self._given and not all_at_once:
                return 0
            moved, size = 0, 0
            for name in sorted(name for name, shards in self._lacking.items() if shards is None or shards - {*away}):
                if moved and not all_at_once and (moved >= PORTION_FILES or size >= PORTION_BYTES):
                    break
                again = repeated_name(name, has_waited=True)
                with suppress(FileNotFoundError):
                    size += (self._folder / name).stat().st_size
                    (self._folder / name).rename(self._landing / again)
                    self._given.add(again)
                    moved += 1
                del self._lacking[name]
            return moved

    def catch_up(self, shard: int) -> bool:
        """Return that there is nothing to do: files are read again by the query; see ``Waits``."""
        return True

    def tokens(self) -> set[str]:
        """Return the tokens of the files that wait, or are read again now."""
        with self._lock:
            return {name.partition(".")[0] for name in (*self._lacking, *self._given)}

    def look(self) -> Waiting | None:
        """Return what waits, None if nothing does; says once in the log when all is stored."""
        with self._lock:
            self._given = {name for name in self._given if (self._landing / name).exists()}
            names = {*self._lacking, *self._given}
            if not names:
                if self._tokens:
                    log.warning("%s that waited for shards: all stored now", count_text(len(self._tokens), "file"))
                    self._tokens.clear()
                return None
            shards = sorted({shard for each in self._lacking.values() for shard in each or ()})
            oldest_ms = min(token_epoch_ms(name.partition(".")[0]) for name in names)
        return Waiting(len(names), shards, oldest_ms)


def landing_names(folder: Path) -> list[str]:
    """Return the names of the landing files in a folder, none if it is not there."""
    try:
        return [name for name in os.listdir(folder) if parse_landing_name(name)]
    except OSError as exc:
        log.debug("%s can't be listed: %s", folder, exc)
        return []


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class _Away:
    wait_ms: float  # between two looks
    next_ms: float
    back_ms: float | None = None  # since when it answers again


class ShardsAway:
    """Which shards are away, so that no task asks them, until each answers again. A task for ``core.background``.

    Args:
        probes: one a shard: raises ``StoreUnavailable`` if it can't store now, and is quick.

        tell: is given which files wait whenever that has changed.
    """

    def __init__(
        self,
        probes: Sequence[Callable[[], object]],
        waits: Waits,
        tell: Callable[[Waiting | None], object],
        clock: Clock,
    ) -> None:
        self._probes = probes
        self._waits = waits
        self._tell = tell
        self._told: Waiting | None = None
        self._clock = clock
        self._lock = Lock()
        self._known: dict[int, _Away] = {}

    def away(self) -> frozenset[int]:
        """Return the shards that are away."""
        with self._lock:
            return frozenset(shard for shard, each in self._known.items() if each.back_ms is None)

    def note(self, found: Collection[int]) -> None:
        """Take note of shards that a batch found away. One that is away again soon is looked at less and less often."""
        now_ms = self._clock.monotonic_ms()
        new = []
        with self._lock:
            for shard in sorted(found):
                before = self._known.get(shard)
                if before is not None and before.back_ms is None:
                    continue
                is_soon = before is not None and now_ms - (before.back_ms or 0) < CALM_MS
                wait_ms = min(2 * before.wait_ms, LOOK_MS_MAX) if before is not None and is_soon else LOOK_MS
                self._known[shard] = _Away(wait_ms, now_ms + wait_ms)
                new.append(str(shard))
        if new:
            log.warning(
                "shard%s %s can't be reached: what belongs there waits and is stored when it can; everything else goes on",
                *("s" if len(new) > 1 else "", ", ".join(new)),
            )

    def step(self) -> float:
        """Look which shards are back, and have read again what waited for them; see ``background.Task``."""
        has_more = False
        for shard in sorted(self.away()):
            each = self._known[shard]
            if self._clock.monotonic_ms() < each.next_ms:
                continue
            try:
                self._probes[shard]()
                is_all = self._waits.catch_up(shard)
            except StoreUnavailable as exc:
                log.debug("shard %d is away: %s", shard, exc)
                each.next_ms = self._clock.monotonic_ms() + each.wait_ms
                continue
            if is_all:
                log.warning("shard %d answers again", shard)
                with self._lock:
                    each.back_ms = self._clock.monotonic_ms()
            has_more = has_more or not is_all
        self._waits.give_back(self.away())
        if (now := self._waits.look()) != self._told:
            self._told = now
            self._tell(now)
        return 0 if has_more else LOOK_MS


def watch_shards(
    client: Any, settings: WriterSettings, waits: Waits, tell: Callable[[Waiting | None], object], clock: Clock
) -> ShardsAway:
    """Return what looks after what waits for shards.

    Args:
        client: one that gives up soon.

        tell: see ``ShardsAway``.
    """
    # This stores nothing and fails where storing would: also without memory, or without replicas that are waited for.
    probes = [
        partial(store.wait_for_copies, False, settings.wait_for_replicas)
        for store in open_shards(client, settings.redis)
    ]
    return ShardsAway(probes, waits, tell, clock)


def waiting_text(waiting: Waiting) -> str:
    """Return what waits for which shards: ``3 files wait for shards 2, 5``."""
    wait = "waits" if waiting.files == 1 else "wait"
    names = f"shard{'s' if len(waiting.shards) > 1 else ''} {', '.join(map(str, waiting.shards))}"
    return f"{count_text(waiting.files, 'file')} {wait} for {names if waiting.shards else 'a shard'}"
