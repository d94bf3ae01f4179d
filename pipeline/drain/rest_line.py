"""The line that a terminal shows while nothing happens."""

import logging
import os
import select
import stat
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from pipeline.core.clock import Clock
from pipeline.core.errors import PipelineError
from pipeline.core.lateness import span_text
from pipeline.drain.totals import Totals
from pipeline.sinks.base import Delivery, Sink
from pipeline.store.outlook import Waiting

QUIET_MS = 1_000  # nothing was printed for so long
FREE_MS = 100  # nothing is due for so long: longer than drawing takes, and a look at Redis
COMMANDS_A_SECOND = (
    0.75  # that looking at Redis may cost an idle loop; its claims take one, and both together must stay below two
)
ERASE = "\r\x1b[J"  # to the beginning of the line, and clear from there to the end of the screen
COLUMNS_UNKNOWN = 80


class Terminal(Protocol):
    """Where a line is drawn."""

    def columns(self) -> int:
        """Return how wide it is now."""
        ...

    def put(self, text: str) -> bool:
        """Write, or leave it: False if that would have to wait."""
        ...


class StreamTerminal:
    """The terminal behind a stream such as ``sys.stderr``."""

    def __init__(self, stream: TextIO) -> None:
        self._descriptor = stream.fileno()
        self._encoding = stream.encoding

    def columns(self) -> int:
        """Return how wide it is now, 80 if it doesn't say."""
        try:
            return os.get_terminal_size(self._descriptor).columns or COLUMNS_UNKNOWN
        except OSError:
            return COLUMNS_UNKNOWN

    def put(self, text: str) -> bool:
        """Write all of it, unless the terminal was stopped with Ctrl-S or belongs to another process of the shell now."""
        try:
            _, writable, _ = select.select([], [self._descriptor], [], 0)
            if not writable or not is_in_foreground(self._descriptor):
                return False
            os.write(self._descriptor, text.encode(self._encoding, "replace"))
            return True
        except OSError:
            return False


class RestLine:
    """``waiting 1,234 · next due in 4.2 s · delivered 99 · lateness p99 2 ms``, drawn at rest and gone before anything is printed.

    The cursor stays at the line's beginning. So a terminal that was made narrower, and broke the line in two, has both parts behind
    the cursor, where erasing takes them; and what the terminal itself prints over it, such as ``^C``, is erased with it.

    It is an aside of the loop, and a filter of log handlers. Everything that prints does so on the loop's thread.

    Args:
        look: asks Redis what waits: after deliveries, and else the more rarely the more it costs. It raises ``PipelineError`` if
            there is no answer.
    """

    def __init__(self, terminal: Terminal, totals: Totals, look: Callable[[], Waiting], clock: Clock) -> None:
        self._terminal = terminal
        self._totals = totals
        self._look = look
        self._clock = clock
        self._is_shown = False
        self._printed_ms = clock.monotonic_ms()
        self._waiting: Waiting | None = None
        self._delivered = 0  # when it looked
        self._next_look_ms = clock.monotonic_ms()

    def __call__(self, free_ms: float, next_ms: float | None) -> None:
        """Draw the line anew, if nothing was printed for a while and nothing is due soon; see ``loop.Aside``."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._printed_ms < QUIET_MS or free_ms < FREE_MS:
            return
        if now_ms >= self._next_look_ms or self._delivered != self._totals.delivered:
            self._look_again(now_ms)
        text = self._text(next_ms)[: self._terminal.columns() - 1]
        self._is_shown = self._terminal.put(f"{ERASE}{text}\r") or self._is_shown

    def erase(self) -> None:
        """Make room for what is about to be printed."""
        self._printed_ms = self._clock.monotonic_ms()
        if self._is_shown:
            self._is_shown = not self._terminal.put(ERASE)

    def filter(self, record: logging.LogRecord) -> bool:
        """Make room for a log line, and let it through."""
        self.erase()
        return True

    def _text(self, next_ms: float | None) -> str:
        parts = []
        if self._waiting is not None:
            parts.append(f"waiting {self._waiting.messages:,}{'' if self._waiting.is_whole else '+'}")
        if next_ms is not None:
            parts.append(f"next due in {span_text(next_ms)}")
        parts.append(f"delivered {self._totals.delivered:,}")
        if self._totals.delivered:
            parts.append(f"lateness p99 {span_text(self._totals.lateness().within_ms(0.99))}")
        return " · ".join(parts)

    def _look_again(self, now_ms: float) -> None:
        try:
            self._waiting = self._look()
        except PipelineError:
            self._waiting = None  # the loop itself tells what is the matter
        commands = self._waiting.commands if self._waiting else 1
        self._delivered = self._totals.delivered
        self._next_look_ms = now_ms + commands * 1_000 / COMMANDS_A_SECOND


class ClearedSink:
    """A sink for which the line is erased first."""

    def __init__(self, sink: Sink, line: RestLine) -> None:
        self._sink = sink
        self._line = line

    def deliver(self, deliveries: Sequence[Delivery], in_time: Callable[[], bool], patient: Callable[[], bool]) -> int:
        """Erase the line, and hand over; see ``Sink.deliver``."""
        self._line.erase()
        return self._sink.deliver(deliveries, in_time, patient)


def is_in_foreground(descriptor: int) -> bool:
    """Tell whether ``descriptor`` is a terminal and this process in the foreground there: others have the screen otherwise."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


def has_room_for_a_line(stream: TextIO, output_descriptor: int = 1) -> bool:
    """Tell whether ``stream`` is a terminal on which a line can come and go without getting between what others print.

    It can't if standard output is a pipe: whoever reads from it, ``tee`` say, may print to the same terminal.
    """
    try:
        mode = os.fstat(output_descriptor).st_mode
        can_erase = os.environ.get("TERM", "dumb") != "dumb"
        return can_erase and is_in_foreground(stream.fileno()) and not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode)
    except OSError:
        return False
