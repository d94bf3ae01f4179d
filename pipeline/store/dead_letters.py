"""Messages that were given up, each with the reason: look at them, schedule them again, or drop them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.core.buckets import bucket_start_ms
from pipeline.core.messages import number_of
from pipeline.store.connection import members_of, translated_errors
from pipeline.store.entries import DeadLetter
from pipeline.store.keys import Keys
from pipeline.store.scripts import Scripts, run_script

PAGE = 100  # letters a round trip
STREAMS_AHEAD, LETTERS_AHEAD = (
    20,
    25,
)  # streams of letters, one a topic and shard, and letters of each, that are read at once
_NAME = re.compile(r"(.+)/([0-9]{1,2})/([0-9]{1,19}-[0-9]{1,19})", re.DOTALL)


class DeadLetters:
    """The dead letters of a namespace. Each verb may raise ``StoreError``: no answer, or an error."""

    def __init__(self, client: Any, shards: Sequence[Keys], scripts: Scripts | None = None) -> None:
        self._client = client
        self._shards = shards
        self._scripts = scripts or Scripts()

    def topics(self) -> list[str]:
        """Return the topics that have dead letters, in order."""
        with translated_errors():
            return sorted(set[str]().union(*(members_of(self._client, keys.dead_topics()) for keys in self._shards)))

    def of_topic(self, topic: str, after: tuple[int, str] = (0, "")) -> Iterator[DeadLetter]:
        """Walk the dead letters of a topic that are there now, the oldest of each shard first: not those that come meanwhile.

        Args:
            after: shard and entry of the last one that the caller has seen.
        """
        shards = [*enumerate(self._shards)][after[0] :]
        with translated_errors():
            lasts = [self._client.xrevrange(keys.dead(topic), count=1) for _, keys in shards]
        for (shard, keys), last in zip(shards, lasts, strict=True):
            start = f"({after[1]}" if shard == after[0] and after[1] else "-"
            while last:
                with translated_errors():
                    page = self._client.xrange(keys.dead(topic), start, last[0][0], count=PAGE)
                yield from (_letter(shard, topic, entry_id.decode(), fields) for entry_id, fields in page)
                if len(page) < PAGE:
                    break
                start = f"({page[-1][0].decode()}"

    def of_topics(self, topics: Sequence[str], after: tuple[str, int, str] | None = None) -> Iterator[DeadLetter]:
        """Walk the dead letters of some topics, in the order of the topics, each as ``of_topic`` does.

        Args:
            topics: in order of their names.

            after: topic, shard and entry of the last one that the caller has seen.
        """
        if after is not None:
            if after[0] in topics:
                yield from self.of_topic(after[0], after[1:])
            topics = [topic for topic in topics if topic > after[0]]
        ahead = max(1, STREAMS_AHEAD // len(self._shards))
        for first in range(0, len(topics), ahead):
            places = [(topic, shard) for topic in topics[first : first + ahead] for shard in range(len(self._shards))]
            with translated_errors():
                pipeline = self._client.pipeline(transaction=False)
                for topic, shard in places:
                    pipeline.xrange(self._shards[shard].dead(topic), count=LETTERS_AHEAD)
                pages = pipeline.execute()
            finished = ""
            for (topic, shard), page in zip(places, pages, strict=True):
                if topic == finished:
                    continue
                yield from (_letter(shard, topic, entry_id.decode(), fields) for entry_id, fields in page)
                if len(page) == LETTERS_AHEAD:  # there may be more of it
                    yield from self.of_topic(topic, (shard, page[-1][0].decode()))
                    finished = topic

    def find(self, name: str) -> DeadLetter | None:
        """Return the dead letter of a name, if it is there."""
        parts = read_name(name)
        if parts is None or parts[1] >= len(self._shards):
            return None
        topic, shard, entry_id = parts
        with translated_errors():
            found = self._client.xrange(self._shards[shard].dead(topic), entry_id, entry_id)
        return _letter(shard, topic, entry_id, found[0][1]) if found else None

    def redrive(self, letter: DeadLetter, now_ms: int) -> bool:
        """Schedule a dead letter again, as due now and never tried; False if it is not there any more.

        Its id leads to it from then on, unless another message waits with that id, or it is for one group.
        """
        keys = self._shards[letter.shard]
        start = bucket_start_ms(now_ms)
        member = replace(letter, due_ms=now_ms, attempt=1).to_member(is_rescheduled=True)
        done = run_script(
            self._client,
            self._scripts,
            "redrive",
            [
                *(keys.dead(letter.topic), keys.buckets(), keys.bucket(start), keys.places(), keys.ids()),
                keys.dead_topics(),
            ],
            [
                *(letter.entry_id, now_ms, start, member, keys.wake()),
                *("" if letter.group else letter.id, letter.topic),
            ],
        )
        return bool(done == 1)

    def purge(self, letter: DeadLetter) -> bool:
        """Drop a dead letter for good; False if it is not there any more."""
        keys = self._shards[letter.shard]
        names, arguments = [keys.dead(letter.topic), keys.dead_topics()], [letter.entry_id, letter.topic]
        return bool(run_script(self._client, self._scripts, "purge", names, arguments) == 1)


def read_name(name: str) -> tuple[str, int, str] | None:
    """Return topic, shard and entry of the name of a dead letter; None if it is no such name."""
    read = _NAME.fullmatch(name)
    return (read[1], int(read[2]), read[3]) if read else None


def _letter(shard: int, topic: str, entry_id: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
    reason, detail, died = (
        fields.get(name, b"").decode("utf-8", "replace") for name in (b"reason", b"detail", b"died_ms")
    )
    return DeadLetter.from_fields(
        *(fields, entry_id),
        topic=topic,
        shard=shard,
        entry_id=entry_id,
        reason=reason,
        detail=detail,
        died_ms=number_of(died, 0),
    )
