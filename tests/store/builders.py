"""Short ways to say what a test stores."""

from collections import defaultdict

from pipeline.store.base import Chunk, Group, IdentifiedMessage

BUCKET_MS = 600_000
TOKEN = "P" * 14


def member(line: int, text: str = "", token: str = TOKEN) -> bytes:
    return f"{token}{line:08x}m{text or f'message {line}'}".encode()


def chunk(
    *rows: tuple[int, int],
    previous_line: int = 0,
    last_line: int | None = None,
    rejected: int = 0,
    identified: tuple[tuple[int, int, str], ...] = (),
    token: str = TOKEN,
) -> Chunk:
    """A chunk of (line, due_ms) rows, and of (line, due_ms, caller's id) rows."""
    groups = defaultdict(list)
    for line, due_ms in sorted(rows, key=lambda row: row[1]):
        groups[due_ms - due_ms % BUCKET_MS] += [str(due_ms).encode(), member(line, token=token)]
    lines = [line for line, *_ in [*rows, *identified]]
    return Chunk(
        file_token=token,
        previous_line=previous_line,
        last_line=last_line if last_line is not None else max(lines, default=previous_line),
        rejected=rejected,
        groups=[Group(start, pairs) for start, pairs in groups.items()],
        identified=[
            IdentifiedMessage(due_ms - due_ms % BUCKET_MS, due_ms, member(line, token=token), caller_id)
            for line, due_ms, caller_id in identified
        ],
    )
