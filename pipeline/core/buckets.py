"""Due times are kept in buckets of ten minutes; this is the arithmetic of their borders."""

from typing import Final

BUCKET_WIDTH_MS: Final = 600_000


def bucket_start_ms(due_ms: int) -> int:
    """Return the start (ms UTC) of the bucket that holds ``due_ms``: a start belongs to its own bucket."""
    return due_ms - due_ms % BUCKET_WIDTH_MS
