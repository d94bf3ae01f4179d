"""``format("duetime")``: tables and streams go into the schedule by the same rules as ``schedule``, and come out as rows."""

import os
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chispa import assert_df_equality
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.client import Duetime
from pipeline.config import load_settings
from pipeline.consume.opening import open_client
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.ids import ARRIVAL_LENGTH, arrival_ms
from pipeline.core.messages import Message
from pipeline.ingest import staged_rows, tables
from pipeline.ingest.data_source import BatchesWriter, DuetimeSource
from pipeline.ingest.scheduled import SPAN_ROWS, Selection, spans_of
from pipeline.spark import register, schedule, scheduled
from pipeline.store.campaigns import Campaigns
from pipeline.store.connection import connect
from pipeline.store.keys import keys_of
from tests.servers import RealServer

HOUR_MS = 3_600_000
AT = datetime(2035, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
AT_MS = int(AT.timestamp() * 1_000)


class World:
    """A namespace, and a session that schedules there."""

    def __init__(self, spark: SparkSession, server: RealServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spark, self.folder = spark, folder
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("REDIS_URL", server.url)
        monkeypatch.setenv("DUETIME_LOCAL_STATE", str(folder))
        self.begin()

    def begin(self) -> None:
        """Go on in a new namespace."""
        self._monkeypatch.setenv("DUETIME_REDIS_NAMESPACE", f"test-{uuid.uuid4().hex}")
        self.settings = load_settings({}, os.environ)
        register(self.spark)

    def save(self, table: DataFrame, name: str = "sale", **options: str) -> None:
        table.write.format("duetime").options(name=name, **options).mode("append").save()

    def writer(self, table: DataFrame, **options: str) -> Any:
        """Return a writer as Spark gets it, in this process."""
        known = {
            "settings": self.settings,
            "open_client": staticmethod(open_client),
            "staging": f"{self.folder}/staging",
        }
        source = type("Source", (DuetimeSource,), known)
        return source({"name": "sale", **options}).writer(table.schema, False)

    def rows(self, **selected: Any) -> list[Any]:
        return scheduled(self.spark, **selected).collect()

    def messages(self) -> list[Message]:
        """Return what is scheduled, as the server has it."""
        client: Any = connect(self.settings.redis)
        [keys] = keys_of(self.settings.redis)
        found = []
        for start in client.zrange(keys.buckets(), 0, -1):
            pairs = client.zrange(keys.bucket(int(start)), 0, -1, withscores=True)
            found += [Message.from_member(member, int(due_ms)) for member, due_ms in pairs]
        client.close()
        return found

    def stages(self) -> list[str]:
        return [path.name for path in self.folder.glob("staging/*-*")]

    def left(self) -> list[str]:
        files = (path for path in self.folder.rglob("part-*") if path.is_file())
        works = self.folder.glob("staging/.work/*")
        return sorted(path.name for path in (*files, *works))


@pytest.fixture
def world(spark: SparkSession, server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield World(spark, server, tmp_path, monkeypatch)


def later(spark: SparkSession, rows: int, partitions: int = 3) -> DataFrame:
    return spark.range(0, rows, 1, partitions).select(
        F.concat(F.lit("m"), "id").alias("message"), F.lit(3_600).alias("delay_sec")
    )


def test_a_table_is_scheduled_once_for_its_name(world: World) -> None:
    table = later(world.spark, 25_000).select(F.concat("message", F.rand()).alias("message"), "delay_sec")
    world.save(table)
    first = {message.body for message in world.messages()}
    assert len(first) == 25_000
    world.save(table.repartition(5))
    others = table.select(F.concat("message", F.rand()).alias("message"), "delay_sec")
    with pytest.raises(
        PySparkException, match="sale has been scheduled with 25,000 rows and comes now with 25,000 others"
    ):
        world.save(others)
    world.save(others, changedRows="ignore")
    assert {message.body for message in world.messages()} == first
    assert schedule(table, "sale").known == 25_000
    world.save(table.limit(10), "another")
    assert len(world.messages()) == 25_010
    assert world.left() == []


def test_the_same_rows_for_a_name_are_known_whoever_brings_them_and_in_whatever_order(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Their delays count from the first time, and both ways to schedule have the same digest of them."""
    at = f"timestamp_millis({AT_MS})"
    table = world.spark.sql(
        f"select 'a' as text, {at} as due, null as delay_sec, 'k1' as id, null as topic, map('x', 'y') as headers union all "
        f"select 'é \\\\ \"', {at}, null, null, 't', null union all select 'b', null, 1.5, null, null, null union all "
        "select 'c', null, -1, null, null, null union all select 'b', null, 1.5, null, null, null"
    )
    world.save(table, "first", message="text", refused="keep")
    schedule(table, "second", message="text")
    for name in ("first", "second"):
        world.save(table.repartition(4).orderBy("text"), name, message="text")
        assert schedule(table.repartition(4), name, message="text").stored == 0
    assert len(world.messages()) == 7, "of the two with an id one is ignored"
    assert caplog.records == []
    with pytest.raises(
        PySparkException, match="comes now with 4 rows that are not the same, which are left out: write new"
    ):
        world.save(table.limit(4), "second", message="text", refused="keep")


def test_each_field_is_what_schedule_makes_of_it(world: World) -> None:
    table = world.spark.createDataFrame(
        [
            ('quoted "\n\\ é', AT, "tea-1", "kitchen", {"a": "b", "": "é"}),
            ("tea", AT + timedelta(microseconds=1), None, None, None),
            ("old", datetime(1970, 1, 5, tzinfo=UTC), None, "default", {}),
        ],
        "text string, due timestamp, id string, topic string, headers map<string,string>",
    )
    schedule(table, "one", message="text")
    by_schedule = {values_of(message) for message in world.messages()}
    world.begin()
    world.save(table, "one", message="text")
    assert {values_of(message) for message in world.messages()} == by_schedule and len(by_schedule) == 3


def values_of(message: Message) -> tuple[object, ...]:
    key = message.id if message.id != message.message_id else ""
    return message.body, message.due_ms, message.topic, key, tuple(message.headers.items())


@pytest.mark.parametrize(
    ("column", "due_ms"),
    [("'2035-01-02T03:04:05.678Z'", AT_MS), (str(AT_MS), AT_MS), (f"timestamp_micros({AT_MS}001)", AT_MS + 1)],
)
def test_a_due_time_may_be_a_text_a_number_or_a_timestamp(world: World, column: str, due_ms: int) -> None:
    world.save(world.spark.range(1).select(F.lit("m").alias("message"), F.expr(column).alias("due")))
    assert [message.due_ms for message in world.messages()] == [due_ms]


@pytest.mark.parametrize("delay", ["cast(1.5 as decimal(4,2))", "1.5", "cast(1.5 as double)"])
def test_a_delay_may_be_any_number(world: World, delay: str) -> None:
    world.save(
        world.spark.sql(f"select 'a' as message, {delay} as delay_sec union all select 'b', 3600.25 as delay_sec")
    )
    a, b = sorted(world.messages(), key=lambda message: message.body)
    assert b.due_ms - a.due_ms == 3_598_750


def test_rows_that_are_no_requests_fail_the_write_before_anything_is_stored(world: World) -> None:
    table = world.spark.sql("select 'a' as message, 60 as delay_sec union all select 'b', -1")
    with pytest.raises(
        PySparkException, match="1 row of sale are no requests, so nothing is scheduled; the first is delay_out"
    ):
        world.save(table)
    assert world.messages() == [] and world.left() == []
    world.save(table, refused="keep")
    assert [message.body for message in world.messages()] == ["a"]
    done = schedule(table, "sale")
    assert (done.stored, done.known, done.refused_count) == (0, 1, 1)
    wanted = world.spark.createDataFrame(
        [("b", -1, "delay_out_of_range")], "message string, delay_sec int, reason string"
    )
    assert_df_equality(done.refused, wanted, ignore_nullable=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": ""}, "Give the rows a name, by which they are known"),
        ({"name": "a sale"}, "A table has 1 to 64 of"),
        ({"name": "a", "changedRows": "no"}, "The option changedRows takes error or ignore"),
        ({"name": "a", "keep_days": "0"}, "The option keep_days takes a number of days"),
        ({"name": "a", "refused": "no"}, "The option refused takes fail or keep"),
        ({"name": "a", "staging": "s3a://b/c"}, "must be one that all machines have mounted"),
        ({"name": "a", "body": "message"}, "A request has no body"),
        ({"name": "a", "message": "text"}, "The table has no column text"),
    ],
)
def test_options_that_are_wrong_are_told(world: World, options: dict[str, str], sentence: str) -> None:
    with pytest.raises(PySparkException, match=sentence):
        world.save(later(world.spark, 1), **options)
    assert world.left() == []


def test_a_message_that_is_a_structure_and_a_mode_that_overwrites_are_refused(world: World) -> None:
    table = world.spark.range(1).select(F.struct("id").alias("message"), F.lit(1).alias("delay_sec"))
    with pytest.raises(PySparkException, match="write it with to_json"):
        world.save(table)
    with pytest.raises(PySparkException, match="only added to"):
        later(world.spark, 1).write.format("duetime").option("name", "sale").mode("overwrite").save()


def batches_of(table: DataFrame) -> Iterator[Any]:
    return iter(table.toArrow().to_batches())


def test_only_the_files_of_the_attempts_that_count_are_stored(world: World) -> None:
    """Attempts of a task that fail, or come second, have written files all the same."""
    table = later(world.spark, 10)
    writer = world.writer(table)
    lost = writer.write(batches_of(table))
    counted = [writer.write(batches_of(table)), writer.write(batches_of(table.limit(0)))]
    assert Path(lost.accepted_file).exists() and counted[1].accepted_file == ""
    writer.commit(counted)
    assert len(world.messages()) == 10 and world.left() == []


def test_a_commit_that_is_cut_off_is_completed_by_the_next_write_with_the_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = later(world.spark, 10)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    for target in ((Campaigns, "begin"), (staged_rows, "_load"), (Campaigns, "finish")):
        writer = world.writer(table)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(*target, die)
            writer.commit([writer.write(batches_of(table))])
        if target[1] == "_load":
            assert world.messages() == []
    assert len(world.messages()) == 10
    other = later(world.spark, 999)
    writer = world.writer(other)
    with pytest.raises(PipelineError, match="sale has been scheduled with 10 rows and comes now with 999 rows"):
        writer.commit([writer.write(batches_of(other))])
    assert len(world.messages()) == 10


def test_a_stage_that_never_became_a_campaign_is_deleted_after_a_week_by_its_own_namespace(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    def write(name: str) -> None:
        writer = world.writer(later(world.spark, 10), name=name)
        writer.commit([writer.write(batches_of(later(world.spark, 10)))])

    def age() -> None:
        client: Any = connect(world.settings.redis)
        [keys] = keys_of(world.settings.redis)
        for folder in client.zrange(keys.stages(), 0, -1):
            client.zadd(keys.stages(), {folder: 1})
        client.close()

    def cut_off(name: str) -> None:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Campaigns, "begin", die)
            write(name)

    cut_off("others")
    age()
    world.begin()
    cut_off("old")
    age()
    cut_off("new")
    write("sale")
    assert sorted(name.partition("-")[0] for name in world.stages()) == ["new", "others"]


def test_nothing_is_left_of_a_write_of_which_no_row_was_refused(world: World) -> None:
    writer = world.writer(later(world.spark, 10))
    writer.commit([writer.write(batches_of(later(world.spark, 10)))])
    assert world.stages() == []


def test_a_campaign_that_was_begun_by_either_way_is_completed_by_the_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tables, "_load", die)
        schedule(later(world.spark, 1_000), "sale")
    world.save(later(world.spark, 5), changedRows="ignore")
    assert len(world.messages()) == 1_000
    table = later(world.spark, 7)
    writer = world.writer(table, name="other")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(staged_rows, "_load", die)
        writer.commit([writer.write(batches_of(table))])
    assert schedule(later(world.spark, 5), "other").stored == 7


def test_rows_that_are_no_requests_fail_a_commit(world: World) -> None:
    table = world.spark.sql("select 'a' as message, 60 as delay_sec union all select 'b', -1")
    writer = world.writer(table)
    with pytest.raises(PipelineError, match="so nothing is scheduled"):
        writer.commit([writer.write(batches_of(table))])
    assert world.messages() == [] and world.left() == []


def test_a_commit_that_comes_again_stores_nothing_of_its_own(world: World) -> None:
    for rows in (10, 20):
        writer = world.writer(later(world.spark, rows), changedrows="ignore")
        writer.commit([writer.write(batches_of(later(world.spark, rows)))])
    assert len(world.messages()) == 10 and world.left() == []


def test_of_two_commits_at_once_one_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comes from behind while the other has found that nothing is known of the name, and is done before it."""
    table, others = later(world.spark, 20), later(world.spark, 10)
    writer, other = world.writer(table), world.writer(others)
    staged, staged_by_other = writer.write(batches_of(table)), other.write(batches_of(others))
    begin = Campaigns.begin

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(Campaigns, "begin", begin)
        other.commit([staged_by_other])
        return begin(*arguments)

    monkeypatch.setattr(Campaigns, "begin", overtaken)
    with pytest.raises(PipelineError, match="scheduled with 10 rows and comes now with 20 rows"):
        writer.commit([staged])
    assert len(world.messages()) == 10 and world.left() == []


def test_a_row_whose_id_looks_like_one_of_ours_keeps_it(world: World) -> None:
    ids = [f"{14 * '-'}00000001", f"{14 * '-'}00000002", f"{14 * 'a'}00000003"]
    table = world.spark.createDataFrame([("m", 60, each) for each in ids], "message string, delay_sec int, id string")
    writer = world.writer(table)
    writer.commit([writer.write(batches_of(table))])
    assert [message.id for message in world.messages()] == ids


def test_a_delay_that_is_no_number_is_out_of_range(world: World) -> None:
    """As ``schedule`` has it."""
    values = ("'nan'", "'inf'", "'-inf'", "5.0")
    table = world.spark.sql(
        " union all ".join(f"select 'a' as message, cast({value} as double) as delay_sec" for value in values)
    )
    world.save(table, refused="keep")
    reasons = [(row.reason, row.delay_sec) for row in schedule(table, "sale").refused.collect()]
    assert len(world.messages()) == 1
    assert reasons == [("delay_out_of_range", float("inf"))] * 3


def test_a_file_that_the_driver_does_not_see_is_an_error(world: World) -> None:
    table = later(world.spark, 10)
    writer = world.writer(table)
    staged = writer.write(batches_of(table))
    Path(staged.accepted_file).unlink()
    with pytest.raises(PipelineError, match="The driver does not see"):
        writer.commit([staged])
    assert world.messages() == []


class Orders:
    """A stream of files into the name ``orders``; each file is a batch."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._folder = world.folder / "in"
        self._folder.mkdir()

    def put(self, number: int, text: str, rows: int = 10) -> None:
        self._folder.joinpath(f"{number}.json").write_text(f'{{"message":"{text}","delay_sec":60}}\n' * rows)

    def run(self, checkpoint: str, **options: str) -> str:
        """Take in what is there, and return the id of the query."""
        reader = self._world.spark.readStream.schema("message string, delay_sec int").option("maxFilesPerTrigger", 1)
        writing = (
            reader.json(str(self._folder))
            .writeStream.format("duetime")
            .options(name="orders", checkpointLocation=str(self._world.folder / checkpoint), **options)
        )
        query = writing.trigger(availableNow=True).start()
        query.awaitTermination(120)
        return str(query.id)

    def undo(self, checkpoint: str) -> None:
        """Have the last batch played again, as after a kill between our commit and Spark's own."""
        commits = self._world.folder / checkpoint / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
        commits.joinpath(str(last)).unlink()
        # Written or not, as a test before has set this session.
        commits.joinpath(f".{last}.crc").unlink(missing_ok=True)


def test_the_batches_of_a_stream_are_scheduled_once(world: World) -> None:
    orders = Orders(world)
    for number in range(3):
        orders.put(number, f"a{number}")
    query = orders.run("checkpoint")
    orders.undo("checkpoint")
    assert orders.run("checkpoint") == query
    assert len(world.messages()) == 30
    assert len({message.message_id for message in world.messages()}) == 30
    arrivals = {arrival_ms(message.message_id[:ARRIVAL_LENGTH]) for message in world.messages()}
    assert len(arrivals) == 3, "delays count from the batch, not from the start of the query"
    assert world.left() == []
    assert schedule(later(world.spark, 5), f"orders-{query}-2").known == 10


def test_a_stream_with_a_new_checkpoint_schedules_its_own_rows(world: World) -> None:
    """Spark counts its batches from 0 again: they are others."""
    orders = Orders(world)
    orders.put(0, "old")
    first = orders.run("first")
    orders.put(0, "new")
    assert orders.run("second") != first
    assert Counter(message.body for message in world.messages()) == {"old": 10, "new": 10}


def test_a_batch_that_is_played_again_with_other_rows_is_an_error(world: World) -> None:
    orders = Orders(world)
    orders.put(0, "old")
    query = orders.run("checkpoint")
    orders.undo("checkpoint")
    orders.put(0, "new", rows=7)
    with pytest.raises(
        PySparkException, match=f"orders-{query}-0 has been scheduled with 10 rows and comes now with 7 rows"
    ):
        orders.run("checkpoint")
    orders.run("checkpoint", changedRows="ignore")
    assert Counter(message.body for message in world.messages()) == {"old": 10}


def test_a_batch_of_no_query_is_an_error(world: World) -> None:
    table = later(world.spark, 1)
    writer = world.writer(table)
    staged = writer.write(batches_of(table))
    with pytest.raises(PipelineError, match="Spark did not say of which query this batch is"):
        BatchesWriter(writer._target).commit([staged], 0)


def test_what_is_scheduled_is_a_table(world: World) -> None:
    with Duetime() as duetime:
        duetime.schedule("tea", due=AT, id="tea-1", topic="kitchen", headers={"a": "b"})
        handle = duetime.schedule("plain", due=AT + timedelta(hours=1)).id
    table = scheduled(world.spark)
    later_at, start = AT + timedelta(hours=1), AT.replace(minute=0, second=0, microsecond=0)
    wanted = [
        (AT, start, "kitchen", "tea-1", "tea", {"a": "b"}, 1, ""),
        (later_at, start + timedelta(hours=1), "default", handle, "plain", {}, 1, ""),
    ]
    found = table.drop("message_id").orderBy("due")
    assert_df_equality(found, world.spark.createDataFrame(wanted, found.schema))
    assert all(len(row.message_id) == 22 for row in table.collect())


def test_a_report_reads_only_its_time_and_its_columns(world: World) -> None:
    times = world.spark.range(0, 3_000, 1, 2).select(
        F.col("id").cast("string").alias("message"), (F.lit(AT_MS) + F.col("id") * 60_000).alias("due")
    )
    schedule(times, "sale")
    assert scheduled(world.spark).count() == 3_000
    table = scheduled(
        world.spark, since=str(AT_MS + 60_000), until="2035-01-02T05:04:05.678Z", columns=("message", "due")
    )
    assert table.columns == ["message", "due"]
    assert sorted(int(row.message) for row in table.collect()) == [*range(1, 120)]
    per_hour = scheduled(world.spark, columns=("due",)).groupBy(F.date_trunc("hour", "due")).count()
    assert per_hour.count() == 51


def test_nothing_scheduled_is_an_empty_table(world: World) -> None:
    assert world.rows() == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"since": "tomorrow"}, "The option from takes a time"),
        ({"columns": ("due", "body")}, "There is no column 'body'"),
    ],
)
def test_what_can_not_be_read_is_told(world: World, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PySparkException, match=sentence):
        scheduled(world.spark, **options)
    with pytest.raises(ConfigError, match="There is no option topic"):
        Selection.of({"topic": "mail"})


@pytest.mark.parametrize(
    ("counts", "spans"),
    [
        ({}, 1),
        ({0: 10, 600_000: 10}, 1),
        ({0: SPAN_ROWS, 600_000: 1}, 2),
        ({0: 3 * SPAN_ROWS, 600_000: 1, 1_200_000: SPAN_ROWS}, 5),
    ],
)
def test_spans_touch_and_cover_all(counts: dict[int, int], spans: int) -> None:
    found = [*spans_of(counts, -5, 10_000_000)]
    assert found[0][0] == -5 and found[-1][1] == 10_000_000
    assert all(one[1] == other[0] for one, other in pairwise(found))
    assert len(found) == spans and all(start < end for start, end in found)
