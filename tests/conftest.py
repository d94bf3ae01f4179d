"""What several folders of tests share: one Spark and one server for each worker process, and the tests' place in the tiers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import tests.examples  # noqa: F401  (registers a profile)
from tests.leaks import find_leaks
from tests.servers import RealServer, real_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Tests that use one of these start jobs or other processes of ours, and most of them kill some.
PROCESS_FIXTURES = {"checkout", "scenario", "spawn", "processes", "broker"}


# What tests start is over before Java's optimizing compiler has paid for itself.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the fixtures that they use; those that use Spark share one session in one worker process, others one broker."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "spark" in fixtures:
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.xdist_group("spark"))
        elif "broker" in fixtures:  # what needs both is in the group of the one that takes longer to start
            item.add_marker(pytest.mark.xdist_group("kafka"))
        if fixtures & PROCESS_FIXTURES:
            item.add_marker(pytest.mark.process)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One small Spark for all tests that need one; starting it takes longer than most of them."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .appName("duetime-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.ansi.enabled", "true")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running


@pytest.fixture
def server(shared_server: RealServer, request: pytest.FixtureRequest) -> Iterator[RealServer]:
    """The server of this worker process, empty; afterwards it may hold only what stays by design, expires or has messages.

    A test that kills a server starts one of its own; one that leaves rubbish on purpose is marked ``leaves_rubbish``.
    """
    with shared_server.client() as client:
        client.flushall()
        yield shared_server
        if not request.node.get_closest_marker("leaves_rubbish"):
            assert find_leaks(client) == []
