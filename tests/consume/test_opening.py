"""From names and places to a consumer."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from jobs.consume import parse_arguments
from pipeline.config import ROOT, TopicSettings
from pipeline.consume.opening import open_consumer, parse_start, place_from_now
from pipeline.consume.retries import retry_delay_ms
from pipeline.core.errors import ConfigError
from pipeline.core.stop import Stop
from pipeline.runtime.server import PrivateServer, private_server, serves
from pipeline.store.entries import entry_id_of
from pipeline.store.groups import NEW, GroupStore
from tests.consume.conftest import TOPIC, Stage
from tests.servers import RealServer, real_server
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("beginning", "0-0"),
        ("new", "$"),
        ("1795176000000-3", "1795176000000-3"),
        ("1970-01-01T00:00:01Z", "999-18446744073709551615"),
        ("1970-01-01T01:00:01.5+01:00", "1499-18446744073709551615"),
        ("1970-01-01T00:00:00Z", "0-0"),
        ("1969-01-01T00:00:00Z", "0-0"),
    ],
)
def test_a_place_to_begin(text: str, start: str) -> None:
    assert parse_start(text) == start


@pytest.mark.parametrize("text", ["", "old", "2026-11-20T12:00:00", "1-", "-1", "1795176000000"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no place to begin at"):
        parse_start(text)


def test_a_group_is_set_back_and_not_over_what_is_unread() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_arguments(["--topic", "mail", "--group", "billing", "--replay", "new"])
    assert str(refused.value) == ("--replay new would skip what is unread; name beginning, an entry's id or a time.")
    for place in ("beginning", "1795176000000-3", "2026-11-20T12:00:00Z"):
        given, _ = parse_arguments(["--topic", "mail", "--group", "billing", "--replay", place])
        assert given.replay == place


@pytest.mark.parametrize("name", ["", "a:b", "a{b}", "a*", "ä", "x" * 65])
def test_names_that_could_leave_the_namespace_are_refused(
    server: RealServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("REDIS_URL", server.url)
    with pytest.raises(ConfigError, match="A topic has 1 to 64"):
        open_consumer(name, "group")
    with pytest.raises(ConfigError, match="A group has 1 to 64"):
        open_consumer("topic", name)
    if name:
        with pytest.raises(ConfigError, match="A consumer has 1 to 64"):
            open_consumer("topic", "group", consumer=name)


def test_without_a_server_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("DUETIME_LOCAL_STATE", str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"\(unix://.*redis.sock\) does not run: start ./spark-submit.sh in the checkout, or set REDIS_URL",
    ):
        open_consumer("topic", "group")


def test_the_private_server_of_the_checkout_is_found_and_kept_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("DUETIME_LOCAL_STATE", str(tmp_path))
    with ExitStack() as stack:
        stack.enter_context(private_server(tmp_path))
        consumer = stack.enter_context(open_consumer("mail", "billing"))
        assert consumer.take() == []
    server = PrivateServer(tmp_path)
    assert not serves(server.socket), "it ends when its last user has left"
    server.release()


def test_a_server_that_would_drop_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with real_server("--maxmemory-policy", "allkeys-lru") as server:
        monkeypatch.setenv("REDIS_URL", server.url)
        with pytest.raises(ConfigError, match="has maxmemory-policy allkeys-lru, which silently drops messages"):
            open_consumer("mail", "billing")
        assert server.client().keys() == []


def clients_of(server: RealServer) -> int:
    return sum(client["name"] == "duetime" for client in server.client().client_list())


def test_closing_leaves_no_connection_behind_and_neither_does_an_opening_that_fails(
    server: RealServer, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", server.url)
    monkeypatch.setenv("DUETIME_REDIS_NAMESPACE", stage.keys.namespace)
    before = clients_of(server)
    consumer = open_consumer("mail", "billing", ordered=True)
    assert clients_of(server) > before
    with pytest.raises(ConfigError, match="is ordered, not shared"):
        open_consumer("mail", "billing", ordered=False)
    consumer.close()
    assert clients_of(server) == before


PROGRAM = """
import sys
from pipeline.consume.handling import run
from pipeline.consume.opening import open_consumer

def handle(message):
    print("handling", message.body, flush=True)
    sys.stdin.readline()

with open_consumer("mail", "billing", start="beginning") as consumer:
    if sys.argv[1] == "run":
        run(consumer, handle)
    else:
        for message in consumer:
            handle(message)
            consumer.ack(message)
print("the end", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("how", ["run", "iterate"])
@pytest.mark.parametrize("is_working", [True, False])
def test_a_signal_ends_a_program_after_the_message_in_work(
    server: RealServer, stage: Stage, number: int, how: str, is_working: bool
) -> None:
    environ = {"REDIS_URL": server.url, "DUETIME_REDIS_NAMESPACE": stage.keys.namespace, "PYTHONPATH": str(ROOT)}
    if is_working:
        stage.send("a", "b")
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        env=os.environ | environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout
    if is_working:
        assert program.stdout.readline() == "handling a\n"
    else:  # Redis 7.0 lists a consumer only when it has got a message, but every server says what a client waits in
        wait_until(lambda: any(client["cmd"] == "xreadgroup" for client in stage.client.client_list()))
    program.send_signal(number)
    out, error = program.communicate("\n" * 10, timeout=60)
    assert (program.returncode, out) == (0, "the end\n")
    assert "Traceback" not in error
    assert stage.pending() == (1 if is_working else 0), "the other message is given back, and free at once"
    if is_working:
        assert [entry.body for entry in stage.open().take()] == ["b"]


def test_stops_of_several_consumers_hear_a_signal_and_are_undone_in_any_order() -> None:
    before = signal.getsignal(signal.SIGTERM)
    first, second = Stop(), Stop()
    first.install()
    second.install()
    signal.raise_signal(signal.SIGTERM)
    assert first.requested and second.requested
    first.restore()
    assert signal.getsignal(signal.SIGTERM) is not before
    second.restore()
    assert signal.getsignal(signal.SIGTERM) is before


def test_on_a_full_server_a_consumer_starts_and_reads(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with real_server("--appendonly", "no", "--maxmemory-policy", "noeviction") as full:
        monkeypatch.setenv("REDIS_URL", full.url)
        client = full.client()
        for number in range(3):
            client.xadd("{duetime:0}:stream:mail", {"message": f"{number}"})
        open_consumer("mail", "billing", start="beginning").close()
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("a", "b")
        for group, ordered in (("billing", None), ("new", None), ("other", True)):
            with open_consumer("mail", group, start="beginning", ordered=ordered) as consumer:
                assert [entry.body for entry in consumer.take()] == ["0", "1", "2"]


def test_user_code_needs_no_more_than_the_names(
    server: RealServer, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", server.url)
    monkeypatch.setenv("DUETIME_REDIS_NAMESPACE", stage.keys.namespace)
    stage.send("hello")
    with open_consumer("mail", "billing", start="beginning") as consumer:
        for message in consumer:
            assert message.body == "hello"
            assert consumer.ack(message)
            break


def test_the_wait_doubles_up_to_its_limit_and_varies_by_a_quarter() -> None:
    settings = TopicSettings(backoff_ms=100, backoff_ms_max=1_000)
    assert [retry_delay_ms(attempt, settings, lambda: 0.5) for attempt in (1, 2, 3, 4, 5, 99)] == [
        *(100, 200, 400, 800),
        *(875, 875),
    ]
    assert retry_delay_ms(1, settings, lambda: 0.0) == 75
    assert retry_delay_ms(1, settings, lambda: 0.999999) == 125


def test_no_wait_is_longer_than_its_limit() -> None:
    settings = TopicSettings()
    longest = {retry_delay_ms(attempt, settings, lambda: 0.999999) for attempt in range(1, 40)}
    assert max(longest) == settings.backoff_ms_max


def test_a_group_that_is_registered_later_in_a_shard_gets_what_came_since_it_began_in_the_others(stage: Stage) -> None:
    """As a shard does that is away when a consumer starts."""
    store = GroupStore(stage.user, [stage.keys], TOPIC, "late", "c")
    stage.send("before")
    [(last, _)] = stage.client.xrevrange(stage.keys.stream(TOPIC), count=1)
    wait_until(lambda: store.now_ms() > entry_id_of(last.decode())[0])
    place = place_from_now(store, NEW)
    stage.send("meanwhile")
    consumer = stage.open(group="other", enter=lambda: store.register(place))
    consumer.store = store
    assert [entry.body for entry in consumer.take()] == ["meanwhile"]
    assert consumer.enter is None
    consumer.close()
