"""What ``spark-submit.sh`` runs: look at the command line, prepare the environment, then become the right program.

- ``jobs/drain.py`` and ``jobs/status.py`` need no Spark: Python on the script, no Java looked for.
- Other Python scripts in client mode: also Python on the script, with Spark's options in ``PYSPARK_SUBMIT_ARGS``. Spark's own
  ``spark-submit`` would turn into the JVM with Python below it, where SIGTERM never reaches the job.
- All else (cluster mode, jars, ``--status``, ``--kill``): Spark's own ``spark-submit``, arguments unchanged.
- No arguments: the supervisor.
"""

import hashlib
import importlib.util
import os
import re
import shlex
import signal
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NoReturn

from pipeline.core.errors import ConfigError, PipelineError
from pipeline.runtime.command_line import (
    CommandLine,
    parse_command_line,
    read_spark_setting,
)
from pipeline.runtime.process import open_standard_fds

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_SPARK = frozenset({"drain.py", "status.py"})
# With one of these the script, if there is one, doesn't run in a driver here.
ELSEWHERE = ("--class", "--kill", "--status", "--remote", "--usage-error")

HELP = """\
Usage:
  ./spark-submit.sh
      Everything on this machine: ingest inbox/ and print each message when it is due. Ctrl-C stops it.
      A few sample messages are dropped into inbox/ at each start.
  ./spark-submit.sh [spark-submit options] jobs/ingest.py [options]
      Take requests in, on this machine or on a cluster (--master ..., --deploy-mode ...).
  ./spark-submit.sh jobs/drain.py [options]
  ./spark-submit.sh jobs/status.py [options]
      Deliver what is due; say what is scheduled. Neither needs Spark.

  Any other Python script, class or jar runs as with Spark's own spark-submit.
  Each job has its own --help: ./spark-submit.sh jobs/drain.py --help

Options:
  -h, --help      show this and exit
  --spark-help    show the help of Spark's own spark-submit and exit
  --version       show the versions of Duetime, Spark, Java and Python and exit

Environment:
  REDIS_URL       the Redis to use; without it, a private one is started in .duetime/, gone with its last user
  JAVA_HOME       the Java to use, 17 or newer; without it, the one on PATH, or one that was installed along
  SPARK_CONF_DIR  Spark's configuration; without it, conf/
  PYSPARK_PYTHON  the Python of a cluster's executors
  DUETIME_SAMPLE  0: drop no sample messages
"""


@dataclass(frozen=True, slots=True)
class Program:
    """What to become: ``argv[0]`` is the path of the program."""

    argv: tuple[str, ...]
    environ: dict[str, str]


def plan_program(argv: Sequence[str], environ: Mapping[str, str], *, root: Path = ROOT, state_dir: Path) -> Program:
    """Return what to become for ``argv``.

    Raises:
        ConfigError: The command line is wrong, the script isn't there, or no Java is.
    """
    line = parse_command_line(argv)
    conf_dir = Path(environ.get("SPARK_CONF_DIR") or root / "conf")

    def setting(option: str, key: str) -> str | None:
        return read_spark_setting(line, conf_dir, option, key)

    child_environ = _base_environ(environ, root)
    script = _find_script(line, root)
    is_ours = script is not None and script.resolve().parent == root / "jobs"
    is_local = (
        re.match(r"local(\[|$)", setting("--master", "spark.master") or environ.get("MASTER") or "local") is not None
    )
    in_cluster = setting("--deploy-mode", "spark.submit.deployMode") == "cluster"
    if script is not None and is_ours and script.name in WITHOUT_SPARK and not in_cluster:
        return Program((sys.executable, str(script), *line.arguments), child_environ)

    options = line.without("")
    if is_ours and not is_local:
        packed = str(pack_package(root, state_dir / "py-files"))
        theirs = setting("--py-files", "spark.submit.pyFiles")
        options = [*line.without("--py-files"), "--py-files", f"{theirs},{packed}" if theirs else packed]
    child_environ |= spark_environ(environ, root, quiet=is_ours and is_local)
    if script is None or in_cluster or line.has(*ELSEWHERE):
        submit = os.path.join(child_environ["SPARK_HOME"], "bin", "spark-submit")
        resource = [] if line.script is None else [str(script or line.script)]
        return Program((submit, *options, *resource, *line.arguments), child_environ)
    if is_local:
        child_environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # nobody else has to reach this Spark
    # Workers run the Python that has our packages; on a cluster the user may know a better path.
    named = setting("", "spark.pyspark.python") or environ.get("PYSPARK_PYTHON")
    child_environ["PYSPARK_PYTHON"] = named if named and not is_local else sys.executable
    child_environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    child_environ["PYSPARK_SUBMIT_ARGS"] = shlex.join([*options, "pyspark-shell"])
    return Program((sys.executable, str(script), *line.arguments), child_environ)


def spark_environ(environ: Mapping[str, str], root: Path = ROOT, *, quiet: bool = True) -> dict[str, str]:
    """Return the variables that a process needs to start Spark: Java, Spark's home and its configuration.

    ``quiet`` is for programs that don't use MLlib: ``prepare_java_home`` says why.

    Raises:
        ConfigError: There is no usable Java.
    """
    # Imported here: the drain loop does without, and starts the faster.
    from pipeline.runtime.java import find_java, prepare_java_home

    java_home = prepare_java_home(find_java(environ), Path(sys.prefix, "share"), quiet=quiet)
    return {
        "JAVA_HOME": str(java_home),
        "SPARK_HOME": _find_spark_home(environ),
        "SPARK_CONF_DIR": environ.get("SPARK_CONF_DIR") or str(root / "conf"),
    }


def _base_environ(environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return ``environ`` with our package importable, also when nobody came through spark-submit.sh."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(root) not in paths:
        paths.insert(0, str(root))
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


def _find_script(line: CommandLine, root: Path) -> Path | None:
    """Return the Python script that is to run here: as the user names it, else in the checkout; None if it is anything else."""
    if line.script is None or not line.script.endswith(".py") or ":/" in line.script:
        return None
    for script in (Path(line.script), root / line.script):
        if script.is_file():
            return script
    raise ConfigError(f"There is no file {line.script}: name a script, for example jobs/ingest.py.")


def _find_spark_home(environ: Mapping[str, str]) -> str:
    """Return the user's ``SPARK_HOME`` if its version is that of our pyspark, else pyspark's own folder.

    Another version's jars would fail later, in ways that are hard to read.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigError("pyspark is not installed: start through ./spark-submit.sh, which installs it.")
    ours = Path(spec.origin).parent
    theirs = Path(environ.get("SPARK_HOME") or ours)
    jars = {jar.name for jar in ours.glob("jars/spark-core_*.jar")}
    return str(theirs if any((theirs / "jars" / name).exists() for name in jars) else ours)


def pack_package(root: Path, folder: Path) -> Path:
    """Zip the ``pipeline`` package for executors and return its path.

    The name holds the content's hash: a running job's file never changes, and the same sources give the same file.
    """
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((root / "pipeline").rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                info = zipfile.ZipInfo(path.relative_to(root).as_posix())  # dated 1980
                info.external_attr = 0o644 << 16
                archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    target = folder / f"pipeline-{hashlib.sha256(buffer.getvalue()).hexdigest()[:12]}.zip"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(buffer.getvalue())
        fresh.rename(target)
    return target


def print_versions() -> None:
    """Print what runs here, one line each."""
    from importlib.metadata import version

    from pipeline import __version__
    from pipeline.runtime.java import find_java

    print(f"Duetime {__version__}\nSpark {version('pyspark')}\nPython {sys.version.split()[0]}", flush=True)
    java = find_java(os.environ)
    print(f"Java {java.version} ({java.origin}: {java.home})")


def become(program: Program) -> NoReturn:
    """Turn this process into ``program``; its process id stays, so whoever sends it signals reaches the job."""
    os.execve(program.argv[0], program.argv, program.environ)


def main(argv: Sequence[str]) -> int:
    """Become the program that ``argv`` asks for; returns an exit code only for what is done here."""
    open_standard_fds()
    try:
        if not argv:
            from pipeline.config import load_settings
            from pipeline.runtime.supervisor import supervise

            return supervise(ROOT, load_settings({}, os.environ))
        if list(argv) == ["--spark-help"]:
            argv = ["--usage-error"]
        line = parse_command_line(argv)
        if line.has("--help", "-h"):
            print(HELP, end="")
            return 0
        if line.has("--version"):
            print_versions()
            return 0
        program = plan_program(argv, os.environ, state_dir=ROOT / ".duetime")
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    become(program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
