"""Finding the folder of cold files of a namespace, or giving it one."""

import logging
import secrets
from typing import Any

from pipeline.config import ColdSettings, RedisSettings
from pipeline.core.cold import HOUR_MS
from pipeline.core.errors import ColdUnavailable, ConfigError, StoreUnavailable
from pipeline.ingest.cold_folder import ColdFolder, ColdPlace
from pipeline.store.cold import has_cold
from pipeline.store.keys import keys_of
from pipeline.store.layout import cold_folder_id

log = logging.getLogger(__name__)


def open_cold(client: Any, redis: RedisSettings, cold: ColdSettings) -> ColdPlace | None:
    """Return where the cold messages of a namespace go, None if they stay in Redis. The first job gives both an ID that ties them.

    Raises:
        ConfigError: the settings do not fit each other.
        ColdUnavailable: the folder is away, another one than Redis knows, or can't be used.
        StoreError: no answer, or an error.
    """
    try:
        known = cold_folder_id(client, redis)
    except StoreUnavailable as exc:
        if cold.folder or redis.shards == 1:
            raise
        log.debug("the first shard is away, so whether messages wait in a cold folder is not known: %s", exc)
        return None
    if not cold.folder:
        if known and has_cold(client, keys_of(redis)):
            raise ColdUnavailable(
                f"Messages of the namespace {redis.namespace} wait in a cold folder, and cold.folder names none: set it, and "
                "cold.horizon_hours = 8784 if no more messages shall go there."
            )
        return None
    if cold.lead_hours >= cold.horizon_hours:
        raise ConfigError(
            f"cold.lead_hours ({cold.lead_hours:g}) must be less than cold.horizon_hours ({cold.horizon_hours:g})."
        )
    folder = ColdFolder(cold.folder, known)
    if known:
        folder.check()
    else:
        folder.folder_id = _tie(client, redis, folder)
    return ColdPlace(cold.folder, folder.folder_id, round(cold.horizon_hours * HOUR_MS))


def _tie(client: Any, redis: RedisSettings, folder: ColdFolder) -> str:
    """Tie a namespace that has no folder to one that is new, or empty."""
    identity = folder.read_identity()
    if identity is None:
        folder_id = cold_folder_id(
            client, redis, secrets.token_hex(8)
        )  # of two jobs that start at once, the first one decides
        folder.write_identity({"id": folder_id, "namespace": redis.namespace})
        return folder_id
    folder.folder_id = str(identity.get("id"))
    if identity.get("namespace") != redis.namespace:
        raise ColdUnavailable(
            f"The cold folder {folder.url} belongs to the namespace {identity.get('namespace')}, not to {redis.namespace}: name "
            "another with cold.folder."
        )
    if folder.names():
        raise ColdUnavailable(
            f"The cold folder {folder.url} has messages of which Redis knows nothing: restore Redis from a backup, or, if they "
            "shall never be delivered, name another folder with cold.folder."
        )
    return cold_folder_id(client, redis, folder.folder_id)
