"""The folders that rows of tables are staged in."""

import logging
import uuid
from collections.abc import Callable
from typing import Final

from pipeline.ingest.readers import url_of
from pipeline.store.campaigns import Campaign, Campaigns

ROWS: Final = "rows"  # the folders of a stage
REFUSED: Final = "refused"

log = logging.getLogger(__name__)


def new_stage(name: str) -> str:
    """Name a stage of a campaign."""
    return f"{name}-{uuid.uuid4().hex}"


def delete_old_stages(campaigns: Campaigns, staging: str, delete: Callable[[str], bool]) -> None:
    """Delete the stages in a staging folder that calls left which died before their campaign was known.

    Other namespaces may use the folder, too, so only stages count that this one has noted.

    Args:
        delete: deletes a folder, and returns whether it was there: one that is not may be on another machine, under the same path.
    """
    for folder in campaigns.old_stages():
        if url_of(folder.rpartition("/")[0]) != url_of(staging.rstrip("/")):
            continue
        try:
            was_there = delete(folder)
        except Exception as exc:  # the rows that are scheduled now don't need it
            log.warning("The folder %s of a call that was cut off can't be deleted: %s", folder, exc)
            continue
        if was_there:
            campaigns.forget_stage(folder)


def done_folder(campaign: Campaign) -> str:
    """Return the folder that nobody needs once all is stored: rows that were refused are kept."""
    return f"{campaign.folder}/{ROWS}" if campaign.refused else campaign.folder
