"""A real server that goes, comes back, fills up, and forgets its scripts."""

import threading
from contextlib import closing

import pytest

from pipeline.config import RedisSettings
from pipeline.core.errors import ConfigError, StoreProtocolError, StoreUnavailable
from pipeline.store import replication
from pipeline.store.base import Scheduled
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.namespace import open_namespace
from pipeline.store.redis_store import RedisStore
from pipeline.store.stats import read_stats
from pipeline.store.wakeup import WakeListener
from tests.chaos.proxy import Proxy, naming, swallow
from tests.leaks import find_leaks
from tests.servers import USER, RealServer, needs_waitaof, real_server
from tests.store.builders import transaction
from tests.store.conftest import START_MS, ends

KEYS = Keys("test")


def open_store(server: RealServer) -> RedisStore:
    return RedisStore(connect(RedisSettings(url=server.url)), KEYS)


def test_what_was_acknowledged_survives_a_kill_of_the_server_and_the_store_goes_on() -> None:
    with real_server() as server:
        store = open_store(server)
        store.schedule("s", transaction((1, START_MS), (2, START_MS)))
        claim = store.claim("loop:0").claim
        assert claim is not None
        assert store.ack(claim, 1, [])
        server.kill()
        with pytest.raises(StoreUnavailable):
            store.ack(claim, 2, [])
        server.start()
        stats = read_stats(server.client(), [KEYS])
        assert (stats.in_flight, stats.counters["delivered"]) == (1, 1)
        assert store.ack(claim, 2, [])
        assert store.schedule("s", transaction((1, START_MS), (2, START_MS))) is None


def test_a_server_that_forgot_the_scripts_is_taught_again() -> None:
    with real_server() as server:
        store = open_store(server)
        store.schedule("s", transaction((1, START_MS)))
        server.client().script_flush()
        assert store.claim("loop:0").claim is not None
        server.client().script_flush()
        assert store.schedule("s", transaction((2, START_MS), token="Q" * 14)) == Scheduled(stored=1)


def test_a_full_server_stores_nothing_of_a_transaction_but_lets_messages_out() -> None:
    with real_server() as server:
        store = open_store(server)
        store.schedule("s", transaction((1, START_MS)))
        server.client().config_set("maxmemory", "1")
        rows = [(line, START_MS) for line in range(2, 100)]
        full = transaction(*rows, identified=((100, START_MS, "a"),), before="all", after="more")
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            store.schedule("s", full)
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            store.schedule("s", transaction(identified=((100, START_MS, "a"),), before="all", after="more"))
        claim = store.claim("loop:0").claim
        assert claim is not None
        assert store.ack(claim, 1, [])
        server.client().config_set("maxmemory", "0")
        assert read_stats(server.client(), [KEYS]).scheduled == 0
        assert store.schedule("s", full) == Scheduled(stored=99)


def test_a_user_that_may_not_rename_is_refused_before_anything_is_stored() -> None:
    with real_server() as server:
        server.client().execute_command("ACL", "SETUSER", USER, "-rename")
        settings = RedisSettings(url=server.url)
        with closing(connect(settings)) as client:
            assert not open_namespace(client, settings, may_create=False)
            with pytest.raises(ConfigError, match="'rename'"):
                open_namespace(client, settings, may_create=True)
            server.client().execute_command("ACL", "SETUSER", USER, "+rename")
            assert open_namespace(client, settings, may_create=True)


def test_a_transaction_that_could_not_be_held_back_moves_no_marker() -> None:
    """The right is taken away from a writer that runs: it hears of it, and its file does not count as stored."""
    with real_server() as server:
        store = open_store(server)
        store.schedule("s", transaction(identified=((1, START_MS, "a"),)))
        server.client().execute_command("ACL", "SETUSER", USER, "-rename")
        with pytest.raises(StoreProtocolError, match="could not store all"):
            store.schedule("s", transaction(identified=((2, START_MS, "a"),), token="Q" * 14))
        assert store.markers("s", ["Q" * 14]) == [""]


def test_what_writers_that_share_idempotency_keys_store_at_the_same_time_is_stored_once() -> None:
    with real_server() as server:
        together, done = threading.Barrier(4), []

        def write(token: str) -> None:
            store = open_store(server)
            together.wait()
            for step in range(50):
                rows = [(2 * line, START_MS) for line in range(1, 20)]
                named = [(2 * line + 1, START_MS + line, f"{step}-{line}") for line in range(1, 20)]
                done.append(
                    store.schedule("s", transaction(*rows, identified=tuple(named), token=f"{token * 10}{step:04d}"))
                )

        writers = [threading.Thread(target=write, args=(token,)) for token in "PQRS"]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        stats = read_stats(server.client(), [KEYS])
        assert (stats.scheduled, sum(each.stored for each in done if each)) == (50 * 19 * 5,) * 2
        assert sum(len(each.duplicates) for each in done if each) == stats.counters["duplicates"] == 50 * 19 * 3
        assert find_leaks(server.client()) == []


@needs_waitaof
def test_a_wait_for_the_disk_ends_when_what_was_stored_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "WAIT_MS", 50)
    with real_server("--appendonly", "yes", "--appendfsync", "no") as server:
        store = open_store(server)
        store.schedule("s", transaction((1, START_MS)))
        with pytest.raises(StoreUnavailable, match="not on disk yet"):
            store.wait_for_copies(on_disk=True)
        store = open_store(server)  # a new connection has written nothing that it would have to wait for
        with pytest.raises(StoreUnavailable, match="not on disk yet"):
            store.wait_for_copies(on_disk=True)
        server.client().config_set("appendfsync", "always")
        store.wait_for_copies(on_disk=True)
        server.client().config_set("appendonly", "no")
        with pytest.raises(StoreProtocolError):
            store.wait_for_copies(on_disk=True)


@needs_waitaof
def test_a_wait_for_the_disk_ends_before_the_wait_for_its_reply_does() -> None:
    with real_server("--appendonly", "yes", "--appendfsync", "no") as server:
        store = RedisStore(connect(RedisSettings(url=server.url, reply_timeout_ms=300)), KEYS)
        store.schedule("s", transaction((1, START_MS)))
        with pytest.raises(StoreUnavailable, match="not on disk yet"):
            store.wait_for_copies(on_disk=True)


def test_two_writers_of_the_same_file_at_the_same_time_store_it_once(server: RealServer) -> None:
    keys = Keys("test-two-writers")
    client = server.client()
    steps = range(100)  # each step is a transaction of 50 lines; the marker is the step's number
    together = threading.Barrier(4)
    stored: list[int] = []

    def write() -> None:
        store = RedisStore(connect(RedisSettings(url=server.url)), keys)
        together.wait()
        for step in steps:
            rows = [(step * 50 + line, START_MS) for line in range(50)]
            move = {"before": str(step) if step else "", "after": str(step + 1)}
            done = store.schedule("s", transaction(*rows, **move))
            stored.append(done.stored if done else 0)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sum(stored) == 5_000 == read_stats(client, [keys]).scheduled
    client.delete(*client.keys("{test-two-writers:0}*"))


def test_eight_loops_share_messages_without_a_copy(server: RealServer) -> None:
    keys = Keys("test-eight-loops")
    client = server.client()
    RedisStore(client, keys).schedule("s", transaction(*((line, START_MS) for line in range(1, 4_001))))
    seen: list[bytes] = []

    def drain(loop: int) -> None:
        store = RedisStore(connect(RedisSettings(url=server.url)), keys)
        for number in range(1_000):
            claim = store.claim(f"{loop}:{number}").claim
            if claim is None:
                return
            seen.extend(message.member for message in claim.messages)
            assert store.ack(claim, len(claim.messages), [])

    loops = [threading.Thread(target=drain, args=(loop,)) for loop in range(8)]
    for thread in loops:
        thread.start()
    for thread in loops:
        thread.join()
    assert len(seen) == len(set(seen)) == 4_000
    client.delete(*client.keys("{test-eight-loops:0}*"))


class TestDoorbell:
    def test_a_newcomer_ends_the_wait(self, server: RealServer) -> None:
        keys = Keys("test-wake_listener")
        wake_listener = WakeListener(connect(RedisSettings(url=server.url)), [keys])
        assert ends(lambda: wake_listener.wait(60_000)), "the first wait subscribes, and returns to look again"
        ringer = threading.Timer(0.05, lambda: server.client().publish(keys.wake(), "1"))
        ringer.start()
        assert ends(lambda: wake_listener.wait(60_000))
        ringer.join()
        wake_listener.close()

    def test_another_shard_or_namespace_does_not_ring(self, server: RealServer) -> None:
        wake_listener = WakeListener(connect(RedisSettings(url=server.url)), [Keys("test-wake_listener")])
        assert ends(lambda: wake_listener.wait(60_000))
        for other in (Keys("test-wake_listener", 1), Keys("test-other")):
            assert server.client().publish(other.wake(), "1") == 0
        wake_listener.close()

    def test_a_subscription_that_is_never_confirmed_is_waited_for_no_longer_than_a_ring(
        self, server: RealServer
    ) -> None:
        with closing(Proxy(server.folder / "s", server.folder / "p-wake_listener")) as proxy:
            proxy.trap(naming("SUBSCRIBE"), swallow)
            wake_listener = WakeListener(connect(RedisSettings(url=proxy.url)), [Keys("test-wake_listener")])
            assert ends(lambda: wake_listener.wait(5))
            wake_listener.close()

    def test_without_a_server_it_still_waits_and_recovers(self) -> None:
        with real_server() as server:
            wake_listener = WakeListener(connect(RedisSettings(url=server.url)), [Keys("test")])
            assert ends(lambda: wake_listener.wait(60_000))
            server.kill()
            for _ in range(3):
                wake_listener.wait(5)
            server.start()
            assert ends(lambda: wake_listener.wait(60_000)), "it subscribes again, and returns to look"
            wake_listener.close()
