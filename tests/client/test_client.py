"""The client's verbs, in memory and on a real server."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import Duetime, MemoryDuetime, Receipt, Request, RequestRefused, State, TargetDown, sync
from pipeline.client.commit import BYTES_MAX, SOURCE_ID, GroupCommit, Stored, _Waiting
from pipeline.config import Settings
from pipeline.core.errors import ConfigError, StoreError, StoreUnavailable, VersionDiffers
from pipeline.core.messages import Message
from pipeline.core.stop import Stop
from pipeline.store.redis_store import RedisStore
from tests.chaos.proxy import Proxy, lose_reply, naming, running
from tests.client.builders import KEYS, deliver_due
from tests.servers import RealServer

HOUR = timedelta(hours=1)


@pytest.fixture(params=["memory", "server"])
def duetime(request: pytest.FixtureRequest) -> Iterator[Duetime]:
    if request.param == "memory":
        with MemoryDuetime() as duetime:
            yield duetime
    else:
        with Duetime(request.getfixturevalue("server").url) as duetime:
            yield duetime


def test_what_is_scheduled_is_found_moved_and_cancelled_by_its_id(duetime: Duetime) -> None:
    due = datetime(2030, 1, 1, 12, tzinfo=UTC)
    receipt = duetime.schedule("tea is ready", due=due, id="tea", topic="kitchen", headers={"lang": "en"})
    assert (receipt.id, receipt.due, receipt.state, receipt.is_duplicate) == ("tea", due, State.SCHEDULED, False)
    found = duetime.get("tea").message
    assert found == receipt.message
    assert found is not None
    assert (found.body, found.topic, found.headers, found.due) == ("tea is ready", "kitchen", {"lang": "en"}, due)
    moved = duetime.reschedule("tea", due=due + HOUR)
    assert moved.state is State.SCHEDULED
    assert moved.message is not None
    assert moved.message.due == due + HOUR
    assert duetime.cancel("tea").message is not None
    assert [duetime.cancel("tea"), duetime.get("tea")] == [duetime.get("tea")] * 2
    assert duetime.get("tea").state is State.CANCELLED
    assert duetime.schedule("tea is ready", due=due, id="tea").state is State.CANCELLED


def test_a_message_without_an_id_has_a_handle(duetime: Duetime) -> None:
    receipt = duetime.schedule("tea", delay=HOUR)
    assert receipt.id.startswith("~")
    assert duetime.get(receipt.id).message == receipt.message
    [listed] = duetime.upcoming()
    assert (listed.id, listed.due) == (receipt.id, receipt.due)
    assert duetime.cancel(receipt.id).state is State.CANCELLED
    assert duetime.get("never").state is State.UNKNOWN


def test_a_known_id_is_told_with_what_is_stored(duetime: Duetime) -> None:
    first = duetime.schedule("tea", due=datetime(2030, 1, 1, tzinfo=UTC), id="tea")
    again = duetime.schedule("coffee", due=datetime(2031, 1, 1, tzinfo=UTC), id="tea")
    assert again == Receipt("tea", first.due_ms, State.SCHEDULED, True, first.message)


def test_an_id_is_made_to_mean_another_message(duetime: Duetime) -> None:
    first = duetime.schedule("tea", delay=HOUR, id="drink")
    found = duetime.replace(Request("coffee", delay=2 * HOUR, id="drink", topic="kitchen"))
    assert found.message is not None
    assert (found.state, found.message.body, found.message.topic) == (State.SCHEDULED, "coffee", "kitchen")
    assert found == duetime.get("drink")
    assert found.message.message_id > str(first.message and first.message.message_id)
    assert len([*duetime.upcoming()]) == 1
    assert duetime.cancel("drink").message == found.message
    assert duetime.schedule("tea", delay=HOUR, id="drink").state is State.CANCELLED
    assert duetime.replace(Request("water", delay=HOUR, id="drink")).state is State.SCHEDULED
    assert duetime.replace(Request("new", delay=HOUR, id="new")).state is State.SCHEDULED
    assert sorted(listed.message.body for listed in duetime.upcoming()) == ["new", "water"]
    with pytest.raises(RequestRefused, match="needs the id"):
        duetime.replace(Request("none", delay=HOUR))


def test_many_are_found_and_cancelled_by_ids_and_handles(duetime: Duetime) -> None:
    ids = [duetime.schedule(f"{n}", delay=HOUR, id=f"id-{n}" if n % 2 else "").id for n in range(230)]
    asked = [*ids, "unknown", "~nonsense", ids[0]]
    found = duetime.get_many(asked)
    assert [each.message and each.message.body for each in found[:230]] == [f"{n}" for n in range(230)]
    assert [each.state for each in found[230:]] == [State.UNKNOWN, State.UNKNOWN, State.SCHEDULED]
    cancelled = duetime.cancel_many(asked)
    assert [each.message for each in cancelled[:230]] == [each.message for each in found[:230]]
    assert [each.state for each in cancelled[230:]] == [State.UNKNOWN, State.UNKNOWN, State.CANCELLED]
    assert [*duetime.upcoming()] == []
    assert duetime.get_many([]) == duetime.cancel_many([]) == []


def test_many_are_scheduled_in_portions_and_duplicates_are_named(duetime: Duetime) -> None:
    requests = [Request(f"message {n}", delay=n % 7_200, id=f"id-{n}" if n % 3 == 0 else "") for n in range(5_500)]
    done = duetime.schedule_many([*requests, requests[0], requests[5_499]])
    assert (done.stored, done.duplicates) == (5_500, (5_500, 5_501))
    messages = [*duetime.upcoming()]
    assert sorted(message.message.body for message in messages) == sorted(request.message for request in requests)
    assert [message.due_ms for message in messages] == sorted(message.due_ms for message in messages)
    assert duetime.schedule_many([]).stored == 0


def test_messages_of_one_due_time_keep_the_order_of_their_calls(duetime: Duetime) -> None:
    due = datetime(2030, 1, 1, tzinfo=UTC)
    for number in range(200):
        duetime.schedule(str(number), due=due)
    duetime.schedule_many(Request(str(number), due=due) for number in range(200, 1_500))
    assert [listed.message.body for listed in duetime.upcoming()] == [str(number) for number in range(1_500)]


def test_upcoming_can_be_narrowed(duetime: Duetime) -> None:
    start = datetime(2030, 1, 1, tzinfo=UTC)
    for number in range(6):
        duetime.schedule(str(number), due=start + number * timedelta(minutes=7), topic=f"topic-{number % 2}")

    def bodies(**options: Any) -> list[str]:
        return [listed.message.body for listed in duetime.upcoming(**options)]

    assert bodies() == ["0", "1", "2", "3", "4", "5"]
    assert bodies(topic="topic-1") == ["1", "3", "5"]
    assert bodies(after=start + timedelta(minutes=7)) == ["1", "2", "3", "4", "5"]
    assert bodies(before="2030-01-01T00:28:00Z", after="2030-01-01T00:00:00.001Z") == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("", delay=1), "empty_message"),
        (Request("x"), "missing_due"),
        (Request("x", delay=1, due=0), "both_due"),
        (Request("x", delay=-1), "delay_out_of_range"),
        (Request("x", delay=float("nan")), "delay_out_of_range"),
        (Request("x", delay=timedelta(days=-1)), "delay_out_of_range"),
        (Request("x", delay=31_622_401), "delay_out_of_range"),
        (Request("x", delay=True), "wrong_type"),
        (Request("x", delay="1"), "wrong_type"),  # type: ignore[arg-type]
        (Request("x", due=datetime(2030, 1, 1)), "due_without_zone"),  # noqa: DTZ001 - that is the point
        (Request("x", due="2030-01-01T00:00"), "due_without_zone"),
        (Request("x", due="tomorrow"), "not_a_time"),
        (Request("x", due=1_800_000_000), "due_in_seconds"),
        (Request("x", due=-1), "due_out_of_range"),
        (Request("x", due=datetime(1969, 1, 1, tzinfo=UTC)), "due_out_of_range"),
        (Request(b"x", delay=1), "wrong_type"),  # type: ignore[arg-type]
        (Request("x\ud800", delay=1), "not_json"),
        (Request("x" * 262_145, delay=1), "message_too_long"),
        (Request("ä" * 200_000, delay=1), "message_too_long"),
        (Request("x", delay=1, id="a b"), "bad_id"),
        (Request("x", delay=1, id="a\n"), "bad_id"),
        (Request("x", delay=1, topic=""), "bad_topic"),
        (Request("x", delay=1, topic="a:b"), "bad_topic"),
        (Request("x", delay=1, headers={"a": 1}), "bad_headers"),  # type: ignore[dict-item]
    ],
)
def test_what_breaks_a_rule_is_refused_with_the_reason_that_files_have(request_: Request, reason: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        request_.checked(0)
    assert (refused.value.reason, str(refused.value)) == (reason, refused.value.detail)


def test_delays_are_rounded_up_to_the_millisecond() -> None:
    delays = (0, 7, 0.1 + 0.2, timedelta(microseconds=1), timedelta(days=366), 31_622_400)
    dues = [Request("x", delay=delay).checked(1_000).due_ms for delay in delays]
    assert dues == [1_000, 8_000, 1_300, 1_001, 31_622_401_000, 31_622_401_000]


def test_threads_share_transactions_and_store_each_message_once(server: RealServer) -> None:
    with Duetime(server.url) as duetime:
        receipts: list[str] = []

        def work(thread: int) -> None:
            for number in range(50):
                receipts.append(duetime.schedule(f"{thread}:{number}", delay=HOUR).id)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(receipts) == sorted(listed.id for listed in duetime.upcoming())
        assert len({*receipts}) == 800
        with server.client() as client:
            marker = client.get(KEYS.marker(SOURCE_ID, client.zrange(KEYS.markers(SOURCE_ID), 0, 0)[0].decode()))
        assert marker is not None
        assert int(marker) < 800  # transactions


def test_one_id_of_many_threads_is_stored_once(server: RealServer) -> None:
    with Duetime(server.url) as duetime:
        together, stored = threading.Barrier(16), []

        def work(thread: int) -> None:
            together.wait()
            stored.append(not duetime.schedule(f"{thread}", delay=HOUR, id="same").is_duplicate)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(stored) == 1


@pytest.fixture
def proxy(server: RealServer, tmp_path: Path) -> Iterator[Proxy]:
    proxy = Proxy(server.folder / "s", tmp_path / "p")
    yield proxy
    proxy.close()


def url_of(proxy: Proxy, server: RealServer) -> str:
    return server.url.replace(f"{server.folder}/s", proxy.url.removeprefix("unix://"))


def test_a_lost_reply_doubles_nothing(server: RealServer, proxy: Proxy) -> None:
    with Duetime(url_of(proxy, server)) as duetime:
        duetime.schedule("first", delay=HOUR, id="first")
        trap = proxy.trap(naming("MULTI"), lose_reply)
        receipt = duetime.schedule("second", delay=HOUR, id="second")
        assert trap.was_sprung
        assert (receipt.state, receipt.is_duplicate) == (State.SCHEDULED, False)
        trap = proxy.trap(naming("MULTI"), lose_reply, first=1, last=3)
        requests = [Request(f"{n}", delay=HOUR, id="first" if n == 7 else "") for n in range(20)]
        assert duetime.schedule_many(requests).duplicates == (7,)
        assert trap.was_sprung
        assert len([*duetime.upcoming()]) == 2 + 19


def test_a_lost_reply_of_a_change_to_one_version_is_no_other_version(server: RealServer, proxy: Proxy) -> None:
    with Duetime(url_of(proxy, server)) as duetime:
        duetime.schedule("first", delay=HOUR, id="tea")
        for script, change in (
            ("by_id", lambda versions: duetime.reschedule("tea", delay=2 * HOUR, if_versions=versions)),
            ("replace", lambda versions: duetime.replace(Request("new", delay=HOUR, id="tea"), if_versions=versions)),
            ("by_id", lambda versions: duetime.cancel("tea", if_versions=versions)),
        ):
            before = duetime.get("tea").version
            trap = proxy.trap(running(script), lose_reply)
            found = change({before})
            assert trap.was_sprung and found == replace(duetime.get("tea"), message=found.message)
            proxy.clear()
            if found.message:
                with pytest.raises(VersionDiffers):
                    duetime.cancel("tea", if_versions={before})


def test_a_server_that_stays_silent_is_an_error_and_the_next_call_starts_anew(server: RealServer, proxy: Proxy) -> None:
    with Duetime(url_of(proxy, server), patience_sec=0.1) as duetime:
        duetime.schedule("first", delay=HOUR)
        proxy.trap(naming("MULTI"), lose_reply)
        silence = proxy.trap(naming("WATCH"), lose_reply, first=2, last=float("inf"))
        with pytest.raises(StoreUnavailable):
            duetime.schedule("second", delay=HOUR)
        proxy.remove(silence)
        duetime.schedule("third", delay=HOUR)
        # The first try of the second call was stored, and nothing could tell so.
        assert [listed.message.body for listed in duetime.upcoming()] == ["first", "second", "third"]


def test_a_call_that_is_interrupted_takes_nothing_from_the_next(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Duetime(server.url) as duetime:
        duetime.schedule("first", delay=HOUR)
        schedule = RedisStore.schedule

        def interrupted(store: RedisStore, *arguments: Any) -> None:
            schedule(store, *arguments)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(RedisStore, "schedule", interrupted)
        with pytest.raises(KeyboardInterrupt):
            duetime.schedule("second", delay=HOUR)
        duetime.schedule("third", delay=HOUR)
        assert [listed.message.body for listed in duetime.upcoming()] == ["first", "second", "third"]


def test_a_call_that_is_interrupted_leaves_nobody_waiting() -> None:
    class Interrupted:
        def commit(self, requests: Sequence[Message]) -> None:
            raise KeyboardInterrupt

    commits = GroupCommit(Interrupted)  # type: ignore[arg-type]
    other = _Waiting([Message(1, "other")])
    commits._queue.append(other)
    with pytest.raises(KeyboardInterrupt):
        commits.store([Message(1, "own")])
    assert [type(result) for result in other.results or ()] == [StoreUnavailable]


def test_calls_of_threads_share_a_transaction_up_to_so_many_bytes() -> None:
    class Counting:
        def commit(self, requests: Sequence[Message]) -> list[Stored | StoreError]:
            transactions.append(len(requests))
            return [Stored(request, "", False) for request in requests]

    transactions: list[int] = []
    commits = GroupCommit(Counting)  # type: ignore[arg-type]
    large = Message(1, "x" * (BYTES_MAX // 4))
    commits._queue.extend(_Waiting([large]) for _ in range(9))
    commits.store([large])
    assert transactions == [4, 4, 2]


def test_a_client_that_fails_to_begin_leaves_no_connection_open(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open = False

    @contextmanager
    def open_client(settings: Settings) -> Iterator[tuple[Any, Settings]]:
        nonlocal is_open
        is_open = True
        try:
            yield None, settings
        finally:
            is_open = False

    monkeypatch.setattr(sync, "open_client", open_client)
    with Duetime(server.url):
        assert is_open
    assert not is_open

    def fail(*arguments: object) -> None:
        raise ConfigError("The folder is away.")

    monkeypatch.setattr(sync, "cold_reader", fail)
    with pytest.raises(ConfigError) as raised:
        Duetime(server.url)
    assert not is_open, raised  # which keeps the connection from being collected


def test_a_marker_that_the_server_lost_makes_it_store_under_another(server: RealServer) -> None:
    with Duetime(server.url) as duetime, server.client() as client:
        duetime.schedule("first", delay=HOUR)
        [part_id] = client.zrange(KEYS.markers(SOURCE_ID), 0, -1)
        client.delete(KEYS.marker(SOURCE_ID, part_id.decode()))
        assert not duetime.schedule("second", delay=HOUR).is_duplicate
        assert [listed.message.body for listed in duetime.upcoming()] == ["first", "second"]


def test_markers_go_when_a_client_is_closed_and_those_of_killed_ones_after_an_hour(server: RealServer) -> None:
    with server.client() as client:
        for part_id, score in (("O" * 14, 1), ("z" * 14, 1e15)):
            client.set(KEYS.marker(SOURCE_ID, part_id), 1)
            client.zadd(KEYS.markers(SOURCE_ID), {part_id: score})
        with Duetime(server.url) as duetime:
            duetime.schedule("first", delay=HOUR)
            assert client.zcard(KEYS.markers(SOURCE_ID)) == 2
        assert client.zrange(KEYS.markers(SOURCE_ID), 0, -1) == [b"z" * 14]
        client.delete(KEYS.marker(SOURCE_ID, "z" * 14), KEYS.markers(SOURCE_ID))


def test_a_process_that_forked_schedules_on_its_own(server: RealServer) -> None:
    with Duetime(server.url) as duetime:
        duetime.schedule("parent", delay=HOUR)
        child = os.fork()
        if child == 0:
            duetime.schedule("child", delay=HOUR)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        duetime.schedule("parent again", delay=HOUR)
        assert {listed.message.body for listed in duetime.upcoming()} == {"parent", "child", "parent again"}
        with server.client() as client:
            assert client.zcard(KEYS.markers(SOURCE_ID)) == 2
            client.flushall()  # the child had no time to tidy up


def test_a_process_that_forked_and_closes_leaves_its_parent_the_marker(server: RealServer) -> None:
    with Duetime(server.url) as duetime, server.client() as client:
        duetime.schedule("parent", delay=HOUR)
        markers = client.zrange(KEYS.markers(SOURCE_ID), 0, -1)
        # As if a thread of the parent were storing at the moment of the fork.
        with duetime.commits._lock:
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                duetime.close()
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert client.zrange(KEYS.markers(SOURCE_ID), 0, -1) == markers
        assert len(markers) == 1


def test_without_a_server_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUETIME_LOCAL_STATE", str(tmp_path))
    with pytest.raises(ConfigError, match="No Redis server is named"):
        Duetime()
    with pytest.raises(StoreUnavailable, match="can't be used now"):
        Duetime(f"unix://{tmp_path}/nothing")


def test_handlers_in_threads_get_each_message_once_and_stop_when_one_of_them_ends(server: RealServer) -> None:
    with Duetime(server.url) as duetime:
        duetime.schedule_many(Request(f"{n}", delay=0, topic="mail") for n in range(100))
        deliver_due(server)
        stop, handled = Stop(), []

        def handle(message: Message) -> None:
            handled.append(message.body)
            stop.requested = len(handled) == 100

        duetime.run_until(stop, "mail", "billing", handle, concurrency=4, start="beginning")
        assert sorted(handled) == sorted(f"{n}" for n in range(100))


def test_a_consumer_shares_the_connection_of_its_client(server: RealServer) -> None:
    with Duetime(server.url) as duetime:
        duetime.schedule("tea", delay=0, topic="mail", id="tea")
        deliver_due(server)
        assert duetime.get("tea").state is State.DELIVERED
        with duetime.consume("mail", "billing", start="beginning") as consumer:
            message = next(iter(consumer))
            assert (message.body, message.id, message.attempt) == ("tea", "tea", 1)
            assert consumer.ack(message)
        duetime.schedule("still open", delay=1)


def test_in_memory_time_passes_when_the_test_says_so() -> None:
    with MemoryDuetime(datetime(2030, 1, 1, tzinfo=UTC)) as duetime:
        duetime.schedule("later", delay=timedelta(days=7), id="later", topic="mail")
        duetime.schedule("sooner", delay=1)
        assert duetime.advance(0.9) == []
        assert [message.body for message in duetime.advance(timedelta(days=30))] == ["sooner", "later"]
        assert duetime.now == datetime(2030, 1, 31, 0, 0, 0, 900_000, UTC)
        assert duetime.get("later").state is State.UNKNOWN  # it came long ago
        with duetime.consume("mail", "billing", start="beginning") as consumer:
            [message] = consumer.take()
            assert consumer.ack(message)


def test_threads_that_share_a_target_leave_it_in_peace_together(server: RealServer) -> None:
    stop, tried_sec, is_down = Stop(), [], threading.Event()

    def handle(message: Message) -> None:
        tried_sec.append(time.monotonic())
        if len(tried_sec) == 1:
            is_down.set()
            raise TargetDown("closed on Sundays", 1)
        stop.requested = True

    with Duetime(server.url) as duetime, server.client() as client:
        duetime.schedule("first", delay=0, topic="mail")
        deliver_due(server)
        runner = threading.Thread(target=duetime.run_until, args=(stop, "mail", "billing", handle, 4, "beginning"))
        runner.start()
        assert is_down.wait(60)
        while not client.zcard(KEYS.buckets()):
            assert runner.is_alive()
        duetime.schedule_many(Request(f"message {number}", delay=0, topic="mail") for number in range(8))
        deliver_due(server)
        runner.join(60)
        client.flushall()  # what was not handled
    assert tried_sec[1] - tried_sec[0] >= 1
