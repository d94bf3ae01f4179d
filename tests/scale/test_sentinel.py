"""A primary and its replica behind real Sentinels with a password of their own, as docs/how-to/cluster.md says."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import redis

from pipeline.client import Duetime, Request
from pipeline.config import RedisSettings, Settings
from pipeline.core.clock import SystemClock
from pipeline.core.errors import StoreUnavailable
from pipeline.runtime.process import wait_until
from pipeline.store.connection import connect, translated_errors
from pipeline.store.keys import keys_of
from pipeline.store.namespace import open_namespace
from pipeline.store.stats import read_stats
from tests.e2e.commands import Checkout, Command
from tests.e2e.conftest import checkout as checkout
from tests.ports import free_port
from tests.scale.test_cluster import Jobs, bodies
from tests.servers import USER, real_server, server_program, user_rights
from tests.tls import Certificates

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("cluster")]

OWN = "of-the-sentinels"
COUNTS = {"before": 500, "early": 100, "later": 500}


class Watched:
    """A primary, a replica and two Sentinels of which both must agree; with certificates, all of them speak TLS alone."""

    def __init__(self, folder: Path, stack: ExitStack, tls: Certificates | None = None) -> None:
        ports = [free_port(), free_port()]
        port_option, self._reached_by = ("tls-port", tls.of_test()) if tls else ("port", {})
        encrypted = [*tls.of_server(), "--tls-replication", "yes"] if tls else []
        tcp = [
            "--bind",
            "127.0.0.1",
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
            "--repl-diskless-sync-delay",
            "0",
        ]
        self.servers = [
            stack.enter_context(real_server(f"--{port_option}", str(port), *tcp, *encrypted)) for port in ports
        ]
        self.ports = ports
        self.servers[1].client().replicaof("127.0.0.1", str(ports[0]))
        self.sentinels = [free_port(), free_port()]
        info = "+client|setinfo" if "+client|setinfo" in user_rights() else ""
        for number, port in enumerate(self.sentinels):
            config = folder / f"sentinel-{number}.conf"
            config.write_text(
                f"port 0\n{port_option} {port}\nbind 127.0.0.1\nrequirepass {OWN}\n"
                f"sentinel sentinel-pass {OWN}\n"
                f"sentinel monitor mine 127.0.0.1 {ports[0]} 2\n"
                "sentinel down-after-milliseconds mine 1000\nsentinel failover-timeout mine 5000\n"
                f"user looker on >{OWN} +sentinel|masters {info}\nuser blind on >{OWN} {info}\n"
            )
            with (folder / f"log-{number}").open("wb") as log:
                command = [server_program(), str(config), "--sentinel", *encrypted]
                process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        assert wait_until(self._is_watched, 30)

    @property
    def url(self) -> str:
        sentinels = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://{USER}:{USER}@127.0.0.1:1,{sentinels}/mine?sentinel_password={OWN}"

    def is_replicated(self) -> bool:
        found = self.servers[0].client().info("replication")
        return "slave0" in found and int(found["slave0"]["offset"]) == found["master_repl_offset"]

    def cut_off(self) -> None:
        """Keep from the replica what the primary takes from now on."""
        self.servers[0].client().execute_command("ACL", "SETUSER", "default", "-psync", "-sync")
        self.servers[0].client().client_kill_filter(_type="replica")
        replica = self.servers[1].client()
        assert wait_until(lambda: replica.info("replication")["master_link_status"] == "down", 20)

    def wait_for_looks(self, *commands: Command) -> None:
        """Return when each command has asked the primary for its position."""
        waiting = [*commands]
        with self.servers[0].client().monitor() as calls:
            while waiting:
                call = calls.next_command()
                if call["command"].upper() == "INFO REPLICATION":
                    waiting = [each for each in waiting if int(call["client_port"] or 0) not in ports_of(each)]

    def is_demoted(self) -> bool:
        """Whether the first primary is a replica; its Sentinels close its connections meanwhile."""
        try:
            return bool(self.servers[0].client().info("replication")["role"] == "slave")
        except redis.exceptions.ConnectionError:
            return False

    def fail_over(self) -> bool:
        """Ask for a failover; a Sentinel that does not know enough of the replica yet refuses."""
        try:
            redis.Redis(port=self.sentinels[0], password=OWN).execute_command("SENTINEL", "FAILOVER", "mine")
        except redis.exceptions.ResponseError:
            return False
        return True

    def _is_watched(self) -> bool:
        try:
            for port in self.sentinels:
                client = redis.Redis(port=port, password=OWN, **self._reached_by)
                [found] = client.sentinel_masters().values()
                if found["num-slaves"] != 1 or found["num-other-sentinels"] != 1:
                    return False
        except redis.exceptions.RedisError:
            return False
        return True


@pytest.fixture
def watched() -> Iterator[Watched]:
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="dt-", dir="/tmp"))
        yield Watched(Path(folder), stack)


def test_a_failover_loses_and_doubles_nothing_that_was_replicated(checkout: Checkout, watched: Watched) -> None:
    settings = RedisSettings(url=watched.url, namespace="test", shards=2)
    jobs = Jobs(checkout, settings)
    client = connect(settings)
    open_namespace(client, settings, may_create=True)
    with Duetime.over(client, Settings(redis=settings), patience_sec=60) as duetime:
        loop = jobs.loop()
        duetime.schedule_many(Request(str(n), delay=8 + n / 100, id=f"k{n}") for n in range(300))
        assert wait_until(watched.is_replicated, 20)
        watched.servers[0].kill()
        duetime.schedule_many(Request(str(n), delay=8 + n / 100, id=f"k{n}") for n in range(300, 600))
        assert wait_until(lambda: len(loop.out) >= 600, 60), loop.screen()
        assert loop.stop() == 0
        assert OWN not in loop.screen()
    assert bodies(loop) == Counter(str(n) for n in range(600))
    assert read_stats(client, keys_of(settings)).scheduled == 0
    client.close()


@pytest.mark.parametrize("lags", [True, False])
def test_what_a_failover_undid_is_noticed_and_stored_again(checkout: Checkout, watched: Watched, lags: bool) -> None:
    settings = RedisSettings(url=watched.url, namespace="test", shards=2)
    jobs = Jobs(checkout, settings)
    ingest = jobs.run("jobs/ingest.py")
    ingest.wait_for_line("ingest is up")
    loop = jobs.loop()
    drop(checkout, "before", 500, delay_sec=23)
    ingest.wait_for_line("500 stored")
    assert wait_until(watched.is_replicated, 20)
    before_ms = SystemClock().wall_ms()
    if lags:
        watched.cut_off()
    drop(checkout, "early", 100, delay_sec=0)
    drop(checkout, "later", 500, delay_sec=23)
    loop.wait_for(lambda command: len(command.out) == 100, "early messages", 30)
    ingest.wait_for(lambda command: lines_of_batches(command) == 1_100, "batch with the last line")
    if not lags:
        assert wait_until(watched.is_replicated, 20)
    watched.wait_for_looks(loop, ingest)  # they can only tell what they have seen
    watched.servers[0].kill()
    wanted = {f"{name}-{number}" for name, count in COUNTS.items() for number in range(count)}
    loop.wait_for(lambda command: {*bodies(command)} == wanted, "message of each request")
    if lags:
        ingest.wait_for_line("stored again what Redis had lost: 6")
    assert wait_until(lambda: read_stats(connect(settings), keys_of(settings)).in_flight == 0, 20)
    found = jobs.status()
    assert (loop.stop(), ingest.stop()) == (0, 0)
    copies = bodies(loop) - Counter(wanted)
    alarms = [line for command in (loop, ingest) for _, line in command.err if "a failover undid" in line]
    if not lags:
        assert not copies and not alarms and found["failover"] is None and not found["ingest"][0]["stored_again"]
        return
    assert {each.partition("-")[0] for each in copies} <= {"early"} and max(copies.values(), default=0) <= 1
    assert len(alarms) == 2, "the loop and the ingest job"
    assert 500 <= found["ingest"][0]["stored_again"] <= 600
    assert found["failover"]["undone_bytes"] > 10_000 and 0 < found["failover"]["since_ms"] < SystemClock().wall_ms()
    assert found["failover"]["since_ms"] >= before_ms - 2_000, "what was stored long before is not in doubt"


def ports_of(command: Command) -> set[int]:
    """Return the ports from which a command and the processes that it has started are connected."""
    root = psutil.Process(command.process.pid)
    return {
        each.laddr.port for process in (root, *root.children(recursive=True)) for each in process.net_connections("tcp")
    }


def lines_of_batches(ingest: Command) -> int:
    return sum(int(number) for _, line in ingest.err for number in re.findall(r"batch \d+: (\d+) in", line))


def drop(checkout: Checkout, name: str, count: int, delay_sec: float) -> None:
    requests = [{"message": f"{name}-{number}", "delay_sec": delay_sec + number / 1_000} for number in range(count)]
    checkout.drop(
        f"{name}.jsonl", *(each | ({"id": each["message"]} if n % 2 else {}) for n, each in enumerate(requests))
    )


def test_the_old_primary_comes_back_as_a_replica_and_is_left(checkout: Checkout, watched: Watched) -> None:
    """A connection that was made before says READONLY, which is no answer; the next one goes to the primary."""
    settings = RedisSettings(url=watched.url, namespace="test")
    client = connect(settings)
    open_namespace(client, settings, may_create=True)
    with Duetime.over(client, Settings(redis=settings), patience_sec=60) as duetime:
        duetime.schedule("before", delay=60)
        assert wait_until(watched.is_replicated, 20)
        assert wait_until(watched.fail_over, 30)
        assert wait_until(watched.is_demoted, 60)
        assert duetime.schedule("after", delay=60)
        assert read_stats(watched.servers[1].client(), keys_of(settings)).scheduled == 2
    client.close()


def test_a_user_of_the_sentinels_needs_what_the_documentation_says(watched: Watched) -> None:
    for user, is_enough in (("looker", True), ("blind", False)):
        url = watched.url.replace("?", f"?sentinel_username={user}&")
        with connect(RedisSettings(url=url)) as client:
            if is_enough:
                assert client.time()
            else:
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.time()


def test_what_is_wrong_is_told_without_a_password(watched: Watched) -> None:
    for before, after, name in [("/mine", "/other", "other"), (f"={OWN}", "=wrong-one", "mine")]:
        told = f"^No master found for '{name}': no Sentinel that answers and lets us in knows one that is up\\.$"
        url = watched.url.replace(before, after)
        with pytest.raises(StoreUnavailable, match=told) as caught, translated_errors():
            connect(RedisSettings(url=url)).ping()
        assert not any(secret in str(caught.value) for secret in (OWN, "wrong-one", f":{USER}@"))
