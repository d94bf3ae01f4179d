"""Nothing is downloaded: pip, and where it takes no part in the test also venv, are shell commands in a process of its own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

Wait = Callable[..., None]
Install = Callable[..., subprocess.Popen[bytes]]

ROOT = Path(__file__).resolve().parents[2]
STUB = """
import os, sys; from pipeline.runtime import bootstrap
run_step, root, lock = bootstrap.run_step, *sys.argv[1:]
def run_stub(command, *rest):
    stub = os.environ["VENV" if command[2] == "venv" else "PIP"]
    run_step(["bash", "-c", stub, *command[2:]] if stub else command, *rest)
bootstrap.run_step = run_stub
bootstrap.__file__ = root + "/pipeline/runtime/bootstrap.py"
sys.argv[1:] = [lock, "-c", "print('became Python')"]
bootstrap.main()
"""
VENV = f"rm -rf .venv; mkdir -p .venv/bin; ln -s '{sys.executable}' .venv/bin/python"
# Notes each start, then waits for the test to let it go on.
SLOW = "echo start >> starts; until [ -e go ]; do read -t 0.02 < <(:) || :; done; touch .venv/package"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "requirements.lock").write_text("a==1\n")
    (tmp_path / "requirements-test.lock").write_text("a==1\nb==1\n")
    return tmp_path


@pytest.fixture
def install(root: Path, spawn: Install) -> Install:
    def start(pip: str, lock: str = "requirements.lock", venv: str = VENV) -> subprocess.Popen[bytes]:
        return spawn([sys.executable, "-c", STUB, str(root), lock], PIP=pip, VENV=venv, PIP_NO_INDEX="1")

    return start


def test_the_first_start_installs_and_becomes_python_and_the_next_only_becomes_python(
    root: Path, install: Install
) -> None:
    assert install("echo $0 $@ >> starts").wait(60) == 0
    assert install("echo $0 $@ >> starts").wait(60) == 0
    assert (root / "starts").read_text() == f"pip install -r {root}/requirements.lock\n"
    assert (root / "stdout").read_text() == "became Python\n" * 2
    said = (root / "stderr").read_text().splitlines()
    assert len(said) == 2, "one sentence before, one after"
    assert "once" in said[0] and f"{root}/.duetime/setup.log" in said[0]
    assert (root / ".duetime").stat().st_mode & 0o777 == 0o700, (
        "messages are in there, and where others reach the server"
    )


@pytest.mark.slow
def test_the_environments_own_pip_is_asked_for_what_the_lock_file_says(root: Path, install: Install) -> None:
    """With the real tools, and no place where the package could be."""
    assert install("", venv="").wait(120) == 1
    assert (root / ".venv" / "pyvenv.cfg").exists()
    assert "No matching distribution found for a==1" in (root / "stderr").read_text()


def test_programs_that_the_environments_python_runs_can_import_what_is_in_the_checkout(
    root: Path, install: Install, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert install(":", venv=f"'{sys.executable}' -m venv --without-pip .venv").wait(60) == 0
    moved = root.rename(tmp_path_factory.mktemp("other") / "moved")
    program = [moved / ".venv" / "bin" / "python", "-c", "import sys; print(*sys.path, sep='\\n')"]
    paths = subprocess.run(program, cwd="/", env={}, capture_output=True, text=True, check=True).stdout
    assert str(moved) in paths.splitlines()


def test_a_changed_lock_file_is_installed_into_the_same_environment(root: Path, install: Install) -> None:
    assert install("echo >> starts; touch .venv/kept").wait(60) == 0
    (root / "requirements.lock").write_text("a==2\n")
    assert install("echo >> starts").wait(60) == 0
    assert (root / "starts").read_text() == "\n\n"
    assert (root / ".venv" / "kept").exists()


def test_an_environment_for_tests_serves_the_jobs_too(root: Path, install: Install) -> None:
    for lock in ("requirements.lock", "requirements-test.lock", "requirements.lock", "requirements-test.lock"):
        assert install("echo $3 >> starts", lock).wait(60) == 0
    assert (root / "starts").read_text().splitlines() == [
        f"{root}/{lock}" for lock in ("requirements.lock", "requirements-test.lock")
    ]


def test_the_test_requirements_contain_those_of_the_jobs() -> None:
    jobs, tests = (
        set(re.findall(r"^[\w.-]+==\S+", (ROOT / name).read_text(), re.MULTILINE))
        for name in ("requirements.lock", "requirements-test.lock")
    )
    assert jobs and jobs < tests


def test_the_second_of_two_first_starts_waits_for_the_other_and_installs_nothing(
    root: Path, install: Install, wait_for: Wait
) -> None:
    first = install(SLOW)
    wait_for((root / "starts").exists, "the first one installs")
    second = install(SLOW)
    wait_for(lambda: "waiting for it" in (root / "stderr").read_text(), "the second one says that it waits")
    (root / "go").touch()
    assert (first.wait(60), second.wait(60)) == (0, 0)
    assert (root / "starts").read_text() == "start\n"


def is_waiting(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has started its tool to the end, so that a signal finds it waiting for that."""
    return psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_installation_stops_its_tool_and_the_next_start_begins_anew(
    root: Path, install: Install, wait_for: Wait, number: int
) -> None:
    process = install(SLOW + "; touch ended")
    wait_for(lambda: (root / "starts").exists() and is_waiting(process), "it installs")
    (root / ".venv" / "half").touch()
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    (root / "go").touch()
    assert install("ls .venv > seen").wait(60) == 0
    assert not (root / "ended").exists()
    assert "half" not in (root / "seen").read_text()


def test_an_interrupted_update_is_made_anew(root: Path, install: Install, wait_for: Wait) -> None:
    assert install("touch .venv/half").wait(60) == 0
    (root / "requirements.lock").write_text("a==2\n")
    process = install(SLOW)
    wait_for(lambda: (root / "starts").exists() and is_waiting(process), "it updates")
    process.terminate()
    process.wait(60)
    assert install("ls .venv > seen").wait(60) == 0
    assert "half" not in (root / "seen").read_text()


def test_after_a_killed_installation_the_next_waits_for_its_tool_and_begins_anew(
    root: Path, install: Install, wait_for: Wait
) -> None:
    process = install(SLOW)
    wait_for((root / "starts").exists, "it installs")
    process.kill()
    process.wait()
    following = install("ls .venv > seen")
    wait_for(lambda: "waiting for it" in (root / "stderr").read_text(), "the tool that is left holds the lock")
    (root / "go").touch()
    assert following.wait(60) == 0
    assert "package" not in (root / "seen").read_text()


def test_a_failed_installation_shows_the_end_of_its_log_names_it_and_is_not_taken_for_done(
    root: Path, install: Install
) -> None:
    assert install("echo no such package; exit 1").wait(60) == 1
    *_, shown, last = (root / "stderr").read_text().splitlines()
    log = root / ".duetime" / "setup.log"
    assert last == f"The packages could not be installed: put right what {log} says, then start again."
    assert shown == "    no such package"
    assert log.read_text() == "no such package\n"
    assert install("echo >> starts").wait(60) == 0
    assert (root / "starts").exists()


def test_a_python_without_ensurepip_is_one_sentence_that_says_what_to_install(root: Path, install: Install) -> None:
    assert install("true", venv="mkdir .venv; echo ensurepip is not available; exit 1").wait(60) == 1
    assert "apt install python3-venv" in (root / "stderr").read_text().splitlines()[-1]
    assert install("true").wait(60) == 0, "the next start begins anew"


def test_an_environment_whose_python_is_gone_is_made_anew(root: Path, install: Install) -> None:
    assert install("true").wait(60) == 0
    python = root / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3")
    assert install("true").wait(60) == 0
    assert os.readlink(python) == sys.executable


def test_it_imports_nothing_of_ours() -> None:
    text = (ROOT / "pipeline" / "runtime" / "bootstrap.py").read_text()
    assert "import pipeline" not in text
    assert "from pipeline" not in text
