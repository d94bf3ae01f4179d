"""Records in, records out, and whatever can die does: the whole way from Kafka through Redis into Kafka, as users run it.

    python -m tests.kafka.campaign --seed 1 --records 100000 --faults 60
    python -m tests.kafka.campaign --seed 1 --records 100000 --faults 60 --at-least-once

What is in the input topic at the end is the truth: a producer whose broker dies does not know what it has sent. It prints each
fault, and exits 1 if a record is missing, or there twice without leave.
"""

import argparse
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Event
from time import monotonic

import psutil

from pipeline.config import RedisSettings
from pipeline.store.connection import connect
from pipeline.store.keys import Keys
from tests.e2e.commands import Checkout, Command, kill_tree
from tests.kafka.broker import Broker, real_broker
from tests.servers import RealServer, real_server

PARTITIONS = 12
TOPICS = ("mail", "news", "orders")
LOOPS = 3
TAKEOVER_SEC = 1.0
SETTLE_SEC = 240.0
ALL_FAULTS = (
    "kill_loop",
    "freeze_loop",
    "kill_loop",
    "freeze_loop",
    "kill_broker",
    "kill_redis",
    "kill_worker",
    "kill_ingest",
)


class Campaign:
    """One run: jobs, a broker and a server, and what happens to them."""

    def __init__(
        self,
        checkout: Checkout,
        broker: Broker,
        server: RealServer,
        seed: int,
        exactly_once: bool,
        say: Callable[[str], None],
    ) -> None:
        self._checkout, self._broker, self._server, self._say = checkout, broker, server, say
        self._random = Random(seed)
        self._exactly_once = exactly_once
        self._sent = 0
        self._may_end = False  # whether a worker of the ingest job was killed
        broker.make_topic("requests", PARTITIONS)
        for topic in TOPICS:
            broker.make_topic(topic, PARTITIONS)
        self._ingest = self._start_ingest()
        self._loops = [self._start_loop() for _ in range(LOOPS)]
        self._ingest.wait_for_line("ingest is up")

    def run(self, records: int, faults: list[str]) -> Counter[tuple[str, str]]:
        """Send records while faults hit, and return how often each record is out; fails if one is missing or wrong."""
        portion = -(-records // (len(faults) + 1))
        for fault in [*faults, ""]:
            self._send(min(portion, records - self._sent))
            Event().wait(self._random.uniform(0, 2))
            if fault:
                begun = monotonic()
                getattr(self, fault)()
                self._say(
                    f"{fault}: {monotonic() - begun:.1f} s, {self._outcome().total():,} of {self._sent:,} are out"
                )
        sent = self._asked_for()
        self._wait_for(lambda: len(self._outcome()) >= len(sent), "all records")
        for job in (*self._loops, self._ingest):
            assert job.process.poll() is None and job.stop() == 0, job.screen()
            assert "Traceback" not in job.screen(), job.screen()
        ids: dict[tuple[str, str], set[bytes | None]] = {text: set() for text in sent}
        for topic in TOPICS:
            for record in self._broker.read_all(topic):
                ids[topic, (record.value or b"").decode()].add(dict(record.headers)["duetime-id"])
        assert all(len(each) == 1 for each in ids.values()), "a copy has the id of its record"
        found = self._outcome()
        assert found.keys() == sent.keys(), found.keys() ^ sent.keys()
        assert set(sent.values()) == {1}
        return found

    def kill_loop(self) -> None:
        at = self._random.randrange(LOOPS)
        self._loops[at].process.kill()
        self._loops[at].process.wait(60)
        self._loops[at] = self._start_loop()

    def freeze_loop(self) -> None:
        """Freeze the loop that writes, if there is one now, until long after its lease."""
        leader = connect(RedisSettings(url=self._server.url)).get(Keys("duetime").forwarder()) or b""
        writing = [loop for loop in self._loops if b":%d:" % loop.process.pid in leader]
        [loop] = writing or [self._random.choice(self._loops)]
        loop.process.send_signal(signal.SIGSTOP)
        Event().wait(TAKEOVER_SEC + self._random.uniform(0.5, 3))
        loop.process.send_signal(signal.SIGCONT)

    def kill_broker(self) -> None:
        self._broker.kill()
        Event().wait(self._random.uniform(0, 2))
        self._broker.start()

    def kill_redis(self) -> None:
        self._server.kill()
        Event().wait(self._random.uniform(0, 1))
        self._server.start()

    def kill_worker(self) -> None:
        """Kill a Python worker of the ingest job; in the middle of a batch, that ends the job."""
        tree = psutil.Process(self._ingest.process.pid).children(recursive=True)
        workers = [each for each in tree if "pyspark.daemon" in " ".join(command_of(each))]
        if workers:
            self._may_end = True
            os.kill(self._random.choice(workers).pid, signal.SIGKILL)

    def kill_ingest(self) -> None:
        """Kill the driver with Java and the workers; the next one reads other portions."""
        kill_tree(self._ingest.process.pid)
        self._ingest.process.wait(60)
        self._ingest = self._start_ingest()

    def _start_ingest(self) -> Command:
        portions = {
            "DUETIME_KAFKA_OFFSETS_PER_TRIGGER": str(self._random.choice((300, 2_000, 200_000))),
            "DUETIME_INGEST_TRANSACTION_MESSAGES": str(self._random.choice((20, 100, 1_000))),
        }
        options = ("--source", "kafka", "--kafka-servers", self._broker.bootstrap, "--kafka-topics", "requests")
        return self._checkout.run("jobs/ingest.py", *options, environ={"REDIS_URL": self._server.url, **portions})

    def _start_loop(self) -> Command:
        settings = {
            "REDIS_URL": self._server.url,
            "DUETIME_KAFKA_TAKEOVER_SEC": str(TAKEOVER_SEC),
            "DUETIME_KAFKA_EXACTLY_ONCE": str(self._exactly_once).lower(),
            "DUETIME_KAFKA_BATCH_MESSAGES": str(self._random.choice((10, 100, 1_000))),
            "DUETIME_DRAIN_CLAIM_LIMIT": str(self._random.choice((20, 100, 1_000))),
        }
        options = ("--sink", "kafka", "--kafka-servers", self._broker.bootstrap)
        return self._checkout.run("jobs/drain.py", *options, environ=settings)

    def _send(self, count: int) -> None:
        for partition in range(PARTITIONS):
            begin, end = self._sent, self._sent + count // PARTITIONS + (partition < count % PARTITIONS)
            values = [
                json.dumps({"topic": TOPICS[n % 3], "message": f"m{n}", "countdown": n % 4}) for n in range(begin, end)
            ]
            self._broker.produce_all("requests", values, b"k%d" % partition, [("n", b"\xff")], partition=partition)
            self._sent = end

    def _asked_for(self) -> Counter[tuple[str, str]]:
        requests = [json.loads(record.value or b"") for record in self._broker.read_all("requests")]
        return Counter((each["topic"], each["message"]) for each in requests)

    def _outcome(self) -> Counter[tuple[str, str]]:
        """Return what a consumer finds that reads committed."""
        return Counter(
            (topic, (record.value or b"").decode()) for topic in TOPICS for record in self._broker.read_all(topic)
        )

    def _start_again(self) -> None:
        """Do as a supervisor does: a job whose worker was killed, or that met no Redis at its very start, has ended with 1."""
        if self._may_end and self._ingest.process.poll() is not None:
            assert self._ingest.end() == 1 and "Traceback" not in self._ingest.screen(), self._ingest.screen()
            self._ingest, self._may_end = self._start_ingest(), False
        elif met_no_redis(self._ingest):
            self._ingest = self._start_ingest()
        self._loops = [self._start_loop() if met_no_redis(loop) else loop for loop in self._loops]

    def _wait_for(self, seen: Callable[[], bool], what: str) -> None:
        end = monotonic() + SETTLE_SEC
        while not seen():
            self._start_again()
            assert monotonic() < end, "\n".join(
                [f"{what}: never", *(job.screen() for job in (*self._loops, self._ingest))]
            )
            Event().wait(0.5)


def met_no_redis(job: Command) -> bool:
    """Whether a job has ended at its start, as Redis was away; fails if it has ended otherwise."""
    if job.process.poll() is None:
        return False
    lines = job.screen().strip().splitlines()
    assert job.end() == 1 and len(lines) == 1 and "Redis does not answer" in lines[0], job.screen()
    return True


def command_of(process: psutil.Process) -> list[str]:
    """Return its command line; nothing of one that has ended, or is a zombie."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def run_campaign(
    checkout: Checkout, seed: int, records: int, faults: int, exactly_once: bool, say: Callable[[str], None] = print
) -> Counter[tuple[str, str]]:
    """Run it; returns how often each record came out."""
    random = Random(seed)
    kinds = random.sample(ALL_FAULTS, min(faults, len(ALL_FAULTS)))
    kinds += random.choices(ALL_FAULTS, k=max(0, faults - len(kinds)))
    with real_broker(transactions=True) as broker, real_server() as server:
        found = Campaign(checkout, broker, server, seed, exactly_once, say).run(records, kinds)
    twice = sum(1 for count in found.values() if count > 1)
    say(f"{len(found):,} records are out, {twice:,} of them several times")
    return found


def main() -> int:
    """Run one campaign, as long as it takes."""
    parser = argparse.ArgumentParser(prog="python -m tests.kafka.campaign", description="Kill all on the way.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--at-least-once", action="store_true")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="duetime-campaign-") as folder:
        checkout = Checkout(Path(folder).resolve())
        try:
            found = run_campaign(checkout, given.seed, given.records, given.faults, not given.at_least_once)
        finally:
            checkout.close()
    return int(not given.at_least_once and max(found.values()) > 1)


if __name__ == "__main__":
    sys.exit(main())
