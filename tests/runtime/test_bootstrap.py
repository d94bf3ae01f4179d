"""Nothing is downloaded: the two steps that would are replaced, in a process of its own, by ``STUB``."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Wait = Callable[..., None]
Install = Callable[..., subprocess.Popen[bytes]]

ROOT = Path(__file__).resolve().parents[2]
STUB = """
import os, sys; from pathlib import Path; from pipeline.runtime import bootstrap
class Environment(bootstrap.Environment):
    def create(self):
        self.python.parent.mkdir(parents=True, exist_ok=True)
        self.python.symlink_to(sys.executable)
    def find_pip(self): return ["bash", "-c", os.environ["PIP"], "pip"] if os.environ["PIP"] else None
    def find_uv(self, pip): return os.environ.get("UV")
bootstrap.PROGRESS_S = 0.05
environment = Environment(Path(sys.argv[1]))
bootstrap.Environment = lambda root: environment
sys.argv[1:] = [sys.argv[2], "-c", "print('became Python')"]
bootstrap.main()
"""
# Notes each start, then waits for the test to let it go on.
SLOW = "echo start >> starts; until [ -e go ]; do read -t 0.02 < <(:) || :; done; touch .venv/package"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "requirements.lock").write_text("a==1\n")
    (tmp_path / "requirements-test.lock").write_text("a==1\nb==1\n")
    return tmp_path


@pytest.fixture
def install(root: Path, spawn: Install) -> Install:
    def start(pip: str, lock: str = "requirements.lock", **environ: str) -> subprocess.Popen[bytes]:
        return spawn([sys.executable, "-c", STUB, str(root), lock], PIP=pip, **environ)

    return start


def test_the_first_start_installs_and_becomes_python_and_the_next_only_becomes_python(
    root: Path, install: Install
) -> None:
    assert install("echo $@ >> starts").wait(20) == 0
    assert install("echo $@ >> starts").wait(20) == 0
    assert (root / "starts").read_text() == f"install -r {root}/requirements.lock\n"
    assert (root / "stdout").read_text() == "became Python\n" * 2
    assert not (root / ".venv" / "unfinished").exists()


def test_a_changed_lock_file_is_installed(root: Path, install: Install) -> None:
    assert install("echo >> starts").wait(20) == 0
    (root / "requirements.lock").write_text("a==2\n")
    assert install("echo >> starts").wait(20) == 0
    assert (root / "starts").read_text() == "\n\n"


def test_an_environment_for_tests_serves_the_jobs_too(root: Path, install: Install) -> None:
    for lock in ("requirements.lock", "requirements-test.lock", "requirements.lock", "requirements-test.lock"):
        assert install("echo $2 $4 >> starts", lock).wait(20) == 0
    assert len((root / "starts").read_text().splitlines()) == 2


def test_the_second_of_two_first_starts_waits_for_the_other_and_installs_nothing(
    root: Path, install: Install, wait_for: Wait
) -> None:
    first = install(SLOW)
    wait_for((root / "starts").exists, "the first one installs")
    second = install(SLOW)
    wait_for(lambda: "waiting for it" in (root / "stderr").read_text(), "the second one says that it waits")
    (root / "go").touch()
    assert (first.wait(20), second.wait(20)) == (0, 0)
    assert (root / "starts").read_text() == "start\n"


def test_a_long_step_says_that_it_is_alive(root: Path, install: Install, wait_for: Wait) -> None:
    process = install(SLOW)
    wait_for(
        lambda: "installing packages with pip, as uv could not: 0 s" in (root / "stderr").read_text(), "a sign of life"
    )
    (root / "go").touch()
    assert process.wait(20) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_installation_stops_its_tool_and_the_next_start_begins_anew(
    root: Path, install: Install, wait_for: Wait, number: int
) -> None:
    process = install(SLOW + "; touch ended")
    wait_for((root / "starts").exists, "it installs")
    (root / ".venv" / "half").touch()
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    (root / "go").touch()
    assert install("ls .venv > seen").wait(20) == 0
    assert not (root / "ended").exists()
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
    assert following.wait(20) == 0
    assert "package" not in (root / "seen").read_text()


def test_a_failed_installation_is_one_sentence_that_names_the_log_and_is_not_taken_for_done(
    root: Path, install: Install
) -> None:
    assert install("echo no such package; exit 1").wait(20) == 1
    last = (root / "stderr").read_text().splitlines()[-1]
    assert last == f"The packages could not be installed: put right what {root}/.venv/setup.log says, then start again."
    assert "no such package" in (root / ".venv" / "setup.log").read_text()
    assert "no such package" in (root / "stderr").read_text()
    assert install("echo >> starts").wait(20) == 0
    assert (root / "starts").exists()


def test_pip_is_used_when_uv_fails(root: Path, install: Install) -> None:
    assert install("echo pip >> starts", UV="/bin/false").wait(20) == 0
    assert (root / "starts").read_text() == "pip\n"
    assert install("echo pip >> starts", lock="requirements-test.lock", UV="/bin/true").wait(20) == 0
    assert (root / "starts").read_text() == "pip\n"


def test_without_pip_and_uv_the_error_says_what_to_install(root: Path, install: Install) -> None:
    assert install("").wait(20) == 1
    assert "apt install python3-venv" in (root / "stderr").read_text().splitlines()[-1]


def test_an_environment_whose_python_is_gone_is_made_anew(root: Path, install: Install) -> None:
    assert install("true").wait(20) == 0
    python = root / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3")
    assert install("true").wait(20) == 0
    assert os.readlink(python) == sys.executable


def test_it_imports_nothing_of_ours() -> None:
    text = (ROOT / "pipeline" / "runtime" / "bootstrap.py").read_text()
    assert "import pipeline" not in text
    assert "from pipeline" not in text
