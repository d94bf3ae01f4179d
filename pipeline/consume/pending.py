"""Finding what is pending for a group on the server, and not known to a consumer."""

import logging
import sys
from dataclasses import dataclass, field

from pipeline.consume.in_flight import InFlight
from pipeline.core.text import count_text
from pipeline.store.entries import BEGINNING
from pipeline.store.groups import END, PAGE, GroupStore

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingWalk:
    """Goes over what is pending, a page of each stream at a time: there may be millions.

    Args:
        pages_max: that a step looks at, of each stream.
    """

    store: GroupStore
    pages_max: int = sys.maxsize
    _cursors: dict[str, str] = field(default_factory=dict)  # where to go on, of the streams that are not over
    _found: int = 0  # and not told yet

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to look at."""
        return not self._cursors

    def begin(self, anew: bool = False) -> None:
        """Begin with all streams, or, unless ``anew``, with those that are over."""
        self._cursors = dict.fromkeys(self.store.streams, BEGINNING) | ({} if anew else self._cursors)

    def step(self, in_flight: InFlight, since_ms: float, is_counted: bool, min_idle_ms: int | None) -> int:
        """Add to ``in_flight`` what some pages hold, the first of each stream with something new; returns how many messages.

        If it fails, what was found so far is kept, and it may be called again.

        Args:
            min_idle_ms: take over what was silent for so long; None means the consumer's own.
        """
        found = 0
        for stream in [*self._cursors]:
            for _ in range(self.pages_max):
                page = self.store.reclaim(stream, self._cursors[stream], PAGE, min_idle_ms)
                added = in_flight.add(page.entries, since_ms, is_counted)
                found += added
                self._cursors[stream] = page.cursor
                if page.cursor == END:
                    del self._cursors[stream]
                if added or page.cursor == END:
                    break
        self._found += found
        return found

    def tell_taken_over(self) -> None:
        """Log how many messages were found since this was last called."""
        if self._found:
            log.warning("took over %s not acknowledged in time", count_text(self._found, "message"))
        self._found = 0
