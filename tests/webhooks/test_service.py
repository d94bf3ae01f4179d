"""Topics with webhooks, from their streams to their targets."""

import socket
import threading
import time
from collections import Counter

import pytest

from jobs import topics
from pipeline.cli import EXIT_SUCCESS
from pipeline.core.clock import SystemClock
from pipeline.core.stop import Stop
from pipeline.store.topics import Topics
from pipeline.webhooks.service import GROUP
from tests.webhooks.conftest import World
from tests.webhooks.receiver import Answer, Posted, Receiver, receiving


def test_a_topic_with_a_webhook_is_posted_and_acknowledged_whatever_its_sink(world: World, receiver: Receiver) -> None:
    world.set("*", sink="screen")
    world.set("mail", webhook=receiver.url)
    world.send("mail", "before the first start")
    world.wait_for(lambda: world.client.xlen(world.shards[0].stream("mail")) == 1, "message in the stream")
    webhooks = world.post()
    world.send("mail", *(f"message {number}" for number in range(20)), headers={"a": "b"})
    receiver.wait_for_posts(21)
    world.wait_for(lambda: world.is_settled("mail"), "acknowledgement of all")
    assert Counter(receiver.bodies()) == Counter(["before the first start", *(f"message {n}" for n in range(20))])
    assert receiver.posted[-1].header("duetime-header-a") == "b"
    assert (webhooks.totals.posted, webhooks.totals.lateness.total()) == (21, 21)
    assert str(webhooks.totals).startswith("posted 21 messages, lateness p50 ")
    assert str(webhooks.totals).endswith("; 0 refused, 0 failed tries, 0 late acks")


def set_by_command(world: World, *words: str) -> None:
    redis = world.settings.redis
    code = topics.main(["set", *words, "--redis", redis.url, "--namespace", redis.namespace], Stop())
    assert code == EXIT_SUCCESS


def fill(world: World, *names: str) -> None:
    for name in names:
        world.send(name, f"{name} before")
        world.wait_for(lambda: world.client.xlen(world.shards[0].stream(name)) == 1, "message in the stream")  # noqa: B023


def test_a_webhook_begins_when_it_is_set_though_its_job_is_started_later(
    world: World, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    world.set("*", sink="stream")
    fill(world, "mail")
    set_by_command(world, "mail", f"webhook={receiver.url}")
    world.send("mail", "after")
    world.wait_for(lambda: world.client.xlen(world.shards[0].stream("mail")) == 2, "message in the stream")
    world.post()
    receiver.wait_for_posts(1)
    world.wait_for(lambda: world.is_settled("mail"), "acknowledgement of all")
    assert receiver.bodies() == ["after"]
    with caplog.at_level("INFO"):
        set_by_command(world, "mail", f"webhook={receiver.url}", "--from", "beginning")
    assert "the webhook of topic mail goes on where it was" in caplog.text


def test_a_webhook_begins_with_what_the_stream_keeps_if_that_is_asked_for(world: World, receiver: Receiver) -> None:
    world.set("*", sink="stream")
    fill(world, "mail")
    set_by_command(world, "mail", f"webhook={receiver.url}", "--from", "beginning")
    world.post()
    receiver.wait_for_posts(1)
    assert receiver.bodies() == ["mail before"]


def test_a_webhook_of_all_topics_begins_when_it_is_set_and_with_all_of_a_topic_that_comes_later(
    world: World, receiver: Receiver
) -> None:
    world.set("*", sink="stream")
    world.set("none", webhook="", sink="stream")
    fill(world, "mail", "none")
    set_by_command(world, f"webhook={receiver.url}")
    fill(world, "later")
    world.send("mail", "mail after")
    world.post()
    receiver.wait_for_posts(2)
    assert sorted(receiver.bodies()) == ["later before", "mail after"]
    assert Topics(world.user, world.shards).groups("none") == []


def test_a_message_whose_target_is_gone_is_a_dead_letter_at_once(world: World, receiver: Receiver) -> None:
    receiver.answer = lambda posted: Answer(410, b"no such customer") if posted.body == b"bad" else Answer()
    world.set("mail", webhook=receiver.url)
    webhooks = world.post()
    world.send("mail", "good", "bad", "good")
    world.wait_for(lambda: world.dead("mail") != [] and world.is_settled("mail"), "dead letter")
    [letter] = world.dead("mail")
    assert (letter["message"], letter["reason"], letter["attempt"], letter["group"]) == ("bad", "refused", "1", GROUP)
    assert letter["detail"] == f"HTTP 410 from {receiver.url}: no such customer"
    assert (webhooks.totals.posted, webhooks.totals.refused, webhooks.totals.failed) == (2, 1, 0)


def test_what_fails_is_tried_again_under_the_same_id_and_then_a_dead_letter(world: World, receiver: Receiver) -> None:
    receiver.answer = lambda posted: Answer(500, b"oops")
    world.set("mail", webhook=receiver.url, attempts_max=3, backoff_ms=1, backoff_ms_max=2)
    webhooks = world.post()
    world.send("mail", "bad", id="order-1")
    world.wait_for(lambda: world.dead("mail") != [], "dead letter")
    assert [posted.attempt for posted in receiver.posted] == [1, 2, 3]
    assert {posted.header("webhook-id") for posted in receiver.posted} == {"order-1"}
    [letter] = world.dead("mail")
    assert (letter["reason"], letter["detail"]) == ("failed", f"HTTP 500 from {receiver.url}: oops")
    assert webhooks.totals.failed == 3


def test_a_target_that_is_down_costs_no_attempt_however_many_are_in_flight(world: World) -> None:
    receiver = Receiver()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    world.set("mail", webhook=f"http://127.0.0.1:{port}/", webhook_concurrency=8, backoff_ms=1, backoff_ms_max=2)
    webhooks = world.post()
    sent = [f"message {number}" for number in range(40)]
    world.send("mail", *sent)
    world.wait_for(lambda: webhooks.totals.failed >= 10, "tries")
    assert webhooks.totals.failed < 20, "the target is not left in peace"
    with receiving(receiver, port):
        receiver.wait_for_posts(len(sent))
        world.wait_for(lambda: world.is_settled("mail"), "acknowledgement of all")
    assert Counter(receiver.bodies()) == Counter(sent)
    assert {posted.attempt for posted in receiver.posted} == {1}
    assert world.dead("mail") == []


@pytest.mark.parametrize("status", [502, 404, 401, 400])
def test_a_target_that_only_fails_costs_five_messages_one_attempt(
    world: World, receiver: Receiver, status: int
) -> None:
    over = threading.Event()
    receiver.answer = lambda posted: Answer() if over.is_set() else Answer(status)
    world.set("mail", webhook=receiver.url, webhook_concurrency=8, backoff_ms=300, attempts_max=2)
    world.post()
    sent = [f"message {number}" for number in range(40)]
    world.send("mail", *sent)
    receiver.wait_for_posts(20)
    over.set()
    world.wait_for(lambda: world.is_settled("mail"), "acknowledgement of all")
    taken = Counter(posted.attempt for posted in receiver.posted[-40:])
    assert world.dead("mail") == []
    assert taken[2] <= 5


def test_a_target_that_asks_for_a_pause_gets_it_from_all(world: World, receiver: Receiver) -> None:
    times: list[float] = []

    def answer(posted: Posted) -> Answer:
        times.append(time.monotonic())
        return Answer(429, headers={"Retry-After": "1"}) if len(times) == 1 else Answer()

    receiver.answer = answer
    world.set("mail", webhook=receiver.url, webhook_concurrency=4)
    world.post()
    world.send("mail", "first")
    receiver.wait_for_posts(1)
    world.wait_for(lambda: world.client.zcard(world.shards[0].buckets()) == 1, "retry")
    world.send("mail", *(f"message {number}" for number in range(10)))
    receiver.wait_for_posts(12)
    assert times[1] - times[0] >= 0.99
    assert {posted.attempt for posted in receiver.posted} == {1}


def test_a_target_that_asks_for_a_pause_gets_it_though_it_takes_what_was_on_its_way(
    world: World, receiver: Receiver
) -> None:
    asked, times = threading.Event(), []

    def answer(posted: Posted) -> Answer:
        times.append(time.monotonic())
        if posted.body == b"busy" and posted.attempt == 1 and len(times) < 3:
            return Answer(503, headers={"Retry-After": "1"})
        return Answer(until=asked if posted.body == b"slow" else None)

    receiver.answer = answer
    world.set("mail", webhook=receiver.url, webhook_concurrency=2)
    webhooks = world.post()
    world.send("mail", "slow")
    receiver.wait_for_posts(1)
    world.send("mail", "busy")
    world.wait_for(lambda: webhooks.totals.failed == 1, "answer")
    asked.set()
    world.wait_for(lambda: webhooks.totals.posted == 1, "answer")
    world.send("mail", "next")
    receiver.wait_for_posts(4)
    assert times[2] - times[1] >= 0.99


def test_a_topic_whose_target_hangs_holds_up_no_other(world: World, receiver: Receiver) -> None:
    release = threading.Event()
    with receiving(Receiver()) as stuck:
        stuck.answer = lambda posted: Answer(until=release)
        world.set("slow", webhook=stuck.url, webhook_concurrency=2)
        world.set("mail", webhook=receiver.url)
        webhooks = world.post()
        world.send("slow", "a", "b", "c")
        stuck.wait_for_posts(2)
        for number in range(5):
            world.send("mail", f"message {number}")
            receiver.wait_for_posts(number + 1)
        webhooks.look()
        assert (len(stuck.posted), stuck.at_a_time) == (2, 2)
        release.set()
        stuck.wait_for_posts(3)
        world.wait_for(lambda: world.is_settled("slow"), "acknowledgement of all")


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_are_in_flight_at_a_time_and_one_by_one_they_keep_their_order(
    world: World, receiver: Receiver, concurrency: int
) -> None:
    release = threading.Event()
    receiver.answer = lambda posted: Answer(until=release)
    world.set("mail", webhook=receiver.url, webhook_concurrency=concurrency, webhook_timeout_sec=60)
    world.post()
    sent = [f"message {number:02}" for number in range(30)]
    world.send("mail", *sent)
    receiver.wait_for_posts(concurrency)
    release.set()
    receiver.wait_for_posts(30)
    assert receiver.at_a_time == concurrency
    assert sorted(receiver.bodies()) == sent
    if concurrency == 1:
        assert receiver.bodies() == sent


def test_a_webhook_that_is_set_changed_or_taken_away_counts_from_the_next_look(
    world: World, receiver: Receiver
) -> None:
    webhooks = world.post()
    world.set("*", sink="stream")
    world.set("mail", webhook=receiver.url)
    webhooks.look()
    world.send("mail", "first")
    receiver.wait_for_posts(1)
    with receiving(Receiver()) as other:
        world.set("mail", webhook=other.url)
        webhooks.look()
        world.send("mail", "second")
        other.wait_for_posts(1)
        world.wait_for(lambda: world.is_settled("mail"), "acknowledgement of all")
        world.set("mail", webhook=None)
        webhooks.look()
        world.wait_for(lambda: not webhooks.posting(), "end of the threads")
        world.send("mail", "third")
        world.wait_for(lambda: world.client.xlen(world.shards[0].stream("mail")) == 3, "message in the stream")
        world.set("mail", webhook=other.url)
        webhooks.look()
        other.wait_for_posts(2)
        assert (receiver.bodies(), other.bodies()) == (["first"], ["second", "third"])


def test_a_webhook_of_all_topics_counts_for_one_that_comes_later_and_not_for_one_that_has_none(
    world: World, receiver: Receiver
) -> None:
    world.set("*", webhook=receiver.url)
    world.set("mail", webhook="", sink="stream")
    webhooks = world.post()
    world.send("mail", "not posted")
    world.send("news", "posted")
    world.wait_for(lambda: bool(world.client.exists(world.shards[0].stream("news"))), "stream")
    webhooks.look()
    receiver.wait_for_posts(1)
    assert receiver.bodies() == ["posted"]
    assert [group.name for group in Topics(world.user, world.shards).groups("mail")] == []


def test_a_topic_of_a_shard_that_is_away_is_posted_on(
    world: World, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.set("*", webhook=receiver.url)
    world.send("news", "posted")
    world.wait_for(lambda: bool(world.client.exists(world.shards[0].stream("news"))), "stream")
    webhooks = world.post()
    receiver.wait_for_posts(1)
    for are_all, posting in ((False, ["news"]), (True, [])):
        monkeypatch.setattr(Topics, "names_that_answer", lambda topics, are_all=are_all: (set(), are_all))
        webhooks.look()
        assert webhooks.posting() == posting


def test_only_the_topics_that_were_asked_for_are_posted(world: World, receiver: Receiver) -> None:
    world.set("mail", webhook=receiver.url)
    world.set("news", webhook=receiver.url)
    webhooks = world.post("news", "other")
    assert webhooks.posting() == ["news"]


def test_a_url_that_another_program_wrote_is_checked_and_told_once(
    world: World, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    for number, url in enumerate(("file:///etc/passwd", "gopher://h/", "http://user:hidden@h/", "http://h/\r\nx: y")):
        world.set(f"bad-{number}", webhook=url)
    world.set("bad-4", webhook=receiver.url, webhook_concurrency=10**9)
    world.set("bad-5", webhook=5)
    world.set("mail", webhook=receiver.url, webhook_concurrency="2")
    webhooks = world.post()
    webhooks.look()
    assert webhooks.posting() == ["mail"]
    said = [record.getMessage() for record in caplog.records if "are not posted" in record.getMessage()]
    assert len(said) == 6
    assert "hidden" not in caplog.text


def test_a_stop_finishes_what_is_in_hand_and_gives_the_rest_back(world: World, receiver: Receiver) -> None:
    release = threading.Event()
    receiver.answer = lambda posted: Answer(until=release)
    world.set("mail", webhook=receiver.url, webhook_concurrency=2)
    webhooks = world.post()
    world.send("mail", *(f"message {number}" for number in range(10)))
    receiver.wait_for_posts(2)
    stopper = threading.Thread(target=webhooks.stop)
    stopper.start()
    world.wait_for(lambda: webhooks.posting() == [], "stop")
    release.set()
    stopper.join()
    in_hand = len(receiver.posted)
    assert webhooks.totals.posted == in_hand == 2
    again = world.post()
    receiver.wait_for_posts(10)
    again.stop()
    assert Counter(receiver.bodies()) == Counter(f"message {number}" for number in range(10))


def test_a_pause_for_a_target_that_is_down_does_not_hold_up_a_stop(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    receiver = Receiver()
    receiver.answer = lambda posted: Answer(503, headers={"Retry-After": "60"})
    with receiving(receiver, port):
        world.set("mail", webhook=receiver.url)
        webhooks = world.post()
        world.send("mail", "a")
        receiver.wait_for_posts(1)
        world.wait_for(lambda: world.client.zcard(world.shards[0].buckets()) == 1, "retry")
        began = time.monotonic()
        webhooks.stop()
        assert time.monotonic() - began < 50, "the pause is of 60 s"


def test_a_group_that_is_dropped_meanwhile_ends_its_topic_alone_and_is_told_once(
    world: World, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    world.set("mail", webhook=receiver.url, webhook_concurrency=1)  # others might register the group anew
    world.set("news", webhook=receiver.url)
    webhooks = world.post()
    world.wait_for(lambda: bool(world.client.exists(world.shards[0].retry("mail", GROUP))), "group")
    world.send("mail", "first")
    receiver.wait_for_posts(1)
    Topics(world.user, world.shards).drop_group("mail", GROUP)
    world.wait_for(lambda: "posting the messages of topic mail failed" in caplog.text, "complaint")
    webhooks.look()
    webhooks.look()
    world.send("news", "second")
    receiver.wait_for_posts(2)
    assert webhooks.posting() == ["news"]


def test_threads_that_end_by_an_accident_are_started_again(
    world: World, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.set("mail", webhook=receiver.url, webhook_concurrency=1)
    failed = threading.Event()

    def fail(*arguments: object) -> None:
        failed.set()
        raise RuntimeError("an accident")

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.webhooks.poster.run", fail)
        webhooks = world.post()
        world.wait_for(lambda: webhooks.posting() == [], "accident")
    assert "posting the messages of topic mail failed: RuntimeError: an accident; this is tried again" in caplog.text
    webhooks.look()
    world.send("mail", "first")
    receiver.wait_for_posts(1)


def test_a_message_that_is_due_is_posted_within_milliseconds(world: World, receiver: Receiver) -> None:
    late_ms: list[int] = []
    world.set("mail", webhook=receiver.url)
    world.post()
    for number in range(20):
        due_ms = world.send("mail", f"message {number}")
        receiver.wait_for_posts(number + 1)
        late_ms.append(SystemClock().wall_ms() - due_ms)
    assert sorted(late_ms)[10] < 100, late_ms  # a blocked read that does not wake up takes a second
