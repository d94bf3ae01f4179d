"""What ``spark-submit.sh`` runs: look at the command line, prepare the environment, then become the right program.

- Our jobs but ``jobs/ingest.py``, and any job's ``--help``: Python on the script, no Java looked for.
- Other Python scripts in client mode: also Python on the script, with Spark's options in ``PYSPARK_SUBMIT_ARGS``. Spark's own
  ``spark-submit`` would turn into the JVM with Python below it, where SIGTERM never reaches the job.
- All else (cluster mode, jars, ``--status``, ``--kill``): Spark's own ``spark-submit``.
- No arguments: the supervisor.
"""

import importlib.util
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pipeline.core.errors import ConfigError, PipelineError
from pipeline.runtime.command_line import append_file, read_spark_setting, split_command_line, take_option
from pipeline.runtime.process import open_standard_fds
from pipeline.runtime.sending import (
    PACK,
    PYTHON,
    check_cluster,
    check_sent,
    find_configuration,
    pack_executors,
    pack_package,
    send_configuration,
    send_packages,
)

ROOT = Path(__file__).resolve().parents[2]
SPARK_JOB = "ingest.py"  # the only job that needs Spark, and with it Java
# With one of these nothing runs in a driver here.
ELSEWHERE = frozenset(("--class", "--kill", "--status", "--remote", "--usage-error"))
ABOUT = frozenset(("-h", "--help", "--version"))

HELP = """\
Usage:
  ./spark-submit.sh
      Everything on this machine: take in what is dropped into inbox/ and print each message when it is due. Ctrl-C stops it.
      The address that it prints shows all of it in a browser.
      The first start with a private Redis drops a few sample messages into inbox/.
  ./spark-submit.sh [spark-submit options] SCRIPT [options]
      One job, or a Python script of your own. Jars and cluster mode work as with Spark's own spark-submit.
  ./spark-submit.sh --pack-executors FILE.tar.gz
      Pack the Python packages that executors need. In front of a job: send them along, too.

Jobs (each has its own --help; only ingest needs Java, and only it has use for spark-submit options):
  jobs/ingest.py        take requests in, on this machine or on a cluster (--master ..., --deploy-mode ...)
  jobs/drain.py         print messages when they are due, or move them into streams
  jobs/consume.py       print the messages of a topic as a consumer of a group
  jobs/hydrate.py       bring messages of the cold folder into Redis
  jobs/webhooks.py      post the messages of topics to URLs
  jobs/topics.py        list topics and groups; pause and resume topics; show and change settings; drop groups
  jobs/schedule.py      schedule a message, or request lines from a pipe
  jobs/messages.py      show, list, cancel and move messages that wait
  jobs/serve.py         answer HTTP: schedule, find, move and cancel messages, and a dashboard
  jobs/dead_letters.py  list, show, redrive and purge dead letters
  jobs/status.py        what is scheduled, in flight and delivered, and how late

Options:
  -h, --help      show this and exit
  --spark-help    show the help of Spark's own spark-submit and exit
  --version       show the versions of Duetime, Spark, Java and Python and exit

Environment:
  REDIS_URL       the Redis to use; without it, redis.url of the configuration; without either, a private one is started
                  in .duetime/, gone with its last user
  DUETIME_CONFIG  the configuration file; without it, conf/pipeline.toml
  DUETIME_<SECTION>_<KEY>
                  a setting, such as DUETIME_INGEST_INPUT; counts instead of the one in the configuration file
  DUETIME_SAMPLE  0: drop no sample messages
  JAVA_HOME       the Java to use, 17 or newer; without it, the one on PATH, or one that was installed along
  SPARK_CONF_DIR  Spark's configuration; without it, conf/
  PYSPARK_PYTHON  the Python of a cluster's executors
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
    options, name, arguments = split_command_line(argv)
    options, archives = take_option(options, PACK)
    environ = _with_our_package(environ, root)
    is_remote = bool(environ.get("SPARK_REMOTE") or take_option(options, "--remote")[1])
    if is_remote and name and Path(name).name == SPARK_JOB:
        raise ConfigError(f"{SPARK_JOB} needs a driver of its own: name a cluster with --master, not Spark Connect.")
    is_jar = name is None and any(argument.endswith(".jar") for argument in argv)
    if is_jar or ELSEWHERE.intersection(option.partition("=")[0] for option in options):
        return _sparks_own(argv, environ, root)
    script = _find_script(name or argv[0], root)
    is_ours = script is not None and script.resolve().parent == root / "jobs"
    conf_dir = Path(environ.get("SPARK_CONF_DIR") or root / "conf")
    master = read_spark_setting(options, conf_dir, "--master", "spark.master") or environ.get("MASTER") or "local"
    is_local = re.match(r"local(\[|$)", master) is not None
    in_cluster = read_spark_setting(options, conf_dir, "--deploy-mode", "spark.submit.deployMode") == "cluster"
    needs_spark = script is None or script.name == SPARK_JOB or in_cluster
    if is_ours and (ABOUT.intersection(arguments) or not needs_spark):
        return Program((sys.executable, str(script), *arguments), dict(environ))
    check_cluster(master, in_cluster, is_ours and in_cluster, options, conf_dir, environ)
    if not is_local:
        packed = pack_package(root, state_dir / "py-files")
        options = append_file(options, conf_dir, "--py-files", "spark.submit.pyFiles", packed)
    if is_ours and in_cluster:
        file = find_configuration(arguments, environ.get("DUETIME_CONFIG") or str(root / "conf" / "pipeline.toml"))
        check_sent(script is not None and script.name == SPARK_JOB, arguments, environ, file)
        options, arguments = send_configuration(options, arguments, conf_dir, file)
    python = read_spark_setting(options, conf_dir, "", "spark.pyspark.python") or environ.get("PYSPARK_PYTHON")
    if archives:
        if is_local:
            raise ConfigError(f"{PACK} is for executors on other machines: name a cluster with --master.")
        options = send_packages(options, conf_dir, pack_executors(Path(archives[-1])))
        options += [] if python else ["--conf", f"spark.pyspark.python={PYTHON}"]
    if script is None or in_cluster:
        return _sparks_own([*options, str(script or name), *arguments], environ, root)
    child = {**environ, **spark_environ(environ, root, quiet=is_ours and is_local)}
    if is_local:
        child.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # nobody else has to reach this Spark
    # Workers run the Python that has our packages; on a cluster the user may know a better path.
    elsewhere = python or (PYTHON if archives else sys.executable)
    child["PYSPARK_PYTHON"] = sys.executable if is_local else elsewhere
    child["PYSPARK_DRIVER_PYTHON"] = sys.executable
    child["PYSPARK_SUBMIT_ARGS"] = shlex.join([*options, "pyspark-shell"])
    return Program((sys.executable, str(script), *arguments), child)


def _find_script(name: str, root: Path) -> Path | None:
    """Return the Python script ``name`` of the user, else of the checkout; None if it is not on this machine.

    Raises:
        ConfigError: there is none.
    """
    if name.startswith("-"):
        raise ConfigError("No script is named: add one, for example jobs/ingest.py; --help lists the jobs.")
    if ":/" in name:
        return None
    if name.endswith(".py"):
        for script in (Path(name), root / name):
            if script.is_file():
                return script
    job = Path("jobs", f"{Path(name).stem}.py")
    hint = f"did you mean {job}?" if (root / job).is_file() else "name a script, for example jobs/ingest.py."
    raise ConfigError(f"There is no script {name}: {hint}")


def _sparks_own(arguments: Sequence[str], environ: Mapping[str, str], root: Path) -> Program:
    child = {**environ, **spark_environ(environ, root, quiet=False)}
    return Program((os.path.join(child["SPARK_HOME"], "bin", "spark-submit"), *arguments), child)


def spark_environ(environ: Mapping[str, str], root: Path = ROOT, *, quiet: bool = True) -> dict[str, str]:
    """Return the variables that a process needs to start Spark: Java, Spark's home and its configuration.

    ``quiet`` is for programs that don't use MLlib: ``prepare_java_home`` says why.

    Raises:
        ConfigError: There is no usable Java.
    """
    # Imported here: the drain loop does without, and starts the faster.
    from pipeline.runtime.class_archive import archive_environ
    from pipeline.runtime.java import find_java, prepare_java_home

    java, share = find_java(environ), Path(sys.prefix, "share")
    spark_home, conf_dir = _find_spark_home(environ), environ.get("SPARK_CONF_DIR") or str(root / "conf")
    return {
        "JAVA_HOME": str(prepare_java_home(java, share, quiet=quiet)),
        "SPARK_HOME": spark_home,
        "SPARK_CONF_DIR": conf_dir,
        **(archive_environ(java, Path(spark_home), Path(conf_dir), share) if quiet else {}),
    }


def _with_our_package(environ: Mapping[str, str], root: Path) -> Mapping[str, str]:
    """Return ``environ`` with our package importable, also when nobody came through spark-submit.sh."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(root) not in paths:
        paths.insert(0, str(root))
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


def _find_spark_home(environ: Mapping[str, str]) -> str:
    """Return the user's ``SPARK_HOME`` if its version is that of our pyspark, else pyspark's own folder.

    Another version's jars would fail later, in ways that are hard to read.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigError("pyspark is not installed: start through ./spark-submit.sh, which installs it.")
    ours = (
        Path(spec.origin).resolve().parent
    )  # of checkouts that share an environment, one path, and one archive of classes
    theirs = Path(environ.get("SPARK_HOME") or ours)
    jars = {jar.name for jar in ours.glob("jars/spark-core_*.jar")}
    return str(theirs if any((theirs / "jars" / name).exists() for name in jars) else ours)


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
        options, script, _ = split_command_line(argv)
        others, archives = take_option(options, PACK)
        if archives and not others and not script:
            print(pack_executors(Path(archives[-1])))
            return 0
        about = ABOUT.intersection(options)
        if about == {"--version"}:
            print_versions()
            return 0
        if about:
            print(HELP, end="")
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
