import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.runtime.submit import Program, pack_package, plan_program

Plan = Callable[..., Program]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with a small package, jobs and configuration, and a Java on PATH."""
    for file in (
        "jobs/ingest.py",
        "jobs/drain.py",
        "jobs/status.py",
        "mine.py",
        "pipeline/a.py",
        "pipeline/store/x.lua",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
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

    def make_plan(words: str, **environ: str) -> Program:
        environ = {"PATH": f"{root}/java/bin:/usr/bin:/bin", **environ}
        return plan_program(shlex.split(words), environ, root=root, state_dir=root / "state")

    return make_plan


@pytest.mark.parametrize("job", ["drain", "status"])
def test_a_job_without_spark_is_run_as_it_is_and_no_java_is_looked_for(plan: Plan, root: Path, job: str) -> None:
    program = plan(f"--master local[2] jobs/{job}.py --once", JAVA_HOME="/nowhere")
    assert program.argv == (sys.executable, f"jobs/{job}.py", "--once")
    assert "PYSPARK_SUBMIT_ARGS" not in program.environ
    assert program.environ["PYTHONPATH"] == str(root)


def test_a_spark_job_runs_in_python_with_sparks_options_in_the_environment(plan: Plan, root: Path) -> None:
    program = plan("--master local[2] --conf 'spark.a=b c' --name=x jobs/ingest.py --once", PYTHONPATH="/theirs")
    assert program.argv == (sys.executable, "jobs/ingest.py", "--once")
    arguments = program.environ["PYSPARK_SUBMIT_ARGS"]
    assert shlex.split(arguments) == ["--master", "local[2]", "--conf", "spark.a=b c", "--name", "x", "pyspark-shell"]
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


def test_a_script_that_is_not_there_is_an_error_that_names_it(plan: Plan) -> None:
    with pytest.raises(ConfigError, match=r"no file jobs/nope\.py"):
        plan("jobs/nope.py")


@pytest.mark.parametrize(
    "words",
    [
        "--deploy-mode cluster --master yarn jobs/ingest.py --once",
        "--conf spark.submit.deployMode=cluster --master yarn mine.py",
        "--deploy-mode cluster --master yarn jobs/drain.py",
        "--class a.B app.jar x",
        "--status 7 --master spark://h:1",
        "--kill 7",
        "s3a://bucket/job.py",
        "--usage-error",
    ],
)
def test_what_does_not_run_in_a_driver_here_is_left_to_sparks_own_command(plan: Plan, words: str) -> None:
    program = plan(words)
    assert program.argv[0].endswith("/pyspark/bin/spark-submit")
    assert [word for word in program.argv[1:] if not word.endswith(".zip") and word != "--py-files"] == words.split()
    assert Path(program.argv[0]).is_file()


@pytest.mark.parametrize("words", ["--master yarn", "--master local-cluster[2,1,1024]", "--conf spark.master=yarn"])
def test_executors_elsewhere_get_our_package_along_with_the_users_files(plan: Plan, root: Path, words: str) -> None:
    given = shlex.split(plan(f"{words} --py-files a.zip,b.py jobs/ingest.py").environ["PYSPARK_SUBMIT_ARGS"])
    files = given[given.index("--py-files") + 1].split(",")
    assert given.count("--py-files") == 1
    assert files[:2] == ["a.zip", "b.py"]
    assert zipfile.ZipFile(files[2]).namelist() == ["pipeline/a.py", "pipeline/store/x.lua"]


@pytest.mark.parametrize("words", ["jobs/ingest.py", "--master local[4] jobs/ingest.py", "--master yarn mine.py"])
def test_nobody_else_gets_it(plan: Plan, words: str) -> None:
    assert "--py-files" not in plan(words).environ["PYSPARK_SUBMIT_ARGS"]


def test_the_packed_package_changes_its_name_with_its_content_only(root: Path) -> None:
    first = pack_package(root, root / "state")
    os.utime(root / "pipeline" / "a.py", (1, 1))
    assert pack_package(root, root / "state") == first
    (root / "pipeline" / "a.py").write_text("changed")
    assert pack_package(root, root / "state") != first


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        pytest.param("--master local", {"PYSPARK_PYTHON": "their-python"}, sys.executable, id="ours on this machine"),
        pytest.param("--master yarn", {}, sys.executable, id="ours if nobody says"),
        pytest.param("--master yarn", {"PYSPARK_PYTHON": "./env/python"}, "./env/python", id="theirs on a cluster"),
        pytest.param("--master yarn --conf spark.pyspark.python=p", {}, "p", id="or as a setting"),
    ],
)
def test_the_python_of_the_workers(plan: Plan, words: str, environ: dict[str, str], expected: str) -> None:
    assert plan(f"{words} jobs/ingest.py", **environ).environ["PYSPARK_PYTHON"] == expected


def test_a_spark_home_of_another_version_is_not_used(plan: Plan, root: Path) -> None:
    (root / "spark" / "jars").mkdir(parents=True)
    (root / "spark" / "jars" / "spark-core_2.12-3.5.0.jar").write_text("")
    ours = plan("jobs/ingest.py", SPARK_HOME=str(root / "spark")).environ["SPARK_HOME"]
    assert ours.endswith("/pyspark")
    jar = next(Path(ours, "jars").glob("spark-core_*.jar")).name
    (root / "spark" / "jars" / jar).write_text("")
    assert plan("jobs/ingest.py", SPARK_HOME=str(root / "spark")).environ["SPARK_HOME"] == str(root / "spark")


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pipeline.runtime.submit", *words]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), **environ}, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip


def test_help_is_ours_and_tells_how_to_see_sparks() -> None:
    result = run("--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "jobs/drain.py" in result.stdout
    assert "--spark-help" in result.stdout


def test_version_names_duetime_spark_python_and_java() -> None:
    words = run("--version").stdout.split()
    assert words[0::2][:4] == ["Duetime", "Spark", "Python", "Java"]


@pytest.mark.parametrize(
    ("words", "environ"), [(("--wrong",), {}), (("mine.py",), {}), (("--version",), {"JAVA_HOME": "/x"})]
)
def test_wrong_use_is_one_sentence_and_exit_code_2(words: tuple[str, ...], environ: dict[str, str]) -> None:
    result = run(*words, **environ)
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
    assert process.wait(10) == 7


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


def run_script(checkout: Path, script: str, *words: str, cwd: Path | None = None, **environ: str) -> list[str]:
    environ = {"PATH": str(checkout / "path"), **environ}
    result = subprocess.run(
        [script, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=10, check=False
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
