"""A real Redis Cluster for tests, on loopback and as durable as the private server, of which each node may be killed."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS
from redis.retry import Retry

from pipeline.runtime.process import wait_until
from tests.ports import free_port
from tests.servers import DURABLE, USER, server_program, user_rights

NODE_TIMEOUT_MS = 1_500


class Node:
    """A server of the cluster."""

    def __init__(self, folder: Path, options: Sequence[str] = (), tls: Sequence[str] = ()) -> None:
        self.folder, self.port, self._options = folder, free_port(), [*options]
        self.tls_port = free_port() if tls else None  # beside the other one, which tests use
        if tls:
            self._options += [
                "--tls-port",
                str(self.tls_port),
                "--tls-cluster",
                "yes",
                "--tls-replication",
                "yes",
                *tls,
            ]
        folder.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            server_program(),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.folder),
            "--save",
            "",
        ]
        cluster = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
        # Its other shards go on when a master is gone, and a new primary is chosen soon.
        cluster += ["--cluster-require-full-coverage", "no", "--cluster-replica-validity-factor", "0"]
        cluster += ["--repl-diskless-sync-delay", "0"]
        user = ["--user", USER, "on", f">{USER}", *user_rights(), "+cluster|slots"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *cluster, *user, *self._options, *DURABLE], stdout=log, stderr=log
            )
        if not wait_until(self._answers, 10):
            raise AssertionError((self.folder / "log").read_text())

    def client(self) -> "redis.Redis":
        """Connect as the default user, who may do everything."""
        return redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0), socket_timeout=10)

    def ask(self, *command: Any) -> Any:
        """Run a command that redis-py would turn into something else."""
        connection: Any = redis.Connection(port=self.port, socket_timeout=10)  # type: ignore[no-untyped-call]
        try:
            connection.send_command(*command)
            return connection.read_response()
        finally:
            connection.disconnect()

    def kill(self) -> None:
        """End it as kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def url(self) -> str:
        return f"redis+cluster://{USER}:{USER}@127.0.0.1:{self.port}"

    @property
    def node_id(self) -> str:
        return str(self.ask("CLUSTER", "MYID").decode())

    def _answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except redis.exceptions.RedisError:
            assert self._process is not None and self._process.poll() is None, (self.folder / "log").read_text()
            return False


class RealCluster:
    """Masters with equal shares of the slots, and so many replicas of each."""

    def __init__(self, folder: Path, masters: int, replicas: int, **options: Sequence[str]) -> None:
        self.masters = [Node(folder / f"m{number}", **options) for number in range(masters)]
        self.replicas = [Node(folder / f"r{number}", **options) for number in range(masters * replicas)]

    @property
    def nodes(self) -> list[Node]:
        return [*self.masters, *self.replicas]

    @property
    def url(self) -> str:
        """Name the masters, as the user with the rights that the documentation asks for."""
        return f"redis+cluster://{USER}:{USER}@" + ",".join(f"127.0.0.1:{node.port}" for node in self.masters)

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        share = REDIS_CLUSTER_HASH_SLOTS / len(self.masters)
        for number, node in enumerate(self.masters):
            node.ask("CLUSTER", "ADDSLOTSRANGE", round(number * share), round((number + 1) * share) - 1)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.tls_port or node.port)
        assert wait_until(lambda: all(self._knows_all(node) for node in self.nodes), 20), "the nodes did not meet"
        for number, node in enumerate(self.replicas):
            node.ask("CLUSTER", "REPLICATE", self.masters[number % len(self.masters)].node_id)
        assert wait_until(lambda: all(_is_well(node) for node in self.nodes), 20), "the cluster is not up"
        linked = lambda node: node.client().info("replication").get("master_link_status") == "up"  # noqa: E731
        assert wait_until(lambda: all(map(linked, self.replicas)), 20), "a replica has no primary"

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def owner(self, slot: int, of: Sequence[Node] | None = None) -> Node:
        """Return the node that has a slot, as the first of ``of`` says."""
        for first, last, master, *_ in (of or self.masters)[0].ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == master[1])
        raise AssertionError(f"nobody has slot {slot}")

    def is_replicated(self) -> bool:
        """Whether each replica has all that its primary has."""
        offsets = [node.client().info("replication") for node in self.masters]
        return all(
            int(each["slave0"]["offset"]) == each["master_repl_offset"] for each in offsets if "slave0" in each
        ) and all("slave0" in each for each in offsets)

    def _knows_all(self, node: Node) -> bool:
        return int(_info(node)["cluster_known_nodes"]) == len(self.nodes)


@contextmanager
def real_cluster(masters: int = 3, replicas: int = 0, **options: Sequence[str]) -> Iterator[RealCluster]:
    """Run a cluster while the block lasts; the options are those of ``Node``."""
    with TemporaryDirectory(prefix="dt-", dir="/tmp") as folder:
        cluster = RealCluster(Path(folder), masters, replicas, **options)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.kill()


def _info(node: Node) -> dict[str, str]:
    text = node.ask("CLUSTER", "INFO").decode()
    return dict(line.split(":", 1) for line in text.split() if ":" in line)


def _is_well(node: Node) -> bool:
    found = _info(node)
    return found["cluster_state"] == "ok" and found["cluster_slots_ok"] == str(REDIS_CLUSTER_HASH_SLOTS)
