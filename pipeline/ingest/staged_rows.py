"""Rows that a Python worker writes down, and a commit stores: what is behind ``df.write.format("duetime")``.

Spark calls ``write`` any number of times for a partition, several at once, and can undo none of it. So ``write`` stores nothing:
it writes its rows down in files of its own and returns their names. ``commit`` comes once, with what one attempt of each task
returned. It makes these files a campaign, as ``tables.py`` does, and stores them from its own process. A commit that comes again,
or after a crash, finds the name known, and stores what is left. With other rows it is an error: they would be left out, and
nobody would know.
"""

import logging
import os
import secrets
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from pipeline.config import Settings
from pipeline.core.errors import PipelineError
from pipeline.core.ids import TOKEN_HALF_BITS, encode_token
from pipeline.core.text import count_text
from pipeline.ingest.blocks import Block, Packing, add_digests, rests_of, store_blocks, task_number
from pipeline.ingest.cold_opening import open_cold
from pipeline.ingest.parsing import FileText, parse_file
from pipeline.ingest.row_lines import has_due_times, request_lines
from pipeline.ingest.stages import REFUSED, ROWS, delete_old_stages, done_folder, new_stage
from pipeline.ingest.stores import Opener, WriterSettings
from pipeline.ingest.summary import Summary
from pipeline.ingest.tables import check_files, check_rows, complete, digest_text, other_rows, writer_settings
from pipeline.store.campaigns import Campaign, Campaigns
from pipeline.store.keys import keys_of

WORK: Final = ".work"  # the folder of files that no commit has counted yet
_SCHEME: Final = "file://"
_QUERY_ID: Final = "sql.streaming.queryId"  # a local property of all tasks of a stream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the tasks and the commit of a write know.

    Args:
        keeps_first: whether rows that come for a name which has others are left out; else they are an error.

        fields: the column of each field.

        work: the folder of files that no commit has counted yet, of this write alone.

        arrival_ms: which delays count from, epoch ms UTC.

        seed: see ``blocks.token_of``.
    """

    settings: Settings
    open_client: Opener
    name: str
    keep_sec: int
    keeps_refused: bool
    keeps_first: bool
    fields: Mapping[str, str]
    work: str
    arrival_ms: int
    seed: int


@dataclass(frozen=True, slots=True)
class Staged(WriterCommitMessage):
    """The files that an attempt of a task has written, "" for none, and how many rows there are in each.

    ``work`` and ``arrival_ms`` are those of its ``Target``: in a stream, a commit has another one. ``query`` is the id that Spark
    keeps in the checkpoint of a stream, "" in no stream.
    """

    work: str
    arrival_ms: int
    query: str = ""
    accepted_file: str = ""
    accepted: int = 0
    refused_file: str = ""
    refused: int = 0
    first_refusal: str = ""
    digest: int = 0


def stage_rows(batches: Iterator[pa.RecordBatch], target: Target) -> Staged:
    """Judge rows and write them down, in files that no other attempt of the task has.

    Raises:
        OSError: they can't be written.
    """
    packing = Packing(target.arrival_ms, target.seed, task_number())
    name = f"part-{task_number():05}-{uuid.uuid4().hex}"
    # Of message ids that no row can have as its id.
    token = encode_token(target.arrival_ms, secrets.randbits(TOKEN_HALF_BITS))
    blocks: list[Block] = []  # without their lines
    refused = 0
    first_refusal = ""
    Path(target.work).mkdir(parents=True, exist_ok=True)
    places = [Path(target.work, f"{name}{ending}") for ending in ("", ".refused")]
    with places[0].open("w", encoding="ascii") as rows_file, places[1].open("wb") as refused_file:

        def write(found: Iterable[Block]) -> None:
            for block in found:
                rows_file.write(f"{block.line}\n")
                blocks.append(block._replace(line=""))

        for batch in batches:
            lines = b"\n".join(request_lines(batch, target.fields))
            file = FileText(token, 1, "json", name, target.arrival_ms, lines)
            has_due = has_due_times(batch, target.fields)
            for part in parse_file(file):
                asked_ms = np.where(has_due[part.line_nos - 1], part.due_ms, target.arrival_ms - 1 - part.due_ms)
                keys = part.idempotency_keys
                write(packing.add(pa.array(part.due_ms), rests_of(part.members), keys, pa.array(asked_ms)))
                for each in part.rejected:
                    reason = each.rejection.reason.value
                    refused_file.write(
                        f'{each.raw[:-1]}{"," if len(each.raw) > 2 else ""}"reason":"{reason}"}}\n'.encode()
                    )
                    first_refusal = first_refusal or f"{reason}: {each.rejection.detail}"
                refused += len(part.rejected)
        write(packing.finish())
        for opened in (rows_file, refused_file):
            opened.flush()
            os.fsync(opened.fileno())
    accepted = sum(block.rows for block in blocks)
    files = [str(place) if rows else "" for place, rows in zip(places, (accepted, refused), strict=True)]
    for place in places:
        if str(place) not in files:
            place.unlink()
    return Staged(
        target.work,
        target.arrival_ms,
        _query_id(),
        files[0],
        accepted,
        files[1],
        refused,
        first_refusal,
        add_digests(block.digest for block in blocks),
    )


def _query_id() -> str:
    """Return the id of the stream that this task is of, as its checkpoint has it, wherever that is; "" in no stream."""
    context = TaskContext.get()
    return (context.getLocalProperty(_QUERY_ID) or "") if context else ""


def commit(target: Target, name: str, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Make the files that count the campaign of a name, unless it has one, and store what is left of it.

    Raises:
        PipelineError: rows are refused, files are missing, the name has other rows, or the campaign was begun elsewhere.
    """
    staged = [message for message in messages if isinstance(message, Staged)]
    with target.open_client(target.settings) as (client, settings):
        campaigns = Campaigns(client, keys_of(settings.redis))
        campaign = campaigns.find(name)
        ours = _campaign_of(target, name, staged)
        try:
            if campaign is None:
                _count(campaigns, target, ours, staged)
                campaign = campaigns.begin(name, ours, target.keep_sec)
                if campaign.stage != ours.stage:
                    forget(ours.folder)
        finally:
            forget(target.work, *works_of(staged))
        if not target.keeps_first and not campaign.has_rows_of(ours):
            raise PipelineError(
                f"{other_rows(name, campaign, ours)}: write new rows under a new name; if these are the old ones, whose texts or "
                "times differ each time they are asked for, keep the first by the option changedRows = ignore."
            )
        cold = open_cold(client, settings.redis, settings.cold)
        campaign, stored = complete(
            campaigns,
            name,
            campaign,
            lambda found: _load(found, writer_settings(found, settings, cold)),
            settings.ingest.marker_keep_sec,
        )
        forget(_path_of(done_folder(campaign)))
    log.info("%s: %s stored, %s refused", name, count_text(stored, "message"), f"{campaign.refused:,}")


def _campaign_of(target: Target, name: str, staged: Sequence[Staged]) -> Campaign:
    """Return the campaign that the files that count would be."""
    stage = new_stage(name)
    return Campaign(
        stage=stage,
        folder=str(Path(target.work).parents[1] / stage),
        arrival_ms=staged[0].arrival_ms if staged else target.arrival_ms,
        files=sum(1 for each in staged if each.accepted),
        refused=sum(each.refused for each in staged),
        accepted=sum(each.accepted for each in staged),
        digest=digest_text(each.digest for each in staged),
    )


def _count(campaigns: Campaigns, target: Target, campaign: Campaign, staged: Sequence[Staged]) -> None:
    """Move the files that count into the folder of a campaign."""
    if campaign.refused and not target.keeps_refused:
        first = next(each.first_refusal for each in staged if each.refused)
        raise PipelineError(
            f"{count_text(campaign.refused, 'row')} of {target.name} are no requests, so nothing is scheduled; the first is "
            f"{first} Correct them, or leave them out by the option refused = keep."
        )
    folder = Path(campaign.folder)
    delete_old_stages(campaigns, str(folder.parent), _delete_stage)
    campaigns.note_stage(campaign.folder)
    files = {
        ROWS: [each.accepted_file for each in staged if each.accepted],
        REFUSED: [each.refused_file for each in staged if each.refused],
    }
    for part, paths in files.items():
        (folder / part).mkdir(parents=True)
        for path in paths:
            try:
                os.rename(path, folder / part / Path(path).name.removesuffix(".refused"))
            except FileNotFoundError as exc:
                raise PipelineError(
                    f"The driver does not see {path}, which a task has written: let staging be a folder that all machines have "
                    "mounted."
                ) from exc
        _sync(folder / part)
    _sync(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def works_of(messages: Sequence[WriterCommitMessage | None]) -> set[str]:
    """Return the folders that attempts of tasks have written into."""
    return {message.work for message in messages if isinstance(message, Staged)}


def forget(*works: str) -> None:
    """Delete what no campaign has, also of attempts that nobody knows of."""
    for work in works:
        shutil.rmtree(work, ignore_errors=True)


def _delete_stage(folder: str) -> bool:
    try:
        shutil.rmtree(_path_of(folder))
    except FileNotFoundError:
        return False
    return True


def _load(campaign: Campaign, settings: WriterSettings) -> Summary:
    """Store what is staged of a campaign from this process; see ``tables.complete``."""
    if "://" in _path_of(campaign.folder):
        raise PipelineError(
            f"The campaign was begun in {campaign.folder}, which Spark alone can read: complete it by schedule, with the same name."
        )
    folder = Path(_path_of(campaign.folder), ROWS)
    paths = [path for path in folder.glob("*") if not path.name.startswith(("_", "."))]
    check_files(campaign, len(paths))
    done = total = store_blocks(_blocks_in(paths), settings)
    while done.lost:
        done = store_blocks(_blocks_in(paths), settings)
        total.add(Summary(stored=done.stored))
    check_rows(campaign, total)
    return total


def _blocks_in(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            yield from (line.rstrip(b"\n") for line in file if not line.startswith(b"{"))


def _path_of(folder: str) -> str:
    return folder.removeprefix(_SCHEME)
