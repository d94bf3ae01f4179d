"""While a master of a Redis Cluster is away, files are taken in all the same: what is not its own is stored and delivered on time.

What is its own waits, also across a kill of the job, and is stored once when the master is back.
"""

import json
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import redis

from pipeline.config import RedisSettings
from pipeline.core.clock import SystemClock
from pipeline.runtime.process import wait_until
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from tests.cluster import RealCluster, real_cluster
from tests.e2e.commands import Checkout, Command, kill_tree
from tests.e2e.conftest import checkout as checkout
from tests.kafka.broker import Broker
from tests.kafka.conftest import broker as broker
from tests.scale.test_cluster import SHARDS, Jobs, bodies, key_of_shard

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.xdist_group("cluster")]

PATIENCE = {"DUETIME_INGEST_SHARD_PATIENCE_SEC": "2"}
LONG_PATIENCE_SEC = 8  # a batch that waits so long is told from a slow machine
SOON_SEC = 60  # for a batch that waits for two shards, on a machine that is busy


@dataclass
class Outage:
    """A cluster of which one master is going to be away, the jobs, and what was dropped."""

    checkout: Checkout
    cluster: RealCluster
    first: bool = False  # whether it is the master of the first shard
    dropped: Counter[str] = field(default_factory=Counter)
    alive: Counter[str] = field(default_factory=Counter)  # what belongs to other masters
    plain: Counter[str] = field(default_factory=Counter)  # what belongs to the shard of its file, which nobody chooses
    rejects: int = 0

    def __post_init__(self) -> None:
        self.settings = RedisSettings(url=self.cluster.url, namespace="test", shards=SHARDS)
        self.jobs = Jobs(self.checkout, self.settings)
        self.victim = self.cluster.owner(keys_of(self.settings)[0 if self.first else 1].slot)
        self.gone = {keys.shard for keys in keys_of(self.settings) if self.cluster.owner(keys.slot) is self.victim}
        if not self.first and 0 in self.gone:
            raise AssertionError("two neighbours have one master")
        self.loop: Command | None = None

    def drop(self, name: str, delay_sec: float = 0) -> None:
        """Drop a file with a message for each shard, one without an id, and a line that is rejected."""
        requests: list[dict[str, object]] = []
        for shard in range(SHARDS):
            body = f"{name}-{shard}"
            requests.append({"message": body, "delay_sec": delay_sec, "id": key_of_shard(shard)})
            (self.dropped if shard in self.gone else self.alive)[body] += 1
        self.plain[f"{name}-plain"] += 1
        self.checkout.drop(f"{name}.jsonl", *requests, {"message": f"{name}-plain", "delay_sec": 0}, {"message": name})
        self.rejects += 1

    def start(self, **environ: str) -> Command:
        ingest = self.jobs.run("jobs/ingest.py", **{**PATIENCE, **environ})
        ingest.wait_for_line("ingest is up")
        return ingest

    def delivered(self, *loops: Command) -> Counter[str]:
        return bodies(*loops)

    def waiting(self) -> list[str]:
        return sorted(path.name for path in (self.checkout.inbox / ".landing" / ".waiting").glob("*"))

    def landed(self) -> list[str]:
        return [path.name for path in (self.checkout.inbox / ".landing").glob("[!.]*")]

    def all_of_it(self) -> Counter[str]:
        return self.dropped + self.alive + self.plain

    def is_all_delivered(self, *loops: Command) -> bool:
        return bodies(*loops) >= self.all_of_it()

    def check_the_end(self, *loops: Command) -> None:
        """Each line of each file is stored once, nothing waits, and its reject is there once."""
        assert bodies(*loops) == self.all_of_it()
        assert wait_until(lambda: not self.waiting() and not self.landed(), 20), (self.waiting(), self.landed())
        assert len(self.checkout.rejects()) == self.rejects
        assert self.stored() == self.all_of_it().total()
        assert (self.stored("rejected"), self.stored("duplicates")) == (self.rejects, 0)

    def stored(self, counter: str = "stored") -> int:
        client = connect(self.settings)
        return sum(int(client.hget(keys.counters(), counter) or 0) for keys in keys_of(self.settings))

    def is_complete(self) -> bool:
        """Whether each shard answers: a master that was started again has to hear from the others first."""
        try:
            return self.stored() >= 0
        except redis.exceptions.RedisError:
            return False

    def rejected(self) -> list[tuple[object, object]]:
        paths = (self.checkout.root / "rejects").glob("*.jsonl")
        records = [json.loads(text) for path in paths for text in path.read_text().splitlines()]
        return [(each["partition"], each["offset"]) for each in records]


@pytest.fixture
def cluster() -> Iterator[RealCluster]:
    with real_cluster(masters=3) as running:
        yield running


def said(job: Command, text: str) -> int:
    return sum(text in line for _, line in job.err)


def kill_all_of(job: Command) -> None:
    """End a job and all its processes as kill -9 does."""
    kill_tree(job.process.pid)
    job.end(20)


def test_files_go_on_while_a_master_is_away_and_nothing_is_lost_or_doubled(
    checkout: Checkout, cluster: RealCluster
) -> None:
    outage = Outage(checkout, cluster)
    ingest = outage.start(DUETIME_INGEST_SHARD_PATIENCE_SEC=str(LONG_PATIENCE_SEC))
    loop = outage.jobs.loop()
    outage.drop("before")
    assert wait_until(lambda: outage.is_all_delivered(loop), SOON_SEC), ingest.screen()
    # Delivered is before committed: a batch that is not would wait for the master, too.
    assert wait_until(lambda: not outage.landed(), SOON_SEC), outage.landed()
    outage.drop("at-once")
    outage.victim.kill()
    for number in range(3):
        outage.drop(f"first{number}")
    assert wait_until(lambda: bodies(loop) >= outage.alive, SOON_SEC), ingest.screen()
    later_ms = SystemClock().wall_ms()
    for number in range(5):
        outage.drop(f"later{number}", delay_sec=3)
        assert wait_until(lambda: not [name for name in outage.landed() if "later" in name], SOON_SEC), ingest.screen()
    took_ms = SystemClock().wall_ms() - later_ms
    assert took_ms < 5 * LONG_PATIENCE_SEC * 1_000, "a batch that knows which shards are away waits for none"
    assert wait_until(lambda: bodies(loop) >= outage.alive, SOON_SEC), ingest.screen()
    assert not (bodies(loop) & outage.dropped) - Counter(
        {f"{n}-{s}": 1 for n in ("before", "at-once") for s in range(6)}
    )
    assert len(outage.waiting()) >= 8, outage.waiting()
    status = outage.jobs.status()
    [waits] = status["waiting"]
    assert (waits["files"], set(waits["shards"])) == (len(outage.waiting()), outage.gone)
    assert "files that were read wait for shards " in status["verdict"] and "PROBLEM" in status["verdict"]
    outage.victim.start()
    assert wait_until(lambda: outage.is_all_delivered(loop), 60), ingest.screen()
    ingest.wait_for_line("that waited for shards: all stored now", 30)
    outage.check_the_end(loop)
    assert wait_until(lambda: outage.jobs.status()["waiting"] == [], 10)
    names = ", ".join(map(str, sorted(outage.gone)))
    assert said(ingest, f"shards {names} can't be reached") + 2 * said(ingest, "shard 1 can't be reached") >= 1
    assert said(ingest, "can't be reached") <= 2 and said(ingest, "all stored now") == 1
    assert said(ingest, "stored again") == 0, "no failover has undone anything"
    assert (ingest.stop(), loop.stop()) == (0, 0)


def test_a_master_that_is_frozen_holds_up_no_file_of_the_others(checkout: Checkout, cluster: RealCluster) -> None:
    outage = Outage(checkout, cluster)
    ingest, loop = outage.start(), outage.jobs.loop("--lease", "5")
    outage.drop("before")
    assert wait_until(lambda: outage.is_all_delivered(loop), SOON_SEC), ingest.screen()
    # Delivered is before committed: a batch that is not would wait for the master, too.
    assert wait_until(lambda: not outage.landed(), SOON_SEC), outage.landed()
    outage.victim.signal(signal.SIGSTOP)
    try:
        outage.drop("frozen")
        assert wait_until(lambda: bodies(loop) >= outage.alive, SOON_SEC), ingest.screen()
        for number in range(3):
            outage.drop(f"later{number}")
            assert wait_until(lambda: bodies(loop) >= outage.alive, SOON_SEC), ingest.screen()
    finally:
        outage.victim.signal(signal.SIGCONT)
    assert wait_until(lambda: outage.is_all_delivered(loop), 60), ingest.screen()
    assert wait_until(lambda: not outage.waiting() and not outage.landed(), 20)
    assert {*bodies(loop)} == {*outage.all_of_it()}
    assert outage.stored() == outage.all_of_it().total(), "a lost reply has doubled nothing"
    assert (ingest.stop(), loop.stop()) == (0, 0)


def test_records_of_kafka_go_on_while_a_master_is_away_and_what_it_lacks_needs_no_next_record(
    checkout: Checkout, cluster: RealCluster, broker: Broker
) -> None:
    outage = Outage(checkout, cluster)
    broker.make_topic("outage", partitions=2)
    kafka = ("--source", "kafka", "--kafka-servers", broker.bootstrap, "--kafka-topics", "outage")

    def send(name: str) -> None:
        for shard in range(SHARDS):
            body = f"{name}-{shard}"
            (outage.dropped if shard in outage.gone else outage.alive)[body] += 1
            value = json.dumps({"message": body, "delay_sec": 0, "id": key_of_shard(shard)}).encode()
            broker.produce("outage", value, partition=shard % 2)
        broker.produce("outage", b"no json", partition=1)
        outage.rejects += 1

    ingest = outage.jobs.run("jobs/ingest.py", *kafka, **PATIENCE)
    ingest.wait_for_line("ingest is up")
    loop = outage.jobs.loop()
    send("before")
    assert wait_until(lambda: outage.is_all_delivered(loop), SOON_SEC), ingest.screen()
    outage.victim.kill()
    for name in ("one", "two", "three"):
        send(name)
        assert wait_until(lambda: bodies(loop) >= outage.alive, SOON_SEC), ingest.screen()
    assert not (bodies(loop) & outage.dropped) - Counter({f"before-{shard}": 1 for shard in outage.gone})
    kill_all_of(ingest)
    again = outage.jobs.run("jobs/ingest.py", *kafka, **PATIENCE)
    again.wait_for_line("ingest is up")
    send("started without it")
    assert wait_until(lambda: bodies(loop) >= outage.alive, SOON_SEC), again.screen()
    outage.victim.start()
    assert wait_until(outage.is_complete, 20)
    assert wait_until(lambda: outage.is_all_delivered(loop), 90), again.screen()
    assert bodies(loop) == outage.all_of_it() and outage.stored() == outage.all_of_it().total()
    outage.victim.kill()
    send("later")
    assert wait_until(lambda: bodies(loop) >= outage.alive, SOON_SEC), again.screen()
    again.wait_for_line("can't be reached", 20)
    outage.victim.start()
    assert wait_until(lambda: outage.is_all_delivered(loop), 60), again.screen()
    assert bodies(loop) == outage.all_of_it() and outage.stored() == outage.all_of_it().total()
    assert len(outage.rejected()) == len({*outage.rejected()}) == outage.rejects
    assert (again.stop(), loop.stop()) == (0, 0)


@pytest.mark.parametrize("first", [True, False], ids=["the first shard's master", "another one"])
def test_jobs_start_while_a_master_is_away_and_files_that_wait_survive_a_kill(
    checkout: Checkout, cluster: RealCluster, first: bool
) -> None:
    outage = Outage(checkout, cluster, first)
    ingest, loop = outage.start(), outage.jobs.loop()
    outage.drop("before")
    assert wait_until(lambda: outage.is_all_delivered(loop), SOON_SEC), ingest.screen()
    # Delivered is before committed: a batch that is not would wait for the master, too.
    assert wait_until(lambda: not outage.landed(), SOON_SEC), outage.landed()
    outage.victim.kill()
    outage.drop("killed", delay_sec=1)
    assert wait_until(lambda: len(outage.waiting()) == 1, SOON_SEC), ingest.screen()
    kill_all_of(ingest)
    kill_all_of(loop)
    again = outage.jobs.run("jobs/ingest.py", **PATIENCE)
    again.wait_for_line("ingest is up")
    drained = outage.jobs.run("jobs/drain.py", "--format", "json", "--lease", "5")
    outage.drop("meanwhile", delay_sec=1)
    assert wait_until(lambda: bodies(loop, drained) >= outage.alive, SOON_SEC), again.screen() + drained.screen()
    assert wait_until(lambda: len(outage.waiting()) == 2, SOON_SEC), again.screen()
    assert not (bodies(loop, drained) - Counter({f"before-{shard}": 1 for shard in outage.gone})) & outage.dropped
    status = outage.jobs.run("jobs/status.py", "--check")
    assert status.end(60) == 1 and "can't be reached" in status.lines()[0], status.screen()
    outage.victim.start()
    assert wait_until(lambda: outage.is_all_delivered(loop, drained), 60), again.screen() + drained.screen()
    outage.check_the_end(loop, drained)
    assert (again.stop(), drained.stop()) == (0, 0)


def test_a_run_that_takes_in_what_is_there_says_what_waits_and_the_next_one_stores_it(
    checkout: Checkout, cluster: RealCluster
) -> None:
    outage = Outage(checkout, cluster)
    client = connect(outage.settings)
    outage.drop("zero")
    first = outage.jobs.run("jobs/ingest.py", "--once", **PATIENCE)
    assert first.end(120) == 0, first.screen()
    outage.victim.kill()
    outage.drop("one")
    once = outage.jobs.run("jobs/ingest.py", "--once", **PATIENCE)
    assert once.end(120) == 1 and said(once, "1 file waits for shard") == 1, once.screen()
    alive = [keys for keys in keys_of(outage.settings) if keys.shard not in outage.gone]
    assert sum(int(client.hget(keys.counters(), "stored")) for keys in alive) >= 2 * len(alive)
    outage.victim.start()
    last = outage.jobs.run("jobs/ingest.py", "--once", **PATIENCE)
    assert last.end(120) == 0, last.screen()
    assert outage.waiting() == [] and outage.landed() == []
    loop = outage.jobs.run("jobs/drain.py", "--format", "json", "--until-empty")
    assert loop.end(60) == 0
    outage.check_the_end(loop)
