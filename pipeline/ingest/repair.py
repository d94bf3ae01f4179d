"""What is done about a failover that undid what was stored: it is noticed, told, and what was read at that time is read again."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

from pipeline.core.clock import Clock
from pipeline.core.files import write_whole
from pipeline.core.text import count_text, utc_text
from pipeline.ingest.stores import Patience, Retry, retrying
from pipeline.ingest.summary import Summary
from pipeline.store.replication import LOOK_MS, Failover, FailoverWatch

log = logging.getLogger(__name__)


class Repeatable(Protocol):
    """What was read, and can be read again."""

    def read_again(self, since_ms: int) -> str:
        """Have all read again that was stored since (epoch ms UTC); returns what that is, for a log, or "" if it is nothing.

        What is still there is not stored twice.
        """
        ...

    def forget_archived(self) -> None:
        """Forget what was stored too long ago; it is called while all servers are known to have it."""
        ...

    def newest_are_stored(self) -> bool:
        """Tell whether what was stored last is still there, as far as that can be known. It is asked once a second."""
        ...


@dataclass(frozen=True, slots=True)
class DirectoryAgain:
    """A directory that Spark reads itself: only the checkpoint keeps its files from being read again."""

    checkpoint: str

    def read_again(self, since_ms: int) -> str:
        """Return what there is to do."""
        return f"nothing until you stop the job, delete its checkpoint {self.checkpoint}, and start it again"

    def forget_archived(self) -> None:
        """Do nothing: the files are not ours."""

    def newest_are_stored(self) -> bool:
        """Say yes: nothing is known."""
        return True


class Repair:
    """Watches the servers while a query runs. A task for ``core.background``.

    Args:
        histories: a file for the histories of the servers (``replication.Position``), so that a start notices, too. None: it can't.

        tell: is given each failover that undid something.

        patience_ms: for a server that has stored a batch and does not answer; 0 is no limit. With one, a start waits for none.
    """

    def __init__(
        self,
        watch: FailoverWatch,
        what: Repeatable,
        histories: Path | None,
        tell: Callable[[Failover], object],
        clock: Clock,
        patience_ms: float = 0,
    ) -> None:
        self._watch = watch
        self._patience_ms = patience_ms
        self._is_unsure = False  # whether it is not known yet what a server says that another run has seen
        self._what = what
        self._path = histories
        self._tell = tell
        self._clock = clock

    def start(self, retry: Retry = retrying) -> None:
        """Look for the first time, before a query runs; what has happened since the job ran last is not known.

        Raises:
            OSError: the file of the histories can't be written.
        """
        self._watch.look(None if self._patience_ms else retry)
        self._compare_with_last_run()

    def step(self) -> float:
        """Look, repair if that is needed, and forget what is old enough; see ``background.Task``."""
        if found := self._watch.look():
            self._handle(found)
        elif not self._what.newest_are_stored():
            self._handle(self._unknown(), is_lost=True)
        if self._is_unsure:
            self._compare_with_last_run()
        if self._watch.saw_all:
            self._what.forget_archived()
        return LOOK_MS

    def is_there(self, batch: Summary) -> bool:
        """Tell whether a batch was stored by the servers that are there now; waits until those answer that have stored it.

        With a patience, one that still does not answer is none of them: what it has of the batch is not known.
        """
        patience, servers = Patience(self._patience_ms), count()
        if found := self._watch.look(lambda read: patience.retrying(next(servers), read), batch.histories):
            self._handle(found)
        if {*batch.histories} <= self._watch.present():
            return True
        log.info("a server that stored the batch is gone or away: the batch is stored again where it is not")
        return False

    def _compare_with_last_run(self) -> None:
        """Notice what happened while no job ran; a server that was not seen yet may have gone on with another history, too."""
        if self._path is None:
            return
        now, before = self._watch.histories(), self._remembered(self._path)
        if not isinstance(before, list) or len(before) != len(now):
            before = ["?" for _ in now]
        unseen = [not history and not self._watch.saw_all for history in now]
        self._is_unsure = any(unseen)
        if any(not is_unseen and a != b for is_unseen, a, b in zip(unseen, now, before, strict=True)):
            self._handle(self._unknown())

    def _unknown(self) -> Failover:
        return Failover(self._clock.wall_ms(), 0, None)

    def _handle(self, failover: Failover, is_lost: bool = False) -> None:
        """Have all read again that may be missing.

        Args:
            is_lost: markers are gone, though the server has not changed, or does not tell.
        """
        if failover.is_harmless:
            log.info("a replica has taken over, and has all that was stored")
        else:
            what = self._what.read_again(failover.since_ms)
            if failover.undone_bytes:
                log.warning(
                    "a failover undid at least the last %s that Redis had taken; deliveries since %s may come twice. "
                    "Read again, to store what is missing: %s",
                    *(
                        count_text(failover.undone_bytes, "byte"),
                        utc_text(failover.since_ms),
                        what or "nothing is kept",
                    ),
                )
                self._tell(failover)
            elif is_lost:
                log.warning(
                    "Redis has lost messages that it had taken, as after FLUSHALL; what was delivered lately may come twice. "
                    "Read again, to store what is missing: %s",
                    what or "nothing, as nothing is kept: send it again",
                )
            elif what:
                log.info(
                    "Redis was restarted, restored or replaced; read again, in case something is missing: %s", what
                )
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            now, before = self._watch.histories(), self._remembered(self._path)
            if self._is_unsure and isinstance(before, list) and len(before) == len(now):
                now = [a or b for a, b in zip(now, before, strict=True)]  # what is not seen yet is compared later
            write_whole(self._path, json.dumps(now).encode())

    @staticmethod
    def _remembered(path: Path) -> object:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
