"""Opening a connection, and the client's errors in our words."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from pipeline.config import RedisSettings
from pipeline.core.errors import ConfigError, StoreFull, StoreProtocolError, StoreUnavailable
from pipeline.core.text import redact_url
from pipeline.store.keys import keys_of
from pipeline.store.topology import CLUSTER, SENTINEL, ClusterClient, kind_of, open_sentinel

# Replies that pass by themselves: the server fails over, runs a long script, or its disk is full. The client has classes
# for some, and leaves the first word of the others in the text. Of one that starts it makes a
# ConnectionError, and MASTERDOWN is a ClusterDownError.
PASSING_ERRORS = (
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
)
# A WakeListener only listens, so no missing reply shows that its connection is dead. The system probes it after half a minute, and
# three times in the next half minute, instead of after two hours; where these options do not exist, its defaults apply.
KEEPALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}
MEMBERS_A_PAGE = 1_000
PASSING_WORDS = ("BUSY", "MISCONF", "NOREPLICAS", "UNBLOCKED")


def connect(settings: RedisSettings) -> Any:
    """Return a client for ``settings.url``; it connects at its first call. Of a Redis Cluster it is the one of the first shard.

    The client's own retries are off: it would repeat calls whose effect it doesn't know.

    Raises:
        ConfigError: the URL is none that we know, or names a file that can't be read.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": settings.connect_timeout_ms / 1000,
        "socket_timeout": settings.reply_timeout_ms / 1000,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "decode_responses": False,
        "protocol": 2,
        "client_name": "duetime",
    }
    _check_files(settings.url)
    if not settings.url.startswith("unix:"):
        options |= {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
    try:
        if kind_of(settings.url) == CLUSTER:
            return ClusterClient.open(settings.url, options, keys_of(settings))
        if kind_of(settings.url) == SENTINEL:
            return open_sentinel(settings.url, options)
        return redis.Redis.from_url(settings.url, **options)
    except (ValueError, TypeError) as exc:
        why = "" if "@" in settings.url else f" ({exc})"  # which may quote a part of the password
        raise ConfigError(
            f"The Redis URL {redact_url(settings.url)!r} is not valid{why}; write redis://host:port/0, rediss:// or unix://path, "
            "redis+cluster://host:port,host:port or redis+sentinel://host:port,host:port/name, "
            "and percent-encode what a password has of / ? # @ and %."
        ) from None


def _check_files(url: str) -> None:
    """See that the files are there which TLS needs: as a call it would fail like a server that is away."""
    query = parse_qs(url.partition("?")[2])
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        for path in query.get(name, []):
            if not os.access(path, os.R_OK):
                raise ConfigError(
                    f"The file {path}, which the Redis URL names as {name}, can't be read; correct the URL, or the file's rights."
                )


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn the client's exceptions into ``StoreError``; NOSCRIPT stays, its caller knows what to do."""
    try:
        yield
    except redis.exceptions.NoScriptError:
        raise
    except redis.exceptions.AuthenticationError as exc:
        raise ConfigError(f"Redis refuses the user or password ({exc}); correct the Redis URL.") from exc
    except redis.exceptions.NoPermissionError as exc:
        raise ConfigError(f"The Redis user may not do what is needed ({exc}); extend its ACL.") from exc
    except MasterNotFoundError as exc:
        found = str(exc).partition(" : ")[0]  # then comes the client's own view of each Sentinel
        raise StoreUnavailable(f"{found}: no Sentinel that answers and lets us in knows one that is up.") from exc
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as exc:
        raise StoreUnavailable(f"Redis does not answer ({exc}).") from exc
    except redis.exceptions.MovedError as exc:
        raise ConfigError(
            "This server is part of a Redis Cluster; name it as redis+cluster://host:port,host:port."
        ) from exc
    except redis.exceptions.ReadOnlyError as exc:  # of a replica; after a failover it may become the primary
        raise StoreUnavailable(f"This server is a replica; name its primary ({exc}).") from exc
    except redis.exceptions.OutOfMemoryError as exc:
        raise StoreFull(f"Redis can't do it now ({exc}).") from exc
    except redis.exceptions.ResponseError as exc:
        # The client puts "Command # 1 (…) of pipeline caused error: " in front of what the server said.
        said = str(exc).rpartition("caused error: ")[2]
        if isinstance(exc, PASSING_ERRORS) or said.startswith(PASSING_WORDS):
            raise StoreUnavailable(f"Redis can't do it now ({exc}).") from exc
        raise StoreProtocolError(f"Redis answered with an error that is not expected here: {exc}.") from exc
    except redis.exceptions.RedisError as exc:  # it would fail the same way each time
        raise StoreProtocolError(f"The Redis client can't make this call ({type(exc).__name__}: {exc}).") from exc


def members_of(client: Any, key: str) -> set[str]:
    """Return the names in a set, read in pages: the server answers nobody else while it reads out 100,000 at once."""
    return {name.decode("utf-8", "replace") for name in client.sscan_iter(key, count=MEMBERS_A_PAGE)}


def server_ms(client: Any) -> int:
    """Return the server's clock, epoch ms UTC.

    Raises:
        StoreError: no answer, or an error.
    """
    with translated_errors():
        seconds, microseconds = client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000
