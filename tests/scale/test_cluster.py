"""A namespace on a real Redis Cluster, as docs/how-to/cluster.md says: every job, slots that move, masters that die."""

import json
import re
import urllib.request
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from threading import Semaphore, Thread
from typing import Any

import pytest
import redis

from pipeline.client import Duetime, Request
from pipeline.config import RedisSettings, Settings
from pipeline.consume.consumer import Outcome
from pipeline.core.clock import SystemClock
from pipeline.core.errors import ConfigError, StoreUnavailable
from pipeline.core.messages import Message
from pipeline.core.stop import Stop
from pipeline.runtime.process import wait_until
from pipeline.store.base import State
from pipeline.store.checks import check_server, find_cluster
from pipeline.store.connection import connect, translated_errors
from pipeline.store.dead_letters import DeadLetters
from pipeline.store.keys import keys_of
from pipeline.store.listing import list_scheduled
from pipeline.store.namespace import change_topic_settings, open_namespace
from pipeline.store.shards import shard_of
from pipeline.store.stats import read_stats
from pipeline.store.topology import client_of
from tests.cluster import RealCluster, real_cluster
from tests.e2e.commands import Checkout, Command
from tests.e2e.conftest import checkout as checkout
from tests.servers import server_version
from tests.webhooks.receiver import Receiver, receiving

SHARDS = 6
pytestmark = [pytest.mark.process, pytest.mark.xdist_group("cluster")]


@pytest.fixture(scope="module")
def shared() -> Iterator[RealCluster]:
    with real_cluster(masters=3) as running:
        yield running


@pytest.fixture
def settings(shared: RealCluster) -> RedisSettings:
    return RedisSettings(url=shared.url, namespace=f"test-{uuid.uuid4().hex}", shards=SHARDS)


class Jobs:
    """Jobs of one namespace."""

    def __init__(self, checkout: Checkout, settings: RedisSettings) -> None:
        self._checkout, self._settings = checkout, settings

    def run(self, *arguments: str, **environ: str) -> Command:
        """Start one."""
        settings = {
            "REDIS_URL": self._settings.url,
            "DUETIME_REDIS_NAMESPACE": self._settings.namespace,
            "DUETIME_REDIS_SHARDS": str(self._settings.shards),
            "DUETIME_REDIS_CONNECT_TIMEOUT_MS": "500",
        }
        return self._checkout.run(*arguments, environ=settings | environ)

    def status(self) -> dict[str, Any]:
        """Return what the status says."""
        command = self.run("jobs/status.py", "--format", "json")
        assert command.end(30) == 0, command.screen()
        return command.records()[0]

    def loop(self, *options: str) -> Command:
        """Start a drain loop, and wait until it has looked at every shard."""
        loop = self.run("jobs/drain.py", "--format", "json", *options)
        client = connect(self._settings)
        assert wait_until(lambda: client.zcard(keys_of(self._settings)[0].drains()) > 0, 30), loop.screen()
        return loop


def opened(settings: RedisSettings, patience_sec: float = 30) -> Duetime:
    client = connect(settings)
    open_namespace(client, settings, may_create=True)
    return Duetime.over(client, Settings(redis=settings), patience_sec)


def key_of_shard(shard: int) -> str:
    """Return an idempotency key that belongs to a shard."""
    return next(key for key in (uuid.uuid4().hex for _ in range(10_000)) if shard_of(key, SHARDS) == shard)


def bodies(*loops: Command) -> Counter[str]:
    return Counter(record["message"] for loop in loops for record in loop.records())


def test_the_shards_lie_on_all_masters_alike(shared: RealCluster, settings: RedisSettings) -> None:
    owners = Counter(shared.owner(keys.slot).port for keys in keys_of(settings))
    assert owners == {node.port: SHARDS // 3 for node in shared.masters}


def test_a_program_finds_changes_and_cancels_what_it_scheduled(settings: RedisSettings) -> None:
    with opened(settings) as duetime:
        done = duetime.schedule_many(Request(f"m{n}", delay=600 + n, id=f"k{n}" if n % 2 else None) for n in range(60))
        assert done.stored == 60
        assert [
            found.message.body for found in duetime.get_many([f"k{n}" for n in range(1, 60, 2)]) if found.message
        ] == [f"m{n}" for n in range(1, 60, 2)]
        assert duetime.get("k7").state is State.SCHEDULED
        assert {found.state for found in duetime.cancel_many([f"k{n}" for n in range(1, 30, 2)])} == {State.CANCELLED}
        assert duetime.reschedule("k31", delay=5).state is State.SCHEDULED
        listed = [found.message.body for found in list_scheduled(connect(settings), keys_of(settings))]
        assert listed == ["m31", *(f"m{n}" for n in range(60) if n != 31 and (n % 2 == 0 or n > 30))]
        assert read_stats(connect(settings), keys_of(settings)).scheduled == 45


def test_all_that_goes_in_comes_out_once(checkout: Checkout, settings: RedisSettings) -> None:
    """18,000 lines through Spark into six shards on three masters, and out by two loops."""
    requests = [{"message": str(n), "delay_sec": 0, **({"id": f"k{n}"} if n % 4 == 0 else {})} for n in range(18_000)]
    for first in range(0, len(requests), 3_000):
        checkout.drop(f"{first}.jsonl", *requests[first : first + 3_000])
    jobs = Jobs(checkout, settings)
    ingest = jobs.run("jobs/ingest.py", "--once")
    assert ingest.end(150) == 0, ingest.screen()
    loops = [jobs.run("jobs/drain.py", "--format", "json", "--until-empty") for _ in range(2)]
    for loop in loops:
        assert loop.end(60) == 0, loop.screen()
    assert bodies(*loops) == Counter(str(n) for n in range(18_000))
    of_shards = [int(connect(settings).hget(keys.counters(), "delivered")) for keys in keys_of(settings)]
    assert sum(of_shards) == 18_000
    assert min(of_shards) > 500
    status = jobs.run("jobs/status.py")
    assert status.end(30) == 0
    assert "delivered         18,000" in " ".join(status.lines()) or any("18,000" in line for line in status.lines())


@pytest.mark.parametrize("ordered", [False, True], ids=["shared", "ordered"])
def test_a_group_reads_the_streams_of_all_masters(checkout: Checkout, settings: RedisSettings, ordered: bool) -> None:
    """What fails is retried in its shard, and in the end a dead letter that is found."""
    jobs = Jobs(checkout, settings)
    with opened(settings) as duetime:
        loop = jobs.loop("--sink", "stream")
        options = ["--topic", "mail", "--group", "seen", "--format", "json", *(["--ordered"] if ordered else [])]
        consumer = jobs.run("jobs/consume.py", *options)
        consumer.wait_for_line("registered the group seen")
        names = [key_of_shard(shard) for shard in range(SHARDS)]
        duetime.schedule_many(
            Request(f"m{n}", delay=n / 100, topic="mail", id=f"{names[n % SHARDS]}{n}") for n in range(300)
        )
        assert wait_until(lambda: len(consumer.out) >= 300, 30), consumer.screen()
        assert consumer.stop() == 0
        assert bodies(consumer) == Counter(f"m{n}" for n in range(300))
        failing = duetime.join("mail", "failing", "", "0-0", ordered, Stop())
        refused = [entry.id for entry in failing.take() if failing.refuse(entry, "no") is Outcome.DEAD]
        failing.close()
        letters = DeadLetters(connect(settings), keys_of(settings)).of_topic("mail")
        assert sorted(letter.id for letter in letters) == sorted(refused) != []
        assert loop.stop() == 0


def test_one_node_of_a_plain_url_is_enough_to_find_the_others(shared: RealCluster, settings: RedisSettings) -> None:
    plain = replace(settings, url=f"redis://duetime:duetime@127.0.0.1:{shared.masters[1].port}/0")
    found = find_cluster(plain)
    assert found.url.startswith("redis+cluster://duetime:duetime@127.0.0.1:")
    assert all(f"127.0.0.1:{node.port}" in found.url for node in shared.masters)
    with opened(found) as duetime:
        assert duetime.schedule("m", delay=60, id="a")
    with (
        pytest.raises(ConfigError, match=r"part of a Redis Cluster; name it as redis\+cluster://"),
        translated_errors(),
    ):
        for keys in keys_of(plain):
            connect(plain).hgetall(keys.counters())


def test_a_seed_that_is_dead_is_passed_over(settings: RedisSettings) -> None:
    with opened(replace(settings, url=settings.url.replace("@", "@127.0.0.1:1,"))) as duetime:
        assert duetime.schedule("m", delay=60)


def test_no_seed_that_answers_is_told_in_one_sentence(settings: RedisSettings) -> None:
    dead = replace(settings, url="redis+cluster://:secret@127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(StoreUnavailable, match="no node of the cluster answers") as told:
        check_server(connect(dead), dead, SystemClock())
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://",
        "redis+cluster://a,,b",
        "redis+cluster://a:x",
        "redis+cluster://a/3",
        "unix+cluster://a",
        "redis+sentinel://a:1",
        "redis+sentinel://a/name/x",
        "redis+other://a",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not valid"):
        connect(RedisSettings(url=url))


def test_each_node_is_checked(shared: RealCluster, settings: RedisSettings) -> None:
    client, last = connect(settings), shared.masters[2]
    assert check_server(client, settings, SystemClock(), writes=True) == []
    last.client().config_set("appendfsync", "everysec")
    [warning] = check_server(client, settings, SystemClock())
    assert warning.startswith(f"127.0.0.1:{last.port}: Redis has appendfsync everysec")
    last.client().config_set("appendfsync", "always")
    last.client().config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{last.port}: Redis has maxmemory-policy allkeys-lru"):
        check_server(client, settings, SystemClock())
    last.client().config_set("maxmemory-policy", "noeviction")


def test_scripts_that_one_master_forgot_are_given_to_it(shared: RealCluster, settings: RedisSettings) -> None:
    with opened(settings) as duetime:
        names = [key_of_shard(shard) for shard in range(SHARDS)]
        duetime.schedule_many(Request("m", delay=60, id=name) for name in names)
        for node in shared.masters:
            node.client().script_flush()
        assert [found.state for found in duetime.get_many(names)] == [State.SCHEDULED] * SHARDS


def test_a_transaction_has_one_shard(settings: RedisSettings) -> None:
    pipeline = connect(settings).pipeline(transaction=True)
    for keys in keys_of(settings):
        pipeline.get(keys.forwarder())
    with pytest.raises(redis.exceptions.RedisError, match="one shard"):
        pipeline.execute()


@pytest.mark.parametrize("atomic", [True, False], ids=["CLUSTER MIGRATESLOTS", "MIGRATE"])
def test_nothing_is_lost_or_doubled_while_slots_move(
    shared: RealCluster, settings: RedisSettings, checkout: Checkout, atomic: bool
) -> None:
    if atomic and server_version() < (99,):
        pytest.skip("only Valkey 9 moves slots atomically")
    jobs, keys = Jobs(checkout, settings), keys_of(settings)[2]
    source = shared.owner(keys.slot)
    target = next(node for node in shared.masters if node is not source)
    with opened(settings) as duetime:
        loop = jobs.loop()
        sent = 0
        for round_number in range(30):
            # Some are due while the slot moves, some after it; all of a round have a key, so a lost reply stores nothing twice.
            duetime.schedule_many(Request(str(n), delay=0.2 + n % 40 / 10, id=f"k{n}") for n in range(sent, sent + 100))
            sent += 100
            if round_number == 10:
                move_slot(shared, source.port, target.port, keys.slot, atomic)
        assert shared.owner(keys.slot) is target
        assert wait_until(lambda: len(loop.out) >= sent, 60), loop.screen()
        assert loop.stop() == 0
    assert bodies(loop) == Counter(str(n) for n in range(sent))
    assert client_of(connect(settings), keys).hget(keys.counters(), "delivered")


def move_slot(cluster: RealCluster, source_port: int, target_port: int, slot: int, atomic: bool) -> None:
    source = next(node for node in cluster.masters if node.port == source_port)
    target = next(node for node in cluster.masters if node.port == target_port)
    if atomic:
        source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.node_id)
        assert wait_until(lambda: cluster.owner(slot, [target]) is target, 30)
    else:
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.node_id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.node_id)
        while names := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "KEYS", *names)
        for node in (target, source, *cluster.masters):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.node_id)
    assert wait_until(lambda: all(cluster.owner(slot, [node]) is target for node in cluster.masters), 30)


@pytest.mark.parametrize("shard", [0, 1], ids=["the first shard's", "another one"])
def test_a_master_that_dies_without_a_replica_delays_no_shard_of_the_others(checkout: Checkout, shard: int) -> None:
    with real_cluster(masters=3) as cluster:
        settings = RedisSettings(url=cluster.url, namespace="test", shards=SHARDS)
        jobs = Jobs(checkout, settings)
        victim = cluster.owner(keys_of(settings)[shard].slot)
        gone = {keys.shard for keys in keys_of(settings) if cluster.owner(keys.slot) is victim}
        names = {key_of_shard(shard): shard for shard in range(SHARDS) for _ in range(20)}
        with opened(settings) as duetime:
            loops = [jobs.loop()]
            duetime.schedule_many(Request(name, delay=3 + n / 40, id=name) for n, name in enumerate(names))
            victim.kill()
            alive = {name for name, shard in names.items() if shard not in gone}
            assert wait_until(lambda: bodies(*loops) == Counter(alive), 20), loops[0].screen()
            # On time is what the benchmark measures; a loop that waited for the dead one would be late by all of the outage.
            late = sorted(record["lateness_ms"] for record in loops[0].records())
            assert late[len(late) // 2] < 500, late
            with pytest.raises(StoreUnavailable):  # it must not count for some alone in silence
                change_topic_settings(connect(settings), settings, "mail", {"max_rate": 5})
            if 0 not in gone:  # which has what is said once for all shards
                loops.append(jobs.loop("--lease", "20"))
                loops[1].wait_for_line("goes by the settings of topics that it has")
            status = jobs.run("jobs/status.py", "--check")
            assert status.end(60) == 1
            if 0 not in gone:
                away = ", ".join(map(str, sorted(gone)))
                assert status.lines()[0].startswith(f"PROBLEM: shards {away} can't be reached and what is there is not")
            name = key_of_shard(next(shard for shard in range(SHARDS) if shard not in gone))
            duetime.schedule(name, delay=0, id=name)
            assert wait_until(lambda: bodies(*loops)[name] == 1, 20), loops[-1].screen()
            victim.start()
            assert wait_until(lambda: bodies(*loops).total() == len(names) + 1, 40), loops[0].screen()
            assert [loop.stop() for loop in loops] == [0] * len(loops)
        assert bodies(*loops) == Counter([*names, name])


def test_a_master_that_dies_keeps_no_consumer_from_the_messages_of_the_others(checkout: Checkout) -> None:
    with real_cluster(masters=3) as cluster, ExitStack() as stack:
        settings = RedisSettings(url=cluster.url, namespace="test", shards=SHARDS)
        jobs = Jobs(checkout, settings)
        victim = cluster.owner(keys_of(settings)[0].slot)
        gone = {keys.shard for keys in keys_of(settings) if cluster.owner(keys.slot) is victim}
        duetime = stack.enter_context(opened(settings))
        loop = jobs.loop("--sink", "stream")
        printing = jobs.run("jobs/consume.py", "--topic", "mail", "--group", "printing", "--format", "json")
        printing.wait_for_line("registered the group printing")
        handled: list[str] = []
        at_once = Semaphore()  # a handler runs one at a time, whatever shard a message is of

        def handle(message: Message) -> None:
            assert at_once.acquire(blocking=False)
            handled.append(message.body)
            at_once.release()

        stop = Stop()
        runner = Thread(target=duetime.run_until, args=(stop, "mail", "handling", handle, 1, "beginning"))
        runner.start()
        stack.callback(runner.join)
        stack.callback(setattr, stop, "requested", True)

        def schedule(body: str, shards: Collection[int], delay: float = 0) -> Counter[str]:
            duetime.schedule_many(
                Request(f"{body}{shard}-{n}", delay=delay, topic="mail", id=key_of_shard(shard))
                for shard in shards
                for n in range(20)
            )
            return Counter(f"{body}{shard}-{n}" for shard in shards for n in range(20))

        def is_there(wanted: Counter[str]) -> bool:
            return bodies(printing) == wanted == Counter(handled)

        wanted = schedule("before", range(SHARDS))
        assert wait_until(lambda: is_there(wanted), 20), printing.screen()
        later = schedule("later", gone, delay=2)
        victim.kill()
        wanted += schedule("meanwhile", {*range(SHARDS)} - gone)
        assert wait_until(lambda: is_there(wanted), 15), (printing.screen(), wanted - Counter(handled))
        victim.start()
        wanted += later
        assert wait_until(lambda: is_there(wanted), 40), (printing.screen(), wanted - Counter(handled))
        assert [job.stop() for job in (loop, printing)] == [0, 0]


@pytest.mark.parametrize("shard", [0, 1], ids=["the first shard's", "another one"])
def test_consumers_webhooks_and_the_api_start_while_a_master_is_away(checkout: Checkout, shard: int) -> None:
    """New groups get what comes from their start on: also of the shards that are away then, with the first of it."""
    with real_cluster(masters=3) as cluster, receiving(Receiver()) as receiver, ExitStack() as stack:
        settings = RedisSettings(url=cluster.url, namespace="test", shards=SHARDS)
        jobs = Jobs(checkout, settings)
        victim = cluster.owner(keys_of(settings)[shard].slot)
        gone = {keys.shard for keys in keys_of(settings) if cluster.owner(keys.slot) is victim}
        duetime = stack.enter_context(opened(settings))
        for topic in ("mail", "news"):
            change_topic_settings(connect(settings), settings, topic, {"sink": "stream"})
        change_topic_settings(connect(settings), settings, "news", {"webhook": receiver.url})
        loop = jobs.loop()

        def schedule(body: str, shards: Collection[int], delay: float = 0) -> Counter[str]:
            duetime.schedule_many(
                Request(f"{body}{number}", delay=delay, topic=topic, id=key_of_shard(number))
                for number in shards
                for topic in ("mail", "news")
            )
            return Counter(f"{body}{number}" for number in shards)

        before = schedule("before", range(SHARDS))
        assert wait_until(
            lambda: sum(connect(settings).xlen(k.stream("mail")) for k in keys_of(settings)) == SHARDS, 20
        )
        wanted = schedule("later", gone, delay=3)
        victim.kill()
        printing = jobs.run("jobs/consume.py", "--topic", "mail", "--group", "printing", "--format", "json")
        printing.wait_for_line("registered the group printing")
        posting = jobs.run("jobs/webhooks.py", "--from", "new")
        posting.wait_for_line("posting the messages of topic news")
        serving = jobs.run("jobs/serve.py", "--port", "0")
        serving.wait_for_line("the API is on")
        handled: list[str] = []
        stop, handle = Stop(), lambda message: handled.append(message.body)
        runner = Thread(target=duetime.run_until, args=(stop, "mail", "handling", handle))
        runner.start()
        stack.callback(runner.join)
        stack.callback(setattr, stop, "requested", True)
        assert wait_until(lambda: is_registered(settings, "mail", "handling", gone), 20)
        assert wait_until(lambda: is_registered(settings, "news", "webhook", gone), 20)

        def is_there(wanted: Counter[str]) -> bool:
            return bodies(printing) == Counter(handled) == Counter(receiver.bodies()) == wanted

        def seen() -> object:
            return printing.screen(), posting.screen(), bodies(printing), handled, receiver.bodies(), wanted, before

        there = schedule("meanwhile", {*range(SHARDS)} - gone)
        assert wait_until(lambda: is_there(there), 20), seen()
        [address] = re.findall(r"the API is on (\S+)", serving.screen())
        body = json.dumps({"message": "by-http", "delay_sec": 600, "id": key_of_shard(min({*range(SHARDS)} - gone))})
        asked = urllib.request.Request(f"{address}/v1/messages", body.encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert answer.status == 201
        victim.start()
        wanted += there
        assert wait_until(lambda: is_there(wanted), 40), seen()
        assert [job.stop() for job in (loop, printing, posting, serving)] == [0] * 4, seen()


def is_registered(settings: RedisSettings, topic: str, group: str, gone: Collection[int]) -> bool:
    """Whether each shard that is there has the group."""
    client, alive = connect(settings), [keys for keys in keys_of(settings) if keys.shard not in gone]
    streams = [keys.stream(topic) for keys in alive]
    return all(
        client.exists(stream) and group.encode() in [each["name"] for each in client.xinfo_groups(stream)]
        for stream in streams
    )


def test_a_replica_that_is_promoted_goes_on(checkout: Checkout) -> None:
    with real_cluster(masters=3, replicas=1) as cluster:
        settings = RedisSettings(url=cluster.url, namespace="test", shards=SHARDS)
        jobs = Jobs(checkout, settings)
        with opened(settings, patience_sec=60) as duetime:
            loop = jobs.loop()
            duetime.schedule_many(Request(str(n), delay=6 + n / 100, id=f"k{n}") for n in range(600))
            victim = cluster.owner(keys_of(settings)[1].slot)
            assert wait_until(cluster.is_replicated, 20)
            victim.kill()
            # The client waits for the promotion where it needs that master.
            duetime.schedule_many(Request(str(n), delay=6 + n / 200, id=f"k{n}") for n in range(600, 1_200))
            assert wait_until(lambda: len(loop.out) >= 1_200, 60), loop.screen()
            assert loop.stop() == 0
        assert bodies(loop) == Counter(str(n) for n in range(1_200))
        with connect(settings) as client:
            assert read_stats(client, keys_of(settings)).scheduled == 0
