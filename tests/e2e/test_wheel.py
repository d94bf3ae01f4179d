"""The wheel as a program's author has it: built, installed into an empty environment, and used as docs/client.md shows."""

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pipeline.client import Duetime, Request
from pipeline.command import EXTRAS, INGEST
from pipeline.config import ROOT
from tests.client.builders import deliver_due
from tests.docs.pages import run_here
from tests.ingest.cold_world import HOUR_MS, ColdWorld
from tests.servers import RealServer

PROBE = """
import json, sys
import duetime
heavy = {"pyspark", "pyarrow", "pandas", "numpy", "pipeline", "jobs"}
print(json.dumps([sorted(heavy & {name.partition(".")[0] for name in sys.modules}), sorted(duetime.__all__)]))
"""

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """The Python of an environment that has the wheel, what it needs, and what MemoryDuetime needs."""
    with TemporaryDirectory() as folder:
        build = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            folder,
            str(ROOT),
        ]
        subprocess.run(build, check=True, cwd=folder)
        [wheel] = Path(folder).glob("*.whl")
        venv.create(f"{folder}/venv", with_pip=True)
        python = Path(folder, "venv/bin/python")
        subprocess.run([python, "-m", "pip", "install", "-q", wheel], check=True)
        listed = subprocess.run([python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True)
        names = {package["name"] for package in json.loads(listed.stdout)}
        # async-timeout is what redis needs of Python before 3.11.3.
        assert names - {"pip", "setuptools", "async-timeout"} == {"duetime", "redis", "hiredis", "msgspec"}
        assert {path.name for path in Path(folder, "venv/lib").glob("*/site-packages/*")} & {
            "pipeline",
            "jobs",
        } == set()
        yield python


def use(
    python: Path, server: RealServer, *arguments: str, home: Path, **more: str
) -> "subprocess.CompletedProcess[str]":
    environ = {"PATH": os.defpath, "REDIS_URL": server.url, "HOME": str(home), **more}
    command = [str(python.parent / arguments[0]), *arguments[1:]]
    return subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True, timeout=60, check=False)


def examples() -> list[str]:
    """The programs of the page: a block that begins with an import begins a new one."""
    programs: list[str] = []
    for block in run_here("docs/client.md", __file__, "python"):
        if block.text.startswith(("from ", "import ")):
            programs.append(block.text)
        else:
            programs[-1] += block.text
    return programs


def test_it_is_small_and_typed_and_has_no_module_of_another_name(
    python: Path, server: RealServer, tmp_path: Path
) -> None:
    done = use(python, server, "python", "-c", PROBE, home=tmp_path)
    assert done.returncode == 0, done.stderr
    heavy, names = json.loads(done.stdout)
    assert heavy == []
    assert {"Duetime", "AsyncDuetime", "MemoryDuetime", "Request", "State", "StoreUnavailable"} <= {*names}
    package = next(python.parents[1].glob("lib/*/site-packages/duetime"))
    assert (package / "py.typed").exists()
    (tmp_path / "program.py").write_text("import duetime\nduetime.Duetime().schedule(3)\n")
    check = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "program.py"]
    typed = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'Argument 1 to "schedule" of "Duetime" has incompatible type "int"; expected "str"' in typed.stdout
    assert "Found 1 error" in typed.stdout


def test_the_examples_of_the_page_work(python: Path, server: RealServer, tmp_path: Path) -> None:
    scheduling, tasks, consuming, testing = examples()
    done = use(python, server, "python", "-c", scheduling, home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"tea 20\S+ \S+\+00:00 False", lines[0])
    assert re.fullmatch(r"scheduled 20.* tea is ready", lines[1])
    assert lines[2] == "10000 ()"
    assert lines[3].endswith("Hello 0")
    done = use(python, server, "python", "-c", tasks, home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    with Duetime(server.url) as duetime:
        duetime.schedule_many(Request(f"{number}", delay=0, topic="mail") for number in range(3))
    deliver_due(server)
    environ = {"REDIS_URL": server.url, "HOME": str(tmp_path)}
    with subprocess.Popen([python, "-c", consuming], env=environ, stdout=subprocess.PIPE, text=True) as consumer:
        assert consumer.stdout is not None
        assert sorted(next(consumer.stdout) for _ in range(3)) == [f"handled: {number}\n" for number in range(3)]
        consumer.terminate()
        assert consumer.wait(30) == 0
    subprocess.run([python, "-m", "pip", "install", "-q", "fakeredis[lua]"], check=True)
    done = use(python, server, "python", "-c", testing, home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with server.client() as client:
        client.flushall()


def test_the_example_of_the_readme_works(python: Path, server: RealServer, tmp_path: Path) -> None:
    [block] = run_here("README.md", __file__, "python")
    for _ in range(2):
        done = use(python, server, "python", "-c", block.text, home=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(r"20\S+ \S+\+00:00 scheduled\n", done.stdout)


def test_the_command_has_the_jobs_that_need_no_spark(python: Path, server: RealServer, tmp_path: Path) -> None:
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return use(python, server, "duetime", *arguments, home=tmp_path)

    assert run("--version").stdout.startswith("duetime ")
    assert (run().returncode, run("--help").returncode, run("nonsense").returncode) == (2, 0, 2)
    told = run("ingest", "--once")
    assert (told.returncode, told.stderr) == (2, f"duetime: {INGEST}.\n")
    assert INGEST in run("--help").stdout
    jobs = re.findall(r"^  (\w+) ", run("--help").stdout, re.M)
    assert jobs
    for job in jobs:
        told = run(job, "--help")
        if job in EXTRAS:
            assert re.fullmatch(
                rf"duetime: {job} also needs \w+: pip install '\.\[{EXTRAS[job]}\]' in the checkout brings it\.\n",
                told.stderr,
            )
            continue
        assert told.returncode == 0, told.stderr
        assert told.stdout.startswith(f"usage: duetime {job} ")
    install, use_it = run_here("docs/client.md", __file__, "console")
    assert install.text.startswith("$ pip install . ")
    words = [shlex.split(command)[1:] for command, _ in use_it.commands()]
    scheduled, shown, cancelled, status = [run(*each) for each in words]
    assert "due" in scheduled.stdout
    assert "tea is ready" in shown.stdout
    assert (cancelled.returncode, status.returncode) == (0, 0)
    told = run("topics", "groups", "mail")
    assert "spark-submit" not in told.stdout + told.stderr


def test_hydrate_needs_an_extra_that_the_errors_name(python: Path, server: RealServer, tmp_path: Path) -> None:
    world = ColdWorld(server, tmp_path, namespace="duetime")
    world.write([world.line("tea", 24, "tea"), world.line("plain", 24)])

    settings = {
        "DUETIME_COLD_FOLDER": str(world.path),
        "DUETIME_COLD_HORIZON_HOURS": "100",
        "DUETIME_COLD_LEAD_HOURS": "48",
    }

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return use(python, server, "duetime", *arguments, home=tmp_path, **settings)

    refused, unread = run("hydrate", "--once"), run("messages", "show", "tea")
    assert (refused.returncode, unread.returncode, unread.stdout) == (2, 1, "")
    named = {told for each in (refused, unread) for told in re.findall(r"pip install '(.+?)'", each.stderr)}
    assert named == {".[cold]"}
    subprocess.run([python, "-m", "pip", "install", "-q", "duetime[cold]"], check=True)  # the wheel is installed
    listed = subprocess.run([python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True)
    assert {package["name"] for package in json.loads(listed.stdout)} & {"pyspark", "pandas"} == set()
    assert '"tea"' in run("messages", "show", "tea", "--format", "json").stdout
    brought = run("hydrate", "--once")
    assert (brought.returncode, world.waiting()) == (0, {"tea": 24 * HOUR_MS, "plain": 24 * HOUR_MS}), brought.stderr
    with server.client() as client:
        client.flushall()
