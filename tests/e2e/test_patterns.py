"""What people build delayed queues and publish/subscribe on Redis for, each played to its end on a real server."""

import signal
import threading
from collections import Counter

from pipeline.config import RedisSettings, Settings, TopicSettings
from pipeline.consume.consumer import Consumer
from pipeline.consume.handling import run
from pipeline.consume.opening import new_consumer, new_store, parse_start
from pipeline.store.connection import connect
from pipeline.store.entries import Entry
from pipeline.store.keys import Keys
from pipeline.store.redis_store import RedisStore
from pipeline.store.topics import Topics
from tests.e2e.commands import Checkout
from tests.servers import RealServer, real_server
from tests.store.builders import transaction
from tests.waiting import wait_until

KEYS = Keys("duetime")
WAIT_SEC = 30.0


def schedule(server: RealServer, *rows: tuple[int, int], token: str = "P" * 14, text: str = "") -> None:
    """Store messages by their number and the milliseconds until they are due."""
    client = connect(RedisSettings(url=server.url))
    seconds, microseconds = client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    of_text = {"member_of": lambda line, _: f"{token}{line:08x}m{text}".encode()} if text else {}
    stored = RedisStore(client, KEYS).schedule(
        "s",
        transaction(*((line, now_ms + wait_ms) for line, wait_ms in rows), token=token, **of_text),  # type: ignore[arg-type]
    )
    assert stored and stored.stored == len(rows)


def open_consumer(server: RealServer, group: str, start: str = "beginning", **settings: float) -> Consumer:
    whole = Settings(redis=RedisSettings(url=server.url), topics=TopicSettings(sink="stream", **settings))  # type: ignore[arg-type]
    store = new_store(connect(whole.redis), whole, "default", group, "")
    store.register(parse_start(start))
    return new_consumer(store, whole, block_ms=50)


def start_moving(checkout: Checkout, server: RealServer, **environ: str) -> None:
    drain = checkout.run("jobs/drain.py", "--sink", "stream", environ={"REDIS_URL": server.url, **environ})
    drain.wait_for(lambda _: bool(server.client().pubsub_numsub(KEYS.wake())[0][1]), "drain loop")


def test_two_loops_with_equal_texts_and_a_crash_lose_and_merge_nothing(checkout: Checkout) -> None:
    """Two pollers, identical texts, a crash between read and acknowledgement: nothing lost or merged, and no copy but of that."""
    with real_server() as server:
        environ = {"REDIS_URL": server.url, "DUETIME_TOPICS_LEASE_SEC": "0.5"}
        consume = (
            "jobs/consume.py",
            "--topic",
            "default",
            "--group",
            "screen",
            "--from",
            "beginning",
            "--format",
            "json",
        )
        start_moving(checkout, server, DUETIME_TOPICS_LEASE_SEC="0.5")
        start_moving(checkout, server, DUETIME_TOPICS_LEASE_SEC="0.5")
        # One consumer reads some and is killed before it acknowledges; it must have been the first to see them.
        victim = open_consumer(server, "screen")
        schedule(server, *((number, 100 + number) for number in range(1, 201)), text="the same text")
        lost = []
        while len(lost) < 10:
            lost += victim.take(10)
        others = [checkout.run(*consume, environ=environ) for _ in range(2)]
        for other in others:
            other.wait_for(lambda _: sum(len(each.out) for each in others) >= 200, "all messages", WAIT_SEC)
            # One may have read all before the other was there, which then knows no signals yet.
            other.wait_for(
                lambda _: len(server.client().xinfo_consumers(KEYS.stream("default"), "screen")) == 3, "consumer"
            )
        assert [other.stop() for other in others] == [0, 0]
        records = [record for other in others for record in other.records()]
        assert {record["message"] for record in records} == {"the same text"}
        assert len({record["id"] for record in records}) == len(records) == 200
        again = {record["id"] for record in records if record["attempt"] == 2}
        assert again == {entry.id for entry in lost}
        assert server.client().xlen(KEYS.stream("default")) == 200


def test_two_threads_read_a_topic_and_one_leaves_and_replays_what_is_retained(checkout: Checkout) -> None:
    """Two threads read one topic concurrently; one unsubscribes, subscribes again and replays what is live."""
    with real_server() as server:
        start_moving(checkout, server)
        seen: list[str] = []
        done = threading.Event()

        def read(consumer: Consumer) -> None:
            def note(entry: Entry) -> None:
                seen.append(entry.body)
                if len(seen) == 100:
                    done.set()

            run(consumer, note)
            consumer.close()

        consumers = [open_consumer(server, "baz") for _ in range(2)]
        for consumer in consumers:
            consumer.stopping = done.is_set
        threads = [threading.Thread(target=read, args=(consumer,)) for consumer in consumers]
        for thread in threads:
            thread.start()
        schedule(server, *((number, number % 7) for number in range(1, 101)))
        for thread in threads:
            thread.join(WAIT_SEC)
        assert Counter(seen) == Counter(f"message {number}" for number in range(1, 101))

        again = open_consumer(server, "baz", start="new")
        again.store.replay(parse_start("beginning"))
        replayed = [entry.body for entry in again.take()]
        assert Counter(replayed) == Counter(seen), "all that is live, once more, for this group"
        assert open_consumer(server, "other", start="new").take() == []


def test_consumers_that_contend_and_fail_and_lose_a_connection_handle_each_message_once(
    checkout: Checkout,
) -> None:
    """Several consumers contend, a handler raises, and an idle connection is dropped: no message is lost or handled twice."""
    with real_server() as server:
        start_moving(checkout, server)
        handled: Counter[str] = Counter()
        raised: set[str] = set()
        lock = threading.Lock()
        done = threading.Event()

        def handler(entry: Entry) -> None:
            number = int(entry.body.split()[1])
            with lock:
                if number % 10 == 0 and entry.body not in raised:
                    raised.add(entry.body)
                    raise ValueError("not this time")
                handled[entry.body] += 1
                if handled.total() == 100:
                    done.set()

        consumers = [open_consumer(server, "codehole", backoff_ms=50) for _ in range(4)]
        for consumer in consumers:
            consumer.stopping = done.is_set
        threads = [threading.Thread(target=run, args=(consumer, handler)) for consumer in consumers]
        for thread in threads:
            thread.start()
        # Every idle connection is dropped by the server, those of the waiting consumers and of the loop among them.
        server.client().execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        schedule(server, *((number, 50 * (number % 10)) for number in range(1, 101)))
        for thread in threads:
            thread.join(WAIT_SEC)
        for consumer in consumers:
            consumer.close()
        assert handled == Counter(f"message {number}" for number in range(1, 101))
        assert len(raised) == 10


def test_a_group_gets_what_was_published_while_it_was_away_and_the_content_expires(checkout: Checkout) -> None:
    """Registered, published to while away, two instances of one consumer; the content is there once, and expires."""
    with real_server() as server:
        start_moving(checkout, server)
        open_consumer(server, "orders").close()
        open_consumer(server, "invoices").close()
        schedule(server, *((number, 0) for number in range(1, 301)))
        client = server.client()
        wait_until(lambda: client.xlen(KEYS.stream("default")) == 300, "all are published")
        first, second = open_consumer(server, "orders"), open_consumer(server, "orders")
        ours, theirs = first.take(150), second.take(150)
        assert len(ours) == len(theirs) == 150
        assert not {entry.id for entry in ours} & {entry.id for entry in theirs}
        first.ack(*ours)
        second.ack(*theirs)
        invoices = open_consumer(server, "invoices")
        held = invoices.take(1_000)
        assert len(held) == 300, "each logical consumer gets each message"
        assert client.xlen(KEYS.stream("default")) == 300, "and the content is there once"

        # Drain loops let go what is older than its time and read by all; here, at once.
        topics = Topics(client, [KEYS])
        soon = TopicSettings(sink="stream", retain_messages=1, retain_sec=1)
        far_ms = topics.now_ms() + 60_000
        assert topics.trim(KEYS, "default", soon, far_ms) == 0, "invoices has not acknowledged"
        invoices.ack(*held)
        while topics.trim(KEYS, "default", soon, far_ms):
            pass
        assert client.xlen(KEYS.stream("default")) <= 100, "whole nodes go, so some may stay"


def test_a_consumer_that_is_told_to_stop_gives_back_and_says_what_it_did(checkout: Checkout) -> None:
    with real_server() as server:
        environ = {"REDIS_URL": server.url}
        start_moving(checkout, server)
        consumer = checkout.run("jobs/consume.py", "--topic", "default", "--group", "g", environ=environ)
        consumer.wait_for_line("registered the group g of the topic default")
        consumer.wait_for_line("No message of topic default has come into its stream yet; the group is registered")
        schedule(server, (1, 0))
        consumer.wait_for_line("message 1")
        assert consumer.stop(signal.SIGINT) == 0
        assert "printed 1 message, lateness" in consumer.screen()
        assert server.client().xpending(KEYS.stream("default"), "g")["pending"] == 0
        assert server.client().xinfo_consumers(KEYS.stream("default"), "g") == []
