"""Reading a message that waits in a cold file, for who asks for it by its id."""

from typing import Any

from pipeline.config import Settings
from pipeline.core.clock import Clock
from pipeline.core.errors import ColdUnavailable
from pipeline.core.text import install_text
from pipeline.store.cold import ColdMember, ColdReader, read_no_cold


def cold_reader(settings: Settings, client: Any, clock: Clock) -> ColdReader:
    """Return what reads such messages, if the settings name a cold folder. Nothing is opened or imported before it is needed."""
    return _FolderReader(settings, client, clock) if settings.cold.folder else read_no_cold


class _FolderReader:
    def __init__(self, settings: Settings, client: Any, clock: Clock) -> None:
        self._settings = settings
        self._client = client
        self._clock = clock
        self._find: ColdReader | None = None

    def __call__(self, message_id: str, shard: int) -> ColdMember | None:
        if self._find is None:
            try:
                from pipeline.ingest.cold_reading import open_finder
            except ImportError as exc:
                raise ColdUnavailable(
                    f"The message {message_id} waits in a cold file, and to read it takes {exc.name}: {install_text('cold')}."
                ) from exc
            self._find = open_finder(self._settings, self._client, self._clock)
        return self._find(message_id, shard)
