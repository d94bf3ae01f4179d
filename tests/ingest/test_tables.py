"""The rows of a table are scheduled once for their name, whatever is cut off, called again or called by two at once."""

import re
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.config import ColdSettings, RedisSettings, Settings
from pipeline.core.errors import ColdUnavailable, ConfigError, PipelineError
from pipeline.core.messages import Message
from pipeline.ingest import executors, tables
from pipeline.ingest.blocks import task_number
from pipeline.ingest.summary import Summary
from pipeline.ingest.tables import ScheduledTable, schedule_table
from pipeline.spark import register, schedule
from pipeline.store.campaigns import OLD_STAGE_MS, STAGE_MS
from pipeline.store.connection import connect, server_ms
from pipeline.store.keys import keys_of
from pipeline.store.namespace import open_namespace
from pipeline.store.stats import read_stats
from tests.leaks import find_leaks
from tests.servers import RealServer

KEEP_SEC = 3_600
HOUR_MS = 3_600_000


class Stage:
    """A namespace, and a folder to stage tables in."""

    def __init__(self, server: RealServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        redis_settings = RedisSettings(url=server.url, namespace=f"test-{uuid.uuid4().hex}")
        self.settings = replace(Settings(), redis=redis_settings)
        self.settings = replace(
            self.settings,
            ingest=replace(self.settings.ingest, rejects=str(folder / "rejects"), transaction_messages=50),
        )
        self.client: Any = connect(redis_settings)
        self.keys = keys_of(redis_settings)[0]
        open_namespace(self.client, redis_settings, may_create=True)

    def schedule(self, table: DataFrame, name: str = "sale", **columns: str) -> ScheduledTable:
        return schedule_table(table, name, columns, f"file://{self.folder}", KEEP_SEC, self.client, self.settings)

    def messages(self) -> list[Message]:
        """Return what is scheduled."""
        found = []
        for start in self.client.zrange(self.keys.buckets(), 0, -1):
            rows = self.client.zrange(self.keys.bucket(int(start)), 0, -1, withscores=True)
            found += [Message.from_member(member, int(due_ms)) for member, due_ms in rows]
        return found

    def bodies(self) -> Counter[str]:
        return Counter(message.body for message in self.messages())

    def staged(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("part-*"))


@pytest.fixture
def stage(server: RealServer, tmp_path: Path) -> Iterator[Stage]:
    yield Stage(server, tmp_path)


def later(spark: SparkSession, rows: int, partitions: int = 3) -> DataFrame:
    return spark.range(0, rows, 1, partitions).select(
        F.concat(F.lit("m"), "id").alias("message"), F.lit(3_600).alias("delay_sec")
    )


def die(*_: object) -> None:
    raise KeyboardInterrupt


def test_each_row_is_scheduled_once_and_those_that_are_no_requests_come_back(spark: SparkSession, stage: Stage) -> None:
    table = spark.createDataFrame(
        [
            ("tea", 90, "tea-1", "kitchen", {"a": "b"}),
            ('quoted "\n\\ é', 5_400, None, None, None),
            (None, 1, None, None, None),
            ("who?", 1, "a b", None, None),
            ("again", 90, "tea-1", None, None),
        ],
        "message string, delay_sec int, id string, topic string, headers map<string,string>",
    )
    before_ms = server_ms(stage.client)
    done = stage.schedule(table)
    assert (done.name, done.stored, done.known, done.refused_count) == ("sale", 2, 1, 2)
    messages = {message.body: message for message in stage.messages()}
    tea = messages.get("tea") or messages["again"]
    assert tea.id == "tea-1" and (tea.topic, tea.headers) in (("kitchen", {"a": "b"}), ("default", {}))
    assert messages['quoted "\n\\ é'].due_ms - tea.due_ms == 5_310_000
    assert before_ms <= tea.due_ms - 90_000 <= server_ms(stage.client)
    wanted = spark.createDataFrame(
        [(None, 1, None, "missing_message"), ("who?", 1, "a b", "bad_id")],
        "message string, delay_sec int, id string, reason string",
    )
    found = done.refused.drop("topic", "headers")
    assert_df_equality(found, wanted, ignore_nullable=True, ignore_row_order=True)
    assert {path.split("/")[1] for path in stage.staged()} == {"refused"}, "what is stored is not kept"
    assert read_stats(stage.client, [stage.keys]).counters["stored"] == 2


def test_a_folder_of_staged_files_may_have_any_name(spark: SparkSession, stage: Stage) -> None:
    stage.folder = stage.folder / "a %41 ü {b,c} [d]*"
    stage.folder.mkdir()
    done = stage.schedule(later(spark, 5).unionByName(spark.sql("select '' as message, 1 as delay_sec")))
    assert (done.stored, done.refused_count, done.refused.count()) == (5, 1, 1)


@pytest.mark.parametrize(
    ("due", "due_ms"),
    [
        ("timestamp '2030-01-01 00:00:00.0005+01:00'", 1_893_452_400_001),
        ("'2030-01-01T00:00:00+01:00'", 1_893_452_400_000),
        ("1893452400000", 1_893_452_400_000),
        ("timestamp '1970-01-05 00:00:00Z'", 345_600_000),
        ("timestamp '9999-12-31 23:59:59Z'", 253_402_300_799_000),
    ],
)
def test_columns_may_have_other_names_and_a_message_fields(
    spark: SparkSession, stage: Stage, due: str, due_ms: int
) -> None:
    body = F.struct(F.lit(7).alias("order"), F.lit("tea").alias("what")).alias("of what")
    done = stage.schedule(spark.range(1).select(body, F.expr(due).alias("ends at")), message="of what", due="ends at")
    assert done.stored == 1
    [message] = stage.messages()
    assert (message.body, message.due_ms) == ('{"order":7,"what":"tea"}', due_ms)
    assert done.refused.columns == ["message", "due", "reason"] and done.refused.count() == 0


def test_a_row_is_written_as_a_message_or_as_it_is_with_a_reason(spark: SparkSession) -> None:
    at = "timestamp '2030-01-01 00:00:00Z'"
    table = spark.sql(
        f"select 'tea' as message, {at} as due, cast(null as string) as id union all select 'x', {at}, 'k' "
        f"union all select '', {at}, null union all select 'x', null, 'a b'"
    )
    at_ms = 1_893_456_000_000
    wanted = [
        (at_ms, "mtea", None, at_ms, None),
        (at_ms, 'j{"message":"x","id":"k"}', "k", at_ms, None),
        (at_ms, None, None, at_ms, '{"message":"","due":"2030-01-01T00:00:00.000Z","reason":"empty_message"}'),
        (None, None, "a b", None, '{"message":"x","id":"a b","reason":"missing_due"}'),
    ]
    found = table.transform(tables.with_lines, 0)
    wanted_table = spark.createDataFrame(wanted, "due_ms long, rest string, id string, asked_ms long, refused string")
    assert_df_equality(found, wanted_table, ignore_nullable=True)
    nothing = spark.range(1).select(F.lit(1).alias("delay_sec")).transform(tables.with_lines, 0)
    assert [row.refused for row in nothing.collect()] == ['{"delay_sec":1,"reason":"missing_message"}']


def test_a_plan_that_gives_other_rows_each_time_is_scheduled_once(spark: SparkSession, stage: Stage) -> None:
    table = spark.range(0, 30_000, 1, 3).select(
        F.concat(F.lit("m"), F.rand()).alias("message"), (F.rand() * 3_600).alias("delay_sec")
    )
    first = stage.schedule(table)
    assert (first.stored, first.known) == (30_000, 0)
    again = stage.schedule(table.repartition(7))
    assert (again.stored, again.known, again.refused_count) == (0, 30_000, 0)
    assert stage.bodies().total() == 30_000
    other = stage.schedule(table, "another sale".replace(" ", "-"))
    assert other.stored == 30_000


@pytest.mark.parametrize("cut_off", ["before it is known", "before it is stored", "in the middle", "before it is done"])
def test_a_call_that_is_cut_off_is_completed_by_the_next(
    spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch, cut_off: str
) -> None:
    """The second call has a table with other rows, in other partitions."""
    table = later(spark, 25_000).select(F.concat("message", F.rand()).alias("message"), "delay_sec")

    class Some(tables.BlockWriter):
        """Leaves out what other tasks than the first have."""

        def write(self, batches: Iterable[pa.RecordBatch]) -> Summary:
            return super().write(batches if task_number() == 0 else ())

    targets = {
        "before it is known": (tables.Campaigns, "begin", die),
        "before it is stored": (tables, "_load", die),
        "in the middle": (tables, "BlockWriter", Some),
        "before it is done": (tables.Campaigns, "finish", die),
    }
    with monkeypatch.context() as patched:
        patched.setattr(*targets[cut_off])
        with pytest.raises(PipelineError if cut_off == "in the middle" else KeyboardInterrupt):
            stage.schedule(table)
    first = stage.bodies()
    done = stage.schedule(table.repartition(5))
    assert (done.stored + done.known, done.refused_count) == (25_000, 0)
    assert stage.bodies().total() == len(stage.bodies()) == 25_000
    assert first <= stage.bodies() and (0 < done.known < 25_000) == (cut_off == "in the middle")
    assert stage.schedule(table).known == 25_000


def test_a_stage_that_never_became_a_campaign_is_deleted_after_a_week_by_its_own_namespace(
    spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Several namespaces may use the folder."""
    other = Stage(stage.server, stage.folder)
    with monkeypatch.context() as patched:
        patched.setattr(tables.Campaigns, "begin", die)
        for each, name in ((stage, "old"), (stage, "new"), (other, "others")):
            with pytest.raises(KeyboardInterrupt):
                each.schedule(later(spark, 5), name)
    now_ms = server_ms(stage.client)
    olds = [*stage.folder.glob("old-*")]
    assert len(olds) == 1, "or it was deleted while it was new"
    old = olds[0]
    for each, folder in ((stage, old), (other, next(stage.folder.glob("others-*")))):
        url = f"file://{folder}"
        assert each.client.zadd(each.keys.stages(), {url: now_ms - OLD_STAGE_MS - 1}, xx=True, ch=True) == 1
    stage.client.zadd(stage.keys.stages(), {f"file://{stage.folder}/not-here": 1})
    elsewhere = stage.folder / "elsewhere" / "sale-1"
    elsewhere.mkdir(parents=True)
    stage.client.zadd(stage.keys.stages(), {f"file://{elsewhere}": 1})
    with monkeypatch.context() as patched:
        patched.setattr(tables._Folder, "delete", not_allowed)
        with pytest.raises(PermissionError):  # once all is stored, where the files of this call are to be deleted
            stage.schedule(later(spark, 6), "sale")
    assert old.exists() and "can't be deleted: no" in caplog.text
    assert stage.schedule(later(spark, 6), "another").stored == 6
    assert elsewhere.exists() and not old.exists()
    assert {path.name.partition("-")[0] for path in stage.folder.glob("*-*")} == {"new", "others", "sale"}
    left = {Path(folder.decode()).name.partition("-")[0] for folder in stage.client.zrange(stage.keys.stages(), 0, -1)}
    assert left == {"new", "not", "sale"}, "what is not here may be on another machine"


def not_allowed(*_: object) -> bool:
    raise PermissionError("no")


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_stage_that_may_be_deleted_makes_no_campaign(
    spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    """As of a program that was stopped for days in the middle."""
    begin = tables.Campaigns.begin

    def much_later(campaigns: tables.Campaigns, name: str, campaign: tables.Campaign, keep_sec: int) -> Any:
        since_ms = server_ms(stage.client) - STAGE_MS - 1_000
        stage.client.zadd(stage.keys.stages(), {campaign.folder: since_ms}, xx=True)
        if is_deleted:
            campaigns.forget_stage(campaign.folder)
        return begin(campaigns, name, campaign, keep_sec)

    with monkeypatch.context() as patched, pytest.raises(PipelineError, match="more than 6 days ago: call again"):
        patched.setattr(tables.Campaigns, "begin", much_later)
        stage.schedule(later(spark, 5))
    assert stage.schedule(later(spark, 5)).stored == 5


def test_a_campaign_whose_reply_was_lost_is_begun_once(stage: Stage) -> None:
    campaigns = tables.Campaigns(stage.client, [stage.keys])
    campaign = tables.Campaign(stage="sale-1", folder="/staging/sale-1", arrival_ms=1, files=1, refused=0)
    campaigns.note_stage(campaign.folder)
    assert [campaigns.begin("sale", campaign, KEEP_SEC) for _ in range(2)] == [campaign, campaign]
    assert stage.client.zcard(stage.keys.stages()) == 0


def test_of_two_calls_at_once_one_counts(spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comes from behind while the other has staged its rows, and is done before it."""
    begin, others = tables.Campaigns.begin, []

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(tables.Campaigns, "begin", begin)
        others.append(stage.schedule(later(spark, 10)))
        return begin(*arguments)

    monkeypatch.setattr(tables.Campaigns, "begin", overtaken)
    done = stage.schedule(later(spark, 1_000))
    assert (others[0].stored, done.stored, done.known) == (10, 0, 10)
    assert stage.bodies() == Counter(f"m{number}" for number in range(10))
    assert stage.staged() == []


def test_a_call_whose_files_are_gone_as_another_one_has_stored_them_is_done(
    spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, others = tables._load, []

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(tables, "_load", load)
        others.append(stage.schedule(later(spark, 10)))
        return load(*arguments)

    monkeypatch.setattr(tables, "_load", overtaken)
    done = stage.schedule(later(spark, 1_000))
    assert (others[0].stored, done.stored, done.known) == (1_000, 0, 1_000)


def test_a_folder_that_is_away_is_an_error_and_not_an_empty_one(
    spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tables, "_load", die)
        stage.schedule(later(spark, 10))
    [folder] = stage.folder.glob("sale-*")
    folder.rename(stage.folder / "away")
    with pytest.raises(PipelineError, match="has 0 of its 3 files"):
        stage.schedule(later(spark, 10))
    assert stage.messages() == []
    (stage.folder / "away").rename(folder)
    assert stage.schedule(later(spark, 10)).stored == 10


def test_a_staged_file_that_lost_rows_is_an_error(
    spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a copy of it was cut off at the end of a line."""
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tables, "_load", die)
        stage.schedule(later(spark, 10))
    [file] = stage.folder.glob("sale-*/rows/part-00001*")
    file.write_text("")
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    with pytest.raises(PipelineError, match=r"Of the 10 rows in .* 7 were read"):
        stage.schedule(later(spark, 10))


def test_other_rows_for_a_name_that_is_done_are_told(
    spark: SparkSession, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    table = later(spark, 1_000).unionByName(spark.sql("select 'b' as message, -1 as delay_sec"))
    stage.schedule(table)
    assert stage.schedule(table.repartition(5).orderBy(F.desc("message"))).known == 1_000
    assert caplog.records == []
    for other, sentence in (
        (table.limit(70), "sale has been scheduled with 1,001 rows and comes now with 70 rows that are not the same"),
        (
            table.select(F.upper("message").alias("message"), "delay_sec"),
            "with 1,001 rows and comes now with 1,001 others",
        ),
        (
            table.withColumn("delay_sec", F.col("delay_sec") + 1),
            "comes now with 1,001 others, which are left out: give them",
        ),
    ):
        caplog.clear()
        done = stage.schedule(other)
        assert (done.stored, done.known, done.refused_count) == (0, 1_000, 1)
        [record] = caplog.records
        assert sentence in record.getMessage()
    assert stage.bodies().total() == 1_000


def test_what_is_known_of_a_campaign_expires_and_no_file_is_left(spark: SparkSession, stage: Stage) -> None:
    stage.schedule(later(spark, 10))
    kept = stage.settings.ingest.marker_keep_sec
    markers = list(stage.server.client().scan_iter(f"{{{stage.keys.tag}}}:marker*"))
    assert len(markers) == 3 + 1 and all(0 < stage.server.client().ttl(key) <= kept for key in markers)
    assert KEEP_SEC - 60 < stage.server.client().ttl(stage.keys.campaign("sale")) <= KEEP_SEC
    assert find_leaks(stage.server.client()) == []
    assert list(stage.folder.glob("sale-*")) == [] and not stage.client.exists(stage.keys.stages())


def test_no_rows_are_a_campaign_too(spark: SparkSession, stage: Stage) -> None:
    empty = later(spark, 0)
    assert [(done.stored, done.known) for done in (stage.schedule(empty), stage.schedule(later(spark, 9)))] == [
        (0, 0)
    ] * 2


@pytest.mark.parametrize(
    ("columns", "wrong", "sentence"),
    [
        ({"message": "text"}, ConfigError, "The table has no column text; it has message, delay_sec."),
        ({"body": "message"}, ConfigError, "A request has no body; its fields are message, due,"),
        ({"message": "delay_sec"}, ConfigError, "The column message is no field of a request: leave it out, or say"),
        (
            {"headers": "message", "message": "delay_sec"},
            TypeError,
            "The column message is of type int, which no request has.",
        ),
    ],
)
def test_columns_that_make_no_request_are_told(
    spark: SparkSession, stage: Stage, columns: dict[str, str], wrong: type[Exception], sentence: str
) -> None:
    with pytest.raises(wrong, match=re.escape(sentence)):
        stage.schedule(later(spark, 1), **columns)
    assert stage.staged() == []


@pytest.mark.parametrize(("of_type", "hour"), [("timestamp_ntz", 0), ("date", 9)])
def test_a_due_time_without_a_zone_is_refused_with_the_way_to_give_it_one(
    spark: SparkSession, stage: Stage, of_type: str, hour: int
) -> None:
    table = spark.sql(f"select 'tea' as message, cast('2027-07-01' as {of_type}) as due")
    with pytest.raises(TypeError, match=f"is of type {of_type}, which has no time zone") as told:
        stage.schedule(table)
    [remedy] = re.findall(r"for example (.*)\.$", str(told.value))
    [row] = table.selectExpr(f"unix_millis({remedy}) as due_ms").collect()
    assert row.due_ms == datetime(2027, 7, 1, hour, tzinfo=ZoneInfo("Europe/Berlin")).timestamp() * 1_000


def test_a_table_is_scheduled_on_the_server_of_the_environment(
    spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", stage.server.url)
    monkeypatch.setenv("DUETIME_REDIS_NAMESPACE", stage.settings.redis.namespace)
    monkeypatch.setenv("DUETIME_LOCAL_STATE", str(stage.folder / "state"))
    assert schedule(later(spark, 5), "sale").stored == 5
    assert schedule(later(spark, 5), "sale", keep_days=1).known == 5
    assert (stage.folder / "state" / "staging").is_dir()
    with pytest.raises(ConfigError, match="A table has"):
        schedule(later(spark, 5), "a sale")


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        ("-S", r"and lack the Python packages numpy, .*: install it"),
        ("", "and lack Python .*: install it there, or set PYSPARK_PYTHON"),
    ],
)
def test_workers_with_another_python_are_told_before_the_first_row(
    spark: SparkSession, stage: Stage, monkeypatch: pytest.MonkeyPatch, python: str, sentence: str
) -> None:
    """As when a program is started in an environment that is not activated."""
    monkeypatch.setenv("REDIS_URL", stage.server.url)
    other = stage.folder / "python"
    if python:
        other.write_text(f'#!/bin/sh\nexec {sys.executable} {python} "$@"\n')
        other.chmod(0o755)
    monkeypatch.setattr(executors, "_checked", set())
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(other))
    for call in (lambda: schedule(later(spark, 5), "sale"), lambda: register(spark)):
        with pytest.raises(PipelineError, match=sentence):
            call()
    assert stage.staged() == [] and stage.messages() == []
    monkeypatch.undo()
    register(spark)
    monkeypatch.setattr(executors, "_ask", None)
    register(spark)  # which asks nobody any more


def test_spark_connect_is_told_to_use_the_data_source() -> None:
    class Session:
        __module__ = "pyspark.sql.connect.session"

    table: Any = SimpleNamespace(sparkSession=Session())
    with pytest.raises(ConfigError, match=r"does not work over Spark Connect, .*: use register"):
        schedule(table, "sale")


def test_a_stream_schedules_its_batches(spark: SparkSession, stage: Stage) -> None:
    """A batch that is played again is known by its number."""
    (stage.folder / "in").mkdir()
    (stage.folder / "in" / "a.json").write_text('{"message":"a","delay_sec":60}\n{"message":"b","delay_sec":-1}\n')
    done: list[ScheduledTable] = []

    def write(batch: DataFrame, number: int) -> None:
        done.append(stage.schedule(batch, f"orders-{number}"))

    for attempt in range(2):
        rows = spark.readStream.schema("message string, delay_sec int").json(str(stage.folder / "in"))
        query = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(stage.folder / f"{attempt}"))
        query.trigger(availableNow=True).start().awaitTermination(120)
    assert [(each.stored, each.known, each.refused_count) for each in done] == [(1, 0, 1), (0, 1, 1)]


def test_rows_that_are_due_much_later_wait_in_cold_files(spark: SparkSession, stage: Stage) -> None:
    cold = ColdSettings(folder=str(stage.folder / "cold"), horizon_hours=0.5, lead_hours=0.1)
    stage.settings = replace(stage.settings, cold=cold)
    for stored in (200, 0):
        done = stage.schedule(later(spark, 200))
        assert (done.stored, done.known) == (stored, 200 - stored)
        assert stage.messages() == [] and read_stats(stage.client, [stage.keys]).cold == 200
    assert len([path for path in (stage.folder / "cold").iterdir() if path.suffix == ".parquet"]) == 3
    (stage.folder / "cold" / "duetime-cold.json").unlink()
    with pytest.raises(ColdUnavailable):
        stage.schedule(later(spark, 200), "another")
