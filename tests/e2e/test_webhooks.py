"""jobs/webhooks.py as its users run it."""

import base64
import json
import signal
import socket
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.client import Duetime, Request
from tests.e2e.commands import Checkout
from tests.servers import RealServer, real_server
from tests.webhooks.receiver import Answer, Receiver, receiving

MESSAGES = 200


@pytest.fixture
def redis_server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving(Receiver()) as made:
        yield made


def told(checkout: Checkout, server: RealServer, *words: str, code: int = 0) -> list[str]:
    command = checkout.run(*words, environ={"REDIS_URL": server.url})
    assert command.end(30) == code, command.screen()
    return command.lines() if code == 0 else command.screen().splitlines()


def test_a_job_that_is_killed_with_messages_in_flight_loses_none(
    checkout: Checkout, redis_server: RealServer, receiver: Receiver
) -> None:
    environ, release = {"REDIS_URL": redis_server.url}, threading.Event()
    command = f"webhook={receiver.url} webhook_concurrency=3 lease_sec=1".split()
    [_, said] = told(checkout, redis_server, "jobs/topics.py", "set", "mail", *command)
    assert said == f"mail: lease_sec=1.0 webhook={receiver.url} webhook_concurrency=3"
    drain = checkout.run("jobs/drain.py", environ=environ)
    receiver.answer = lambda posted: Answer(until=release if len(receiver.posted) > MESSAGES // 4 else None)
    sent = [f"message {number}" for number in range(MESSAGES)]
    with Duetime(redis_server.url) as duetime:
        duetime.schedule_many(Request(text, delay=0, topic="mail") for text in sent)
        first = checkout.run("jobs/webhooks.py", environ=environ)
        receiver.wait_for_posts(MESSAGES // 4 + 3)  # three hang, and the server does not know that they came
        first.stop(signal.SIGKILL)
        release.set()
        second = checkout.run("jobs/webhooks.py", environ=environ)
        receiver.wait_for(lambda: {*receiver.bodies()} == {*sent}, "message after the crash")
        groups, done = ("jobs/topics.py", "groups"), "mail webhook: lag 0, pending 0; "
        second.wait_for(
            lambda _: told(checkout, redis_server, *groups)[0].startswith(done), "acknowledgement of all", 20
        )
    again = [text for text, count in Counter(receiver.bodies()).items() if count > 1]
    assert 1 <= len(again) <= 6, again
    assert second.stop() == 0
    assert "posted 1" in second.screen() and " refused, " in second.screen()
    assert drain.stop() == 0
    assert drain.lines() == [], "messages of a topic with a webhook went to the screen"


def test_a_webhook_that_is_set_while_the_job_runs_is_posted_signed_until_it_is_stopped(
    checkout: Checkout, redis_server: RealServer, receiver: Receiver
) -> None:
    environ = {"REDIS_URL": redis_server.url}
    Path(checkout.root / "secrets").write_text(f"* whsec_{base64.b64encode(bytes(32)).decode()}\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    flags = ("--secrets", "secrets", "--log-format", "json", "--metrics-port", port)
    job = checkout.run("jobs/webhooks.py", *flags, environ=environ)
    drain = checkout.run("jobs/drain.py", environ=environ)
    told(checkout, redis_server, "jobs/topics.py", "set", f"webhook={receiver.url}")
    with Duetime(redis_server.url) as duetime:
        duetime.schedule("hello", delay=0, topic="news")
        receiver.wait_for_posts(1)
    assert receiver.posted[0].header("webhook-signature").startswith("v1,")
    job.wait_for_line("posting the messages of topic news to ")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        assert b'duetime_webhooks_up{namespace="duetime"} 1.0' in reply.read()
    assert job.stop(signal.SIGINT) == 0
    records = [json.loads(line) for _, line in job.err]
    [posting] = [record["message"] for record in records if "posting the messages" in record["message"]]
    assert "4 at a time, signed" in posting
    assert records[-1]["message"].startswith("posted 1 message, lateness p50 ")
    assert drain.stop() == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("jobs/webhooks.py", "--topic", "a:b"), "A topic has 1 to 64"),
        (("jobs/webhooks.py", "--secrets", "none"), "The secrets none can't be read"),
        (("jobs/webhooks.py", "--from", "yesterday"), "is no place to begin at"),
        (("jobs/topics.py", "set", "mail", "webhook=example.org"), "webhook must be an http:// or https:// URL"),
        (("jobs/topics.py", "set", "mail", "webhook=http://u:hidden@h/"), "but is 'http://u:***@h/'"),
        (("jobs/topics.py", "set", "mail", "webhook_timeout_sec=0"), "webhook_timeout_sec must be 0.1 to 3600"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(
    checkout: Checkout, redis_server: RealServer, words: tuple[str, ...], said: str
) -> None:
    [line] = told(checkout, redis_server, *words, code=2)
    assert said in line
    assert "hidden" not in line
