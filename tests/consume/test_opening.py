"""From names and places to a consumer."""

import pytest

from pipeline.config import TopicSettings
from pipeline.consume.opening import open_consumer, parse_start
from pipeline.consume.retries import retry_delay_ms
from pipeline.core.errors import ConfigError
from tests.consume.conftest import Stage
from tests.servers import RealServer


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


def test_without_a_server_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match="set REDIS_URL"):
        open_consumer("topic", "group")


def test_user_code_needs_no_more_than_the_names(
    server: RealServer, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", server.url)
    monkeypatch.setenv("DUETIME_REDIS_NAMESPACE", stage.keys.namespace)
    stage.send("hello")
    with open_consumer("mail", "billing", start="beginning") as consumer:
        for message in consumer:
            assert message.message == "hello"
            assert consumer.ack(message)
            break


def test_the_wait_doubles_up_to_its_limit_and_varies_by_a_quarter() -> None:
    settings = TopicSettings(backoff_ms=100, backoff_ms_max=1_000)
    assert [retry_delay_ms(attempt, settings, lambda: 0.5) for attempt in (1, 2, 3, 4, 5, 99)] == [
        *(100, 200, 400, 800),
        *(1_000, 1_000),
    ]
    assert retry_delay_ms(1, settings, lambda: 0.0) == 75
    assert retry_delay_ms(1, settings, lambda: 0.999999) == 125
