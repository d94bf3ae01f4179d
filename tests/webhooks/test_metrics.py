"""What Prometheus sees of jobs/webhooks.py."""

import pytest
from prometheus_client import CollectorRegistry

from pipeline import __version__
from pipeline.core.errors import StoreUnavailable
from pipeline.webhooks import service
from pipeline.webhooks.metrics import WebhooksCollector
from pipeline.webhooks.service import Webhooks
from tests.webhooks.conftest import World
from tests.webhooks.receiver import Answer, Posted, Receiver


class Scraped:
    def __init__(self, webhooks: Webhooks) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(WebhooksCollector("here", webhooks))

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"duetime_{name}", {"namespace": "here", **labels})

    def requests(self, topic: str = "mail") -> dict[str, float | None]:
        results = ("taken", "refused", "failed", "unavailable")
        return {each: self.value("webhooks_requests_total", topic=topic, result=each) for each in results}


def test_what_is_posted_is_served_by_topic_and_result(world: World, receiver: Receiver) -> None:
    answers = {b"gone": Answer(410), b"bad": Answer(400), b"busy": Answer(429, headers={"Retry-After": "0"})}

    def answer(posted: Posted) -> Answer:
        is_first = [each.body for each in receiver.posted].count(posted.body) == 1
        return answers.get(posted.body, Answer()) if is_first or posted.body != b"busy" else Answer()

    receiver.answer = answer
    world.set("mail", webhook=receiver.url, webhook_concurrency=1, attempts_max=2, backoff_ms=1, backoff_ms_max=2)
    scraped = Scraped(world.post())
    assert scraped.requests() == dict.fromkeys(("taken", "refused", "failed", "unavailable"))
    world.send("mail", "good", "gone", "bad", "good")
    world.wait_for(lambda: len(world.dead("mail")) == 2 and world.is_settled("mail"), "dead letters")
    world.send("mail", "busy")
    world.wait_for(lambda: len(receiver.posted) == 7 and world.is_settled("mail"), "acknowledgement of all")
    assert scraped.requests() == {"taken": 3, "refused": 1, "failed": 2, "unavailable": 1}
    assert scraped.value("webhooks_dead_letters_total", topic="mail") == 2
    assert scraped.value("webhooks_retries_total", topic="mail") == 2
    assert scraped.value("webhooks_lateness_seconds_count", topic="mail") == 3
    assert scraped.value("build_info", version=__version__) == 1


def test_a_target_that_is_down_is_seen(world: World, receiver: Receiver) -> None:
    receiver.answer = lambda posted: Answer(429)
    world.set("mail", webhook=receiver.url)
    scraped = Scraped(world.post())
    assert scraped.value("webhooks_target_down", topic="mail") == 0
    world.send("mail", "first")
    world.wait_for(lambda: scraped.value("webhooks_target_down", topic="mail") == 1, "knowledge that it is down")
    receiver.answer = lambda posted: Answer()
    world.wait_for(lambda: scraped.value("webhooks_target_down", topic="mail") == 0, "knowledge that it works")


def test_a_server_that_is_away_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    webhooks = world.post()
    scraped = Scraped(webhooks)
    assert scraped.value("webhooks_up") == 1

    def fail(*arguments: object) -> None:
        raise StoreUnavailable("Redis does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(service, "current_settings", fail)
        with pytest.raises(StoreUnavailable):
            webhooks.look()
        assert scraped.value("webhooks_up") == 0
    webhooks.look()
    assert scraped.value("webhooks_up") == 1
