"""Where messages go when they are due. Every sink has its name here; docs/sinks.md says what a new one needs.

A sink that delivers is called by a drain loop, under the lease of a claim (``base.Sink``). The others are part of ``claim.lua``,
which moves a message and ends its schedule in one step, so a loop never has it in flight.
"""

from collections.abc import Callable, Mapping
from typing import Final, Literal

from pipeline.core.clock import Clock
from pipeline.sinks.base import Sink
from pipeline.sinks.screen import ScreenSink

SinkName = Literal["screen", "stream", "kafka"]
# From the form of the output (text or json) and a clock, the sink that a loop delivers to.
DELIVERING: Final[Mapping[SinkName, Callable[[str, Clock], Sink]]] = {"screen": ScreenSink}
MOVED_BY_CLAIM: Final[frozenset[SinkName]] = frozenset({"stream", "kafka"})
