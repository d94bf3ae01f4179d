"""Short ways to say what a test stores."""

from collections import defaultdict

from pipeline.store.base import NO_FENCE, FenceMove, Group, IdentifiedMessage, Transaction
from pipeline.store.resp import frame_pair

BUCKET_MS = 600_000
TOKEN = "P" * 14


def member(line: int, text: str = "", token: str = TOKEN) -> bytes:
    return f"{token}{line:08x}m{text or f'message {line}'}".encode()


def transaction(
    *rows: tuple[int, int],
    before: str = NO_FENCE,
    after: str = "all",
    rejected: int = 0,
    identified: tuple[tuple[int, int, str], ...] = (),
    token: str = TOKEN,
) -> Transaction:
    """A transaction of one file: (line, due_ms) rows, and (line, due_ms, caller's id) rows."""
    groups = defaultdict(list)
    for line, due_ms in sorted(rows, key=lambda row: row[1]):
        groups[due_ms - due_ms % BUCKET_MS].append(frame_pair(due_ms, member(line, token=token).decode()))
    return Transaction(
        moves=[FenceMove(token, before, after)],
        groups=[Group(start, pairs) for start, pairs in groups.items()],
        identified=[
            IdentifiedMessage(due_ms - due_ms % BUCKET_MS, due_ms, member(line, token=token), caller_id)
            for line, due_ms, caller_id in identified
        ],
        rejected=rejected,
    )
