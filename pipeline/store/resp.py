"""Messages as they go on the wire: score and member as RESP bulk strings, framed once where a message is made.

A client that packs millions of small arguments by itself costs more than parsing them out of JSON. The protocol is
https://redis.io/docs/latest/develop/reference/protocol-spec/, and only bulk strings are used of it.
"""

from collections.abc import Sequence


def frame_pair(due_ms: int, member: str) -> str:
    """Return due_ms and member as two bulk strings; texts until they are sent, as joining many is cheap."""
    size = len(member) if member.isascii() else len(member.encode())
    due = str(due_ms)
    return f"${len(due)}\r\n{due}\r\n${size}\r\n{member}\r\n"


def unframe_pair(pair: str) -> tuple[int, bytes]:
    """Return due_ms and member of ``frame_pair``."""
    _, due_ms, _, rest = pair.split("\r\n", 3)
    return int(due_ms), rest[:-2].encode()


def frame_command(*words: str | bytes | int, pairs: Sequence[str] = ()) -> bytes:
    """Return a command of ``words``, followed by pairs of ``frame_pair``."""
    encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    head = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
    return b"*%d\r\n%b%b" % (len(words) + 2 * len(pairs), head, "".join(pairs).encode())
