"""A drain loop as users run it, whose reader a test can stop."""

import json
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

from tests.chaos.drain_history import Shown
from tests.chaos.proxy import WAIT_SEC
from tests.e2e.commands import Checkout, Command


class Loop(Command):
    """A drain loop; its reader can stop after some lines, so that it is stuck in the middle of what it writes."""

    def __init__(self, argv: list[str], environ: dict[str, str], checkout: Checkout, reads: float) -> None:
        self.reads = reads
        self.is_stuck = threading.Event()
        self.go_on = threading.Event()
        super().__init__(argv, environ, checkout.root)

    @property
    def number(self) -> int:
        """Its process id, which its claims have in their tokens."""
        return self.process.pid

    def count(self, text: str) -> int:
        """Count the lines on standard error that have ``text``."""
        return sum(text in line for _, line in self.err)

    @property
    def is_torn(self) -> bool:
        """Tell whether the last line is the beginning of one, as its end has torn it."""
        return bool(self.out) and _is_torn(self.out[-1][1])

    def shown(self) -> list[Shown]:
        """What came out, without a last line that is torn."""
        lines = self.out[: len(self.out) - self.is_torn]
        return [Shown(self.number, read_ms, json.loads(line)) for read_ms, line in lines]

    def _read(self, stream: Any, lines: list[tuple[int, str]]) -> None:
        super()._read(_Halting(stream, self) if lines is self.out else stream, lines)


class _Halting:
    """The lines of a stream, as slowly as a loop's reader is told to take them."""

    def __init__(self, stream: BinaryIO, loop: Loop) -> None:
        self._stream = stream
        self._loop = loop

    def __enter__(self) -> "_Halting":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __iter__(self) -> Iterator[bytes]:
        for number, line in enumerate(self._stream, start=1):
            yield line
            if number == self._loop.reads:
                self._loop.is_stuck.set()
                self._loop.go_on.wait(WAIT_SEC)


def _is_torn(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return True
    return False
