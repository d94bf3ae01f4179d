"""Rows that cancel and replace: how many go together, which of one key counts, and what each comes to."""

from collections.abc import Iterable, Iterator

from pipeline.core.messages import Cancellation, Change
from pipeline.store.base import Found, State

CHANGES_MAX = 100  # a round trip, whose replies may have a message each
CHANGES_BYTES = 4 * 1024 * 1024  # of their messages, a round trip, give or take one


def rank(change: Change) -> tuple[bool, str]:
    """Return what is greater for the change that wins among those of one key."""
    return (True, "") if isinstance(change, Cancellation) else (False, change.message.message_id)


def outcome_of(change: Change, found: Found) -> str:
    """Return what a change counts as, by the name in ``Changed``."""
    if found.state in (State.IN_FLIGHT, State.DELIVERED):
        return "late"
    if isinstance(change, Cancellation):
        return "cancelled" if found.message or found.state is State.UNKNOWN else "duplicates"
    is_there = found.message is not None and found.message.message_id == change.message.message_id
    return "replaced" if is_there else "duplicates"


def pages_of(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Cut changes into as many as go in one round trip."""
    page: list[Change] = []
    size = 0
    for change in changes:
        page.append(change)
        size += 0 if isinstance(change, Cancellation) else len(change.message.body)
        if len(page) == CHANGES_MAX or size >= CHANGES_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page
