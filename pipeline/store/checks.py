"""What must be true of a server before work starts. Each finding is one sentence that says what it costs or what to do."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import redis

from pipeline.config import RedisSettings
from pipeline.core.clock import Clock
from pipeline.core.errors import ConfigError, StoreProtocolError, StoreUnavailable
from pipeline.core.text import redact_url
from pipeline.store.connection import connect, server_ms, translated_errors
from pipeline.store.keys import Keys
from pipeline.store.shards import first_that_answers
from pipeline.store.topology import PORT, Address, ClusterClient, client_of, cluster_url, kind_of

VERSION_MIN = (7, 0)  # scripts with flags, ZRANGE BYSCORE; older ones have no fix for CVE-2022-24735
EXPECTED_POLICY = "noeviction"


def find_cluster(settings: RedisSettings) -> RedisSettings:
    """Return ``settings``; if their server is part of a Redis Cluster, with a URL that says so and names all nodes.

    Raises:
        ConfigError: the URL is not valid, or the server does not let us in.
    """
    if kind_of(settings.url) or settings.url.startswith("unix:"):
        return settings
    try:
        with translated_errors(), connect(settings) as client:
            if client.info("cluster").get("cluster_enabled") != 1:
                return settings
            cluster = connect(replace(settings, url=cluster_url(settings.url, [_address_of(settings.url)])))
            return replace(settings, url=cluster_url(settings.url, cluster.cluster_map.nodes()))
    except StoreUnavailable:
        return settings  # which its check will tell


def check_server(client: Any, settings: RedisSettings, clock: Clock, writes: bool = False) -> list[str]:
    """Ask the server, or each node of a cluster, whether it can keep the guarantee.

    Args:
        writes: whether the job stores or delivers, which a replica can't.

    Returns:
        Warnings: what is weaker than it should be, and what that costs.
    Raises:
        StoreUnavailable: no answer, or a replica, which may become the primary.
        ConfigError: wrong password, a server that is too old, or one that drops keys when it is full.
    """
    if not isinstance(client, ClusterClient):
        return _check_node(client, settings, clock, writes)
    try:
        with translated_errors():
            nodes = client.cluster_map.clients()
    except StoreUnavailable as exc:
        raise StoreUnavailable(f"{exc} Start it, or name other nodes with --redis or REDIS_URL.") from exc
    warnings: list[str] = []
    for name, node in nodes:
        try:
            warnings += [f"{name}: {each}" for each in _check_node(node, settings, clock, False)]
        except StoreUnavailable as exc:
            # Its shards wait, or it is a replica: those of the other masters go on.
            warnings.append(f"{name} can't be checked now: {exc}")
        except ConfigError as exc:
            raise ConfigError(f"{name}: {exc}") from exc
        finally:
            node.close()
    return warnings


def _check_node(client: Any, settings: RedisSettings, clock: Clock, writes: bool) -> list[str]:
    try:
        with translated_errors():
            info: dict[str, Any] = client.info()
        sent_ms = clock.wall_ms()
        now_ms = server_ms(client)
        received_ms = clock.wall_ms()
    except StoreUnavailable as exc:
        raise StoreUnavailable(
            f"Redis at {redact_url(settings.url)} can't be used now: {exc} Start it, or name another with --redis or REDIS_URL."
        ) from exc
    _check_version(info)
    _check_policy(info)
    if writes and info.get("role") == "slave":
        raise StoreUnavailable(
            f"Redis at {redact_url(settings.url)} is a replica; name its primary with --redis or REDIS_URL."
        )
    warnings = _persistence_warnings(info, _config_value(client, "appendfsync"))
    skew_ms = now_ms - (sent_ms + received_ms) // 2
    if abs(skew_ms) > settings.clock_skew_ms_max:
        late_or_early = "late" if skew_ms < 0 else "early"
        warnings.append(
            f"The clock of Redis is {abs(skew_ms)} ms {'behind' if skew_ms < 0 else 'ahead of'} this machine's, so a delay "
            f"that starts here ends that much {late_or_early}; synchronise both with NTP."
        )
    return warnings


def meaning_of_stored(client: Any, shards: Sequence[Keys], wait_for_disk: bool, *of: str) -> str:
    """Return ``what_stored_means`` of the server of the first shard that answers; arguments and errors as there."""
    return first_that_answers(shards, lambda keys: what_stored_means(client_of(client, keys), wait_for_disk, *of))


def what_stored_means(
    client: Any, wait_for_disk: bool, what: str = "batch", setting: str = "ingest.wait_for_disk"
) -> str:
    """Return a sentence that says which guarantee holds for a batch, or something else, that is stored.

    Args:
        setting: where ``wait_for_disk`` is from.

    Raises:
        StoreUnavailable: no answer.
        ConfigError: the server can't tell when something is on disk, and is asked to.
    """
    with translated_errors():
        has_file = client.info("persistence").get("aof_enabled") == 1
    if wait_for_disk:
        if not has_file:
            raise ConfigError(f"{setting} needs appendonly yes on the server; set it, or turn wait_for_disk off.")
        try:
            with translated_errors():
                client.execute_command("WAITAOF", 0, 0, 0)
        except StoreProtocolError as exc:
            raise ConfigError(
                f"{setting} needs Redis 7.2 or newer, or Valkey (the server has no WAITAOF); turn it off."
            ) from exc
    appendfsync = _config_value(client, "appendfsync")
    if not has_file:
        return (
            f"Durability: a {what} counts as stored once it is in the memory of Redis; a crash of the server loses it."
        )
    if appendfsync == "always":
        return f"Durability: a {what} counts as stored once Redis has fsynced it (appendfsync always)."
    if wait_for_disk:
        return f"Durability: a {what} counts as stored once Redis has fsynced it (each {what} waits for WAITAOF)."
    if appendfsync is None:
        return f"Durability: a {what} counts as stored once Redis has it; how soon Redis fsyncs it can't be read from this server."
    return (
        f"Durability: a {what} counts as stored once it is in the memory of Redis, which fsyncs it a moment later "
        f"(appendfsync {appendfsync})."
    )


def _address_of(url: str) -> Address:
    parts = urlsplit(url)
    return parts.hostname or "localhost", parts.port or PORT


def _check_version(info: dict[str, Any]) -> None:
    text = str(info.get("redis_version", "0"))
    version = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    if version < VERSION_MIN:
        raise ConfigError(f"Redis {text} is too old; use Redis 7.0 or newer, or Valkey.")


def _check_policy(info: dict[str, Any]) -> None:
    policy = info.get("maxmemory_policy", EXPECTED_POLICY)
    if policy != EXPECTED_POLICY:
        raise ConfigError(
            f"Redis has maxmemory-policy {policy}, which silently drops messages when memory is full; "
            f"set it with CONFIG SET maxmemory-policy {EXPECTED_POLICY}."
        )


def _persistence_warnings(info: dict[str, Any], appendfsync: str | None) -> list[str]:
    if info.get("aof_enabled") != 1:
        warning = (
            "Redis keeps no append-only file, so a crash of the server loses every message since its last snapshot, or all; "
            "set appendonly yes and appendfsync always."
        )
        return [warning]
    if appendfsync not in (None, "always"):
        warning = (
            f"Redis has appendfsync {appendfsync}, so a crash of the server can lose the last seconds of messages and repeat "
            "deliveries; set appendfsync always for no loss."
        )
        return [warning]
    return []


def _config_value(client: "redis.Redis", name: str) -> str | None:
    """Return a configuration value, None where a managed server forbids CONFIG."""
    try:
        return dict(client.config_get(name)).get(name)
    except redis.exceptions.RedisError:
        return None
