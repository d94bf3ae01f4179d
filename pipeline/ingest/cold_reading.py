"""Finding a single message in the cold files, by its message id, for who wants to see or to reschedule it."""

from bisect import bisect_right
from threading import Lock
from typing import Any, Final

from pipeline.config import Settings
from pipeline.core.clock import Clock
from pipeline.core.ids import TOKEN_LENGTH
from pipeline.ingest.cold_files import ColdFile
from pipeline.ingest.cold_folder import ColdFolder, ColdName
from pipeline.store.cold import ColdMember
from pipeline.store.layout import cold_folder_id

LISTING_MS: Final = 5_000  # how old the listing may be in which a file is looked for


class ColdFinder:
    """Reads messages from the files of a folder; see ``store.cold.ColdReader``. For any number of threads."""

    def __init__(self, folder: ColdFolder, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._lock = Lock()
        self._listed_ms = -float("inf")
        self._parts: dict[
            tuple[str, int], list[tuple[int, ColdName]]
        ] = {}  # by token and shard, with their first lines
        self._replaced: dict[ColdName, list[ColdName]] = {}  # by merged file

    def __call__(self, message_id: str, shard: int) -> ColdMember | None:
        """Return a message; None if no file has it.

        Raises:
            ColdUnavailable: the folder can't be used.
            PipelineError: a file is damaged.
        """
        token, line = message_id[:TOKEN_LENGTH], int(message_id[TOKEN_LENGTH:], 16)
        with self._lock:
            for is_again in (False, True):
                if is_again or self._clock.monotonic_ms() - self._listed_ms > LISTING_MS:
                    self._list()
                for _, name in reversed(self._candidates(token, shard, line)):
                    if found := self._read(name, token, line):
                        return found
        return None

    def _candidates(self, token: str, shard: int, line: int) -> list[tuple[int, ColdName]]:
        """Return the files that may have a line: the part of the landing file that it is in, alone or merged."""
        parts = self._parts.get((token, shard), [])
        end = bisect_right(parts, line, key=lambda part: part[0])
        return [part for part in parts[:end] if part[0] == parts[end - 1][0]] if end else []

    def _list(self) -> None:
        names = self._folder.names()
        parts: dict[tuple[str, int], list[tuple[int, ColdName]]] = {}
        for name in names:
            for original in self._originals(name):
                first_line = int(original.part_id[TOKEN_LENGTH + 1 :] or 1)
                parts.setdefault((original.token, original.shard), []).append((first_line, name))
        for each in parts.values():
            each.sort(key=lambda part: part[0])
        self._replaced = {name: self._replaced[name] for name in names if name in self._replaced}
        self._parts, self._listed_ms = parts, self._clock.monotonic_ms()

    def _originals(self, name: ColdName) -> list[ColdName]:
        if not name.is_merged:
            return [name]
        if name not in self._replaced:
            try:
                with ColdFile(self._folder, name) as file:
                    self._replaced[name] = file.replaces
            except FileNotFoundError:
                return []
        return self._replaced[name]

    def _read(self, name: ColdName, token: str, line: int) -> ColdMember | None:
        try:
            with ColdFile(self._folder, name) as file:
                found = file.find(token, line)
                return ColdMember(*found) if found else None
        except FileNotFoundError:
            return None


def open_finder(settings: Settings, client: Any, clock: Clock) -> ColdFinder:
    """Return what reads messages from the cold folder of a namespace.

    Raises:
        ColdUnavailable: there is no such folder.
        StoreError: no answer, or an error.
    """
    return ColdFinder(ColdFolder(settings.cold.folder, cold_folder_id(client, settings.redis)), clock)
