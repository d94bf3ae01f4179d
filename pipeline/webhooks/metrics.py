"""What a job has posted, for Prometheus. Imported only where it is served."""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import Metric

from pipeline.consume.retries import Outcome
from pipeline.metrics import JobCollector
from pipeline.webhooks.service import Webhooks
from pipeline.webhooks.totals import Result

REQUESTS: Final = (
    "Requests by what became of them: taken (2xx), refused (410), failed (another answer, or none), unavailable (no connection, or "
    "429, or 503 with Retry-After: no attempt)."
)


class WebhooksCollector(JobCollector):
    """The numbers of one job. It asks nobody for them."""

    def __init__(self, namespace: str, webhooks: Webhooks) -> None:
        super().__init__(namespace)
        self._webhooks = webhooks

    def collect(self) -> Iterator[Metric]:
        """Return everything as it is now."""
        topics, down = self._webhooks.totals.snapshot(), self._webhooks.targets_down()
        yield self.build_info()
        meaning = "1 if Redis answered at the last look at the settings of topics."
        yield self.gauge("webhooks_up", meaning, self._webhooks.is_up)
        requests = {(topic, result): each.requests[result] for topic, each in topics.items() for result in Result}
        yield self.counter("webhooks_requests", REQUESTS, requests, "topic", "result")
        for name, outcome, meaning in (
            ("retries", Outcome.RETRY, "Messages that were not taken and are to be tried again."),
            ("dead_letters", Outcome.DEAD, "Messages that became dead letters."),
        ):
            counts = {(topic,): each.outcomes[outcome] for topic, each in topics.items()}
            yield self.counter(f"webhooks_{name}", meaning, counts, "topic")
        meaning = (
            "From when a message was due to when its target had taken it, at the first attempt, on the job's clock."
        )
        lateness = {(topic,): each.lateness for topic, each in topics.items()}
        yield self.histogram("webhooks_lateness_seconds", meaning, lateness, "topic")
        meaning = "1 while the target seems to be down, so that one message at a time is tried."
        yield self.gauges(
            "webhooks_target_down", meaning, {(topic,): is_down for topic, is_down in down.items()}, "topic"
        )
