"""dramatiq: send_with_options from threads; a worker of 8 threads that is idle for 50 ms at most."""

import logging
import signal
import sys
import time
from collections.abc import Sequence

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from shared import in_threads, record, run, text_of

THREADS, WORKER_THREADS, IDLE_MS = 16, 8, 50
broker = RedisBroker(url=f"unix://{sys.argv[2]}")
dramatiq.set_broker(broker)


@dramatiq.actor
def remind(text: str) -> None:
    """Be a task."""
    record(text)


def send(number: int, due_ms: int) -> None:
    """Schedule one; its delays count from now on."""
    remind.send_with_options(args=(text_of(number),), delay=max(0, due_ms - time.time_ns() // 1_000_000))


def schedule(due_ms: Sequence[int]) -> None:
    """Schedule one by one."""
    in_threads(due_ms, send, THREADS)


def work() -> None:
    """Run a worker."""
    logging.basicConfig(level=logging.WARNING)
    worker = dramatiq.Worker(broker, worker_threads=WORKER_THREADS, worker_timeout=IDLE_MS)
    worker.start()
    signal.sigwait({signal.SIGTERM})
    worker.stop(timeout=2_000)


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
run(schedule, work)
