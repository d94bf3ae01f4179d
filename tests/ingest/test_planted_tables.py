"""The tests of tables notice what they are there for: each protection, taken out, is missed."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pipeline.core.errors import PipelineError
from pipeline.ingest import blocks, data_source, staged_rows, tables
from pipeline.store.campaigns import Campaigns
from tests.chaos.test_planted import Mutant, plant
from tests.ingest import test_blocks, test_data_source
from tests.ingest import test_tables as tests
from tests.ingest.test_data_source import World
from tests.ingest.test_tables import Stage
from tests.servers import RealServer

pytestmark = pytest.mark.planted

FINISH = (Campaigns, "finish")


def of_an_old_stage(spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tests.test_a_stage_that_may_be_deleted_makes_no_campaign(spark, stage, monkeypatch, is_deleted=False)


def of_a_deleted_stage(spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tests.test_a_stage_that_may_be_deleted_makes_no_campaign(spark, stage, monkeypatch, is_deleted=True)


# By name: the function, old and new text, and what notices it.
FAULTS: dict[str, tuple[Any, str, str, Callable[..., None]]] = {
    "the last one who has staged a name counts": (
        (Campaigns, "begin"),
        "nx=True",
        "nx=False",
        tests.test_of_two_calls_at_once_one_counts,
    ),
    "what a crash has left stays": (
        (tables, "delete_old_stages"),
        "for folder in campaigns.old_stages():",
        "for folder in ():",
        tests.test_a_stage_that_never_became_a_campaign_is_deleted_after_a_week_by_its_own_namespace,
    ),
    "a stage of another folder is deleted": (
        (tables, "delete_old_stages"),
        'if url_of(folder.rpartition("/")[0]) != url_of(staging.rstrip("/")):',
        "if False:",
        tests.test_a_stage_that_never_became_a_campaign_is_deleted_after_a_week_by_its_own_namespace,
    ),
    "a stage that is not here is forgotten": (
        (tables, "delete_old_stages"),
        "if was_there:",
        "if True:",
        tests.test_a_stage_that_never_became_a_campaign_is_deleted_after_a_week_by_its_own_namespace,
    ),
    "a stage is deleted while it is new": (
        (Campaigns, "old_stages"),
        "- OLD_STAGE_MS",
        "",
        tests.test_a_stage_that_never_became_a_campaign_is_deleted_after_a_week_by_its_own_namespace,
    ),
    "a stage that may be deleted becomes a campaign": (
        (Campaigns, "begin"),
        "if since_ms is None or server_ms(self._client) - since_ms > STAGE_MS:",
        "if since_ms is None:",
        of_an_old_stage,
    ),
    "a stage that was deleted becomes a campaign": (
        (Campaigns, "begin"),
        "if since_ms is None or server_ms(self._client) - since_ms > STAGE_MS:",
        "if since_ms is not None and server_ms(self._client) - since_ms > STAGE_MS:",
        of_a_deleted_stage,
    ),
    "the stage of a campaign is deleted one day": (
        (Campaigns, "begin"),
        "pipeline.zrem(self._keys.stages(), campaign.folder)",
        "pass",
        tests.test_what_is_known_of_a_campaign_expires_and_no_file_is_left,
    ),
    "an empty folder stays of each name": (
        (tables, "done_folder"),
        "if campaign.refused else campaign.folder",
        "",
        tests.test_what_is_known_of_a_campaign_expires_and_no_file_is_left,
    ),
    "a folder that is away is an empty one": (
        (tables, "check_files"),
        "if there != campaign.files:",
        "if False:",
        tests.test_a_folder_that_is_away_is_an_error_and_not_an_empty_one,
    ),
    "files that another one has stored and deleted are missed": (
        (tables, "complete"),
        "if not (found := campaigns.find(name)) or not found.is_done:",
        "if True:",
        tests.test_a_call_whose_files_are_gone_as_another_one_has_stored_them_is_done,
    ),
    "markers stay": (
        FINISH,
        "pipeline.expire(keys.markers(campaign.stage), keep_sec)",
        "pass",
        tests.test_what_is_known_of_a_campaign_expires_and_no_file_is_left,
    ),
    "rows that were not read are not missed": (
        (tables, "check_rows"),
        "if done.lines != campaign.accepted:",
        "if False:",
        tests.test_a_staged_file_that_lost_rows_is_an_error,
    ),
    "a delay counts from the call that stores": (
        (tables, "with_lines"),
        "with_due_ms, arrival_ms)",
        "with_due_ms, 0)",
        tests.test_each_row_is_scheduled_once_and_those_that_are_no_requests_come_back,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(
    name: str,
    spark: SparkSession,
    server: RealServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, old, new, check = FAULTS[name]
    plant(Mutant(name, (), {target: ((old, new),)}), monkeypatch)
    made: dict[str, Any] = {"monkeypatch": monkeypatch, "caplog": caplog}
    more = {argument: value for argument, value in made.items() if argument in inspect.signature(check).parameters}
    monkeypatch.setattr(tests, "schedule_table", tables.schedule_table)
    with pytest.raises((AssertionError, PipelineError, PySparkException, pytest.fail.Exception)):
        check(spark, Stage(server, tmp_path), **more)


# Of functions that run in this process when a test calls them; Spark's workers have their own.
OTHERS: dict[str, tuple[Any, str, str, Callable[..., None]]] = {
    "blocks of a task have the same token": (
        (blocks, "token_of"),
        " + number)",
        ")",
        test_blocks.test_no_two_blocks_of_a_table_have_the_same_token,
    ),
    "blocks of different tasks have the same token": (
        (blocks, "token_of"),
        "(task << _BLOCK_BITS)",
        "task",
        test_blocks.test_no_two_blocks_of_a_table_have_the_same_token,
    ),
    "a block that lost rows is read": (
        (blocks, "read_block"),
        "if len(messages) != rows:",
        "if False:",
        test_blocks.test_a_damaged_block_is_an_error,
    ),
    "files of all attempts count": (
        (staged_rows, "_count"),
        "[each.accepted_file for each in staged if each.accepted]",
        '[str(path) for path in Path(target.work).glob("part-*")]',
        test_data_source.test_only_the_files_of_the_attempts_that_count_are_stored,
    ),
    "what a commit that was killed has left stays": (
        (staged_rows, "delete_old_stages"),
        "for folder in campaigns.old_stages():",
        "for folder in ():",
        test_data_source.test_a_stage_that_never_became_a_campaign_is_deleted_after_a_week_by_its_own_namespace,
    ),
    "an empty folder stays of each batch": (
        (staged_rows, "done_folder"),
        "if campaign.refused else campaign.folder",
        "",
        test_data_source.test_nothing_is_left_of_a_write_of_which_no_row_was_refused,
    ),
    "a file that is not there is passed over": (
        (staged_rows, "_count"),
        "except FileNotFoundError as exc:",
        "except FileNotFoundError as exc:\n                continue",
        test_data_source.test_a_file_that_the_driver_does_not_see_is_an_error,
    ),
    "rows that are no requests are left out and nobody is told": (
        (staged_rows, "_count"),
        "if campaign.refused and not target.keeps_refused:",
        "if False:",
        test_data_source.test_rows_that_are_no_requests_fail_a_commit,
    ),
    "other rows for a known name are left out and nobody is told": (
        (staged_rows, "commit"),
        "if not target.keeps_first and not campaign.has_rows_of(ours):",
        "if False:",
        test_data_source.test_a_commit_that_is_cut_off_is_completed_by_the_next_write_with_the_name,
    ),
    "a digest knows nothing of times": (
        (blocks, "digest_of"),
        "+ 31 * hash_array(asked_ms.to_numpy())",
        "",
        test_blocks.test_the_digest_of_rows_is_that_of_every_version,
    ),
    "a commit takes its own rows when another one was first": (
        (staged_rows, "commit"),
        "campaign = campaigns.begin(name, ours, target.keep_sec)",
        "campaign = ours",
        test_data_source.test_of_two_commits_at_once_one_counts,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_planted_fault_in_blocks_or_in_a_commit_is_noticed(
    name: str, spark: SparkSession, server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, old, new, check = OTHERS[name]
    plant(Mutant(name, (), {target: ((old, new),)}), monkeypatch)
    monkeypatch.setattr(test_blocks, "read_block", blocks.read_block)
    monkeypatch.setattr(test_blocks, "digest_of", blocks.digest_of)
    monkeypatch.setattr(data_source, "commit", staged_rows.commit)
    made: dict[str, Any] = {
        "world": lambda: World(spark, server, tmp_path, monkeypatch),
        "monkeypatch": lambda: monkeypatch,
    }
    arguments = {name: make() for name, make in made.items() if name in inspect.signature(check).parameters}
    with pytest.raises((AssertionError, PipelineError, pa.ArrowException, pytest.fail.Exception)):
        check(**arguments)
