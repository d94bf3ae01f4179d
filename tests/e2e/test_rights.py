"""Each job as a Redis user of its own, with the rights that docs/operations.md gives it: they are enough, and none is idle."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import redis

from pipeline.client import Duetime, Request
from pipeline.config import ALL_TOPICS, ROOT, DrainSettings, RedisSettings, Settings, TopicSettings
from pipeline.consume.opening import new_consumer, new_store
from pipeline.ingest.cold_folder import SOURCE_ID
from pipeline.ingest.cold_merging import KEEP_MS, Merger, forget_markers
from pipeline.runtime.process import wait_until
from pipeline.runtime.submit import spark_environ
from pipeline.store.base import NO_ROWS, MarkerMove, Transaction
from pipeline.store.connection import connect
from pipeline.store.entries import BEGINNING
from pipeline.store.keys import Keys
from pipeline.store.layout import outbox_id
from pipeline.store.namespace import adopt_topic_settings, open_namespace
from pipeline.store.outbox import Outbox
from pipeline.store.redis_store import RedisStore
from pipeline.store.scripts import NAMES, read_script
from pipeline.store.topics import Topics
from tests.cluster import Node, real_cluster
from tests.e2e.commands import Checkout, Command
from tests.e2e.conftest import checkout as checkout
from tests.ingest.cold_world import HOUR_MS, ColdWorld
from tests.ports import free_port
from tests.servers import DURABLE, USER, RealServer, real_server, user_rights, users_of_docs
from tests.store.builders import set_topic, transaction
from tests.web.running import LINES, WAIT_SEC
from tests.webhooks.receiver import Receiver, receiving

pytestmark = pytest.mark.process

KEYS = Keys("duetime")
PAST = "2001-01-01T00:00:00Z"
NOT_LIMITED = {"auth", "hello", "ping", "quit"}  # what every user may do, or needs no right for
OF_THE_TEST = {"config|resetstat", "monitor", "echo"}
REQUESTS = [
    {"message": "plain", "delay_sec": 60},
    {"message": "keyed", "id": "k", "delay_sec": 60},
    {"message": "again", "id": "k", "delay_sec": 60},
    {"cancel": "k"},
    {"message": "replaced", "id": "r", "replace": True, "delay_sec": 60},
]
# A command of a script stands in a call, or is chosen before it.
_CALLS = re.compile(r"(?:call\(|lookup\(|\{|and|or)\s*'([A-Z]{3,})'(?:, '([A-Z]+)')?")
_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end$", re.M | re.S)
_CONTAINERS = ("XGROUP", "XINFO")


@dataclass
class World:
    """A server, and a job that runs there as its own user. ``used`` has the commands that it ran, or that its scripts may run."""

    server: RealServer | Node
    job: str
    receiver: Receiver
    used: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return self.server.url.replace(f"{USER}:{USER}@", f"{self.job}:secret@")

    @property
    def settings(self) -> Settings:
        return Settings(redis=RedisSettings(url=self.url))

    def run(self, *options: str, code: int = 0, given: str = "") -> str:
        """Run the job to its end, and return what it printed."""
        done = subprocess.run(
            self.command(*options),
            env=self.environ(),
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, f"{self.job} {options}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *options: str) -> Command:
        return Command(self.command(*options), self.environ(), ROOT)

    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-P", str(ROOT / "jobs" / f"{self.job}.py"), *options]

    def environ(self) -> dict[str, str]:
        disk = str("+waitaof" in user_rights()).lower()
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "REDIS_URL": self.url,
            "DUETIME_API_WAIT_FOR_DISK": disk,
        }

    @contextmanager
    def client(self) -> Iterator[Any]:
        client = connect(self.settings.redis)
        yield client
        client.close()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note down what the block runs on the server."""
        admin = self.server.client()
        admin.script_flush()
        watcher: Any = admin.connection_pool.get_connection()
        watcher.send_command("MONITOR")
        watcher.read_response()
        admin.config_resetstat()
        yield
        stats = admin.info("commandstats")
        self.used |= {name.removeprefix("cmdstat_") for name, each in stats.items() if each["calls"]}
        admin.echo("this was the last one")
        scripts = {}
        for name in NAMES:
            text = read_script(name)
            scripts[name] = (admin.script_load(text).encode(), json.dumps(text.splitlines()[1]).encode()[1:-1])
        while b"this was the last one" not in (line := watcher.read_response()):
            for name, marks in scripts.items():
                if b'"EVAL' in line and any(mark in line for mark in marks):
                    self.used |= calls_of(name)
        watcher.disconnect()
        assert [(entry["username"], entry["object"]) for entry in admin.acl_log()] == []


def calls_of(script: str) -> set[str]:
    """Return the commands that a script may call, also those that no test comes to."""
    text, functions = read_script(script), list(_FUNCTION.finditer(read_script(script)))
    for function in reversed(functions):  # which calls only those above it
        if not re.search(rf"\b{function[1]}\(", text.replace(function[0], "")):
            text = text.replace(function[0], "")  # it came along with what is included
    found = {f"{name}|{part}".lower() if name in _CONTAINERS else name.lower() for name, part in _CALLS.findall(text)}
    return found & {right.lstrip("+") for right in user_rights()}  # the others are no commands


def fill(server: RealServer | Node, webhook: str) -> None:
    """What jobs meet: messages that wait, are due, in streams, held, dead, in the outbox, and in the hands of a loop that died."""
    settings = Settings(redis=RedisSettings(url=server.url))
    client = connect(settings.redis)
    open_namespace(client, settings.redis, may_create=True)
    sinks: dict[str, dict[str, Any]] = {
        "mail": {"max_rate": 1_000_000}, "late": {"expire_after_sec": 60}, "held": {}, "kafka": {"sink": "kafka"},
        "posted": {"webhook": webhook},
    }  # fmt: skip
    for topic, own in sinks.items():
        set_topic(client, KEYS, topic, TopicSettings(**{"sink": "stream", **own}))
    set_topic(client, KEYS, ALL_TOPICS, TopicSettings(sink="screen"))
    Topics(client, [KEYS]).pause("held", 1)
    store, alive = (RedisStore(client, KEYS, DrainSettings(lease_sec=sec, claim_limit=1)) for sec in (0.1, 3_600))
    with Duetime.over(client, settings) as duetime:
        duetime.schedule("tea", delay=3_600, id="tea")
        for topic in (*sinks, "screen"):
            duetime.schedule_many(Request(f"{topic} {n}", due=PAST, topic=topic, id=f"{topic}-{n}") for n in range(3))
        group = new_store(client, settings, "mail", "billing", "one")
        group.register("0-0")
        for number in range(20):
            store.claim(f"of-the-dead-{number}")
        duetime.schedule("in the hands of another loop", due=PAST, topic="screen")
        alive.claim("of-another")
        first, *_ = new_consumer(group, settings).take()
        group.dead_letter(first, "refused", "odd", 1)
        duetime.schedule_many(Request("due", due=PAST, topic=topic) for topic in (*sinks, "screen"))
    client.close()


def schedule(world: World) -> None:
    world.run("tea", "--in", "3m")
    world.run("tea", "--in", "3m", "--id", "tea")
    world.run("--lines", given="".join(f"{json.dumps(request)}\n" for request in REQUESTS))
    store_late(world)


TABLES = """
import sys
from pyspark.sql import SparkSession
from pipeline.spark import register, schedule, scheduled

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
table = spark.sql("select concat('m', id) as message, 60 as delay_sec, concat('id-', id) as id from range(100)")
for name in ("sale", "sale"):
    print(schedule(table, name, staging=sys.argv[1]).stored)
register(spark)
table.drop("id").write.format("duetime").options(name="other", staging=sys.argv[1]).mode("append").save()
print(scheduled(spark).where("message like 'm%'").count())
"""
REPORT = TABLES.partition("table =")[0] + "print(scheduled(spark).count())"


def run_on_spark(world: World, program: str, *arguments: str) -> list[str]:
    """Return the lines that a program on Spark prints."""
    environ = {**os.environ, **spark_environ(os.environ), **world.environ(), "SPARK_LOCAL_IP": "127.0.0.1"}
    environ["DUETIME_INGEST_WAIT_FOR_DISK"] = environ["DUETIME_API_WAIT_FOR_DISK"]
    command = [sys.executable, "-P", "-c", program, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def store_late(world: World) -> None:
    """Do what is done after a lost reply, and when markers of programs that were killed are swept."""
    with world.client() as client:
        store = RedisStore(client, KEYS)
        assert store.schedule("late", transaction((1, 1))) is not None
        assert store.schedule("late", transaction((1, 1))) is None
        store.forget_markers("late", [part for part, _ in store.marked_parts("late")])


def messages(world: World) -> None:
    world.run("show", "tea")
    world.run("list")
    world.run("move", "tea", "--in", "9m")
    world.run("cancel", "tea")


def status(world: World) -> None:
    world.run("--check", code=1)


def topics(world: World) -> None:
    for words in (
        "list",
        "groups",
        "pause mail",
        "resume held",
        "set mail webhook=http://h/",
        "unset mail webhook",
        "set max_rate=9",
    ):
        world.run(*words.split())
    world.run("drop-group", "mail", "billing")


def dead_letters(world: World) -> None:
    letters = [line.partition(" ")[0] for line in world.run("list").splitlines()]
    world.run("show", letters[0])
    world.run("redrive", letters[0])
    world.run("purge", "--all")


def drain(world: World) -> None:
    world.run("--once")
    with world.client() as client:
        outbox_id(client, world.settings.redis)
        outbox = Outbox(client, KEYS, "me", 1_000)
        assert outbox.exists() and outbox.length() and outbox.acquire()
        first, second, *_ = outbox.read("", "", 10) or []
        outbox.refuse(first, "odd", "odd")
        outbox.read(second.entry_id, "", 10)
        outbox.wait("", 1)
        outbox.leave()
    port = free_port()
    loop = world.start("--metrics-port", str(port))
    loop.wait_for_line("metrics are on", 20)
    assert "duetime_held_messages" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert loop.stop() == 0


def consume(world: World) -> None:
    mail = ("--topic", "mail", "--once", "--group")
    world.run(*mail, "new", "--from", "beginning")
    world.run(*mail, "new", "--replay", "beginning")
    world.run(*mail, "ordered", "--from", "beginning", "--ordered")
    take_over(world)


def take_over(world: World) -> None:
    """Do what a consumer does with what others left, and with what failed."""
    with world.client() as client:
        store = new_store(client, world.settings, "mail", "billing", "two")
        pages = [store.reclaim(stream, BEGINNING, 100, 0) for stream in store.streams]
        first, second, *others = [entry for page in pages for entry in page.entries]
        store.schedule_retry(first, 1, 2)
        store.dead_letter(second, "failed", "odd", 1)
        store.settle("ack", others)
        store.ack_and_read([], 1)
        store.wait(1)
        store.sweep(0)
        assert store.acquire_active(1_000)
        store.leave()


def webhooks(world: World) -> None:
    posting = world.start()
    world.receiver.wait_for_posts(3)
    assert posting.stop() == 0, posting.screen()
    take_over(world)


def serve(world: World) -> None:
    port = free_port()
    serving = world.start("--port", str(port))
    serving.wait_for_line("the API is on", 30)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_SEC) as api:

        def ask(method: str, path: str, record: Any = None, **headers: str) -> Any:
            is_lines = isinstance(record, str)
            body = {"content": record, "headers": LINES | headers} if is_lines else {"json": record, "headers": headers}
            answer = api.request(method, path, **body if record is not None else {})
            assert answer.status_code < 300, f"{method} {path}: {answer.text}"
            return answer

        lines = "".join(f"{json.dumps(request)}\n" for request in REQUESTS)
        ask("POST", "/v1/messages", {"message": "now", "delay_sec": 60})
        ask("POST", "/v1/messages", {"message": "key", "delay_sec": 60}, **{"Idempotency-Key": "api"})
        ask("POST", "/v1/batches", lines)
        ask("POST", "/v1/batches", lines, **{"Idempotency-Key": "batch"})
        ask("GET", "/v1/messages/tea")
        ask("PATCH", "/v1/messages/tea", {"delay_sec": 70})
        ask("PUT", "/v1/messages/tea", {"message": "more tea", "delay_sec": 70})
        ask("PUT", "/v1/topics/mail/pause")
        letter = ask("GET", "/v1/dead").json()["letters"][0]["name"]
        for path in (
            *("/v1/messages", "/v1/load", "/v1/status", "/v1/topics", "/v1/topics/mail", "/readyz", "/metrics", "/"),
            *("/messages", "/messages/tea", "/topics", "/topics/mail", "/dead", f"/letter?name={letter}", "/loops"),
            *("/change/messages?verb=move&topic=mail", "/change/dead?verb=purge"),
        ):
            ask("GET", path)
        ask("DELETE", "/v1/topics/held/pause")
        ask("POST", "/v1/cancellations", {"ids": ["tea"]})
        ask("DELETE", "/v1/messages/r")
        ask("POST", "/v1/dead/redrive", {"names": [letter]})
        ask("POST", "/v1/dead/purge", {"topic": "late"})
        with api.stream("GET", "/live") as events:
            assert next(events.iter_lines())
    assert serving.stop() == 0, serving.screen()
    store_late(world)


def hydrate(world: World) -> None:
    with TemporaryDirectory() as folder:
        admin = ColdWorld(world.server, Path(folder), namespace=KEYS.namespace)
        admin.now_ms -= 100 * HOUR_MS  # so that the files are settled
        admin.write([admin.line("a", 98)])
        world.run("--once", "--folder", str(admin.path))
        admin.write(*[[admin.line(f"later {n}", 200)] for n in range(20)])
        with world.client() as client:
            store = RedisStore(client, KEYS)
            stale = Transaction([MarkerMove("x", "elsewhere", "all")], NO_ROWS, NO_ROWS, 0)
            assert store.hydrate(SOURCE_ID, stale) is None
            assert Merger(admin.folder, store, 0, -HOUR_MS).merge(admin.now_ms + 100 * HOUR_MS, 0) == 20
            forget_markers(store, [], admin.now_ms + 2 * KEEP_MS)


def ingest(world: World, checkout: Checkout) -> None:
    checkout.drop("requests.jsonl", *REQUESTS, "no JSON")
    environ = world.environ()
    environ |= {
        "DUETIME_INGEST_WAIT_FOR_DISK": environ["DUETIME_API_WAIT_FOR_DISK"],
        "DUETIME_INGEST_WAIT_FOR_REPLICAS": "1",
    }
    del environ["PYTHONPATH"]
    done = checkout.run("jobs/ingest.py", "--once", environ=environ)
    assert done.end() == 0, done.screen()
    store_late(world)


WORK: dict[str, Callable[[World], None]] = {
    each.__name__: each
    for each in (schedule, messages, hydrate, drain, consume, webhooks, topics, dead_letters, serve, status)
}  # fmt: skip


JOBS = ["ingest", *WORK]
MAKES_NAMESPACES = {*JOBS} - {"messages", "dead_letters", "status"}
ADOPTS_SETTINGS = {"drain", "consume", "webhooks"}
ON_A_CLUSTER = ["+cluster|slots"]


def users(*more: str) -> list[str]:
    """Return the options of a server that has the users of the documentation, with some rights more."""
    of_jobs = {name: rights for name, rights in users_of_docs().items() if name != USER}
    return [word for name, rights in of_jobs.items() for word in ("--user", name, "on", ">secret", *rights, *more)]


@contextmanager
def world_of(job: str, server: RealServer | Node) -> Iterator[World]:
    """A job on a server: at first it meets a namespace that is new, then one that is in use."""
    with receiving(Receiver()) as receiver:
        world = World(server, job, receiver)
        server.client().flushall()
        if job in MAKES_NAMESPACES:
            with world.noting(), world.client() as client:
                open_namespace(client, world.settings.redis, may_create=True)
                if job in ADOPTS_SETTINGS:
                    adopt_topic_settings(client, replace(world.settings, given={"mail": {"attempts_max": 3}}))
        server.client().flushall()
        fill(server, receiver.url)
        yield world


def idle_and_missing(world: World) -> tuple[set[str], set[str]]:
    """Return what a user may do and never does, and what it did without a right."""
    granted = {right[1:] for right in users_of_docs()[world.job] if right[0] == "+"}
    used = world.used - OF_THE_TEST - NOT_LIMITED
    return granted - used, used - granted


def test_there_is_a_user_for_each_job() -> None:
    assert {path.stem for path in (ROOT / "jobs").glob("*.py")} == {*JOBS} == users_of_docs().keys() - {USER}


@pytest.mark.parametrize("job", WORK)
def test_a_job_works_with_the_rights_of_its_own_user_and_uses_each(job: str) -> None:
    with real_server(*users(), *DURABLE) as server, world_of(job, server) as world:
        with world.noting():
            WORK[job](world)
        assert idle_and_missing(world) == (set(), set())


def test_the_ingest_job_works_with_the_rights_of_its_own_user_and_uses_each(checkout: Checkout) -> None:
    port = str(free_port())
    listening = ("--port", port, "--bind", "127.0.0.1")
    with real_server(*users(), *DURABLE, *listening) as server, real_server("--replicaof", "127.0.0.1", port):
        assert wait_until(lambda: server.client().info("replication")["connected_slaves"] == 1, 20)
        with world_of("ingest", server) as world:
            with world.noting():
                ingest(world, checkout)
            assert idle_and_missing(world) == (set(), {"replconf"}), "which is the replica's"


def test_tables_need_the_rights_of_the_ingest_job_and_reports_those_of_the_status(tmp_path: Path) -> None:
    with real_server(*users(), *DURABLE) as server:
        with world_of("ingest", server) as world, world.noting():
            assert run_on_spark(world, TABLES, str(tmp_path)) == ["100", "0", "200"]
        assert idle_and_missing(world)[1] == set()
        with world_of("status", server) as world, world.noting():
            [scheduled] = run_on_spark(world, REPORT)
        assert idle_and_missing(world)[1] == set() and int(scheduled) > 0


def test_on_a_cluster_the_jobs_need_to_know_of_the_slots_and_no_more() -> None:
    with real_cluster(1, options=users(*ON_A_CLUSTER)) as cluster:
        [node] = cluster.masters
        for job in ("schedule", "drain", "consume", "status"):
            with world_of(job, node) as world:
                with world.noting():
                    WORK[job](world)
                assert idle_and_missing(world) == (set(), {"cluster|slots"}), job


def test_another_database_needs_one_right_more() -> None:
    with real_server(*users("+select"), *DURABLE) as server:
        world = World(server, "schedule", Receiver())
        world.run("tea", "--in", "3m", "--redis", f"{world.url}?db=2")
        assert "+select" not in users_of_docs()["schedule"]


def test_the_user_of_all_jobs_may_do_what_any_of_theirs_may() -> None:
    of_jobs = {right for job in JOBS for right in users_of_docs()[job]} - {"%R~{duetime:*}*"}
    assert of_jobs == {*users_of_docs()[USER]}


def test_who_only_looks_can_change_nothing() -> None:
    with real_server(*users(), *DURABLE) as server, World(server, "status", Receiver()).client() as client:
        for command in (("HSET", KEYS.meta(), "shards", 2), ("EVAL", "return 1", 0), ("HGETALL", "{other:0}:meta")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
