"""From names to a consumer."""

import os
import random
import re
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.config import Settings, check_name, load_settings
from pipeline.consume.consumer import Consumer
from pipeline.core.clock import SystemClock
from pipeline.core.errors import ConfigError
from pipeline.core.stop import Stop
from pipeline.runtime.server import PrivateServer, serves
from pipeline.store.checks import check_server, find_cluster
from pipeline.store.connection import connect
from pipeline.store.entries import BEGINNING, place_before
from pipeline.store.groups import NEW, GroupStore
from pipeline.store.keys import Keys, keys_of
from pipeline.store.namespace import adopt_topic_settings, open_namespace
from pipeline.store.scripts import Scripts
from pipeline.store.topology import ClusterClient, client_of

_ENTRY_ID = re.compile(r"[0-9]{1,16}-[0-9]{1,20}")
BLOCK_MS = 1_000  # that a read waits for a message; it must end before the wait for its reply does


def open_consumer(
    topic: str,
    group: str,
    consumer: str = "",
    start: str = "new",
    ordered: bool | None = None,
    handle_signals: bool = True,
) -> Consumer:
    """Return a consumer on the server of ``REDIS_URL`` or the configuration, else on the private one of this checkout, if it runs.

    Close it, or use it by ``with``: that also closes its connections.

    Args:
        group: the logical consumer. It is registered if it is new, and then gets every message, whether it runs or not.

        consumer: its name in the group, unique among all that ever run; "" makes one.

        start: where a new group begins; see ``parse_start``.

        ordered: whether one consumer of the group is active at a time. The first one decides for the group; None joins it as it is.

        handle_signals: in the main thread, let SIGTERM and Ctrl-C end the iteration after the message in work, until it is closed.
    Raises:
        ConfigError: a name or a setting is not valid, the group is of the other kind, or there is no server, or one that is too
            old or drops keys when it is full.
        StoreUnavailable: no answer.
    """
    with ExitStack() as stack:
        client, settings = stack.enter_context(open_client(load_settings({}, os.environ)))
        stop = stack.enter_context(stop_on_signals(handle_signals))
        opened = join_group(client, settings, topic, group, consumer, start, ordered, stop)
        opened.on_close = stack.pop_all().close
        return opened


@contextmanager
def stop_on_signals(handle_signals: bool = True) -> Iterator[Stop]:
    """Give a stop that SIGTERM and Ctrl-C request meanwhile, if this is the main thread."""
    stop = Stop()
    if handle_signals and threading.current_thread() is threading.main_thread():
        stop.install()
    try:
        yield stop
    finally:
        stop.restore()


@contextmanager
def open_client(settings: Settings, may_create: bool = True) -> Iterator[tuple[Any, Settings]]:
    """Connect a program to a namespace, and keep the private server up meanwhile, if it is that one; see ``open_consumer``.

    Args:
        may_create: whether a namespace that is new is made; who only looks has no right to do that.
    """
    with ExitStack() as stack:
        if not settings.redis.url:
            url = stack.enter_context(_running_private_server(settings))
            settings = replace(settings, redis=replace(settings.redis, url=url))
        settings = replace(settings, redis=find_cluster(settings.redis))
        client = connect(settings.redis)
        stack.callback(client.close)
        check_server(client, settings.redis, SystemClock())  # its warnings are for the jobs that store and deliver
        open_namespace(client, settings.redis, may_create)
        yield client, settings


def join_group(
    client: Any,
    settings: Settings,
    topic: str,
    group: str,
    consumer: str,
    start: str,
    ordered: bool | None,
    stop: Stop,
    scripts: Scripts | None = None,
) -> Consumer:
    """Return a consumer on a connection that its caller closes later; see ``open_consumer``."""
    store = new_store(client, settings, topic, group, consumer, scripts)
    settings = adopt_topic_settings(client, settings)
    store.register(parse_start(start), ordered)
    return new_consumer(store, settings, **stoppable(stop))


def new_store(
    client: Any,
    settings: Settings,
    topic: str,
    group: str,
    consumer: str,
    scripts: Scripts | None = None,
    shards: Sequence[Keys] = (),
) -> GroupStore:
    """Return the store of a consumer, its names checked.

    Args:
        shards: which it reads; all, if none is named.
    Raises:
        ConfigError: a name is not valid.
    """
    return GroupStore(
        client_of(client, shards[0]) if len(shards) == 1 else client,
        shards or keys_of(settings.redis),
        check_name("topic", topic),
        check_name("group", group),
        check_name("consumer", consumer or _own_name()),
        scripts,
    )


def place_from_now(store: GroupStore, start: str) -> str:
    """Return where a group begins that begins at ``start`` now, and is registered later: ``NEW`` is after this moment.

    Raises:
        StoreError: no answer, or an error.
    """
    return place_before(store.now_ms()) if start == NEW else start


def shards_of_consumers(client: Any, settings: Settings, concurrency: int, ordered: bool) -> Sequence[Sequence[Keys]]:
    """Return which shards each of some consumers reads that together handle ``concurrency`` messages at a time.

    All of them; or, where they are on several servers, one, so that one that is away delays no message of another. Then there
    may be more consumers than that, which take turns. Those of an ordered group read all, as only one of them may be active.
    """
    shards = keys_of(settings.redis)
    if ordered or len(shards) == 1 or not isinstance(client, ClusterClient):
        return [shards] * concurrency
    return [[keys] for keys in shards] * -(-concurrency // len(shards))


def new_consumer(store: GroupStore, settings: Settings, **options: Any) -> Consumer:
    """Return a consumer on the clocks of this machine.

    Args:
        options: others of ``Consumer``.
    """
    return Consumer(
        **{
            "store": store,
            "settings": settings.of_topic(store.topic),
            "clock": SystemClock(),
            "wait": _pause,
            "random": random.random,
            "block_ms": max(1, min(BLOCK_MS, settings.redis.reply_timeout_ms // 2)),  # 0 would be for ever
            **options,
        }
    )


def run_together(calls: Sequence[Callable[[], object]], stop: Stop) -> None:
    """Make calls at a time, each in a thread of its own, but a single one in this one; one that fails requests a stop.

    Raises:
        what a call does, of the first that fails.
    """

    def work(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException:
            stop.requested = True
            raise

    if len(calls) == 1:
        work(calls[0])
        return
    with ThreadPoolExecutor(len(calls), "duetime-handler") as pool:
        futures = [pool.submit(work, call) for call in calls]
        for future in as_completed(futures):
            future.result()


def stoppable(stop: Stop) -> dict[str, Any]:
    """Return the options of a consumer that ends when a stop is requested.

    A signal ends a wait of the main thread at once. Other threads look at the stop each second.
    """
    return {
        "stopping": stop,
        "interruptible": stop.interrupting,
        "wait": lambda ms: stop.interrupting(lambda: _pause(min(ms, BLOCK_MS))),
    }


def parse_start(text: str) -> str:
    """Return the entry after which a group begins: of ``beginning``, ``new``, an entry's id, or a time in ISO 8601 with its zone.

    Raises:
        ConfigError: it is none of these.
    """
    if text in ("beginning", "new"):
        return BEGINNING if text == "beginning" else NEW
    if _ENTRY_ID.fullmatch(text):
        return text
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigError(
            f"{text!r} is no place to begin at: say beginning, new, an entry's id such as 1795176000000-0, "
            "or a time with its zone such as 2026-11-20T12:00:00Z."
        )
    return place_before(round(moment.timestamp() * 1000))


@contextmanager
def _running_private_server(settings: Settings) -> Iterator[str]:
    """Use the private server of this checkout, and keep it up meanwhile."""
    server = PrivateServer(Path(settings.local.state))
    try:
        if not serves(server.socket):
            raise ConfigError(
                f"No Redis server is named, and the private one ({server.url}) does not run: start ./spark-submit.sh in the "
                "checkout, or set REDIS_URL."
            )
        server.acquire()
        yield server.url
    finally:
        server.release()


def _pause(ms: float) -> None:
    select.select([], [], [], ms / 1000)


def _own_name() -> str:
    host = re.sub(r"[^0-9A-Za-z._-]", "-", socket.gethostname())[:32]
    return f"{host}-{os.getpid()}-{secrets.token_hex(6)}"
