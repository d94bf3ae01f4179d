"""Idempotency keys whose messages have ended: known for a time, then forgotten."""

from collections.abc import Callable
from typing import Any

from pipeline.store.keys import Keys
from pipeline.store.scripts import Scripts, run_script

FORGET_LIMIT = 1_000  # a call, of those that were delivered and of those that were cancelled


def forget_ids(client: Any, keys: Keys, scripts: Scripts, now_ms: Callable[[], int] | None = None) -> bool:
    """Forget keys of a shard whose time is over, some at a time; says whether there may be more. Atomic.

    Args:
        now_ms: tests give a clock; None means the server's.

    Raises:
        StoreError: no answer, or an error.
    """
    now = now_ms() if now_ms else ""
    forgotten = run_script(client, scripts, "forget_ids", [keys.ids(), keys.cancelled()], [FORGET_LIMIT, now])
    return bool(forgotten == FORGET_LIMIT)
