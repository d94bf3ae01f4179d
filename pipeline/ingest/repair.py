"""What is done about a failover that undid what was stored: it is noticed, told, and what was read at that time is read again."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.core.clock import Clock
from pipeline.core.files import write_whole
from pipeline.core.text import count_text, utc_text
from pipeline.ingest.shard_writer import Summary
from pipeline.ingest.stores import retrying
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
        """Tell whether what was stored last is still there, as far as that can be known."""
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
    """

    def __init__(
        self,
        watch: FailoverWatch,
        what: Repeatable,
        histories: Path | None,
        tell: Callable[[Failover], object],
        clock: Clock,
    ) -> None:
        self._watch = watch
        self._what = what
        self._path = histories
        self._tell = tell
        self._clock = clock

    def start(self) -> None:
        """Look for the first time, before a query runs; what has happened since the job ran last is not known.

        Raises:
            OSError: the file of the histories can't be written.
        """
        self._watch.look(retrying)
        if self._path is not None and self._watch.histories() != self._remembered(self._path):
            self._handle(self._unknown())

    def step(self) -> float:
        """Look, repair if that is needed, and forget what is old enough; see ``background.Task``."""
        if found := self._watch.look() or self._look_at_markers():
            self._handle(found)
        if self._watch.saw_all:
            self._what.forget_archived()
        return LOOK_MS

    def is_there(self, batch: Summary) -> bool:
        """Tell whether a batch was stored by the servers that are there now; waits until those answer that have stored it."""
        if found := self._watch.look(retrying, batch.histories):
            self._handle(found)
        if {*batch.histories} <= {*self._watch.histories()}:
            return True
        log.info("a failover came between: the batch is stored again where it is not")
        return False

    def _look_at_markers(self) -> Failover | None:
        """Look whether what was stored last is there, of servers that do not tell of their history."""
        return None if all(self._watch.histories()) or self._what.newest_are_stored() else self._unknown()

    def _unknown(self) -> Failover:
        return Failover(self._clock.wall_ms(), 0, None)

    def _handle(self, failover: Failover) -> None:
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
            elif what:
                log.info(
                    "Redis was restarted, restored or replaced; read again, in case something is missing: %s", what
                )
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(self._watch.histories()).encode())

    @staticmethod
    def _remembered(path: Path) -> object:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
