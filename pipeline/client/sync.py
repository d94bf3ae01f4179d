"""The client of a program with threads, or none."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from pipeline.client.cold import cold_reader
from pipeline.client.commit import BYTES_MAX, MESSAGES_MAX, Committer, GroupCommit, Stored
from pipeline.client.consuming import Consuming
from pipeline.client.patience import Patience
from pipeline.client.requests import Delay, Due, Receipt, Request, due_ms_of
from pipeline.config import Settings, Value, load_settings
from pipeline.consume.opening import open_client
from pipeline.core.clock import Clock, SystemClock
from pipeline.core.due import DUE_MS_MAX
from pipeline.core.errors import RequestRefused, StoreError
from pipeline.core.messages import DEFAULT_TOPIC, Change, Message, Reason, Replacement
from pipeline.store.base import Changed, Found, Scheduled, State
from pipeline.store.by_id import MessagesById
from pipeline.store.keys import keys_of
from pipeline.store.listing import ScheduledMessage, list_scheduled
from pipeline.store.places import handle_of
from pipeline.store.scripts import Scripts
from pipeline.store.shards import open_shards

PATIENCE_SEC: Final = 5.0

T = TypeVar("T")


class Duetime(Consuming):
    """Schedules messages of a namespace, finds, moves and cancels them, and consumes topics. Threads may share one.

        with Duetime("redis://localhost:6379/0") as duetime:
            receipt = duetime.schedule("tea is ready", delay=180, id="tea")
            duetime.cancel("tea")

    Each call waits at most ``patience_sec`` for a server that does not answer, and then raises ``StoreUnavailable``. Its own tries
    never store a message twice.

    Args:
        url: redis://, rediss:// or unix://; "" means ``REDIS_URL``, else what the configuration says, else the private server of
            this checkout, if it runs.

        namespace: "" means that of the configuration, which is ``duetime`` unless it says otherwise.

        config: a configuration file, as the jobs have it.

        wait_for_disk: what is stored is on the server's disk (WAITAOF; Redis 7.2 or newer, or Valkey). With ``appendfsync always``
            it is so anyway.

    Raises:
        ConfigError: no server is named, or it or the namespace is not fit.
        StoreUnavailable: no answer.
    """

    def __init__(
        self,
        url: str = "",
        *,
        namespace: str = "",
        config: Path | None = None,
        patience_sec: float = PATIENCE_SEC,
        wait_for_disk: bool = False,
    ) -> None:
        flags: dict[str, dict[str, Value]] = {"redis": {}}
        if url:
            flags["redis"]["url"] = url
        if namespace:
            flags["redis"]["namespace"] = namespace
        with ExitStack() as stack:
            client, settings = stack.enter_context(open_client(load_settings(flags, os.environ, config)))
            self._begin(client, settings, SystemClock(), Scripts(), patience_sec, wait_for_disk=wait_for_disk)
            self._stack = stack.pop_all()

    @classmethod
    def over(
        cls, client: Any, settings: Settings, patience_sec: float = PATIENCE_SEC, wait_for_disk: bool = False
    ) -> Self:
        """Return one on a connection that its caller closes."""
        made = cls.__new__(cls)
        made._begin(client, settings, SystemClock(), Scripts(), patience_sec, wait_for_disk=wait_for_disk)
        return made

    def _begin(
        self,
        client: Any,
        settings: Settings,
        clock: Clock,
        scripts: Scripts,
        patience_sec: float,
        now_ms: Callable[[], int] | None = None,
        wait_for_disk: bool = False,
    ) -> None:
        self._stack = ExitStack()
        self._client, self._settings, self._clock, self._scripts = client, settings, clock, scripts
        self._retrying = Patience(clock, patience_sec)
        self._keys = keys_of(settings.redis)
        retention_ms, read_cold = settings.drain.id_retention_sec * 1000, cold_reader(settings, client, clock)
        self._by_id = MessagesById(client, self._keys, retention_ms, scripts, now_ms, read_cold)

        def new_committer() -> Committer:
            stores = open_shards(client, settings.redis, scripts=scripts, now_ms=now_ms)
            keep_ms = settings.ingest.marker_keep_sec * 1000
            return Committer(stores, self._by_id.get, clock, patience_sec * 1000, keep_ms, wait_for_disk)

        self.commits = GroupCommit(new_committer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.commits.close()
        self._stack.close()

    def schedule(
        self,
        message: str,
        *,
        delay: Delay | None = None,
        due: Due | None = None,
        id: str = "",
        topic: str = DEFAULT_TOPIC,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        """Schedule a message; see ``Request``. Calls of several threads share a transaction.

        Raises:
            RequestRefused: it breaks a rule.
            StoreUnavailable: it may be stored; with an id, call again.
        """
        request = Request(message, delay=delay, due=due, id=id, topic=topic, headers=headers or {})
        return self.receipt_of(self.store([self.check(request)])[0])

    def schedule_many(self, requests: Iterable[Request]) -> Scheduled:
        """Schedule requests, thousands in a transaction, while they are read.

        Returns:
            How many are stored, and the places of the duplicates.
        Raises:
            RequestRefused: one breaks a rule. Transactions before it are stored; what is read of its own is not.
            StoreUnavailable: some are stored, others may be; with ids, call again with all.
        """
        stored, duplicates, place = 0, [], 0
        for messages in self._in_portions(requests):
            results = self.store(messages)
            duplicates += [place + number for number, result in enumerate(results) if result.is_duplicate]
            place += len(results)
        stored = place - len(duplicates)
        return Scheduled(stored, tuple(duplicates))

    def get(self, id: str) -> Found:
        """Look for a message by its idempotency key or handle."""
        return self._retrying(lambda: self._by_id.get(id))

    def cancel(self, id: str, *, if_versions: Collection[str] = ()) -> Found:
        """Take a message out of the schedule, so that it never comes.

        Args:
            if_versions: only if the message that waits has one of these, see ``Found``; none means in any case.

        Returns:
            The state ``CANCELLED``, with the message if this call did it; any other state says why it was not possible.
        Raises:
            VersionDiffers: it has another version.
        """
        return self._retrying(lambda: self._by_id.cancel(id, if_versions=if_versions))

    def get_many(self, ids: Sequence[str]) -> list[Found]:
        """Look for messages, hundreds in a round trip."""
        return self._retrying(lambda: self._by_id.get_many(ids))

    def cancel_many(self, ids: Sequence[str]) -> list[Found]:
        """Cancel messages, hundreds in a round trip, each for itself; see ``cancel``."""
        return self._retrying(lambda: self._by_id.cancel_many(ids))

    def replace(self, request: Request, *, if_versions: Collection[str] = ()) -> Found:
        """Have a request's id mean this message: it replaces the one that waits, or is stored anew, also after a cancellation.

        Args:
            if_versions: only if a message waits and has one of these, see ``Found``, or "*", any; none means in any case.

        Returns:
            The message that waits now: this one, or a later replacement. ``IN_FLIGHT`` and ``DELIVERED`` say that it came too late.
        Raises:
            RequestRefused: the request breaks a rule, or has no id.
            VersionDiffers: it has another version, or nothing waits.
        """
        if not request.id:
            raise RequestRefused(Reason.REPLACE_WITHOUT_ID, "A replacement needs the id that it replaces.")
        return self.put(self.check(request), if_versions)

    def put(self, message: Message, if_versions: Collection[str] = ()) -> Found:
        """Do what ``replace`` does with a message that is checked already, and has an id."""
        named = self.commits.name(message)
        return self._retrying(lambda: self._by_id.replace(named, True, if_versions))

    def reschedule(
        self, id: str, *, delay: Delay | None = None, due: Due | None = None, if_versions: Collection[str] = ()
    ) -> Found:
        """Give a message that waits another due time.

        Args:
            if_versions: as in ``cancel``.

        Returns:
            The state ``SCHEDULED``, with the message as it is now; any other state says why it was not possible.
        Raises:
            RequestRefused: the due time breaks a rule.
            VersionDiffers: it has another version.
        """
        due_ms = Request("-", delay=delay, due=due).checked(self._clock.wall_ms()).due_ms
        return self._retrying(lambda: self._by_id.reschedule(id, due_ms, if_versions))

    def apply(self, changes: Sequence[Change]) -> Changed:
        """Make the changes that lines ask for: of one id a cancellation wins, else the replacement that comes last."""
        named = [
            Replacement(self.commits.name(each.message)) if isinstance(each, Replacement) else each for each in changes
        ]
        return self._retrying(lambda: self._by_id.apply(named))

    def upcoming(
        self, *, topic: str = "", after: Due | None = None, before: Due | None = None
    ) -> Iterator[ScheduledMessage]:
        """Walk the scheduled messages in order of due time, from ``after`` on and before ``before``, those of a topic or all.

        What is held, as its topic is paused or has used up its rate limit, is not among them: ``get`` finds it. What is added or
        delivered meanwhile may be there or not. A call that gets no answer raises ``StoreUnavailable``.
        """
        from_ms = 0 if after is None else due_ms_of(after)
        until_ms = DUE_MS_MAX if before is None else due_ms_of(before)
        for found in list_scheduled(self._client, self._keys, from_ms, until_ms):
            if topic in ("", found.message.topic):
                yield found

    def check(self, request: Request) -> Message:
        """Return the message that a request asks for now.

        Raises:
            RequestRefused: it breaks a rule.
        """
        return request.checked(self._clock.wall_ms())

    def receipt_of(self, stored: Stored) -> Receipt:
        """Return what the caller of a request is told."""
        message = stored.message
        if not stored.is_duplicate:
            return Receipt(handle_of(message), message.due_ms, State.SCHEDULED, False, message)
        found = self.get(message.id)
        due_ms = found.message.due_ms if found.message else message.due_ms
        return Receipt(message.id, due_ms, found.state, True, found.message)

    def _in_portions(self, requests: Iterable[Request]) -> Iterator[list[Message]]:
        messages: list[Message] = []
        size = 0
        for request in requests:
            message = self.check(request)
            messages.append(message)
            size += len(message.body)
            if len(messages) >= MESSAGES_MAX or size >= BYTES_MAX:
                yield messages
                messages, size = [], 0
        if messages:
            yield messages

    def store(self, messages: list[Message]) -> list[Stored]:
        """Store messages that are checked already.

        Raises:
            StoreError: it is not known whether all are stored.
        """
        stored = []
        for result in self.commits.store(messages):
            if isinstance(result, StoreError):
                raise result
            stored.append(result)
        return stored
