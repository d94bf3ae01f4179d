"""Consuming the messages of topics, over the connection of a client."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Semaphore
from typing import Any

from pipeline.config import Settings
from pipeline.consume.consumer import Consumer
from pipeline.consume.handling import Breaker, run
from pipeline.consume.opening import (
    join_group,
    new_consumer,
    new_store,
    parse_start,
    place_from_now,
    run_together,
    shards_of_consumers,
    stop_on_signals,
    stoppable,
)
from pipeline.core.messages import Message
from pipeline.core.stop import Stop
from pipeline.store.keys import Keys
from pipeline.store.namespace import adopt_topic_settings
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
            concurrency: how many messages are handled at a time, each in a thread of its own; 1 means in this one. On a Redis
                Cluster each shard has at least one thread, so that a master that is away delays no message of another.
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
        breaker, turns = Breaker(), Semaphore(concurrency)
        whole_group = new_store(self._client, self._settings, topic, group, "", self._scripts)
        place = place_from_now(whole_group, parse_start(start))
        whole_group.register(parse_start(start), ordered, passes_over=True)
        settings = adopt_topic_settings(self._client, self._settings, scripts=self._scripts)
        shares = shards_of_consumers(self._client, settings, concurrency, whole_group.ordered)

        def work(shards: Sequence[Keys]) -> None:
            store = new_store(self._client, settings, topic, group, "", self._scripts, shards)
            enter = partial(store.register, place, ordered)
            with new_consumer(store, settings, enter=enter, **stoppable(stop)) as consumer:
                if concurrency > 1:
                    consumer.limit = 1  # what one thread read ahead, the others could not handle
                run(consumer, handler, breaker, turns)

        run_together([partial(work, shards) for shards in shares], stop)

    def join(self, topic: str, group: str, consumer: str, start: str, ordered: bool | None, stop: Stop) -> Consumer:
        """Return a consumer that ends when ``stop`` is requested; see ``consume``."""
        return join_group(self._client, self._settings, topic, group, consumer, start, ordered, stop, self._scripts)
