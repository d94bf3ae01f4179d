"""Where the bars of a chart are; the template draws them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.core.buckets import BUCKET_WIDTH_MS, bucket_start_ms
from pipeline.core.lateness import BOUNDS_MS, Lateness
from pipeline.core.text import span_text, utc_text
from pipeline.web.rendering import path_of

HEIGHT: Final = 100.0  # of the tallest bar
LEAST: Final = 1.5  # of one that is not empty
MARKS: Final = 6  # labels below the bars of time
LATENESS_STEP: Final = 4  # bars between two labels
RANGES: Final = (6, 24, 168)  # hours


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: where it is, how many it stands for and of what, and where it leads to."""

    x: float
    y: float
    width: float
    height: float
    count: int
    label: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """The bars that are not empty, ``width`` places in all, the marks below with the places of each, ``most`` in a bar, and all."""

    bars: Sequence[Bar]
    width: int
    marks: Sequence[tuple[str, int]]
    most: int
    total: int


def load_chart(buckets: Mapping[int, int], now_ms: int, hours: int) -> Chart:
    """Draw how many messages are due in each ten minutes from now on."""
    first = bucket_start_ms(now_ms)
    starts = range(first, first + hours * 3_600_000, BUCKET_WIDTH_MS)
    counts = [buckets.get(start, 0) for start in starts]
    labels = [f"{utc_text(start)[:16]} to {utc_text(start + BUCKET_WIDTH_MS)[11:16]} UTC" for start in starts]
    paths = [path_of("messages", **{"from": start, "to": start + BUCKET_WIDTH_MS}) for start in starts]
    every = len(starts) // MARKS
    marks = [utc_text(start)[5:16] if hours > 24 else utc_text(start)[11:16] for start in starts[::every]]
    return _chart(counts, labels, paths, [(mark, 1) for mark in marks])


def lateness_chart(lateness: Lateness) -> Chart:
    """Draw how many messages were how late."""
    labels = [f"at most {span_text(bound)}" for bound in BOUNDS_MS] + [f"more than {span_text(BOUNDS_MS[-1])}"]
    step = LATENESS_STEP
    marks = [(span_text(BOUNDS_MS[at]), min(step, len(labels) - at)) for at in range(0, len(labels), step)]
    return _chart(lateness.counts, labels, [""] * len(labels), marks)


def _chart(
    counts: Sequence[int], labels: Sequence[str], paths: Sequence[str], marks: Sequence[tuple[str, int]]
) -> Chart:
    most = max(counts, default=0)
    bars = []
    for x, (count, label, path) in enumerate(zip(counts, labels, paths, strict=True)):
        if count:
            height = round(max(LEAST, HEIGHT * count / most), 2)
            bars.append(Bar(x + 0.08, round(HEIGHT - height, 2), 0.84, height, count, label, path))
    return Chart(bars, len(counts), marks, most, sum(counts))
