"""What the API counts, for Prometheus."""

from typing import TYPE_CHECKING, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

if TYPE_CHECKING:
    from pipeline.web.api import Api

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_SEC: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Meters:
    """Counters of one process since it started."""

    def __init__(self, api: "Api") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one series in eight, which nobody asks for
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        namespace = api.settings.redis.namespace

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"duetime_api_{name}", meaning, ["namespace", *labels], registry=self._registry)

        self._requests = counter("requests", "Requests that were answered.", "method", "route", "status")
        self._seconds = Histogram(
            "duetime_api_request_seconds",
            "From the head of a request to its answer.",
            ["namespace", "method", "route"],
            buckets=BOUNDS_SEC,
            registry=self._registry,
        )
        self.stored = counter("stored", "Messages that were stored.").labels(namespace)
        self.duplicates = counter("duplicates", "Messages whose id was known.").labels(namespace)
        self._namespace = namespace
        self._known: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        for name, meaning, value in (
            ("waiting", "Messages that wait to be stored.", lambda: api.waiting_messages),
            ("reading_bytes", "Bytes of bodies in memory.", lambda: api.reading.bytes),
            ("connections", "Open connections.", api.count_connections),
        ):
            gauge = Gauge(f"duetime_api_{name}", meaning, ["namespace"], registry=self._registry)
            gauge.labels(namespace).set_function(value)

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        key = (method, route, status)
        if key not in self._known:
            self._known[key] = (
                self._requests.labels(self._namespace, method, route, str(status)),
                self._seconds.labels(self._namespace, method, route),
            )
        requests, histogram = self._known[key]
        requests.inc()
        histogram.observe(seconds)

    def text(self) -> bytes:
        """Return everything as it is now."""
        return generate_latest(self._registry)
