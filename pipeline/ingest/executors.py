"""Ask each executor of a cluster, before the first batch, whether it has what it needs.

``check_executors`` runs in the driver. What it asks an executor is answered by a program of its own, which the executor's JVM
starts: Spark's own Python workers could not say what is missing when it is Python itself, or a package that they import. Only the
standard library is imported here at the top, as this module is the first that such a program imports.
"""

import importlib
import json
import logging
import pickle
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.clock import Clock, SystemClock
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.core.files import mark_folder, read_mark
from pipeline.landing.folder import SOURCE_ID_NAME

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pipeline.config import RedisSettings, Settings
    from pipeline.ingest.cold_folder import ColdPlace
    from pipeline.ingest.sources import Source

log = logging.getLogger(__name__)

PACKAGES = ("numpy", "pandas", "pyarrow", "msgspec", "redis")
KAFKA_PACKAGE = "confluent_kafka"
_checked: set[tuple[str, bool]] = set()  # applications whose workers have what they need, and whether they reach Redis
ROUNDS_MAX = 5  # of questions; the scheduler gives each idle executor one, so that one round is nearly always enough

# Executed by ``python -c`` on an executor, where our own code is an archive beside the working directory.
_PROGRAM = """\
import json, os, platform, sys
asked = json.loads(sys.stdin.readline())
said = {"host": platform.node(), "place": os.getcwd(), "now_ms": None}
if list(sys.version_info[:2]) != asked["python"]:
    here, there = ".".join(map(str, sys.version_info[:2])), ".".join(map(str, asked["python"]))
    said["missing"] = ["Python %s, which the driver has (%s is Python %s)" % (there, sys.executable, here)]
else:
    sys.path[:0] = asked["paths"]
    try:
        from pipeline.ingest.executors import answer
        said.update(answer(asked))
    except ImportError as exc:
        said["missing"] = ["the project's own code (%s)" % exc]
print(json.dumps(said))
"""
_NO_PYTHON = (
    '{"host": "%s", "place": "%s", "now_ms": null, "missing": ["Python (%s is not there, or does not run)"]}\\n'
)
# Without a Python somebody else must answer, and read what is asked, lest Spark finds nobody at the other end.
_SHELL = (
    'command -v "$0" >/dev/null 2>&1 && "$0" -c "$1" && exit; '
    f"""cat >/dev/null; printf '{_NO_PYTHON}' "$(uname -n)" "$PWD" "$0" """
)


def command_of(python: str) -> list[str]:
    """Return the command that answers on an executor what one line of standard input asks."""
    return ["sh", "-c", _SHELL, python, _PROGRAM]


def check_executors(
    spark: "SparkSession",
    settings: "Settings",
    redis: "RedisSettings",
    source: "Source",
    cold: "ColdPlace | None" = None,
) -> str:
    """Ask each executor that is there now; one whose clock is wrong is a warning.

    Returns:
        The mark of the rejects folder, for ``RejectsWriter``; "" if the driver is the only executor.

    Raises:
        ConfigError: the server is one that only this machine reaches.
        PipelineError: executors lack something; one sentence for each host.
    """
    context = spark.sparkContext
    if str(context.master).partition("[")[0] == "local":
        return ""
    if not settings.redis.url:
        raise ConfigError(
            "Executors on other machines can't reach the private server; name one with --redis or REDIS_URL."
        )
    rejects = Path(settings.ingest.rejects).absolute()
    mark = mark_folder(rejects)
    packages = [*PACKAGES, *([KAFKA_PACKAGE] if settings.ingest.source == "kafka" else [])]
    asked = question(redis, source, rejects, mark, packages, cold)
    asked["paths"] = list(context._python_includes or ())
    answers = _ask(context, json.dumps(asked), SystemClock())
    for warning in judge(answers, settings.redis.clock_skew_ms_max):
        log.warning("%s", warning)
    log.info("%s what is needed", "1 executor has" if len(answers) == 1 else f"{len(answers)} executors have")
    return mark


def question(
    redis: "RedisSettings",
    source: "Source",
    rejects: Path,
    mark: str,
    packages: Sequence[str],
    cold: "ColdPlace | None" = None,
) -> dict[str, Any]:
    """Return what an executor is asked."""
    landing = Path(source.location, SOURCE_ID_NAME)
    return {
        "python": list(sys.version_info[:2]),
        "paths": [],
        "packages": list(packages),
        "input": [source.location, source.source_id] if landing.exists() else None,  # else Spark has its own ways there
        "rejects": [str(rejects), mark],
        "cold": [cold.folder, cold.folder_id] if cold else None,
        "redis": b64encode(pickle.dumps(redis)).decode(),
    }


def check_workers(spark: "SparkSession", redis: "RedisSettings | None" = None) -> None:
    """See, once for a Spark application, that the workers of a user's program can do what this package has them do.

    Args:
        redis: the server that they store in; None if the driver does, or alone can.

    Raises:
        PipelineError: their Python is another one, or lacks a package, or Redis does not answer them.
    """
    context = spark.sparkContext
    application, is_local = str(context.applicationId), str(context.master).partition("[")[0] == "local"
    asks_redis = redis is not None and not is_local  # workers of this machine reach what the driver does
    if not _checked.isdisjoint(((application, asks_redis), (application, True))):
        return
    asked: dict[str, Any] = {"python": list(sys.version_info[:2]), "packages": PACKAGES}
    asked["paths"] = list(context._python_includes or ())
    if is_local:
        from pyspark import SparkFiles

        asked["paths"] = [str(Path(SparkFiles.getRootDirectory(), name)) for name in asked["paths"]]
    if asks_redis:
        asked["redis"] = b64encode(pickle.dumps(redis)).decode()
    lacks = _lacks_by_host(_ask(context, json.dumps(asked), SystemClock()))
    if lacks:
        host, what = min(lacks.items())
        raise PipelineError(
            f"Spark's workers on {host} run {context.pythonExec}, and lack {', and '.join(what)}: install it there, or set "
            f"PYSPARK_PYTHON, before Spark starts, to a Python that has it, as {sys.executable} has here."
        )
    _checked.add((application, asks_redis))


def _lacks_by_host(answers: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Return what executors lack, for each host where they lack something."""
    found: dict[str, list[str]] = {}
    for said in answers:
        for what in said["missing"]:
            if what not in found.setdefault(said["host"], []):
                found[said["host"]].append(what)
    return found


def judge(answers: Iterable[dict[str, Any]], skew_ms_max: int) -> list[str]:
    """Return a warning for each host with a wrong clock.

    Raises:
        PipelineError: executors lack something; one sentence for each host.
    """
    answers = [*answers]
    sentences = [
        f"An executor on {host} lacks {', and '.join(what)}." for host, what in sorted(_lacks_by_host(answers).items())
    ]
    if sentences:
        raise PipelineError(f"{' '.join(sentences)} docs/how-to/spark-cluster.md says how executors get it.")
    skews = {said["host"]: said["skew_ms"] for said in answers if said["skew_ms"] > skew_ms_max}
    return [
        f"The clock of the executor on {host} differs by {skew_ms} ms from the driver's; synchronise both with NTP."
        for host, skew_ms in sorted(skews.items())
    ]


def _ask(context: Any, asked: str, clock: Clock) -> list[dict[str, Any]]:
    """Return what each executor answers."""
    java = context._jsc
    command = command_of(context.pythonExec)
    answers: dict[tuple[str, str], dict[str, Any]] = {}
    for _ in range(ROUNDS_MAX):
        executors = max(1, java.sc().getExecutorMemoryStatus().size() - 1)  # the driver is one of them
        if len(answers) >= executors:
            break
        began_ms = clock.wall_ms()
        lines = list(java.parallelize([asked] * executors, executors).pipe(command).collect())
        ended_ms = clock.wall_ms()
        for said in (json.loads(line) for line in lines if line.startswith("{")):  # a Python may greet
            now_ms = said["now_ms"] or began_ms
            said["skew_ms"] = max(0, began_ms - now_ms, now_ms - ended_ms)
            answers[said["host"], said["place"]] = said
    return list(answers.values())


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Return on an executor what it lacks, and its clock."""
    return {"missing": list(_find_missing(asked)), "now_ms": SystemClock().wall_ms()}


def _find_missing(asked: dict[str, Any]) -> list[str]:
    missing, packages = [], []
    for name in asked["packages"]:
        try:
            importlib.import_module(name)
        except ImportError:
            packages.append(name)
    if packages:
        missing.append(f"the Python packages {', '.join(packages)}")
    if asked.get("input") and not _is_input(*asked["input"]):
        missing.append(f"the driver's input folder at {asked['input'][0]}")
    if asked.get("rejects") and read_mark(Path(asked["rejects"][0])) != asked["rejects"][1]:
        missing.append(f"the driver's rejects folder at {asked['rejects'][0]}")
    if asked.get("cold") and not packages and not _is_cold_folder(*asked["cold"]):
        missing.append(f"the driver's cold folder at {asked['cold'][0]}")
    redis = not packages and asked.get("redis")
    if redis and (failure := _redis_failure(pickle.loads(b64decode(redis)))):
        missing.append(f"a way to Redis ({failure.rstrip('.')})")
    return missing


def _is_input(folder: str, source_id: str) -> bool:
    try:
        return Path(folder, SOURCE_ID_NAME).read_text(encoding="ascii", errors="replace").strip() == source_id
    except OSError:
        return False


def _is_cold_folder(folder: str, folder_id: str) -> bool:
    from pipeline.ingest.cold_folder import ColdFolder

    try:
        ColdFolder(folder, folder_id).check()
    except PipelineError:
        return False
    return True


def _redis_failure(settings: "RedisSettings") -> str:
    from pipeline.store.connection import connect, server_ms

    try:
        server_ms(connect(settings))
    except PipelineError as exc:
        return str(exc)
    return ""
