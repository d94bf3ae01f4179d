"""The lines of a body, judged by the rules of requests."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.core.messages import Change, Message, Rejection
from pipeline.core.validation import validate_line
from pipeline.ingest.usual_lines import fast_request
from pipeline.web.problems import Problem


@dataclass(slots=True)
class Judged:
    """The lines of a batch: messages and changes, each with its place, counted from 0, and what is refused."""

    count: int
    messages: list[Message] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    change_places: list[int] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)


def judge(line: bytes, arrival_ms: int) -> Message | Change | Rejection | None:
    """Judge a line; None is a blank one."""
    return fast_request(line, arrival_ms) or validate_line(line, "json", arrival_ms)


def split(body: bytes) -> list[bytes]:
    """Return the lines of a body, without their ends; the last one may lack its end."""
    lines = body.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix(b"\r") for line in lines] if b"\r" in body else lines


def judge_lines(lines: list[bytes], arrival_ms: int, is_strict: bool) -> Judged:
    """Judge each line; blank ones are left out.

    Raises:
        Problem: ``lines_refused``, if all must be right and some are not.
    """
    judged = Judged(len(lines))
    for place, line in enumerate(lines):
        found = judge(line, arrival_ms)
        if isinstance(found, Message):
            judged.messages.append(found)
            judged.places.append(place)
        elif isinstance(found, Rejection):
            judged.rejected.append({"line": place + 1, "reason": found.reason, "detail": found.detail})
        elif found is not None:
            judged.changes.append(found)
            judged.change_places.append(place)
    if is_strict and judged.rejected:
        raise Problem("lines_refused", "Correct the lines, and send all of them again.", rejected=judged.rejected)
    return judged
