"""What is measured beside each other by ``bench.peers``: ours in three forms, and the peers."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

from bench.filling import KEYS
from bench.loops import NULL, PIPE, Loop, Reader, running, split_lines, start_ours
from bench.peer_programs import OUR_PROGRAM, Handled, Peer, Worker
from bench.server import Server
from pipeline.core.messages import DEFAULT_TOPIC

OURS_PIPE = "ours: drain loop to a pipe"
OURS_BATCHES = "ours: loop, consumer that acks batches"
OURS_HANDLER = "ours: loop, consumer with a handler"
OURS = (OURS_PIPE, OURS_BATCHES, OURS_HANDLER)
LOOK_SEC, GROUP_SEC_MAX = 0.01, 30.0
_OUR_TEXT = re.compile(rb"reminder (\d{9}) for a customer$")


@dataclass(frozen=True, slots=True)
class Working:
    """A worker at work: what it writes a line a job to, and how it is stopped, which returns what it has handled."""

    reader: Reader
    finish: Callable[[], Handled]


@dataclass(frozen=True, slots=True)
class Subject:
    """One that is measured: the program that schedules, and how a worker is started."""

    name: str
    command: Sequence[str]
    start: Callable[[Server], AbstractContextManager[Working]]


def make_subjects(peers: Mapping[str, Peer]) -> list[Subject]:
    """Return ours, which come in three forms, and the peers."""
    return [
        Subject(OURS_PIPE, OUR_PROGRAM, _drain_to_pipe),
        Subject(OURS_BATCHES, OUR_PROGRAM, partial(_drain_to_consumer, "work_batches")),
        Subject(OURS_HANDLER, OUR_PROGRAM, partial(_drain_to_consumer, "work")),
        *(Subject(name, peer.command(), partial(_work, peer.command())) for name, peer in peers.items()),
    ]


@contextmanager
def _work(command: Sequence[str], server: Server) -> Iterator[Working]:
    with Worker(command, server) as worker:
        yield Working(worker.reader, worker.handled)


@contextmanager
def _drain_to_pipe(server: Server) -> Iterator[Working]:
    """Handled is what the reader at the other end of the pipe has."""
    with running([start_ours(server, PIPE)]) as [loop]:
        assert loop.reader is not None
        yield Working(loop.reader, lambda: _stop_and_read(loop))


def _stop_and_read(loop: Loop) -> Handled:
    loop.stop()
    assert loop.reader is not None
    handled = []
    for read_ns, line in split_lines(loop.reader.portions):
        found = _OUR_TEXT.search(line)
        if not found:
            raise RuntimeError(f"The loop wrote {line[:200]!r}.")
        handled.append((int(found[1]), read_ns / 1_000_000))
    return handled


@contextmanager
def _drain_to_consumer(verb: str, server: Server) -> Iterator[Working]:
    """The consumer waits already when the loop begins to move messages into its stream."""
    with Worker(OUR_PROGRAM, server, verb) as worker:
        deadline = time.monotonic() + GROUP_SEC_MAX
        while not server.client.exists(KEYS.stream(DEFAULT_TOPIC)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"Our consumer did not start:\n{worker.said()}")
            time.sleep(LOOK_SEC)
        with running([start_ours(server, NULL, "--sink", "stream")]):
            yield Working(worker.reader, worker.handled)
