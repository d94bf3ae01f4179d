"""A real Kafka broker for tests: one process on loopback, with its data in a folder of its own.

    with real_broker() as broker:
        broker.make_topic("orders", partitions=2)
        broker.produce("orders", b"value", key=b"key", headers=[("trace", b"1"), ("trace", None)])
        [record] = broker.read_all("orders")

Code under test connects to ``broker.bootstrap``. Its jars are fetched once (``jars.py``). Where they can't be had, the tests that
want a broker are skipped, but fail if ``CI`` is ``true``.
"""

import os
import secrets
import shutil
import socket
import subprocess
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from confluent_kafka import KafkaException

from pipeline.runtime.process import dies_with_parent, wait_until
from tests.kafka import jars
from tests.kafka.clients import Clients
from tests.ports import free_port

HOST = "127.0.0.1"
START_SEC = 60.0  # 3 on an idle machine

# The heap is enough for some hundred thousand records; the compiler is the one that pays for itself within seconds.
JAVA_OPTIONS = ("-Xmx160m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Dlog4j2.level=WARN")

PROTOCOLS = {"PLAINTEXT": "PLAINTEXT", "PROXIED": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}

SERVER = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    # A single broker has no others to copy to.
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 1,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "share.coordinator.state.topic.num.partitions": 1,
    # After a kill it is let in again only when its old self is forgotten: after 9 s, if nothing else is said.
    "broker.session.timeout.ms": 2_000,
    "broker.heartbeat.interval.ms": 500,
    "group.initial.rebalance.delay.ms": 0,  # else the first consumer of a group waits 3 s for others
    "auto.create.topics.enable": "false",
    "num.network.threads": 1,
    "num.io.threads": 2,
    "log.cleaner.dedupe.buffer.size": 2_097_152,
}

# The kernel ends a broker with the thread that started it, lest a killed test leave one behind. This thread lasts as long as the
# process.
_starter = ThreadPoolExecutor(1)


class Broker(Clients):
    """A broker that a test may kill and start again, on the same data and the same ports.

    Args:
        proxied_port: There is a second listener, at ``upstream``, which tells clients that the broker is at this port of loopback:
            a proxy there stays in between.
        listeners: names of more listeners, with the security protocol of each; ``addresses`` says where they are.
        java_options: of the machine that it runs on; those that are left out suit tests.
        settings: of the server, with ``_`` for each dot.
    """

    def __init__(
        self,
        folder: Path,
        proxied_port: int | None = None,
        listeners: Mapping[str, str] | None = None,
        java_options: Sequence[str] = JAVA_OPTIONS,
        **settings: object,
    ) -> None:
        self._java_options = java_options
        protocols = listeners or {}
        self._port, controller, upstream, *more = (free_port() for _ in range(3 + len(protocols)))
        super().__init__(f"{HOST}:{self._port}")
        self.folder = folder
        self.log = folder / "broker.log"
        self.upstream = (HOST, upstream)
        self.addresses = {name: f"{HOST}:{port}" for name, port in zip(protocols, more, strict=True)}
        advertised = [f"{name}://{at}" for name, at in {"PLAINTEXT": self.bootstrap, **self.addresses}.items()]
        listening = [*advertised, f"CONTROLLER://{HOST}:{controller}"]
        if proxied_port is not None:
            listening.append(f"PROXIED://{HOST}:{upstream}")
            advertised.append(f"PROXIED://{HOST}:{proxied_port}")
        self._settings = SERVER | {
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "listeners": ",".join(listening),
            "advertised.listeners": ",".join(advertised),
            "listener.security.protocol.map": ",".join(map(":".join, {**PROTOCOLS, **protocols}.items())),
            "log.dirs": folder / "data",
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, for the first time or again; returns when it answers and every partition has its leader."""
        assert self._process is None, "it runs already"
        home = jars.installed()
        _write_properties(self.folder / "server.properties", self._settings)
        if not (self.folder / "data").exists():
            self._make_data(home)
        # Native libraries are unpacked into the temporary folder, and stay there after a kill.
        options = [
            *self._java_options,
            f"-Djava.io.tmpdir={self.folder}",
            "-cp",
            jars.class_path(home, jars.read_list()),
        ]
        command = [jars.java_program(), *options, "kafka.Kafka", str(self.folder / "server.properties")]
        with open(self.log, "ab") as log:
            start = _starter.submit(
                subprocess.Popen, command, preexec_fn=dies_with_parent(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
            self._process = start.result()
        if not wait_until(self._has_ended_or_answers, START_SEC) or self._process.poll() is not None:
            raise AssertionError(f"the broker did not start: {self.log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """End it as kill -9 does."""
        self._end("kill")

    def stop(self) -> None:
        """Let it shut down, by SIGTERM."""
        self._end("terminate")

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None, "it doesn't run"
        return self._process.pid

    def _make_data(self, home: Path) -> None:
        """Make what Kafka's storage tool would make, with a cluster id of its own."""
        data = self.folder / "data"
        data.mkdir()
        shutil.copy(home / jars.CHECKPOINT, data)
        ids = {"cluster.id": _new_id(), "node.id": 1, "directory.id": _new_id(), "version": 1}
        _write_properties(data / "meta.properties", ids)

    def _has_ended_or_answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            return True
        with socket.socket() as connection:  # a client of Kafka's would wait longer between two attempts
            if connection.connect_ex((HOST, self._port)) != 0:
                return False
        try:
            known = self.admin.list_topics(timeout=1.0)
        except KafkaException:
            return False
        leaders = [it.leader for topic in known.topics.values() for it in topic.partitions.values()]
        return bool(known.brokers) and min(leaders, default=0) >= 0

    def _end(self, how: str) -> None:
        if self._process is not None:
            getattr(self._process, how)()
            self._process.wait(START_SEC)
            self._process = None


@contextmanager
def real_broker(
    *,
    transactions: bool = False,
    proxied_port: int | None = None,
    listeners: Mapping[str, str] | None = None,
    **settings: object,
) -> Iterator[Broker]:
    """Run a broker while the block lasts.

    Args:
        transactions: Have it ready for transactions as well, for a second more.
        proxied_port, listeners: see ``Broker``.
        settings: of the server, with ``_`` for each dot.
    """
    if why := jars.why_unavailable():
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"There is no Kafka: {why}")
    with TemporaryDirectory(prefix="dt-", dir="/tmp") as folder:
        broker = Broker(Path(folder), proxied_port, listeners, JAVA_OPTIONS, **settings)
        try:
            broker.start()
            if transactions:
                broker.prepare_transactions()
            yield broker
        finally:
            broker.kill()


def _write_properties(path: Path, properties: Mapping[str, object]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))


def _new_id() -> str:
    """Return 16 bytes as Kafka writes them, of which the first is zero as the text must not begin with a hyphen."""
    return urlsafe_b64encode(bytes(1) + secrets.token_bytes(15)).decode().rstrip("=")
