"""What is asked of a server before work starts."""

from typing import Any

import pytest

from pipeline.config import RedisSettings
from pipeline.core.errors import ConfigError, StoreUnavailable
from pipeline.store.checks import check_server, what_stored_means
from pipeline.store.connection import connect
from tests.servers import USER, RealServer, needs_waitaof, real_server, server_version

NOW_MS = 1_700_000_000_000


class StoppedClock:
    def wall_ms(self) -> int:
        return NOW_MS

    def monotonic_ms(self) -> float:
        return 0.0


class Server:
    """A server's answers, for those that can't be had here."""

    def __init__(self, skew_ms: int = 0, fsync: str = "always", **info: Any) -> None:
        self._info = {"redis_version": "7.0.15", "maxmemory_policy": "noeviction", "aof_enabled": 1, **info}
        self._skew_ms = skew_ms
        self._fsync = fsync

    def info(self) -> dict[str, Any]:
        return self._info

    def time(self) -> tuple[int, int]:
        return divmod((NOW_MS + self._skew_ms) * 1000, 1_000_000)

    def config_get(self, name: str) -> dict[str, str]:
        return {name: self._fsync}


def warnings_of(server: Server) -> list[str]:
    return check_server(server, RedisSettings(), StoppedClock())  # type: ignore[arg-type]


def test_a_server_as_it_should_be_gives_no_warning() -> None:
    assert warnings_of(Server()) == []


@pytest.mark.parametrize("version", ["6.2.14", "6.0", "5"])
def test_a_server_that_is_too_old_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=f"{version} is too old"):
        warnings_of(Server(redis_version=version))


def test_a_replica_is_refused_to_who_stores_or_delivers() -> None:
    replica = Server(role="slave")
    assert warnings_of(replica) == []
    with pytest.raises(StoreUnavailable, match="is a replica; name its primary"):
        check_server(replica, RedisSettings(), StoppedClock(), writes=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["7.0.0", "7.2.4", "10.0.1"])
def test_newer_servers_are_fine(version: str) -> None:
    assert warnings_of(Server(redis_version=version)) == []


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_drops_keys_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match="CONFIG SET maxmemory-policy noeviction"):
        warnings_of(Server(maxmemory_policy=policy))


@pytest.mark.parametrize(
    ("skew_ms", "said"),
    [
        (0, None),
        (1_000, None),
        (-1_000, None),
        (1_001, "1001 ms ahead of this machine's, so a delay that starts here ends that much early"),
        (-5_000, "5000 ms behind this machine's, so a delay that starts here ends that much late"),
    ],
)
def test_clocks_that_differ_are_told(skew_ms: int, said: str | None) -> None:
    warnings = warnings_of(Server(skew_ms=skew_ms))
    assert bool(warnings) == bool(said)
    assert said is None or said in warnings[0]


def test_weak_persistence_is_told_with_what_it_costs() -> None:
    assert "loses every message" in warnings_of(Server(aof_enabled=0))[0]
    assert "can lose the last seconds" in warnings_of(Server(fsync="everysec"))[0]


def test_the_private_kind_of_server_passes(server: RealServer) -> None:
    settings = RedisSettings(url=server.url)
    from pipeline.core.clock import SystemClock

    assert check_server(connect(settings), settings, SystemClock()) == []


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    settings = RedisSettings(url="redis://:hidden@127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match=r"redis://:\*\*\*@127.0.0.1:1") as caught:
        check_server(connect(settings), settings, StoppedClock())
    assert "hidden" not in str(caught.value)


def test_a_wrong_password_is_refused() -> None:
    with real_server("--requirepass", "secret") as server:
        settings = RedisSettings(url=server.url.replace(f":{USER}@", ":wrong@"))
        with pytest.raises(ConfigError, match="correct the Redis URL"):
            check_server(connect(settings), settings, StoppedClock())


@pytest.mark.parametrize("url", ["http://x", "redis://host:port", "host:6379"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not valid"):
        connect(RedisSettings(url=url))


@pytest.mark.parametrize("password", ["abc/def", "abc#def", "abc?def", "abc]def"])
def test_a_url_whose_password_is_not_encoded_is_refused_without_a_part_of_it(password: str) -> None:
    with pytest.raises(ConfigError, match="percent-encode") as caught:
        connect(RedisSettings(url=f"redis://:{password}@host:6379/0"))
    assert "abc" not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("options", "wait_for_disk", "said"),
    [
        ("--appendonly yes --appendfsync always", False, "once Redis has fsynced it (appendfsync always)."),
        pytest.param(
            "--appendonly yes --appendfsync everysec",
            True,
            "once Redis has fsynced it (each batch waits for WAITAOF).",
            marks=needs_waitaof,
        ),
        ("--appendonly yes --appendfsync everysec", False, "which fsyncs it a moment later (appendfsync everysec)."),
        ("--appendonly no", False, "a crash of the server loses it"),
    ],
)
def test_what_stored_means_is_told(options: str, wait_for_disk: bool, said: str) -> None:
    with real_server(*options.split()) as server:
        assert said in what_stored_means(connect(RedisSettings(url=server.url)), wait_for_disk)


def test_a_server_that_cannot_wait_for_its_disk_is_refused_if_it_has_to() -> None:
    with real_server("--appendonly", "no") as server, pytest.raises(ConfigError, match="needs appendonly yes"):
        what_stored_means(connect(RedisSettings(url=server.url)), True)
    renamed = ("--rename-command", "WAITAOF", "") if server_version() >= (7, 2) else ()  # it knows none anyway
    with_file = ("--appendonly", "yes", *renamed)
    with real_server(*with_file) as server, pytest.raises(ConfigError, match=r"needs Redis 7\.2"):
        what_stored_means(connect(RedisSettings(url=server.url)), True)
