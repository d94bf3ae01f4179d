import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.runtime.sending import PYTHON, pack_package
from pipeline.runtime.submit import Program, plan_program

Plan = Callable[..., Program]

ROOT = Path(__file__).resolve().parents[2]
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.py"))


CONFIGURATION = """\
[redis]
url = "redis://redis.internal"
[ingest]
input = "/shared/inbox"
rejects = "/shared/rejects"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with a small package, jobs and configuration, and a Java on PATH."""
    jobs = [f"jobs/{job}.py" for job in JOBS]
    for file in (
        *jobs,
        "mine.py",
        "duetime/__init__.py",
        "pipeline/a.py",
        "pipeline/store/x.lua",
        "conf/pipeline.toml",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(CONFIGURATION if file.endswith("toml") else "")
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f"#!/bin/sh\necho ' java.home = {tmp_path}/java'\necho java.base@17\necho jdk.incubator.vector@17\n"
    )
    java.chmod(0o755)
    return tmp_path


@pytest.fixture
def plan(root: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(sys, "prefix", str(root / "venv"))
    monkeypatch.chdir(root)

    def make_plan(arguments: str, **environ: str) -> Program:
        environ = {"PATH": f"{root}/java/bin:/usr/bin:/bin", "HADOOP_CONF_DIR": "/etc/hadoop", **environ}
        return plan_program(shlex.split(arguments), environ, root=root, state_dir=root / "state")

    return make_plan


@pytest.mark.parametrize("job", [job for job in JOBS if job != "ingest"])
def test_every_job_but_ingest_is_run_as_it_is_and_no_java_is_looked_for(plan: Plan, root: Path, job: str) -> None:
    program = plan(f"--master local[2] jobs/{job}.py --once", JAVA_HOME="/nowhere")
    assert program.argv == (sys.executable, f"jobs/{job}.py", "--once")
    assert "PYSPARK_SUBMIT_ARGS" not in program.environ
    assert program.environ["PYTHONPATH"] == str(root)


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_the_help_of_a_job_needs_neither_java_nor_a_cluster(plan: Plan, option: str) -> None:
    program = plan(f"--master yarn --deploy-mode cluster jobs/ingest.py {option}", JAVA_HOME="/nowhere")
    assert program.argv == (sys.executable, "jobs/ingest.py", option)


def test_a_spark_job_runs_in_python_with_sparks_options_in_the_environment(plan: Plan, root: Path) -> None:
    program = plan("--master local[2] --conf 'spark.a=b c' --name=x jobs/ingest.py --once", PYTHONPATH="/theirs")
    assert program.argv == (sys.executable, "jobs/ingest.py", "--once")
    arguments = program.environ["PYSPARK_SUBMIT_ARGS"]
    assert shlex.split(arguments) == ["--master", "local[2]", "--conf", "spark.a=b c", "--name=x", "pyspark-shell"]
    assert program.environ["SPARK_CONF_DIR"] == f"{root}/conf"
    assert program.environ["PYTHONPATH"] == f"{root}:/theirs"
    assert program.environ["PYSPARK_PYTHON"] == program.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable


def test_a_script_is_found_in_the_users_folder_first_then_in_the_checkout(
    plan: Plan, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert plan("jobs/drain.py").argv[1] == f"{root}/jobs/drain.py"
    (elsewhere / "jobs").mkdir()
    (elsewhere / "jobs" / "drain.py").write_text("")
    assert plan("jobs/drain.py").argv[1] == "jobs/drain.py"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("jobs/nope.py", r"no script jobs/nope\.py: name a script"),
        ("ingest", r"no script ingest: did you mean jobs/ingest\.py\?"),
        ("status --format json", r"no script status: did you mean jobs/status\.py\?"),
        ("drain.py", r"no script drain\.py: did you mean jobs/drain\.py\?"),
        ("jobs", "no script jobs: name a script"),
        ("nonsense", "no script nonsense: name a script"),
        ("--master local[2]", "No script is named"),
        ("--master local[2] ingest", "No script is named"),
        ("--master local[2] --deploy-mode cluster jobs/ingest.py", r"local\[2\] is this machine"),
        ("--deploy-mode cluster mine.py", "local is this machine"),
        ("--master spark://h:1 --deploy-mode cluster jobs/ingest.py", "standalone cluster runs no Python drivers"),
        (
            "--master local-cluster[1,1,9] --deploy-mode cluster jobs/ingest.py",
            r"local-cluster\[1,1,9\] is this machine",
        ),
        ("--remote sc://h jobs/ingest.py", r"ingest\.py needs a driver of its own: name a cluster with --master"),
        ("--master k8s://h jobs/ingest.py", r"needs spark\.kubernetes\.container\.image: name it with --conf"),
        (
            "--master k8s://h --deploy-mode cluster jobs/ingest.py",
            r"container\.image and \S+\.file\.upload\.path: name",
        ),
        ("--master yarn --deploy-mode cluster jobs/ingest.py --config no.toml", r"no configuration file .*/no\.toml"),
        ("--pack-executors p.tar.gz jobs/ingest.py", "--pack-executors is for executors on other machines"),
        ("--master yarn --pack-executors p.zip jobs/ingest.py", r"ends in \.tar\.gz, which p\.zip does not"),
    ],
)
def test_what_can_only_fail_is_refused_in_a_sentence(plan: Plan, arguments: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(arguments, JAVA_HOME="/nowhere")


@pytest.mark.parametrize(
    "arguments",
    [
        "--class a.B app.jar x.py",
        "--class=a.B app.jar x.py",
        "app.jar x",
        "--status 7 --master spark://h:1",
        "--kill 7",
        "s3a://bucket/job.py",
        "--usage-error",
    ],
)
def test_what_does_not_run_in_a_driver_here_is_left_to_sparks_own_command(plan: Plan, arguments: str) -> None:
    program = plan(arguments)
    assert program.argv[0].endswith("/pyspark/bin/spark-submit")
    assert Path(program.argv[0]).is_file()
    assert program.argv[1:] == tuple(arguments.split())


@pytest.mark.parametrize("job", ["ingest", "drain"])
def test_a_driver_in_the_cluster_gets_our_package_and_the_configuration(plan: Plan, root: Path, job: str) -> None:
    program = plan(f"--master yarn --deploy-mode cluster --files a jobs/{job}.py --once")
    assert program.argv[0].endswith("/pyspark/bin/spark-submit")
    packed = program.argv[program.argv.index("--py-files") + 1]
    assert Path(packed).is_file()
    assert program.argv[1:] == (
        *("--master", "yarn", "--deploy-mode", "cluster", "--py-files", packed),
        *("--files", f"a,{root}/conf/pipeline.toml", f"jobs/{job}.py", "--once", "--config", "pipeline.toml"),
    )


@pytest.mark.parametrize(
    ("form", "environ"),
    [
        ("--config mine.toml", {}),
        ("--config=mine.toml", {"DUETIME_CONFIG": "other.toml"}),
        ("", {"DUETIME_CONFIG": "mine.toml"}),
    ],
)
def test_a_driver_in_the_cluster_gets_the_configuration_that_the_user_names(
    plan: Plan, root: Path, form: str, environ: dict[str, str]
) -> None:
    (root / "mine.toml").write_text(CONFIGURATION)
    program = plan(f"--master yarn --deploy-mode cluster jobs/ingest.py {form} --once", **environ)
    assert program.argv[program.argv.index("--files") + 1] == f"{root}/mine.toml"
    assert program.argv[-4:] == ("jobs/ingest.py", "--once", "--config", "mine.toml")


def test_yarn_without_its_configuration_is_refused(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="let HADOOP_CONF_DIR or YARN_CONF_DIR name that folder"):
        plan("--master yarn jobs/ingest.py", HADOOP_CONF_DIR="")
    plan("--master yarn jobs/ingest.py", HADOOP_CONF_DIR="", YARN_CONF_DIR="/etc/hadoop")


@pytest.mark.parametrize(
    ("text", "arguments", "environ", "sentence"),
    [
        (
            CONFIGURATION,
            "",
            {"REDIS_URL": "redis://a"},
            r"does not see REDIS_URL of this shell: write that into \S+mine\.toml",
        ),
        (CONFIGURATION, "--redis redis://b", {"REDIS_URL": "redis://a"}, ""),
        (
            CONFIGURATION,
            "",
            {"DUETIME_INGEST_TRIGGER": "1 second"},
            "does not see DUETIME_INGEST_TRIGGER of this shell",
        ),
        (CONFIGURATION, "", {"DUETIME_SAMPLE": "0"}, ""),
        ("", "", {}, r"needs a server that it can reach: write redis\.url into \S+mine\.toml"),
        ("[redis]\nurl=1", "", {}, r"redis\.url"),
        (CONFIGURATION.replace('url = "redis://redis.internal"', 'url_file = "/there/url"'), "", {}, ""),
        ('[redis]\nurl="redis://a"', "", {}, "has no folder 'rejects' of this machine: name with --rejects"),
        (
            '[redis]\nurl="redis://a"',
            "--rejects /s/rejects",
            {},
            "has no folder 'input' of this machine: name with --input",
        ),
        (CONFIGURATION, "--input=inbox", {}, "has no folder 'inbox' of this machine"),
        (CONFIGURATION, "--input s3a://bucket/in", {}, ""),
        ('[redis]\nurl="redis://a"', "--source kafka --rejects /s/rejects", {}, ""),
    ],
)
def test_what_a_driver_in_the_cluster_would_not_find_is_refused_here(
    plan: Plan, root: Path, text: str, arguments: str, environ: dict[str, str], sentence: str
) -> None:
    (root / "mine.toml").write_text(text)
    command = f"--master yarn --deploy-mode cluster jobs/ingest.py --config mine.toml {arguments}"
    if sentence:
        with pytest.raises(ConfigError, match=sentence):
            plan(command, **environ)
    else:
        assert plan(command, **environ).argv[0].endswith("/spark-submit")


@pytest.mark.parametrize("is_there", [True, False])
def test_the_packed_package_reads_the_configuration_of_its_container_or_refuses(tmp_path: Path, is_there: bool) -> None:
    container = tmp_path / "container"
    container.mkdir()
    if is_there:
        (container / "pipeline.toml").write_text('[redis]\nnamespace = "ours"\n')
    program = "from pathlib import Path; from pipeline import config; print(config.__file__)\n"
    program += "print(config.load_settings({}, {}, Path('pipeline.toml')).redis.namespace)"
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=container, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(pack_package(ROOT, tmp_path))},
    )  # fmt: skip
    assert ".zip/pipeline/config.py" in result.stdout
    if is_there:
        assert result.stdout.splitlines()[1] == "ours"
    else:
        assert "ConfigError: The configuration file pipeline.toml can't be read" in result.stderr


@pytest.mark.parametrize("options", ["--master yarn", "--master local-cluster[2,1,1024]", "--conf spark.master=yarn"])
def test_executors_elsewhere_get_our_package_along_with_the_users_files(plan: Plan, root: Path, options: str) -> None:
    given = shlex.split(plan(f"{options} --py-files a.zip,b.py jobs/ingest.py").environ["PYSPARK_SUBMIT_ARGS"])
    files = given[given.index("--py-files") + 1].split(",")
    assert given.count("--py-files") == 1
    assert files[:2] == ["a.zip", "b.py"]
    assert zipfile.ZipFile(files[2]).namelist() == ["duetime/__init__.py", "pipeline/a.py", "pipeline/store/x.lua"]


@pytest.mark.parametrize(
    "options",
    ["", "--deploy-mode cluster", "--conf spark.submit.deployMode=cluster"],
    ids=["client", "cluster", "conf"],
)
def test_a_program_of_the_users_gets_our_package_on_a_cluster(plan: Plan, root: Path, options: str) -> None:
    program = plan(f"{options} --master yarn mine.py --once")
    given = list(program.argv) if options else shlex.split(program.environ["PYSPARK_SUBMIT_ARGS"])
    packed = given.pop(given.index("--py-files") + 1)
    assert Path(packed).parent == root / "state" / "py-files"
    if options:
        assert given[0].endswith("/pyspark/bin/spark-submit")
        assert given[1:] == [*shlex.split(options), "--master", "yarn", "--py-files", "mine.py", "--once"]


@pytest.mark.parametrize("arguments", ["jobs/ingest.py", "--master local[4] jobs/ingest.py", "--master local mine.py"])
def test_nobody_else_gets_it(plan: Plan, arguments: str) -> None:
    assert "--py-files" not in plan(arguments).environ["PYSPARK_SUBMIT_ARGS"]


@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_packages_are_packed_and_sent_with_the_python_that_they_are_built_for(
    plan: Plan, root: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("pipeline.runtime.sending.PACKED", ("msgspec",))
    conf = "--conf spark.executorEnv.PYTHONPATH=/theirs --archives a.zip#a"
    command = f"--master yarn --deploy-mode {mode} {conf} --pack-executors p.tar.gz jobs/ingest.py"
    program = plan(command)
    assert (root / "p.tar.gz").is_file()
    options = shlex.split(program.environ.get("PYSPARK_SUBMIT_ARGS", "")) or list(program.argv)
    assert options[options.index("--archives") + 1] == f"a.zip#a,{root}/p.tar.gz#duetime-packages"
    for name in ("executorEnv", "yarn.appMasterEnv", "kubernetes.driverEnv"):
        others = ":/theirs" if name == "executorEnv" else ""
        assert f"spark.{name}.PYTHONPATH=duetime-packages{others}" in options
    assert f"spark.pyspark.python={PYTHON}" in options
    assert "--pack-executors" not in options
    assert mode == "cluster" or program.environ["PYSPARK_PYTHON"] == PYTHON

    named = plan(command, PYSPARK_PYTHON="/opt/python")
    assert f"spark.pyspark.python={PYTHON}" not in str(named)
    assert named.environ["PYSPARK_PYTHON"] == "/opt/python"


def test_the_packed_package_changes_its_name_with_its_content_only(root: Path) -> None:
    first = pack_package(root, root / "state")
    os.utime(root / "pipeline" / "a.py", (1, 1))
    assert pack_package(root, root / "state") == first
    (root / "pipeline" / "a.py").write_text("changed")
    assert pack_package(root, root / "state") != first


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        pytest.param("--master local", {"PYSPARK_PYTHON": "their-python"}, sys.executable, id="ours on this machine"),
        pytest.param("--master yarn", {}, sys.executable, id="ours if nobody says"),
        pytest.param("--master yarn", {"PYSPARK_PYTHON": "./env/python"}, "./env/python", id="theirs on a cluster"),
        pytest.param("--master yarn --conf spark.pyspark.python=p", {}, "p", id="or as a setting"),
    ],
)
def test_the_python_of_the_workers(plan: Plan, options: str, environ: dict[str, str], expected: str) -> None:
    assert plan(f"{options} jobs/ingest.py", **environ).environ["PYSPARK_PYTHON"] == expected


def test_a_spark_home_of_another_version_is_not_used(plan: Plan, root: Path) -> None:
    (root / "spark" / "jars").mkdir(parents=True)
    (root / "spark" / "jars" / "spark-core_2.12-3.5.0.jar").write_text("")
    ours = plan("jobs/ingest.py", SPARK_HOME=str(root / "spark")).environ["SPARK_HOME"]
    assert ours.endswith("/pyspark")
    jar = next(Path(ours, "jars").glob("spark-core_*.jar")).name
    (root / "spark" / "jars" / jar).write_text("")
    assert plan("jobs/ingest.py", SPARK_HOME=str(root / "spark")).environ["SPARK_HOME"] == str(root / "spark")


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pipeline.runtime.submit", *arguments]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), **environ}, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip


def test_help_is_ours_names_every_job_and_says_how_to_see_sparks() -> None:
    result = run("--deploy-mode", "cluster", "--help", JAVA_HOME="/nowhere")
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(re.findall(r"^  jobs/(\w+)\.py  +\w", result.stdout, re.MULTILINE)) == JOBS
    assert "--spark-help" in result.stdout


def test_version_names_duetime_spark_python_and_java() -> None:
    printed = run("--version").stdout.split()
    assert printed[0::2][:4] == ["Duetime", "Spark", "Python", "Java"]


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [(("--wrong",), {}), (("ingest",), {}), (("mine.py",), {}), (("--version",), {"JAVA_HOME": "/x"})],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], environ: dict[str, str]) -> None:
    result = run(*arguments, **environ)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1


def test_a_script_gets_signals_and_its_exit_code_is_ours(tmp_path: Path, spawn: Callable, wait_for: Callable) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print(os.getpid(), flush=True)\n"
        "while True: signal.pause()\n"
    )
    process = spawn([sys.executable, "-P", "-m", "pipeline.runtime.submit", str(script)])
    wait_for(
        lambda: (tmp_path / "stdout").read_text() == f"{process.pid}\n", "the script runs under the same process id"
    )
    process.terminate()
    assert process.wait(60) == 7


# The shell script, in a checkout whose Pythons are stubs that say how they were started.

SAY = """#!/bin/bash
printf '%s' "{name}"; printf ' <%s>' "$@"; echo; echo "PYTHONPATH=$PYTHONPATH"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "a checkout"
    for folder in (".venv/bin", ".venv/installed", "tests", "path"):
        (root / folder).mkdir(parents=True)
    for file in ("spark-submit.sh", "tests/run.sh", "requirements.lock", "requirements-test.lock"):
        shutil.copy(ROOT / file, root / file)
        if file.endswith(".lock"):
            shutil.copy(ROOT / file, root / ".venv" / "installed" / file)
    for name, path in (("venv", root / ".venv" / "bin" / "python"), ("system", root / "path" / "python3")):
        path.write_text(SAY.format(name=name))
        path.chmod(0o755)
    for tool in ("bash", "dirname", "readlink"):
        (root / "path" / tool).symlink_to(shutil.which(tool))
    return root


def run_script(checkout: Path, script: str, *arguments: str, cwd: Path | None = None, **environ: str) -> list[str]:
    environ = {"PATH": str(checkout / "path"), **environ}
    result = subprocess.run(
        [script, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def test_the_script_becomes_the_environments_python_when_nothing_is_to_install(checkout: Path, tmp_path: Path) -> None:
    said = run_script(checkout, f"{checkout}/spark-submit.sh", "a b", "", cwd=tmp_path, PYTHONPATH="/theirs")
    assert said == ["venv <-P> <-m> <pipeline.runtime.submit> <a b> <>", f"PYTHONPATH={checkout}:/theirs"]


def test_the_script_works_through_symbolic_links(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "first").symlink_to("../a checkout/spark-submit.sh")
    (folder / "second").symlink_to(folder / "first")
    assert run_script(checkout, "./second", cwd=folder)[1] == f"PYTHONPATH={checkout}"


@pytest.mark.parametrize("missing", [".venv/installed/requirements.lock", ".venv/bin/python"])
def test_the_script_sets_up_first_when_something_is_missing(checkout: Path, missing: str) -> None:
    (checkout / missing).unlink()
    said = run_script(checkout, f"{checkout}/spark-submit.sh", "x")
    setup = f"<{checkout}/pipeline/runtime/bootstrap.py> <requirements.lock> <-m> <pipeline.runtime.submit> <x>"
    assert said[-2] == f"system {setup}"


def test_the_script_sets_up_again_when_the_requirements_have_changed(checkout: Path) -> None:
    with open(checkout / "requirements.lock", "a") as lock:
        lock.write("more==1\n")
    assert run_script(checkout, f"{checkout}/spark-submit.sh")[0].startswith("system ")


def test_the_test_script_uses_the_test_requirements_and_runs_in_the_root(checkout: Path, tmp_path: Path) -> None:
    said = run_script(checkout, f"{checkout}/tests/run.sh", "-k", "x", cwd=tmp_path)
    assert said == ["venv <-P> <-m> <pipeline.runtime.run_tests> <-k> <x>", f"PYTHONPATH={checkout}"]
    (checkout / ".venv" / "installed" / "requirements-test.lock").unlink()
    assert "<requirements-test.lock>" in run_script(checkout, f"{checkout}/tests/run.sh", cwd=tmp_path)[-2]


def test_without_a_suitable_python_the_script_says_which_to_install(checkout: Path) -> None:
    (checkout / ".venv" / "bin" / "python").unlink()
    (checkout / "path" / "python3").write_text("#!/bin/bash\nexit 1\n")
    result = subprocess.run(
        [checkout / "spark-submit.sh"], env={"PATH": f"{checkout}/path"}, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "Duetime needs Python 3.11 to 3.14 on PATH: install one of them, then start again.\n"


def test_the_sample_is_made_of_requests_that_are_due_within_seconds() -> None:
    for text in (ROOT / "conf" / "sample.jsonl").read_text(encoding="utf-8").splitlines():
        request = json.loads(text)
        assert request.keys() <= {"message", "delay_sec", "countdown", "topic", "headers"}
        assert 1 <= request.get("delay_sec", request.get("countdown")) <= 5
