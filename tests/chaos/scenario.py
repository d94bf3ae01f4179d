"""An ingest job that is killed again and again, while a drain loop delivers what it stores."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

import psutil
from inotify_simple import INotify, flags

from pipeline.ingest.rejects import WORK_NAME
from tests.chaos.proxy import WAIT_SEC, Proxy, after, before, naming, running
from tests.chaos.workload import Workload, deliveries
from tests.e2e.commands import Checkout, Command
from tests.servers import RealServer

LINES = 150  # a file; three files a round
RUN_SEC = 300.0  # what has not ended by then never will, however busy the machine


class Moment(StrEnum):
    """When the kill comes."""

    LANDING = "files are being landed"
    BETWEEN = "between two transactions"
    BEFORE = "before a transaction is stored"
    STORED = "a transaction is stored, its reply not read"
    ALL_STORED = "everything is stored, nothing committed"
    COMMITTING = "the commit is being written"
    COMMITTED = "the commit is written, nothing cleaned up"
    ANY = "at any moment after the first transaction"


class Victim(StrEnum):
    """Whom it hits."""

    ALL = "all processes"
    DRIVER = "the driver"
    JVM = "the JVM"
    WORKERS = "the Python workers"


@dataclass(frozen=True)
class Crash:
    """One run of the job and its end. ``number`` counts the run's transactions, ``pause_ms`` is for ``Moment.ANY``."""

    moment: Moment
    victim: Victim
    number: int = 1
    pause_ms: int = 0
    master: str = "local[2]"
    transaction_messages: int = 20
    segment_bytes: int = 4_000
    wait_for_disk: bool = False
    once: bool = False
    conf: tuple[str, ...] = ()

    def may_miss(self, job: Command) -> bool:
        """Tell whether the job has ended before a kill that may rightly come too late."""
        return self.moment is Moment.ANY and self.once and job.process.poll() == 0

    def __str__(self) -> str:
        point = f"kill -9 {self.victim}, {self.moment} (transaction {self.number}, {self.pause_ms} ms)"
        sizes = f"transaction_messages={self.transaction_messages} segment_bytes={self.segment_bytes}"
        sizes += " wait_for_disk" * self.wait_for_disk
        return f"{point}; {self.master} {sizes} {' '.join(self.conf)}{' --once' * self.once}"


def random_crash(random: Random, once: bool = False) -> Crash:
    """Draw a crash and the settings of its run."""
    confs = {
        "spark.sql.files.maxPartitionBytes": ("3000", "100000", "128m"),
        "spark.sql.files.openCostInBytes": ("1", "65536", "4m"),
        "spark.sql.execution.arrow.maxRecordsPerBatch": ("1", "7", "100", "10000"),
        "spark.sql.shuffle.partitions": ("1", "5"),
    }
    moment, transaction_messages = random.choice(list(Moment)), random.choice((5, 7, 20, 50, 1_000))
    # A worker that is idle may die without harm, and while files are being landed there is none.
    is_storing = moment in (Moment.BETWEEN, Moment.BEFORE, Moment.STORED, Moment.ALL_STORED)
    victims = list(Victim) if is_storing else [Victim.ALL, Victim.DRIVER, Victim.JVM]
    return Crash(
        moment=moment,
        victim=random.choice(victims if moment is not Moment.LANDING else [Victim.ALL, Victim.DRIVER]),
        number=random.randint(1, max(1, min(9, 200 // transaction_messages))),  # no more than there surely are
        pause_ms=random.randint(0, 3_000),
        master=f"local[{random.randint(1, 3)}]",
        transaction_messages=transaction_messages,
        segment_bytes=random.choice((2_000, 4_000, 33_554_432)),
        wait_for_disk=random.random() < 0.5,
        once=once or random.random() < 0.5,
        conf=tuple(f"{name}={random.choice(values)}" for name, values in confs.items()),
    )


@dataclass
class Scenario:
    """A checkout, its server, and the truth about what was sent."""

    checkout: Checkout
    server: RealServer
    seed: int
    shards: int = 1
    workload: Workload = field(init=False)
    proxy: Proxy = field(init=False)
    drain: Command = field(init=False)
    survivors: list[psutil.Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workload = Workload(self.seed)
        self.proxy = Proxy(self.server.folder / "s", self.server.folder / "p")
        self.checkout.inbox.mkdir()

    def start_drain(self) -> None:
        """Deliver, from now on, whatever is due."""
        self.drain = self.checkout.run("jobs/drain.py", "--format", "json", environ=self._environ(self.server.url))

    def close(self) -> None:
        self.proxy.close()

    def crash(self, crash: Crash) -> None:
        """Drop files, run the job, kill it as told, and see its processes end."""
        self.workload.drop(self.checkout.inbox, LINES)
        self.proxy.clear()
        job = self.run(crash)
        kill = Kill(job, crash.victim)
        self._arm(crash, kill)
        job.wait_for(lambda _: kill.landed.is_set() or crash.may_miss(job), f"kill {crash.moment}", RUN_SEC)
        code = job.end(RUN_SEC)
        if crash.victim in (Victim.JVM, Victim.WORKERS) and kill.landed.is_set():
            expect_told(job, code)
        self.survivors += kill.tree

    def run(self, crash: Crash, **environ: str) -> Command:
        """Start the job with the settings of ``crash``, and harm nothing."""
        conf = [word for setting in crash.conf for word in ("--conf", setting)]
        return self.checkout.run(
            *("--master", crash.master, *conf, "jobs/ingest.py", "--checkpoint", str(self._checkpoint)),
            *(["--once"] if crash.once else []),
            environ={
                **self._environ(self.proxy.url),
                "DUETIME_INGEST_TRANSACTION_MESSAGES": str(crash.transaction_messages),
                "DUETIME_INGEST_SEGMENT_BYTES": str(crash.segment_bytes),
                "DUETIME_INGEST_WAIT_FOR_DISK": str(crash.wait_for_disk).lower(),
                **environ,
            },
        )

    def settle(self, crash: Crash) -> None:
        """Run the job to its end, deliver everything, and compare that with what was sent; after ``start_drain``."""
        self.proxy.clear()
        last = self.run(crash)
        assert last.end(RUN_SEC) == 0, last.screen()
        _, alive = psutil.wait_procs(self.survivors, WAIT_SEC)
        assert alive == [], "processes outlive the crash of those they belong to"
        rest = self.drain_the_rest()
        assert self.drain.stop() == 0, self.drain.screen()
        self.expect_each_once([*self.drain.records(), *rest])

    def drain_the_rest(self) -> list[dict[str, Any]]:
        """Deliver until nothing is left."""
        rest = self.checkout.run(
            "jobs/drain.py", "--until-empty", "--format", "json", environ=self._environ(self.server.url)
        )
        assert rest.end() == 0, rest.screen()
        return rest.records()

    def expect_each_once(self, records: list[dict[str, Any]]) -> None:
        """Compare count and content of all deliveries and rejects with what was sent."""
        delivered = deliveries(records)
        lost, copies = self.workload.expected - delivered, delivered - self.workload.expected
        assert (lost, copies) == (Counter(), Counter()), f"{lost=} {copies=}"
        assert {record["attempt"] for record in records} == {1}
        assert len({record["id"] for record in records}) == len(records)
        assert self._stored() == len(records)
        assert not list((self.checkout.root / "rejects" / WORK_NAME).iterdir()), "dead tasks leave their work"
        rejects = Counter((r["file"], r["line"], r["reason"]) for r in self.checkout.rejects())
        assert rejects == self.workload.rejected

    @property
    def _checkpoint(self) -> Path:
        return self.checkout.root / "checkpoint"

    def _arm(self, crash: Crash, kill: "Kill") -> None:
        # From the moment on, every time: a kill that found its victim gone comes again.
        ever = float("inf")
        stores = running("schedule")
        if crash.moment is Moment.LANDING:
            landing = self.checkout.inbox / ".landing"
            landing.mkdir(exist_ok=True)
            kill.when_named(landing, lambda name: name[:1] not in "._")
        elif crash.moment is Moment.BETWEEN:
            self.proxy.trap(naming("WATCH"), before(kill), crash.number, ever)
        elif crash.moment is Moment.BEFORE:
            self.proxy.trap(stores, before(kill), crash.number, ever)
        elif crash.moment is Moment.STORED:
            self.proxy.trap(stores, after(kill), crash.number, ever)
        elif crash.moment is Moment.ALL_STORED:
            self.proxy.trap(stores, after(lambda: self._stored_everything() and kill()), last=ever)
        elif crash.moment is Moment.ANY:
            self.proxy.trap(stores, before(threading.Timer(crash.pause_ms / 1000, kill).start))
        else:
            wanted = str.isdigit if crash.moment is Moment.COMMITTED else lambda name: name.endswith(".tmp")

            def watch_commits() -> None:
                kill.look_up()
                kill.when_named(self._checkpoint / "commits", wanted)

            self.proxy.trap(stores, before(watch_commits))

    def _stored_everything(self) -> bool:
        return self._stored() == self.workload.expected.total()

    def _stored(self) -> int:
        client = self.server.client()
        return sum(int(client.hget(f"{{duetime:{shard}}}:counters", "stored") or 0) for shard in range(self.shards))

    def _environ(self, url: str) -> dict[str, str]:
        return {"REDIS_URL": url, "DUETIME_REDIS_SHARDS": str(self.shards)}


def expect_told(job: Command, code: int) -> None:
    """Who starts a job must see that it failed, why, and what to do, and no pages of traces."""
    assert code == 1, f"exit {code}:\n{job.screen()}"
    lines = [line for _, line in job.err]
    assert lines[-1].endswith("Start the job again; it goes on where it was."), job.screen()
    assert not any(line.startswith((" ", "\t", "Traceback")) for line in lines), job.screen()


class Kill:
    """A kill -9 that knows whether it hit: call it, or let it come when a file appears."""

    def __init__(self, job: Command, victim: Victim) -> None:
        self.landed = threading.Event()
        self.tree: list[psutil.Process] = []
        self._driver = psutil.Process(job.process.pid)
        self._victim = victim
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if self.landed.is_set():
                return
            if not self.tree:
                self.look_up()
            for process in self.tree:
                try:
                    if self._is_victim(process):
                        process.kill()
                        self.landed.set()
                except psutil.Error:
                    pass  # it has ended by itself, and may be a zombie still
            if not self.landed.is_set():
                self.tree = []

    def look_up(self) -> None:
        """Look up the processes beforehand, for moments that last only milliseconds."""
        try:
            self.tree = [self._driver, *self._driver.children(recursive=True)]
        except psutil.Error:
            pass  # the job has ended by itself, which is told where its end is waited for

    def when_named(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        """Watch a folder, and kill at once when a file with such a name is made in it."""
        watch = INotify()
        watch.add_watch(folder, flags.CREATE | flags.MOVED_TO)
        threading.Thread(target=self._watch, args=(watch, wanted), daemon=True).start()

    def _watch(self, watch: INotify, wanted: Callable[[str], bool]) -> None:
        with watch:
            while self._driver.is_running():
                if any(wanted(event.name) for event in watch.read(timeout=200)):
                    self()
                    return

    def _is_victim(self, process: psutil.Process) -> bool:
        if self._victim is Victim.ALL:
            return True
        if self._victim is Victim.DRIVER:
            return process == self._driver
        if self._victim is Victim.JVM:
            return process.name() == "java"
        parent = process.parent()  # workers are forks of a daemon
        return parent is not None and _is_daemon(process) and _is_daemon(parent)


def _is_daemon(process: psutil.Process) -> bool:
    return not {"pyspark.daemon", "pipeline.ingest.quiet_daemon"}.isdisjoint(process.cmdline())
