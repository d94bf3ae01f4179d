"""A message as it stands in a stream."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.core.ids import MESSAGE_ID_LENGTH

_NUMBER = re.compile(r"-?[0-9]{1,16}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A message as one group has it.

    Args:
        stream: the key it is in, and ``entry_id`` its id there, ``<epoch ms>-<number>``.

        handed_out: how often it was handed out from there.

        first_attempt: which attempt of the group the first of these was, from 1.

        due_ms: when it was due first, epoch ms UTC.
    """

    shard: int
    stream: str
    entry_id: str
    handed_out: int
    id: str
    topic: str
    message: str
    due_ms: int
    first_attempt: int
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from every other entry."""
        return self.stream, self.entry_id

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self.first_attempt + max(self.handed_out, 1) - 1


def read_entry(
    shard: int, stream: str, topic: str, entry_id: str, handed_out: int, fields: Mapping[bytes, bytes]
) -> Entry:
    """Return an entry of a stream; one that another program wrote has what it has."""
    texts = read_texts(fields)
    return Entry(
        shard=shard,
        stream=stream,
        entry_id=entry_id,
        handed_out=handed_out,
        id=texts.get("id", entry_id),
        topic=topic,
        message=texts.get("message", ""),
        due_ms=read_number(texts.get("due_ms", ""), int(entry_id.partition("-")[0])),
        first_attempt=max(1, read_number(texts.get("attempt", ""), 1)),
        headers=read_headers(texts.get("headers", "")),
    )


def read_texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return fields as texts; what is not UTF-8 becomes readable."""
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in fields.items()}


def read_number(text: str, otherwise: int) -> int:
    """Return the number that a text is, or another one if it is none, or more than a time can be."""
    return int(text) if _NUMBER.fullmatch(text) else otherwise


def read_headers(text: str) -> dict[str, str]:
    """Return the headers of an entry; none if another program wrote something else there."""
    try:
        headers = json.loads(text or "{}")
        pairs = headers.items() if isinstance(headers, dict) else ()
        return {_whole(name): _whole(str(value)) for name, value in pairs}
    except (ValueError, RecursionError):
        return {}


def _whole(text: str) -> str:
    """Return a text without halves of surrogate pairs, which JSON can escape and UTF-8 can't carry."""
    return text.encode("utf-8", "replace").decode()


def member_id(entry_id: str) -> str:
    """Return a member's id for an entry that is scheduled again: as unique as the entry's id, and in the same order."""
    ms, _, number = entry_id.partition("-")
    return f"{int(ms):013d}{int(number):09d}"[-MESSAGE_ID_LENGTH:]
