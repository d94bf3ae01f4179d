"""What pages show, read from Redis within bounds, and as the templates want it."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from pipeline.core.lateness import Lateness
from pipeline.core.text import count_text, span_text
from pipeline.status import Status, read_status
from pipeline.store.heartbeats import FRESH_MS, LoopProgress, LoopStats, add_up_loops, add_up_topics
from pipeline.store.namespace import current_topic_settings
from pipeline.store.topics import TopicInfo, Topics
from pipeline.web.api import Api
from pipeline.web.charts import RANGES, lateness_chart, load_chart
from pipeline.web.rendering import path_of, relative

WINDOW_MS: Final = 10_000  # rates are those of so long a time
GAP_MS: Final = 120_000  # looks that are further apart say nothing of now
TOPICS_SHOWN: Final = 10  # on the overview
TOPICS_PAGE: Final = 100


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic: what there is of it, and what the loops of the last hour did with it."""

    info: TopicInfo
    path: str
    delivered: int
    p99_ms: int | None
    rate: float | None


@dataclass(frozen=True, slots=True)
class Tile:
    """A number that matters; ``tone`` is "bad" if somebody should look after it."""

    id: str
    label: str
    value: str
    note: str = ""
    tone: str = ""
    path: str = ""


class Rates:
    """How fast counters rise, by the looks that were taken at them."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Mapping[str, int]]] = deque()

    def add(self, at_ms: float, counters: Mapping[str, int]) -> None:
        """Add a look, by a clock that only runs forward."""
        while self._looks and (len(self._looks) > 1 and at_ms - self._looks[1][0] >= WINDOW_MS):
            self._looks.popleft()
        while self._looks and at_ms - self._looks[0][0] > GAP_MS:
            self._looks.popleft()
        self._looks.append((at_ms, counters))

    def per_sec(self, name: str) -> float | None:
        """Return how much a counter rose a second; None if that is not known."""
        (first_ms, first), (last_ms, last) = self._looks[0], self._looks[-1]
        if last_ms - first_ms < 500 or name not in first or name not in last:
            return None
        return max(0, last[name] - first[name]) * 1_000 / (last_ms - first_ms)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the namespace, at which time of a clock that only runs forward; ``total`` is of the loops of the last hour."""

    at_ms: float
    status: Status
    total: LoopStats
    topics: Sequence[TopicInfo]

    def counters(self) -> dict[str, int]:
        """Return what rates are made of."""
        counted = {name: self.status.stats.counters.get(name, 0) for name in ("stored", "delivered")}
        return counted | {f"topic {name}": each.delivered for name, each in self.total.topics.items()}


def read_look(api: Api) -> Look:
    """Look at the namespace.

    Raises:
        StoreError: no answer, or an error.
    """
    status = read_status(api.client, api.shards)
    total = add_up_loops(each.stats for each in status.loops)
    topics = Topics(api.client, api.shards)
    names = sorted(total.topics, key=lambda name: -total.topics[name].delivered)[:TOPICS_SHOWN]
    if len(names) < TOPICS_SHOWN:
        names = [*names, *(name for name in topics.names() if name not in names)][:TOPICS_SHOWN]
    return Look(api.clock.monotonic_ms(), status, total, topics.look_many(names))


def overview(look: Look, rates: Rates, hours: int) -> dict[str, Any]:
    """Return what the overview shows."""
    stats, status = look.status.stats, look.status
    chart = load_chart(stats.buckets, stats.now_ms, hours)
    lateness = add_up_topics(look.total.topics.values()).lateness
    return {
        "now_ms": stats.now_ms,
        "problems": status.problems(),
        "verdict": status.verdict(),
        "tiles": _tiles(look, rates, lateness),
        "chart": chart,
        "hours": hours,
        "ranges": RANGES,
        "beyond": sum(stats.buckets.values()) - chart.total,
        "late": stats.late,
        "lateness": lateness_chart(lateness),
        "p50": span_text(lateness.quantile_ms(0.5)),
        "p99": span_text(lateness.quantile_ms(0.99)),
        "topics": [_row(info, look, rates) for info in look.topics],
        "ingests": status.ingests[:5],
        "is_empty": status.is_empty() and not stats.counters.get("stored"),
        "has_loop": bool(status.running_loops()),
    }


def _tiles(look: Look, rates: Rates, lateness: Lateness) -> list[Tile]:
    stats = look.status.stats
    due = stats.next_due_ms
    held = f"{count_text(stats.held, 'held message')}" if stats.held else "scheduled messages"
    next_due = "nothing" if due is None else relative(max(0, due - stats.now_ms))
    p99 = span_text(lateness.quantile_ms(0.99)) if lateness.total() else "none yet"
    return [
        Tile("waiting", "Waiting", f"{stats.scheduled:,}", held, "", "/messages"),
        Tile("next-due", "Next due", next_due, "" if due is None else "the first of all"),
        Tile(
            "oldest-late",
            "Oldest late",
            span_text(stats.overdue_ms) if stats.late else "none",
            f"{stats.late:,} late by 10 s or more" if stats.late else "nothing is late",
            "bad" if stats.late else "",
            path_of("messages", to=stats.now_ms) if stats.late else "",
        ),
        Tile("in-flight", "In flight", f"{stats.in_flight:,}", "with a drain loop now"),
        Tile("dead", "Dead letters", f"{stats.dead:,}", "given up", "bad" if stats.dead else "", "/dead"),
        Tile(
            "delivered",
            "Delivered a second",
            _rate(rates, "delivered"),
            f"{stats.counters.get('delivered', 0):,} in all",
        ),
        Tile("stored", "Stored a second", _rate(rates, "stored"), f"{stats.counters.get('stored', 0):,} in all"),
        Tile("lateness", "Lateness p99", p99, "by the loops of the last hour"),
    ]


def _rate(rates: Rates, name: str) -> str:
    rate = rates.per_sec(name)
    return "–" if rate is None else rate_text(rate)


def rate_text(rate: float) -> str:
    """Return a number a second, with a decimal where it is small."""
    return f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def _row(info: TopicInfo, look: Look, rates: Rates) -> TopicRow:
    done = look.total.topics.get(info.name)
    return TopicRow(
        info,
        path_of("topics", info.name),
        done.delivered if done else 0,
        done.lateness.quantile_ms(0.99) if done and done.lateness.total() else None,
        rates.per_sec(f"topic {info.name}"),
    )


def topics(api: Api, look: Look, rates: Rates, after: str) -> dict[str, Any]:
    """Read what the list of topics shows, behind a name.

    Raises:
        StoreError: no answer, or an error.
    """
    found = Topics(api.client, api.shards)
    names = found.names()
    shown = [name for name in names if name > after][: TOPICS_PAGE + 1]
    rows = [_row(info, look, rates) for info in found.look_many(shown[:TOPICS_PAGE])]
    more = path_of("topics", after=shown[TOPICS_PAGE - 1]) if len(shown) > TOPICS_PAGE else ""
    return {"now_ms": look.status.stats.now_ms, "rows": rows, "count": len(names), "more": more, "after": after}


def topic(api: Api, look: Look, rates: Rates, name: str) -> dict[str, Any]:
    """Read what the page of a topic shows.

    Raises:
        StoreError: no answer, or an error.
    """
    found = Topics(api.client, api.shards)
    settings = current_topic_settings(api.client, api.settings, name)
    row, groups = _row(found.look(name), look, rates), found.groups(name)
    has_any = row.info.in_stream or row.info.held or row.info.dead or row.delivered or groups
    return {
        "now_ms": look.status.stats.now_ms,
        "row": row,
        "groups": groups,
        "is_known": bool(has_any or row.info.paused_ms is not None),
        "lease_ms": settings.lease_sec * 1000,
        "settings": sorted(asdict(settings).items()),
    }


def loops(look: Look) -> dict[str, Any]:
    """Return what is shown of drain loops and ingest jobs."""
    stats = look.status.stats
    return {
        "now_ms": stats.now_ms,
        "loops": [(each, _state(each, stats.now_ms), _lateness(each)) for each in look.status.loops],
        "running": len(look.status.running_loops()),
        "ingests": look.status.ingests,
        "running_ingests": look.status.running_ingests,
        "total": look.total,
        "outbox": stats.outbox,
        "outbox_ms": stats.outbox_ms,
    }


def _state(loop: LoopProgress, now_ms: int) -> str:
    return "ended" if loop.has_ended else "running" if now_ms - loop.seen_ms < FRESH_MS else "silent"


def _lateness(loop: LoopProgress) -> Lateness:
    return add_up_topics(loop.stats.topics.values()).lateness
