"""The archive of Spark's classes: when it fits, how Java's shim gets it, and that nothing of its making is left."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from pipeline.core.errors import ConfigError
from pipeline.runtime import class_archive
from pipeline.runtime.class_archive import ARCHIVE, MAKE, archive_environ, archive_made_beside, make_archive
from pipeline.runtime.java import VECTOR_MODULE, Java, find_java, prepare_java_home
from pipeline.runtime.process import wait_until
from pipeline.runtime.submit import ROOT, spark_environ


@pytest.fixture
def spark_home(tmp_path: Path) -> Path:
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    (tmp_path / "spark" / "jars" / "a.jar").write_text("a")
    return tmp_path / "spark"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "conf").mkdir()
    for name in ("log4j2.properties", "spark-defaults.conf", "pipeline.toml"):
        (tmp_path / "conf" / name).touch()
    return tmp_path / "conf"


def java(version: str = "17.0.1", home: Path = Path("/java")) -> Java:
    return Java(home, version, "PATH", frozenset())


def test_another_java_and_other_jars_have_an_archive_of_their_own(tmp_path: Path, spark_home: Path, conf: Path) -> None:
    names = [archive_environ(java(), spark_home, conf, tmp_path)[ARCHIVE] for _ in range(2)]
    names.append(archive_environ(java("17.0.2"), spark_home, conf, tmp_path)[ARCHIVE])
    (spark_home / "jars" / "a.jar").write_text("aa")
    names.append(archive_environ(java(), spark_home, conf, tmp_path)[ARCHIVE])
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_a_java_that_was_updated_in_place_has_an_archive_of_its_own(
    tmp_path: Path, spark_home: Path, conf: Path
) -> None:
    """It may keep its version, and maps no archive on top of one of its own that is another now."""
    own = tmp_path / "java" / "lib" / "server" / "classes.jsa"
    own.parent.mkdir(parents=True)
    names = set()
    for content in ("build 6", "build 10"):
        own.write_text(content)
        names.add(archive_environ(java(home=tmp_path / "java"), spark_home, conf, tmp_path)[ARCHIVE])
    assert len(names) == 2


@pytest.mark.parametrize("name", ["core-site.xml", "metrics.properties", "log4j2.yaml"])
def test_a_configuration_that_java_reads_by_the_class_path_stays_on_it(
    tmp_path: Path, spark_home: Path, conf: Path, name: str
) -> None:
    (conf / name).touch()
    assert archive_environ(java(), spark_home, conf, tmp_path) == {}


LOGGING = "-Dlog4j2.configurationFile={conf}/log4j2.properties"
MAPPED = (LOGGING, "-XX:SharedArchiveFile={archive}", "-Xlog:cds*=off")


@pytest.mark.parametrize(
    ("environ", "is_made", "expected"),
    [
        ({}, True, ("-cp", "{conf}/:/jars/*")),
        ({ARCHIVE: "{archive}"}, False, (LOGGING, "-cp", "/jars/*")),
        ({ARCHIVE: "{archive}"}, True, (*MAPPED, "-cp", "/jars/*")),
    ],
)
def test_the_shim_passes_an_archive_that_is_there(
    tmp_path: Path, environ: dict[str, str], is_made: bool, expected: tuple[str, ...]
) -> None:
    program, archive, conf = tmp_path / "home" / "bin" / "java", tmp_path / "an archive.jsa", tmp_path / "conf dir"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    if is_made:
        archive.touch()
    found = Java(tmp_path / "home", "17.0.1", "PATH", frozenset({VECTOR_MODULE}))
    shim = prepare_java_home(found, tmp_path / "share", quiet=True) / "bin" / "java"
    names = {"conf": str(conf), "archive": str(archive)}
    own = {name: text.format(**names) for name, text in environ.items()}
    given = [shim, "-cp", f"{conf}/:/jars/*", "Main", "a b"]
    environ = {"PATH": os.environ["PATH"], "SPARK_CONF_DIR": str(conf), **own}
    said = subprocess.run(given, env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [*(text.format(**names) for text in expected), "Main", "a b"]
    assert said.stderr == ""


def of_this_test(folder: Path) -> list[psutil.Process]:
    """The processes that write into ``folder``, by their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.environ().get("SPARK_SUBMIT_OPTS", ""):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_for_processes(folder: Path, wanted: bool) -> list[psutil.Process]:
    wait_until(lambda: bool(of_this_test(folder)) == wanted, 30)
    return of_this_test(folder)


def test_a_job_that_ends_takes_the_making_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (spark_environ(os.environ) | {ARCHIVE: str(tmp_path / "spark-1.jsa"), MAKE: "1"}).items():
        monkeypatch.setenv(name, value)
    with archive_made_beside(ROOT):
        found = wait_for_processes(tmp_path, True)
        assert found
        assert {process.nice() for process in found} == {19}
        assert not make_archive(os.environ, ROOT), "two make it at once"
    assert wait_for_processes(tmp_path, False) == []
    assert not (tmp_path / "spark-1.jsa").exists()


def test_a_job_that_is_started_by_itself_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARCHIVE, str(tmp_path / "spark-1.jsa"))
    monkeypatch.delenv(MAKE, raising=False)
    monkeypatch.setattr(class_archive, "make_archive", lambda *arguments: pytest.fail("it is made"))
    monkeypatch.setattr(class_archive, "Thread", lambda **options: pytest.fail("it is made"))
    with archive_made_beside(ROOT):
        assert list(tmp_path.iterdir()) == []


def test_one_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "spark-1.jsa").write_text("old")
    assert make_archive({ARCHIVE: str(tmp_path / "spark-1.jsa")}, ROOT)
    assert not make_archive({}, ROOT), "a start that has no use for one"
    assert [path.name for path in tmp_path.iterdir()] == ["spark-1.jsa"]


def test_none_is_made_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive, "CGROUPS", tmp_path)
    own = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)[2].lstrip("/")
    (tmp_path / own).mkdir(parents=True, exist_ok=True)
    (tmp_path / own / "memory.max").write_text(f"{3 << 30}\n")
    (tmp_path / own / "memory.current").write_text(f"{2 << 30}\n")
    monkeypatch.setattr(class_archive, "_start", lambda *arguments: pytest.fail("it is made"))
    assert not make_archive({ARCHIVE: str(tmp_path / "spark-1.jsa")}, ROOT)


def test_a_spark_of_these_tests_has_mapped_it() -> None:
    """``tests/run.sh`` makes it; without, every test that starts a Spark takes six seconds more."""
    try:
        environ = spark_environ(os.environ)
    except ConfigError:
        pytest.skip("there is no Java")
    archive = Path(environ[ARCHIVE])
    if not archive.exists():
        pytest.skip("there was no memory for it, or these tests were not started by tests/run.sh")
    program = find_java({"JAVA_HOME": environ["JAVA_HOME"], "PATH": ""}).home / "bin" / "java"
    jars = Path(environ["SPARK_HOME"]) / "jars"
    path = f"{next(jars.glob('slf4j-api-*.jar'))}:{jars}/*"
    # The heap is that of a job: with the one that a large machine gives by itself Java lays objects out in another way.
    options = [f"-XX:SharedArchiveFile={archive}", "-Xmx1g", "-Xlog:class+load", "-cp", path]
    command = [program, *options, "org.apache.spark.deploy.SparkSubmit", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "org.apache.spark.deploy.SparkSubmit source: shared objects file (top)" in said.stdout, said.stdout[:2000]
