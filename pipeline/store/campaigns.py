"""What is known of campaigns: tables whose rows are scheduled once, for their name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pipeline.core.errors import PipelineError
from pipeline.store.connection import server_ms, translated_errors
from pipeline.store.keys import Keys
from pipeline.store.topology import client_of

_DAY_MS: Final = 86_400_000
STAGE_MS: Final = 6 * _DAY_MS  # how old a stage may be when it is made known: no table takes days to write down
OLD_STAGE_MS: Final = 7 * _DAY_MS  # from when on it may be deleted; a day later, as a failover may set the clock back


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Where the rows of a campaign are staged, and what became of them.

    Args:
        stage: the name of its folder of staged files, and of the source of their progress markers; unique among all that ever were.

        folder: the URL of that folder.

        arrival_ms: when it was staged, epoch ms UTC, which delays count from.

        files: that are staged; ``accepted`` counts rows in them that are requests, and ``refused`` those that are none.

        digest: of the rows that are requests, in hexadecimal; the same for the same rows in another order.

        is_done: whether all are stored.
    """

    stage: str
    folder: str
    arrival_ms: int
    files: int
    refused: int
    accepted: int = 0
    digest: str = ""
    is_done: bool = False

    @property
    def rows(self) -> int:
        """How many rows the table had."""
        return self.accepted + self.refused

    def has_rows_of(self, other: "Campaign") -> bool:
        """Say whether two campaigns have the same rows, in whatever order."""
        return (self.accepted, self.refused, self.digest) == (other.accepted, other.refused, other.digest)


class Campaigns:
    """The campaigns of a namespace, in its first shard. Each verb may raise ``StoreUnavailable``: then it may be said again."""

    def __init__(self, client: Any, shards: Sequence[Keys]) -> None:
        self._client = client_of(client, shards[0])
        self._all_shards = [(client_of(client, keys), keys) for keys in shards]
        self._keys = shards[0]

    def find(self, name: str) -> Campaign | None:
        """Return the campaign of a name, None if it is not known, or was forgotten."""
        with translated_errors():
            found = self._client.get(self._keys.campaign(name))
        return msgspec.json.decode(found, type=Campaign) if found else None

    def note_stage(self, folder: str) -> None:
        """Note that rows will be staged in a folder, which is deleted one day if no campaign gets it."""
        with translated_errors():
            self._client.zadd(self._keys.stages(), {folder: server_ms(self._client)})

    def old_stages(self) -> list[str]:
        """Return the folders that no campaign got, and none can get any more."""
        until_ms = server_ms(self._client) - OLD_STAGE_MS
        with translated_errors():
            return [folder.decode() for folder in self._client.zrange(self._keys.stages(), 0, until_ms, byscore=True)]

    def forget_stage(self, folder: str) -> None:
        """Forget a folder that was deleted."""
        with translated_errors():
            self._client.zrem(self._keys.stages(), folder)

    def begin(self, name: str, campaign: Campaign, keep_sec: int) -> Campaign:
        """Make a campaign known for so long, unless there is one of that name; returns the one that is there now.

        Raises:
            PipelineError: its stage is so old that it may be deleted at any time, or was deleted, or not noted.
        """
        with translated_errors():
            since_ms = self._client.zscore(self._keys.stages(), campaign.folder)
        if since_ms is None or server_ms(self._client) - since_ms > STAGE_MS:
            if found := self.find(name):  # also by ourselves, if the reply was lost
                return found
            raise PipelineError(
                f"Redis has no note of the rows in {campaign.folder}, or one of more than {STAGE_MS // _DAY_MS} days ago: "
                "call again."
            )
        with translated_errors():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.set(self._keys.campaign(name), msgspec.json.encode(campaign), nx=True, ex=keep_sec)
            pipeline.zrem(self._keys.stages(), campaign.folder)
            pipeline.execute()
        return self.find(name) or campaign

    def finish(self, name: str, campaign: Campaign, keep_sec: int) -> None:
        """Note that all is stored. Its progress markers expire after ``keep_sec``: others may be storing it, too."""
        with translated_errors():
            self._client.set(self._keys.campaign(name), msgspec.json.encode(campaign), xx=True, keepttl=True)
            for client, keys in self._all_shards:
                pipeline = client.pipeline(transaction=False)
                for part_id in client.zrange(keys.markers(campaign.stage), 0, -1):
                    pipeline.expire(keys.marker(campaign.stage, part_id.decode()), keep_sec)
                pipeline.expire(keys.markers(campaign.stage), keep_sec)
                pipeline.execute()
