"""Consuming the messages of topics, over the connection of a client."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from typing import Any

from pipeline.config import Settings
from pipeline.consume.consumer import Consumer
from pipeline.consume.handling import Breaker, run
from pipeline.consume.opening import join_group, stop_on_signals
from pipeline.core.messages import Message
from pipeline.core.stop import Stop
from pipeline.store.scripts import Scripts


class Consuming:
    """The verbs of a client that read topics."""

    _client: Any
    _settings: Settings
    _scripts: Scripts

    def consume(
        self,
        topic: str,
        group: str,
        *,
        consumer: str = "",
        start: str = "new",
        ordered: bool | None = None,
        handle_signals: bool = True,
    ) -> Consumer:
        """Return a consumer of a topic: iterate it, ``ack`` or ``nack`` each message, and close it.

        The arguments are those of ``consume.opening.open_consumer``.
        """
        with ExitStack() as stack:
            stop = stack.enter_context(stop_on_signals(handle_signals))
            opened = self.join(topic, group, consumer, start, ordered, stop)
            opened.on_close = stack.pop_all().close
            return opened

    def run(
        self,
        topic: str,
        group: str,
        handler: Callable[[Message], object],
        *,
        concurrency: int = 1,
        start: str = "new",
        ordered: bool | None = None,
        handle_signals: bool = True,
    ) -> None:
        """Call a handler for each message of a topic until SIGTERM or Ctrl-C, which let it finish what is in hand.

        A message whose handler raises is retried later, and becomes a dead letter after the last attempt, as
        ``consume.handling.run`` says. While a handler works, the lease of its message is renewed.

        Args:
            concurrency: how many messages are handled at a time, each in a thread of its own; 1 means in this one.
        """
        with stop_on_signals(handle_signals) as stop:
            self.run_until(stop, topic, group, handler, concurrency, start, ordered)

    def run_until(
        self,
        stop: Stop,
        topic: str,
        group: str,
        handler: Callable[[Message], object],
        concurrency: int = 1,
        start: str = "new",
        ordered: bool | None = None,
    ) -> None:
        """Do what ``run`` does, until ``stop`` is requested."""
        breaker = Breaker()

        def work() -> None:
            try:
                with self.join(topic, group, "", start, ordered, stop) as consumer:
                    if concurrency > 1:
                        consumer.limit = 1  # what one thread read ahead, the others could not handle
                    run(consumer, handler, breaker)
            finally:
                stop.requested = True  # one that fails ends the others

        if concurrency == 1:
            work()
            return
        with ThreadPoolExecutor(concurrency, "duetime-handler") as pool:
            futures = [pool.submit(work) for _ in range(concurrency)]
            for future in as_completed(futures):
                future.result()

    def join(self, topic: str, group: str, consumer: str, start: str, ordered: bool | None, stop: Stop) -> Consumer:
        """Return a consumer that ends when ``stop`` is requested; see ``consume``."""
        return join_group(self._client, self._settings, topic, group, consumer, start, ordered, stop, self._scripts)
