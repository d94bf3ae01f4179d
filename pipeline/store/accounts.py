"""How jobs tell of themselves: a hash each, which expires, and an index of them by time."""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.store.connection import translated_errors


def replace_account(
    client: Any, key: str, index_key: str, name: str, at_ms: int, keep_sec: int, values: Mapping[str, Any]
) -> None:
    """Replace what is known of ``name``, and forget those that said nothing for ``keep_sec``, in one round trip.

    Args:
        values: written as JSON, each for itself.

    Raises:
        StoreError: no answer, or an error.
    """
    texts = {field: json.dumps(value, ensure_ascii=False) for field, value in values.items()}
    with translated_errors():
        pipeline = client.pipeline(transaction=True)
        pipeline.hset(key, mapping=texts)
        pipeline.expire(key, keep_sec)
        pipeline.zadd(index_key, {name: at_ms})
        pipeline.zremrangebyscore(index_key, "-inf", at_ms - keep_sec * 1000)
        pipeline.execute()
