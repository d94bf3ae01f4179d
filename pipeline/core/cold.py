"""What Redis holds of a message that waits in a cold file (docs/adr/0031-cold-messages.md): its hour, and its place.

The place is shorter than any other: the hour for which the message counts, and its message id, as one number.
"""

from typing import Final

from pipeline.core.ids import LINE_NO_MAX, TOKEN_ALPHABET, TOKEN_LENGTH

# 20 bits of the hour, 84 of the token and 32 of the line: an entry of a hash has room for 17 bytes where one more costs 16 more.
COLD_PLACE_LENGTH: Final = 17
HOUR_MS: Final = 3_600_000  # cold messages are counted by the hours of their due times
COLD_HOUR_MAX: Final = (1 << 20) - 1  # in 2089


def hour_of(due_ms: int) -> int:
    """Return the hour since the epoch for which a cold message counts that is due at ``due_ms``; the last one has what is later."""
    return min(due_ms // HOUR_MS, COLD_HOUR_MAX)


def cold_place(message_id: str, due_ms: int) -> bytes:
    """Return the place of a message with an idempotency key that waits in a cold file."""
    bits = hour_of(due_ms)
    for character in message_id[:TOKEN_LENGTH]:
        bits = bits << 6 | TOKEN_ALPHABET.index(character)
    return (bits << 32 | int(message_id[TOKEN_LENGTH:], 16)).to_bytes(COLD_PLACE_LENGTH)


def read_cold_place(place: bytes) -> tuple[str, int] | None:
    """Return the message id of a message that waits in a cold file, and the hour for which it counts; None of any other place."""
    if len(place) != COLD_PLACE_LENGTH:
        return None
    bits = int.from_bytes(place)
    token = "".join(TOKEN_ALPHABET[bits >> shift & 63] for shift in range(32 + 6 * (TOKEN_LENGTH - 1), 31, -6))
    return f"{token}{bits & LINE_NO_MAX:08x}", bits >> 32 + 6 * TOKEN_LENGTH
