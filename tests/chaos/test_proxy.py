"""The proxy itself: a fault that never happens would make every other test here pass."""

import threading
from collections.abc import Iterator

import pytest
import redis

from pipeline.config import RedisSettings
from pipeline.core.errors import StoreUnavailable
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.scripts import Scripts
from pipeline.store.wakeup import WakeListener
from tests.chaos.proxy import (
    Exchange,
    Proxy,
    after,
    before,
    instead,
    lose_reply,
    naming,
    pass_on,
    refuse,
    reply_with,
    running,
    swallow,
)
from tests.servers import RealServer
from tests.store.builders import transaction
from tests.store.conftest import START_MS

is_push = naming("RPUSH")


@pytest.fixture
def proxy(server: RealServer) -> Iterator[Proxy]:
    path = server.folder / "p"
    made = Proxy(server.folder / "s", path)
    yield made
    made.close()
    path.unlink()
    server.client().flushall()


def client_of(proxy: Proxy) -> "redis.Redis":
    return connect(RedisSettings(url=proxy.url))


def pushed(server: RealServer) -> list[bytes]:
    return server.client().lrange("l", 0, -1)


def test_without_a_trap_it_is_not_there(proxy: Proxy) -> None:
    client = client_of(proxy)
    assert client.rpush("l", "a", b"\r\n\x00", "") == 3
    assert client.lrange("l", 0, -1) == [b"a", b"\r\n\x00", b""]
    assert client.get("none") is None
    pipeline = client.pipeline(transaction=True)
    pipeline.rpush("l", "x" * 1_000_000).lrange("none", 0, -1)
    assert pipeline.execute() == [4, []]
    with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
        client.get("l")


def test_the_n_th_command_loses_its_reply_and_no_other(proxy: Proxy, server: RealServer) -> None:
    trap = proxy.trap(is_push, lose_reply, first=2)
    client = client_of(proxy)
    client.rpush("l", 1)
    assert not trap.was_sprung
    with pytest.raises(redis.exceptions.ConnectionError):
        client.rpush("l", 2)
    trap.wait()
    client.rpush("l", 3)
    assert pushed(server) == [b"1", b"2", b"3"]


def test_a_refused_command_and_a_made_up_reply_do_not_reach_the_server(proxy: Proxy, server: RealServer) -> None:
    proxy.trap(is_push, refuse)
    proxy.trap(is_push, reply_with(b"-OOM made up\r\n"), first=2, last=3)
    client = client_of(proxy)
    with pytest.raises(redis.exceptions.ConnectionError):
        client.rpush("l", 1)
    for number in (2, 3):
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.rpush("l", number)
    client.rpush("l", 4)
    assert pushed(server) == [b"4"]


def test_a_swallowed_command_is_never_answered_nor_executed(proxy: Proxy, server: RealServer) -> None:
    proxy.trap(is_push, swallow)
    client = connect(RedisSettings(url=proxy.url, reply_timeout_ms=20))
    with pytest.raises(redis.exceptions.TimeoutError):
        client.rpush("l", 1)
    client.rpush("l", 2)
    assert pushed(server) == [b"2"]


def test_a_trap_that_is_taken_away_does_nothing_more(proxy: Proxy, server: RealServer) -> None:
    gone, other = (proxy.trap(is_push, refuse, last=float("inf")), proxy.trap(naming("LPUSH"), refuse))
    proxy.remove(gone)
    client = client_of(proxy)
    client.rpush("l", 1)
    with pytest.raises(redis.exceptions.ConnectionError):
        client.lpush("l", 2)
    assert not gone.was_sprung
    assert other.was_sprung
    assert pushed(server) == [b"1"]


def test_before_and_after_see_the_server_as_it_is_then(proxy: Proxy, server: RealServer) -> None:
    seen: list[list[bytes]] = []
    proxy.trap(is_push, before(lambda: seen.append(pushed(server))))
    proxy.trap(is_push, after(lambda: seen.append(pushed(server))), first=2)
    client = client_of(proxy)
    client.rpush("l", 1)
    client.rpush("l", 2)
    assert seen == [[], [b"1", b"2"]]


def test_what_is_done_instead_keeps_the_command_from_the_server(proxy: Proxy, server: RealServer) -> None:
    seen: list[list[bytes]] = []
    proxy.trap(is_push, instead(lambda: seen.append(pushed(server))))
    client = client_of(proxy)
    with pytest.raises(redis.exceptions.ConnectionError):
        client.rpush("l", 1)
    client.rpush("l", 2)
    assert (seen, pushed(server)) == ([[]], [b"2"])


def test_a_stalled_command_holds_up_its_connection_alone(proxy: Proxy, server: RealServer) -> None:
    gate = threading.Event()
    trap = proxy.trap(is_push, before(gate.wait))
    slow = threading.Thread(target=lambda: client_of(proxy).rpush("l", "slow"))
    slow.start()
    trap.wait()
    client_of(proxy).rpush("l", "fast")
    gate.set()
    slow.join()
    assert pushed(server) == [b"fast", b"slow"]


def test_a_script_is_known_by_its_name(proxy: Proxy) -> None:
    transactions, claims = proxy.trap(running("schedule"), pass_on), proxy.trap(running("claim"), refuse, first=3)
    Scripts().load(client_of(proxy))
    store = RedisStore(client_of(proxy), Keys("test-running"))
    assert store.schedule("s", transaction((1, START_MS), after="1")) is not None
    assert store.schedule("s", transaction((1, START_MS))) is None, "the marker is elsewhere, nothing is sent"
    assert store.claim("a").claim is not None  # two calls: the first tells which bucket is the oldest
    with pytest.raises(StoreUnavailable):
        store.claim("b")
    assert (transactions.seen, claims.seen) == (1, 3)
    assert claims.was_sprung


def test_a_transaction_is_one_call(proxy: Proxy, server: RealServer) -> None:
    seen: list[tuple[list[bytes], bytes, list[bytes]]] = []

    def note(exchange: Exchange) -> None:
        replies = exchange.forward()
        seen.append(([command[0] for command in exchange.call], replies, pushed(server)))
        exchange.answer(replies)

    proxy.trap(naming("MULTI"), note)
    proxy.trap(naming("MULTI"), lose_reply, first=2)
    proxy.trap(naming("MULTI"), refuse, first=3)
    proxy.trap(naming("MULTI"), reply_with(b"-ERR made up\r\n"), first=4)
    client = client_of(proxy)

    def push(value: str) -> list[int]:
        return client.pipeline(transaction=True).rpush("l", value).rpush("l", value).execute()

    assert push("a") == [1, 2]
    assert seen == [
        ([b"MULTI", b"RPUSH", b"RPUSH", b"EXEC"], b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n:1\r\n:2\r\n", [b"a"] * 2)
    ]
    for value, raised in (("b", redis.exceptions.ConnectionError), ("c", redis.exceptions.ConnectionError)):
        with pytest.raises(raised):
            push(value)
    with pytest.raises(redis.exceptions.ResponseError, match="made up"):
        push("d")
    assert push("e") == [5, 6]
    assert pushed(server) == [b"a", b"a", b"b", b"b", b"e", b"e"]


def test_a_transaction_behind_a_watch_that_was_broken_is_answered_with_nil(proxy: Proxy, server: RealServer) -> None:
    client = client_of(proxy)
    proxy.trap(naming("MULTI"), before(lambda: server.client().rpush("l", "theirs")))
    pipeline = client.pipeline()
    pipeline.watch("l")
    pipeline.multi()
    pipeline.rpush("l", "ours")
    with pytest.raises(redis.exceptions.WatchError):
        pipeline.execute()
    assert pushed(server) == [b"theirs"]


def test_a_subscription_passes_through(proxy: Proxy, server: RealServer) -> None:
    keys = Keys("test-bell")
    wake_listener = WakeListener(client_of(proxy), [keys])
    wake_listener.wait(60_000)  # until it is confirmed
    server.client().publish(keys.wake(), "1")
    rung = threading.Thread(target=wake_listener.wait, args=(60_000,))
    rung.start()
    rung.join(30)
    assert not rung.is_alive()
    wake_listener.close()


def test_a_server_that_is_gone_is_gone_behind_the_proxy_too_until_it_is_back(proxy: Proxy, server: RealServer) -> None:
    client = client_of(proxy)
    client.rpush("l", 1)
    server.kill()
    with pytest.raises(redis.exceptions.ConnectionError):
        client.rpush("l", 2)
    server.start()
    assert client.rpush("l", 3) == 2
