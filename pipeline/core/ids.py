"""Names that sort by arrival: the token of a landing file, and the id of the message that stands in one of its lines.

A token is 14 characters of an alphabet in ASCII order, six bits each: seven characters of time, seven of chance. A message id is
the token and the line's number in the original file, so a file that is read again gives the same ids, two equal lines give two,
and neither the number of cores nor any setting has a say in it.
"""

from functools import lru_cache
from typing import Final

TOKEN_ALPHABET: Final = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
TOKEN_LENGTH: Final = 14
LINE_NO_LENGTH: Final = 8
MESSAGE_ID_LENGTH: Final = TOKEN_LENGTH + LINE_NO_LENGTH
TOKEN_HALF_BITS: Final = 42
ARRIVAL_LENGTH: Final = TOKEN_LENGTH // 2  # the characters of time of a token, and so of an id
# Eight hexadecimal digits; a file with more lines than this would need ids of another width.
LINE_NO_MAX: Final = 0xFFFF_FFFF

_BITS_PER_CHARACTER: Final = 6
_VALUE_OF: Final = {character: value for value, character in enumerate(TOKEN_ALPHABET)}


def encode_token(epoch_ms: int, random_bits: int) -> str:
    """Write a time and 42 random bits as a token; tokens sort as their times do.

    Raises:
        ValueError: either number is negative or needs more than 42 bits (a time after the year 2109).
    """
    return _encode_half(epoch_ms, "epoch_ms") + _encode_half(random_bits, "random_bits")


def decode_token(token: str) -> tuple[int, int]:
    """Read the time, in ms UTC, and the random bits back from a token.

    Raises:
        ValueError: the text is not a token.
    """
    if len(token) != TOKEN_LENGTH or any(character not in _VALUE_OF for character in token):
        raise ValueError(f"{token!r} is not a token: it takes {TOKEN_LENGTH} characters of {TOKEN_ALPHABET}.")
    return _decode_half(token[:ARRIVAL_LENGTH]), _decode_half(token[ARRIVAL_LENGTH:])


def token_epoch_ms(token: str) -> int:
    """Read the time back from a token, in ms UTC.

    Raises:
        ValueError: the text is not a token.
    """
    return decode_token(token)[0]


@lru_cache(maxsize=4_096)  # the messages of a file have it in common
def arrival_ms(message_id_head: str) -> int | None:
    """Return when a message came in, in ms UTC, from the first ``ARRIVAL_LENGTH`` characters of its id; None if they are no time.

    An id that another program made up may look like a time all the same.
    """
    try:
        return _decode_half(message_id_head) if len(message_id_head) == ARRIVAL_LENGTH else None
    except KeyError:
        return None


def message_id(token: str, line_no: int) -> str:
    """Name the message that stands in line ``line_no`` (1-based, of the original file) of the file ``token``.

    Raises:
        ValueError: the token has another length, or the line number is outside 0..LINE_NO_MAX.
    """
    if len(token) != TOKEN_LENGTH:
        raise ValueError(f"{token!r} is not a token: it takes {TOKEN_LENGTH} characters.")
    if not 0 <= line_no <= LINE_NO_MAX:
        raise ValueError(f"Line number {line_no} is outside 0..{LINE_NO_MAX}, so it does not fit into a message id.")
    return f"{token}{line_no:08x}"


def message_id_of_entry(entry_id: str) -> str:
    """Name the message of a stream's entry, ``<epoch ms>-<number>``, when it is scheduled anew.

    Ids sort as entries do. Two groups that retry the same entry give the same id: their members differ in the group.
    """
    ms, _, number = entry_id.partition("-")
    return f"{ms:0>13}{number:0>9}"[-MESSAGE_ID_LENGTH:]


def _decode_half(half: str) -> int:
    value = 0
    for character in half:
        value = value << _BITS_PER_CHARACTER | _VALUE_OF[character]
    return value


def _encode_half(value: int, name: str) -> str:
    if not 0 <= value < 1 << TOKEN_HALF_BITS:
        raise ValueError(f"{name} is {value}, and a token holds 0..{(1 << TOKEN_HALF_BITS) - 1}.")
    shifts = range(TOKEN_HALF_BITS - _BITS_PER_CHARACTER, -1, -_BITS_PER_CHARACTER)
    return "".join(TOKEN_ALPHABET[value >> shift & 63] for shift in shifts)
