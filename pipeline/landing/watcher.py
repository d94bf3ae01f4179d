"""Waits until something may have happened in a folder: at once with inotify, else every 200 ms.

What it reports is never needed for correctness (the gatekeeper looks for itself), so every failure just means polling.
"""

import logging
import os
import select
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)

POLL_S = 0.2
_KNOWN_FILES_MAX = 20_000


class Watcher:
    """Watches one folder, not what is below it. Not thread-safe."""

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = os.fspath(folder)
        self._inotify: Any = None  # inotify_simple has no types, and is absent outside Linux
        self._closed: dict[str, bool] = {}
        try:
            import inotify_simple
        except ImportError:
            return
        self._flags = inotify_simple.flags
        flags = self._flags
        # ATTRIB: a file becomes readable or gets another time. Reading and closing what was read make no event, so the
        # gatekeeper does not wake itself up.
        mask = (
            flags.CLOSE_WRITE
            | flags.MOVED_TO
            | flags.CREATE
            | flags.ATTRIB
            | flags.DELETE_SELF
            | flags.MOVE_SELF
            | flags.ONLYDIR
        )
        try:
            self._inotify = inotify_simple.INotify()
            self._inotify.add_watch(self._folder, mask)
        except OSError as exc:
            self._give_up(exc)

    def wait(self, timeout_s: float) -> bool:
        """Return True when something may have changed in the folder, False after ``timeout_s`` without that.

        Without inotify that is after 200 ms at most, and always "may have changed". It only polls, so any exception may
        leave it at any point; once something has changed it returns at once until ``catch_up`` is called.
        """
        timeout_s = max(0.0, timeout_s)
        poller = select.poll()
        if self._inotify is None:
            poller.poll(min(timeout_s, POLL_S) * 1000)
            return True
        poller.register(self._inotify.fileno(), select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def catch_up(self) -> None:
        """Take note of what has changed so far."""
        if self._inotify is not None:
            try:
                self._note(self._inotify.read(timeout=0))
            except (OSError, ValueError) as exc:
                self._give_up(exc)

    def closed(self, name: str) -> bool | None:
        """Return whether the file was closed by its writer or renamed in (True), or created and not closed (False).

        None: it was there before the watch began, or not all events were seen.
        """
        return self._closed.get(name)

    def close(self) -> None:
        """Stop watching; ``wait`` then polls."""
        inotify, self._inotify = self._inotify, None
        self._closed.clear()
        if inotify is not None:
            inotify.close()

    def _note(self, events: list[Any]) -> None:
        flags = self._flags
        for event in events:
            if event.mask & (flags.DELETE_SELF | flags.MOVE_SELF | flags.IGNORED | flags.UNMOUNT):
                self._give_up(FileNotFoundError("the folder is gone"))
                return
            if event.mask & flags.Q_OVERFLOW or len(self._closed) > _KNOWN_FILES_MAX:
                self._closed.clear()
            elif event.mask & (flags.CLOSE_WRITE | flags.MOVED_TO):
                self._closed[event.name] = True
            elif event.mask & flags.CREATE:
                self._closed[event.name] = False

    def _give_up(self, why: Exception) -> None:
        log.warning("Changes of %s are not notified (%s); it is looked through every 200 ms.", self._folder, why)
        with suppress(OSError):
            self.close()
