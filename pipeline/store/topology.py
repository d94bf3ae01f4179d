"""Where the shards are: on one server, on the primary that Sentinels name, or on the masters of a Redis Cluster.

Of a cluster each shard has a plain ``redis.Redis``, whose new connections go to the master that has its slot now. A reply which
says that it is elsewhere closes the connection and counts as no answer, so whoever called asks again and meets the new master.
redis-py's ``RedisCluster`` would repeat calls whose effect is not known, a transaction without its ``WATCH`` among them.
"""

import threading
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final, Self
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline, PubSub
from redis.connection import Connection, ConnectionPool, SSLConnection, parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from pipeline.core.clock import SystemClock
from pipeline.store.keys import Keys

CLUSTER, SENTINEL = "cluster", "sentinel"
MAP_MS: Final = (
    100  # what the cluster said of its slots counts so long: the shards of a master that died ask once, not each
)
PORT, SENTINEL_PORT = 6379, 26379

_parse: Any = parse_url
_MOVED = (redis.exceptions.MovedError, redis.exceptions.AskError, redis.exceptions.ReadOnlyError)
Address = tuple[str, int]


def kind_of(url: str) -> str:
    """Return ``cluster`` or ``sentinel`` for redis+cluster://, rediss+sentinel:// and so on, "" for one server."""
    return url.partition("://")[0].partition("+")[2]


def seeds_of(url: str) -> tuple[list[Address], dict[str, Any], str]:
    """Return the addresses that a URL of several names, the options of connections, and its path.

    Raises:
        ValueError: it is no such URL.
    """
    scheme, _, rest = url.partition("://")
    plain, _, kind = scheme.partition("+")
    if plain not in ("redis", "rediss") or kind not in (CLUSTER, SENTINEL):
        raise ValueError("no such scheme")
    rest, mark, query = rest.partition("?")  # which may have paths of files
    hosts, _, path = rest.partition("/")
    user, at, hosts = hosts.rpartition("@")
    parts = [urlsplit(f"{plain}://{host}") for host in hosts.split(",")]
    addresses = [(part.hostname or "", part.port or (PORT if kind == CLUSTER else SENTINEL_PORT)) for part in parts]
    if not all(host for host, _ in addresses):
        raise ValueError("a host is missing")
    options = dict(_parse(f"{plain}://{user}{at}localhost{mark}{query}"))
    options.pop("host", None)
    return addresses, options, path.strip("/")


def open_sentinel(url: str, options: Mapping[str, Any]) -> Any:
    """Return a client of the primary that Sentinels name, wherever that is when a connection is made.

    Raises:
        ValueError: the URL has no name of a primary, or is none.
    """
    addresses, of_url, path = seeds_of(url)
    name, _, database = path.partition("/")
    if not name:
        raise ValueError("the name of the primary is missing")
    own = {key: of_url.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in of_url}
    merged = {**options, **of_url, "db": int(database or 0)}
    if merged.pop("connection_class", None) is not None:
        merged["ssl"] = True
    shared = {key: value for key, value in merged.items() if key.startswith(("socket_", "ssl"))}
    sentinels = {**shared, "retry": Retry(NoBackoff(), 0), **own}
    made: Any = Sentinel
    return made(addresses, sentinel_kwargs=sentinels, **merged).master_for(name)


class ClusterMap:
    """Which master has a slot, as the first node says that answers."""

    def __init__(self, seeds: Sequence[Address], options: Mapping[str, Any], is_tls: bool) -> None:
        self._seeds = [*seeds]
        self._options = options
        self._class: Any = SSLConnection if is_tls else Connection
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int, Address]] = []
        self._nodes: list[Address] = []
        self._clock = SystemClock()
        self._asked_ms = -inf

    def master_of(self, slot: int) -> Address:
        """Return the master that has a slot now.

        Raises:
            redis.ConnectionError: no node answers, or nobody has it.
        """
        self.nodes()
        for first, last, address in self._ranges:
            if first <= slot <= last:
                return address
        raise redis.exceptions.ConnectionError(f"no master of the cluster has slot {slot}")

    def nodes(self) -> list[Address]:
        """Return all nodes that hold slots, at first one that has just answered; errors as above."""
        with self._lock:
            if self._clock.monotonic_ms() - self._asked_ms >= MAP_MS:
                self._ask()
            return [*self._nodes]

    def look_elsewhere(self) -> None:
        """Ask another node the next time: one that is cut off from the others says for ever what was true before."""
        with self._lock:
            self._nodes = self._nodes[1:] + self._nodes[:1]

    def clients(self) -> list[tuple[str, redis.Redis]]:
        """Return a client of each of them by its address, which the caller closes; errors as above."""
        made = []
        for host, port in self.nodes():
            pool = ConnectionPool(**{**self._options, "host": host, "port": port, "connection_class": self._class})
            made.append((f"{host}:{port}", redis.Redis(connection_pool=pool)))
        return made

    def _ask(self) -> None:
        asked = list(dict.fromkeys([*self._nodes, *self._seeds]))
        errors = []
        for address in asked:
            try:
                found = self._slots(address)
            except (redis.exceptions.RedisError, OSError) as exc:
                if isinstance(exc, redis.exceptions.AuthenticationError | redis.exceptions.NoPermissionError):
                    raise
                errors.append(f"{address[0]}:{address[1]}: {exc}")
                continue
            if not found:
                errors.append(f"{address[0]}:{address[1]} knows of no slots")
                continue
            self._ranges = [(first, last, nodes[0]) for first, last, nodes in found]
            masters = [nodes[0] for _, _, nodes in found]
            replicas = [node for _, _, nodes in found for node in nodes[1:]]
            # Who answered is asked first the next time.
            self._nodes = list(dict.fromkeys([address, *masters, *replicas]))
            self._asked_ms = self._clock.monotonic_ms()
            return
        raise redis.exceptions.ConnectionError(f"no node of the cluster answers ({'; '.join(errors)})")

    def _slots(self, address: Address) -> list[tuple[int, int, list[Address]]]:
        patience = {"socket_timeout": self._options.get("socket_connect_timeout")}
        connection = self._class(**{**self._options, **patience, "host": address[0], "port": address[1]})
        try:
            connection.connect()
            connection.send_command("CLUSTER", "SLOTS")
            rows = connection.read_response()
        finally:
            connection.disconnect()
        return [
            (int(first), int(last), [((node[0] or b"").decode() or address[0], int(node[1])) for node in nodes])
            for first, last, *nodes in rows
        ]


class ClusterClient(redis.Redis):
    """A client of the shards of a cluster: a call goes to the master that has its first key; without a key, to the first shard's.

    A pipeline sends each shard its own commands, and one with ``MULTI`` must be of one shard. What wants a connection of a shard
    takes its client, see ``client_of``.
    """

    cluster_map: ClusterMap
    _clients: Mapping[str, Any]  # by hash tag
    _of_any: ConnectionPool  # to whichever node answers

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any], shards: Sequence[Keys]) -> Self:
        """Return a client; nothing is asked yet.

        Raises:
            ValueError: the URL is none of a cluster.
        """
        seeds, of_url, path = seeds_of(url)
        if path not in ("", "0"):
            raise ValueError("a cluster has no other database than 0")
        is_tls = of_url.pop("connection_class", None) is not None
        merged: dict[str, Any] = {**options, **of_url}
        cluster_map = ClusterMap(seeds, merged, is_tls)
        merged = {**merged, "cluster_map": cluster_map}
        merged["connection_class"] = _ShardSSLConnection if is_tls else _ShardConnection
        pools = {keys.tag: ConnectionPool(**merged, slot=keys.slot) for keys in shards}
        client = cls(connection_pool=pools[shards[0].tag])
        client.cluster_map, client._of_any = cluster_map, ConnectionPool(**merged, slot=None)
        client._clients = {tag: redis.Redis(connection_pool=pool) for tag, pool in pools.items()}
        return client

    def of_tag(self, tag: str) -> Any:
        """Return the client of the shard that has a hash tag."""
        return self._clients[tag]

    def tag_of(self, arguments: Sequence[Any]) -> str:
        """Return the hash tag of the first key among the arguments of a command, that of the first shard if there is none."""
        for each in arguments:
            text = each.decode("utf-8", "replace") if isinstance(each, bytes) else each
            if isinstance(text, str) and text.startswith("{") and (tag := text[1:].partition("}")[0]) in self._clients:
                return tag
        return next(iter(self._clients))

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        """Run a command where its key is."""
        return self.of_tag(self.tag_of(arguments)).execute_command(*arguments, **options)

    def transaction(self, func: Any, *watches: Any, **options: Any) -> Any:
        """Run a transaction where the keys are that it watches."""
        return self.of_tag(self.tag_of(watches)).transaction(func, *watches, **options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> "_ClusterPipeline":
        """Return a pipeline of all shards."""
        return _ClusterPipeline(self, transaction)

    def pubsub(self, **options: Any) -> PubSub:
        """Listen at any node that answers: each hears what is published at any other."""
        return PubSub(self._of_any, **options)

    def close(self) -> None:
        """Close the connections of all shards."""
        self._of_any.disconnect()
        for client in self._clients.values():
            client.connection_pool.disconnect()


class _ClusterPipeline(Pipeline):
    """Commands of several shards, each sent to its own; the replies come in the order of the commands."""

    def __init__(self, client: ClusterClient, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client, self._is_transaction = client, transaction

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self.command_stack = self.command_stack, []
        of_tags: dict[str, list[int]] = {}
        for index, (arguments, _) in enumerate(commands):
            of_tags.setdefault(self._client.tag_of(arguments), []).append(index)
        if self._is_transaction and len(of_tags) > 1:
            raise redis.exceptions.RedisError("a transaction has one shard")
        replies: dict[int, Any] = {}
        for tag, indexes in of_tags.items():
            pipeline: Any = self._client.of_tag(tag).pipeline(transaction=self._is_transaction)
            for index in indexes:
                arguments, options = commands[index]
                pipeline.execute_command(*arguments, **options)
            replies.update(zip(indexes, pipeline.execute(raise_on_error), strict=True))
        return [replies[index] for index in range(len(commands))]


def client_of(client: Any, keys: Keys) -> Any:
    """Return the client of a shard: ``client`` itself, if all are on one server."""
    return client_of_key(client, keys.wake())


def client_of_key(client: Any, key: str | bytes) -> Any:
    """Return the client of the shard that has a key: ``client`` itself, if all are on one server."""
    return client.of_tag(client.tag_of([key])) if isinstance(client, ClusterClient) else client


def cluster_url(url: str, nodes: Sequence[Address]) -> str:
    """Return the URL of a cluster, of which ``url`` names one node, with all of its nodes."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    user, at, _ = rest.partition("/")[0].rpartition("@")
    hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in nodes)
    return f"{scheme}+{CLUSTER}://{user}{at}{hosts}" + (f"/?{query}" if query else "")


class _FindsItsMaster:
    """A connection that asks where it belongs whenever it is made; see ``ClusterClient``."""

    def __init__(self, *, cluster_map: ClusterMap, slot: int | None, **options: Any) -> None:
        self._cluster_map, self._slot = cluster_map, slot
        super().__init__(**options)

    def _connect(self) -> Any:
        known = self._cluster_map
        self.host, self.port = known.nodes()[0] if self._slot is None else known.master_of(self._slot)
        try:
            return super()._connect()  # type: ignore[misc]
        except (redis.exceptions.RedisError, OSError):
            known.look_elsewhere()
            raise

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().read_response(*arguments, **options)  # type: ignore[misc]
        except (*_MOVED, redis.exceptions.ClusterDownError) as exc:
            self.disconnect()  # type: ignore[attr-defined]
            self._cluster_map.look_elsewhere()
            raise redis.exceptions.ConnectionError(
                f"this node is not, or not yet, the master of the slot: {exc}"
            ) from exc


class _ShardConnection(_FindsItsMaster, Connection):
    pass


class _ShardSSLConnection(_FindsItsMaster, SSLConnection):
    pass
