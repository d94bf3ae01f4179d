"""What a failover undoes is noticed to the byte, on real servers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from pipeline.config import RedisSettings
from pipeline.core.errors import StoreUnavailable
from pipeline.runtime.process import wait_until
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.replication import Failover, FailoverWatch, Position, may_fail_over, read_position
from tests.clock import ManualClock
from tests.ports import free_port
from tests.servers import RealServer, needs_waitaof, real_server
from tests.store.builders import transaction
from tests.store.conftest import START_MS

KEYS = Keys("duetime")
NOW_MS = 1_700_000_000_000
TCP = ("--bind", "127.0.0.1", "--appendonly", "yes", "--repl-diskless-sync-delay", "0")


def offset_of(server: RealServer) -> int:
    return int(server.client().info("replication")["master_repl_offset"])


def is_caught_up(primary: RealServer, replica: RealServer) -> bool:
    found = replica.client().info("replication")
    return found.get("master_link_status") == "up" and int(found["slave_repl_offset"]) == offset_of(primary)


@contextmanager
def replicated() -> Iterator[tuple[RealServer, RealServer]]:
    """A primary and a replica that has all of it."""
    port = free_port()
    with real_server("--port", str(port), *TCP) as primary, real_server("--port", str(free_port()), *TCP) as replica:
        replica.client().replicaof("127.0.0.1", str(port))
        assert wait_until(lambda: is_caught_up(primary, replica), 20)
        yield primary, replica


def cut_off(primary: RealServer, replica: RealServer) -> None:
    """Keep from the replica what comes from now on."""
    primary.client().execute_command("ACL", "SETUSER", "default", "-psync", "-sync")
    primary.client().client_kill_filter(_type="replica")
    assert wait_until(lambda: replica.client().info("replication")["master_link_status"] == "down", 20)


class World:
    """A watch whose server can be replaced by another."""

    def __init__(self, server: RealServer) -> None:
        self.server = server
        self.clock = ManualClock(NOW_MS)
        self.watch = FailoverWatch([lambda: read_position(self.server.client())], self.clock)

    def write(self, bytes_: int = 100) -> None:
        self.server.client().set("key", "x" * bytes_)

    def look(self, after_ms: int = 1_000) -> Failover | None:
        self.clock.advance_ms(after_ms)
        return self.watch.look()


def test_what_a_failover_undid_is_told_to_the_byte_and_since_when() -> None:
    with replicated() as (primary, replica):
        world = World(primary)
        assert world.look() is None
        world.write()
        assert world.look() is None
        assert wait_until(lambda: is_caught_up(primary, replica), 20)
        cut_off(primary, replica)
        received = int(replica.client().info("replication")["slave_repl_offset"])
        world.write()
        assert world.look() is None
        lost = offset_of(primary) - received
        assert lost > 100
        primary.kill()
        assert world.look() is None and not world.watch.saw_all
        replica.client().replicaof("NO", "ONE")
        world.server = replica
        found = world.look()
        assert found == Failover(NOW_MS + 5_000, NOW_MS + 2_000, lost), "what was written by the second look is there"
        assert not found.is_harmless and world.watch.saw_all
        assert world.look() is None, "it is told once"


def test_a_replica_that_has_everything_is_no_alarm() -> None:
    with replicated() as (primary, replica):
        world = World(primary)
        world.write()
        assert world.look() is None
        assert wait_until(lambda: is_caught_up(primary, replica), 20)
        primary.kill()
        replica.client().replicaof("NO", "ONE")
        world.server = replica
        found = world.look()
        assert found is not None and found.is_harmless
        world.write()
        assert world.look() is None


def test_a_server_that_is_restarted_or_restored_can_not_tell() -> None:
    with real_server("--appendonly", "yes") as server:
        world = World(server)
        assert world.look() is None
        server.kill()
        server.start()
        assert world.look() == Failover(NOW_MS + 2_000, 0, None)


def test_two_failovers_between_two_looks_can_not_be_told_apart() -> None:
    with replicated() as (primary, replica):
        world = World(primary)
        assert world.look() is None
        for _ in range(2):
            replica.client().replicaof("NO", "ONE")
            world.server = replica
            primary, replica = replica, primary
            assert wait_until(lambda primary=primary: primary.client().info("replication")["role"] == "master", 20)
            port = primary.client().config_get("port")["port"]
            replica.client().replicaof("127.0.0.1", port)
            assert wait_until(lambda pair=(primary, replica): is_caught_up(*pair), 20)
        found = world.look()
        assert found is not None and found.undone_bytes is None


def test_a_replica_is_no_answer_and_a_user_who_may_not_ask_is_told_nothing() -> None:
    with replicated() as (primary, replica):
        with pytest.raises(StoreUnavailable, match="is a replica"):
            read_position(replica.client())
        primary.client().execute_command("ACL", "SETUSER", "blind", "on", "nopass", "~*", "+@all", "-info")
        port = primary.client().config_get("port")["port"]
        blind = redis.Redis(port=int(port), username="blind", password="x")
        assert read_position(blind) is None
        watch = FailoverWatch([lambda: read_position(blind)], ManualClock(NOW_MS))
        assert watch.look() is None and watch.histories() == [""] and watch.saw_all


def test_shards_are_looked_at_apart() -> None:
    positions: list[Position | None] = [Position("a", 10, "0", -2), Position("b", 10, "0", -2)]

    def read(shard: int) -> Position:
        position = positions[shard]
        if position is None:
            raise StoreUnavailable("Redis does not answer.")
        return position

    watch = FailoverWatch([lambda: read(0), lambda: read(1)], ManualClock(NOW_MS))
    assert watch.look() is None
    positions[:] = [None, Position("c", 20, "b", 4)]
    assert watch.look() == Failover(NOW_MS, 0, 6)
    assert watch.histories() == ["a", "c"] and not watch.saw_all
    positions[:] = [Position("d", 20, "a", 10), Position("c", 30, "b", 4)]
    asked = []
    assert watch.look(lambda call: asked.append(call) or call(), wanted=["a"]) == Failover(NOW_MS, NOW_MS, 0)
    assert len(asked) == 1, "the other server is not waited for"
    positions[:] = [Position("d", 19, "a", 10), Position("e", 30, "c", 29)]
    assert watch.look() == Failover(NOW_MS, 0, None), "a history that became shorter was restored"


def test_it_forgets_how_it_was_long_ago_but_for_the_last_look() -> None:
    clock = ManualClock(NOW_MS)
    positions = [Position("a", 0, "0", -2)]
    watch = FailoverWatch([lambda: positions[0]], clock, keep_ms=10_000)
    for offset in range(100):
        positions[0] = Position("a", offset, "0", -2)
        assert watch.look() is None
        clock.advance_ms(500)
    positions[0] = Position("b", 100, "a", 20)
    found = watch.look()
    assert found is not None and (found.since_ms, found.undone_bytes) == (0, 79), "so far back nothing is known"
    clock.advance_ms(3_600_000)
    assert watch.look() is None
    positions[0] = Position("c", 200, "b", 100)
    found = watch.look()
    assert found is not None and found.is_harmless


def test_a_batch_waits_for_replicas() -> None:
    with replicated() as (primary, replica):
        store = RedisStore(connect(RedisSettings(url=primary.url, reply_timeout_ms=500)), KEYS)
        store.schedule("s", transaction((1, START_MS)))
        RedisStore(connect(RedisSettings(url=primary.url)), KEYS).wait_for_copies(on_disk=False, replicas=1)
        with pytest.raises(StoreUnavailable, match="on 1 replicas so far, not on 2"):
            store.wait_for_copies(on_disk=False, replicas=2)
        cut_off(primary, replica)
        store.schedule("s", transaction((2, START_MS), token="B"))
        with pytest.raises(StoreUnavailable, match="on 0 replicas so far, not on 1"):
            store.wait_for_copies(on_disk=False, replicas=1)


@needs_waitaof
def test_a_batch_waits_for_the_disk_and_for_replicas() -> None:
    with replicated() as (primary, _):
        store = RedisStore(connect(RedisSettings(url=primary.url)), KEYS)
        primary.client().config_set("appendfsync", "always")
        store.schedule("s", transaction((1, START_MS)))
        store.wait_for_copies(on_disk=True, replicas=1)
        assert store.history() == primary.client().info("replication")["master_replid"]


def test_a_server_on_a_socket_of_this_machine_has_no_successor() -> None:
    assert not may_fail_over("") and not may_fail_over("unix:///run/redis.sock")
    assert may_fail_over("redis://127.0.0.1:6379/0") and may_fail_over("redis+sentinel://h/mine")
