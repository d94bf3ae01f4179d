"""Short ways to say what a test stores."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from pipeline.store.base import NO_FENCE, FenceMove, Group, IdentifiedMessage, Transaction

BUCKET_MS = 600_000
TOKEN = "P" * 14


def member(line: int, text: str = "", token: str = TOKEN) -> bytes:
    return f"{token}{line:08x}m{text or f'message {line}'}".encode()


def group(bucket_start_ms: int, messages: Sequence[tuple[int, bytes]]) -> Group:
    """Messages of one bucket as they go on the wire."""
    words = (word for due_ms, member in messages for word in (b"%d" % due_ms, member))
    return Group(bucket_start_ms, len(messages), b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))


def transaction(
    *rows: tuple[int, int],
    before: str = NO_FENCE,
    after: str = "all",
    rejected: int = 0,
    identified: tuple[tuple[int, int, str], ...] = (),
    token: str = TOKEN,
    member_of: Callable[[int, str], bytes] | None = None,
) -> Transaction:
    """A transaction of one file: (line, due_ms) rows, and (line, due_ms, caller's id) rows.

    Args:
        member_of: what is stored for a line and its caller's id.
    """
    write = member_of or (lambda line, caller_id: member(line, token=token))
    groups = defaultdict(list)
    for line, due_ms in sorted(rows, key=lambda row: row[1]):
        groups[due_ms - due_ms % BUCKET_MS].append((due_ms, write(line, "")))
    return Transaction(
        moves=[FenceMove(token, before, after)],
        groups=[group(start, pairs) for start, pairs in groups.items()],
        identified=[
            IdentifiedMessage(due_ms - due_ms % BUCKET_MS, due_ms, write(line, caller_id), caller_id)
            for line, due_ms, caller_id in identified
        ],
        rejected=rejected,
    )
